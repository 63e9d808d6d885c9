"""A rule for a debugging aid that was left on: torch's anomaly detection."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding
from autotune.explain.places import line_with
from autotune.harness.explain.documents import BACKWARD, MAIN

ANOMALY = "anomaly detection"
# With anomaly detection, each operator of the forward pass records the Python stack. This takes time in the modules STACKS. In
# the backward pass, the operators SEARCHES search the gradients for NaN.
STACKS = ("traceback.py", "linecache.py", "tokenize.py", "codecs.py")
SEARCHES = ("aten::isnan", "aten::ne", "aten::_is_any_true", "aten::any", "aten::item", "aten::_local_scalar_dense")
SWITCH = re.compile(r"\bdetect_anomaly\b|\bset_detect_anomaly\b")
# Seconds that anomaly detection costs, as a multiple of the seconds seen in STACKS and SEARCHES: at least, usually, at most. On
# one thread of an EPYC, a step of a CNN took 158 ms instead of 123, and a step of a small RNN 18 ms instead of 4.
SEEN_TIMES = (0.6, 1.0, 1.6)


def anomaly_detection(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if anomaly detection is on. On a GPU, most of its cost is that the host waits for each search."""
    if not evidence.first.is_anomaly_mode:
        return
    files = dict.fromkeys(line.file for line in evidence.own_lines())
    place = next((place for file in files if (place := line_with(SWITCH, file))), None)
    seconds = _stacks_s(evidence) + _searches_s(evidence)
    yield Finding(
        cause=ANOMALY,
        where=evidence.place(*place) if place else "torch.autograd",
        evidence=f"{evidence.of_step(seconds)} in recording stacks and in searching gradients for NaN",
        gain=evidence.gain((min(seconds * times, evidence.step_s) for times in SEEN_TIMES), "predicted"),
        basis="stack samples of the training thread, and operators in the trace",
        code="remove torch.autograd.set_detect_anomaly(True), or turn it on only while looking for a NaN",
    )


def _stacks_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in which stacks are recorded."""
    lines = [line for line in evidence.first.lines if line.where == MAIN and not line.is_own]
    return math.fsum(line.self_s for line in lines if os.path.basename(line.file) in STACKS)


def _searches_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in which gradients are searched; 0 without a trace."""
    rows = evidence.operations[0].by_operator if evidence.operations else []
    return math.fsum(row["seconds"] for row in rows if row.get("phase") == BACKWARD and row["operator"] in SEARCHES)
