"""What a check of the campaign is, and the file that remembers which are done."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.reporting import machine_lines, table

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to find out.

    Attributes:
        name: a sentence that is true when the check passes.
        run: finds it out in a folder of its own; returns the evidence in one line, raises AssertionError when it is not so.
        needs_cuda: what stays unknown without a CUDA device, in one line; empty when a CPU can tell.
    """

    name: str
    run: Callable[[Path], str]
    needs_cuda: str = ""


@dataclass(kw_only=True)
class Finding:
    """What a check found."""

    name: str
    status: str
    evidence: str
    seconds: float = 0.0


def run_stage(stage: str, checks: Sequence[Check], out: Path, *, has_cuda: bool) -> list[Finding]:
    """Runs the checks of a stage that are not done yet; every finding is on disk before the next check begins.

    Args:
        stage: its name, and that of its files.
        checks: what to find out, in order.
        out: folder of `<stage>.json` and `<stage>.md`; those that passed there are not run again.
        has_cuda: whether a CUDA device is there.
    """
    file = out / f"{stage}.json"
    done = {entry["name"]: Finding(**entry) for entry in json.loads(file.read_text())} if file.exists() else {}
    findings = []
    for number, check in enumerate(checks):
        earlier = done.get(check.name)
        finding = (
            earlier if earlier and earlier.status == PASSED else _find(check, out / stage / str(number), has_cuda=has_cuda)
        )
        findings.append(finding)
        print(f"{finding.status:8} {finding.name}: {finding.evidence}", flush=True)
        file.write_text(json.dumps([asdict(entry) for entry in findings], indent=1))
        (out / f"{stage}.md").write_text(page(stage, findings))
    return findings


def _find(check: Check, place: Path, *, has_cuda: bool) -> Finding:
    if check.needs_cuda and not has_cuda:
        return Finding(name=check.name, status=NOT_RUN, evidence=f"no CUDA device: {check.needs_cuda}")
    place.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    try:
        status, evidence = PASSED, check.run(place)
    except Exception as error:  # a broken check must not take the others' findings with it
        status, evidence = FAILED, f"{type(error).__name__}: {error}"
        (place / "traceback.txt").write_text(traceback.format_exc())
    return Finding(name=check.name, status=status, evidence=evidence, seconds=time.monotonic() - started_s)


def page(stage: str, findings: Sequence[Finding]) -> str:
    """Returns the findings as Markdown."""
    rows = [(entry.status, entry.name, entry.evidence, f"{entry.seconds:.0f}") for entry in findings]
    return f"# {stage}\n\n{table(('', 'check', 'evidence', 'seconds'), rows)}\n\n" + "\n".join(machine_lines()) + "\n"
