"""Rules for torch.compile: code that is compiled again and again, and graphs that break."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding
from autotune.harness.explain.documents import BACKWARD, FORWARD, INPUT, OPTIMIZER
from autotune.quantities import step_time_text

DYNAMIC = "compile.dynamic"
MAX_REASON_CHARS = 100
# Seconds that each break costs, in addition to the code that cannot be compiled: guards are checked once more, and forward and
# backward enter compiled code once more. Usual value (150 to 180 us measured on a busy EPYC), and upper limit.
BREAK_S = (150e-6, 400e-6)


def recompilation(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if torch.compile keeps recompiling during training.

    Recompilations that ended before the observed steps, such as one for the first smaller batch, cost nothing any more. They
    still cost time if torch has reached its limit of recompilations, because it then runs the code uncompiled.
    """
    compiled = evidence.first.compiled
    if compiled is None or not compiled.recompilations or not (compiled.seconds or compiled.is_limit_hit):
        return
    top = compiled.recompilations[0]
    seconds, slowed_s = compiled.seconds / max(1, evidence.first.steps), _slowed_s(evidence, compiled.seconds)
    count = sum(int(entry.get("count") or 1) for entry in compiled.recompilations)
    value = "true" if evidence.may_set(DYNAMIC, "true") else None
    yield Finding(
        cause="recompilation",
        where=_place(top, evidence),
        evidence=f"{count} recompilation{'s' * (count != 1)} so far; compiling takes {step_time_text(seconds)} per step "
        f"in {evidence.first.steps} observed steps{_reason(top)}",
        gain=evidence.gain((0.5 * seconds, seconds + 0.5 * slowed_s, 1.15 * seconds + slowed_s), "predicted"),
        basis="compiling in the observed steps, plus half of the time by which forward without compiling exceeds half of "
        "backward",
        code="keep the shapes the same in all steps: pad, drop the last batch, bucket lengths; or torch.compile(dynamic=True)",
        knob=DYNAMIC if value else "",
        value=value,
    )


def _slowed_s(evidence: Evidence, compile_s: float) -> float:
    """Returns the seconds per step that the forward pass loses in addition to compiling.

    Every call checks the guards of all graphs made so far. Once there are as many as torch's limit, code runs uncompiled.
    Without these costs, a forward pass takes about half as long as the backward pass, which has twice as many matrix products.
    So if forward takes 100 ms in addition to compiling, and backward 120 ms, forward has lost 40 ms.
    """
    phases = evidence.phases_s
    own_s = phases.get(FORWARD, 0.0) - compile_s / max(1, evidence.first.steps)
    return max(0.0, own_s - 0.5 * phases.get(BACKWARD, 0.0))


def graph_breaks(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for the lines that torch.compile cannot put into a graph. The finding's gain is what the lines cost.

    The gain is a floor: a broken graph also prevents fusions across the break, and only a trial shows what these would gain.
    """
    compiled = evidence.first.compiled
    if compiled is None or not compiled.graph_breaks:
        return
    breaks = compiled.graph_breaks
    count, own_s = sum(int(entry.get("count") or 1) for entry in breaks), _seconds_at(breaks, evidence)
    top = max(breaks, key=lambda entry: _seconds_at([entry], evidence))
    mid, high = (own_s + count * seconds for seconds in BREAK_S)
    least_s = 0.0 if evidence.is_cuda else own_s  # on a GPU, the host may run ahead of the device
    yield Finding(
        cause="graph breaks",
        where=_place(top, evidence),
        evidence=f"{count} graph break{'s' * (count != 1)}; their lines take {evidence.of_step(own_s)}{_reason(top)}",
        gain=evidence.gain((least_s, mid, high), "floor"),
        basis=f"profiler samples of these lines, and {BREAK_S[0] * 1e6:.0f} us at each break to leave and enter compiled code",
        code="move the line out of the compiled function, or write it as tensor operations",
    )


def _seconds_at(breaks: Sequence[Mapping[str, Any]], evidence: Evidence) -> float:
    """Returns the seconds per step that the training thread spends in lines with a graph break."""
    places = {(os.path.basename(str(entry.get("file") or "")), int(entry.get("line") or 0)) for entry in breaks}
    lines = [line for line in evidence.own_lines() if (os.path.basename(line.file), line.line) in places]
    return math.fsum(line.self_s for line in lines if line.phase not in (INPUT, OPTIMIZER))


def _place(entry: Mapping[str, Any], evidence: Evidence) -> str:
    if not entry.get("file"):
        return evidence.model_place
    return evidence.place(str(entry["file"]), int(entry.get("line") or 0))


def _reason(entry: Mapping[str, Any]) -> str:
    """Returns ": " and the first line of a reason; "" if there is none."""
    lines = str(entry.get("reason") or "").strip().splitlines()
    return f": {lines[0][:MAX_REASON_CHARS]}" if lines else ""
