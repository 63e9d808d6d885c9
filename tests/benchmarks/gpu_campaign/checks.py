"""Defines the campaign's checks and their goals, and runs the checks of a stage."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_campaign.document import Document

# How a check ended. LATER: there was no time for it, or only for a part of it; the next run of the command measures the rest.
DONE, MISSED, FAILED, NOT_RUN, LATER = "done", "MISSED", "FAILED", "not run", "later"
IS_OVER = (DONE, MISSED)


class Missing(Exception):
    """Something that a check needs is missing; the message says what it is and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal for a measured number.

    Attributes:
        what: name of the number, in words.
        value: the measured number.
        bound: the value that the number must reach.
        is_ceiling: whether the number must not exceed the bound, instead of reaching it.
    """

    what: str
    value: float
    bound: float
    is_ceiling: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the number meets the goal."""
        return self.value <= self.bound if self.is_ceiling else self.value >= self.bound

    def words(self) -> str:
        """Returns the number and its goal as text."""
        return f"{self.what}: {self.value:.3g}, goal {'at most' if self.is_ceiling else 'at least'} {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a check.

    Attributes:
        evidence: the measured numbers, in one line.
        goals: the goals that the numbers must meet; ignored in a dry run.
        detail: further results as Markdown, such as a table.
        is_whole: False if another run of the command has to measure the rest.
    """

    evidence: str
    goals: Sequence[Goal] = ()
    detail: str = ""
    is_whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a check works, and what it may use.

    Attributes:
        folder: the stage's folder for studies and trials. It is kept, so that an interrupted stage can continue.
        results: folder of the results.
        is_dry: whether this is a dry run, at small sizes, whose numbers mean nothing.
        until_s: end of the stage's time, on the monotonic clock.
    """

    stage: str
    folder: Path
    results: Path
    document: Document
    is_dry: bool
    until_s: float

    @property
    def left_s(self) -> float:
        """Seconds that the stage has left."""
        return self.until_s - time.monotonic()

    def kept(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the stored measurement of this name; measures and stores it if there is none.

        Args:
            name: name of the measurement within its stage.
            measure: takes the measurement; returns plain JSON values.
        """
        return self.document.kept(self.stage, name, measure)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: the check in words; finished checks are recognised by their names.
        run: runs the check; raises AssertionError if the check fails, Missing if it cannot run here.
        needs_cuda: what stays unknown without a CUDA device, in one line; "" if the check runs on a CPU.
        seconds: rough duration. If less time is left, the check is not started, unless it is the first.
    """

    name: str
    run: Callable[[Place], Found]
    needs_cuda: str = ""
    seconds: float = 30.0

    @property
    def slug(self) -> str:
        """Returns the name of the check's folder."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60]


@dataclass(kw_only=True)
class Finding:
    """The outcome of a check, as stored in the document."""

    name: str
    status: str
    evidence: str
    seconds: float = 0.0
    goals: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""

    @property
    def line(self) -> str:
        """Returns the outcome in one line."""
        return f"{self.status:8} {self.name}: {self.evidence}"


def goal_lines(finding: Finding, *, is_dry: bool) -> Iterator[str]:
    """Yields a line for each goal of a check."""
    for document in finding.goals:
        goal = Goal(**document)
        yield f"{goal.words()}: {'not judged, dry' if is_dry else 'met' if goal.is_met else 'MISSED'}"


def run_stage(place: Place, checks: Sequence[Check], *, has_cuda: bool) -> Iterator[Finding]:
    """Runs the checks of a stage that are not done yet, and yields every finding once it is on disk.

    Args:
        place: folders and time of the stage.
        checks: the checks, in order.
        has_cuda: whether there is a CUDA device.
    """
    done = {entry["name"]: Finding(**entry) for entry in place.document.findings(place.stage)}
    findings, is_first = [], True
    for check in checks:
        earlier = done.get(check.name)
        if earlier and earlier.status in IS_OVER:
            finding = earlier
        elif check.needs_cuda and not has_cuda:
            finding = Finding(name=check.name, status=NOT_RUN, evidence=f"no CUDA device: {check.needs_cuda}")
        elif place.left_s < check.seconds and not is_first:
            finding = Finding(name=check.name, status=LATER, evidence="no time left for it: give the same command again")
        else:
            finding, is_first = _find(check, place), False
        findings.append(finding)
        print(finding.line, flush=True)
        for line in goal_lines(finding, is_dry=place.is_dry):
            print(f"         {line}", flush=True)
        place.document.write_findings(place.stage, [asdict(entry) for entry in findings])
        yield finding


def _find(check: Check, place: Place) -> Finding:
    place.folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    found = Found(evidence="")
    try:
        found = check.run(place)
        is_missed = not place.is_dry and not all(goal.is_met for goal in found.goals)
        status = LATER if not found.is_whole else MISSED if is_missed else DONE
    except Missing as missing:
        return Finding(name=check.name, status=NOT_RUN, evidence=str(missing))
    except (Exception, SystemExit) as error:  # a broken check must not lose the findings of the others
        status, found = FAILED, Found(evidence=f"{type(error).__name__}: {error}")
        (place.folder / f"{check.slug}.txt").write_text(traceback.format_exc())
    return Finding(
        name=check.name,
        status=status,
        evidence=found.evidence,
        seconds=time.monotonic() - started_s,
        goals=[asdict(goal) for goal in found.goals],
        detail=found.detail,
    )
