"""What a check of the campaign is, the goals it is held to, and how the checks of a stage are run."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_campaign.document import Document

# How a check ended. LATER: there was no time left for it, or not for all of it; the next go measures what is missing.
DONE, MISSED, FAILED, NOT_RUN, LATER = "done", "MISSED", "FAILED", "not run", "later"
IS_OVER = (DONE, MISSED)


class Missing(Exception):
    """What a check needs is not there; says what, and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a number should reach.

    Attributes:
        what: the number, in words.
        value: as measured.
        bound: to be reached.
        is_ceiling: whether the bound must not be exceeded instead.
    """

    what: str
    value: float
    bound: float
    is_ceiling: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.value <= self.bound if self.is_ceiling else self.value >= self.bound

    def words(self) -> str:
        """Returns the number and its goal."""
        return f"{self.what}: {self.value:.3g}, goal {'at most' if self.is_ceiling else 'at least'} {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a check found out.

    Attributes:
        evidence: in one line.
        goals: what it is held to; a dry run's small sizes are held to nothing.
        detail: Markdown, a table say.
        is_whole: False when something is left to be measured in another go.
    """

    evidence: str
    goals: Sequence[Goal] = ()
    detail: str = ""
    is_whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a check works, and what it may use.

    Attributes:
        folder: of the stage, for studies and trials; kept, so that what was cut off goes on.
        results: folder whose files are results.
        is_dry: whether this is a dry run: small sizes, numbers that mean nothing.
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
        """Returns what was measured under this name, in this go or an earlier one; measures it where there is nothing yet.

        Args:
            name: of the measurement, within its stage.
            measure: returns plain JSON values.
        """
        return self.document.kept(self.stage, name, measure)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to find out.

    Attributes:
        name: in words; what is done is found again by it.
        run: finds it out; raises AssertionError when it is not so, Missing when it cannot be found out here.
        needs_cuda: what stays unknown without a CUDA device, in one line; empty when a CPU can tell.
        seconds: what it takes, roughly: it is not begun with less time left, unless it is the first.
    """

    name: str
    run: Callable[[Place], Found]
    needs_cuda: str = ""
    seconds: float = 30.0

    @property
    def slug(self) -> str:
        """Returns the name of a folder for it."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60]


@dataclass(kw_only=True)
class Finding:
    """What became of a check; as it stands in the document."""

    name: str
    status: str
    evidence: str
    seconds: float = 0.0
    goals: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""

    @property
    def line(self) -> str:
        """Returns it in a line."""
        return f"{self.status:8} {self.name}: {self.evidence}"


def goal_lines(finding: Finding, *, is_dry: bool) -> Iterator[str]:
    """Yields the goals of a check, a line each."""
    for document in finding.goals:
        goal = Goal(**document)
        yield f"{goal.words()}: {'not judged, dry' if is_dry else 'met' if goal.is_met else 'MISSED'}"


def run_stage(place: Place, checks: Sequence[Check], *, has_cuda: bool) -> Iterator[Finding]:
    """Runs the checks of a stage that are not done yet, and yields every finding once it is on disk.

    Args:
        place: where, and until when.
        checks: what to find out, in order.
        has_cuda: whether a CUDA device is there.
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
    except (Exception, SystemExit) as error:  # a broken check must not take the others' findings with it
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
