"""Compares findings of `autotune explain` with the planted causes and their true costs, and prints how often they are right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.knobs.base import value_text
from tests.benchmarks.planted_causes import CAUSES, Cause, Program
from tests.benchmarks.planted_truth import Gain
from tests.benchmarks.reporting import table

NUM_FIRST = 3  # if two causes are planted, both must be among this many first findings
WITHIN_FRAC = 0.25  # a predicted gain is near the measured gain if it differs by at most this share of it
HEALTHY_GAIN = 0.10  # in a program without a planted cause, a finding of at least this gain is false
FLOOR_SLACK = 0.03  # how far a gain stated as "at least" may exceed the measured gain
GOAL_FIRST, GOAL_INSIDE, GOAL_WITHIN, GOAL_PAIRS_FRAC = 13, 12, 10, 0.9  # three of the 14 single causes, the last of the pairs


class Gains(Protocol):
    """Provides the measured gains."""

    def gain(self, program: Program, switched_off: str) -> Gain | None:
        """Returns the gain from switching causes off; None if it was not measured."""

    def setting_gain(self, program: Program, setting: str) -> Gain | None:
        """Returns the gain from a setting; None if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The parts of a finding that are judged.

    Attributes:
        cause, where: cause and place as printed; as JSON if the place has several parts.
        low, mid, high: the gain, 0.38 for 38 % more samples per second; None if the finding does not state it.
        kind: "bound", "floor", "predicted" or "measured".
        setting: the setting whose gain is stated, such as "precision.amp=bf16"; "" if the remedy is a change of the code.
    """

    cause: str
    where: str = ""
    low: float | None = None
    mid: float | None = None
    high: float | None = None
    kind: str = ""
    setting: str = ""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Finding:
        """Returns a finding from the JSON document. No other function knows the document's form."""
        where, gain, remedy = document.get("where") or "", document.get("gain") or {}, document.get("remedy") or {}
        return cls(
            cause=str(document["cause"]),
            where=where if isinstance(where, str) else json.dumps(where, ensure_ascii=False),
            low=gain.get("low"),
            mid=gain.get("mid"),
            high=gain.get("high"),
            kind=str(gain.get("kind") or ""),
            setting=f"{remedy['knob']}={value_text(remedy['value'])}" if remedy.get("knob") else "",
        )

    @property
    def size(self) -> float:
        """Returns the finding's gain: the middle of its interval or, if there is none, the end that is known."""
        return next((value for value in (self.mid, self.low, self.high) if value is not None), 0.0)

    def is_of(self, cause: Cause) -> bool:
        """Returns whether the finding's cause is of the same class as a planted cause."""
        words = _plain(self.cause)
        return any(f" {_plain(name).strip()} " in words for name in CAUSES[cause.kind])

    def is_at(self, program: Program, cause: Cause) -> bool:
        """Returns whether the finding names a line of a planted cause or, if it names no line, one of the cause's words."""
        named = list(_lines(self.where, program.path)) if cause.lines else []
        if named:
            return any(one.start <= last and first < one.stop for one in program.line_ranges(cause) for first, last in named)
        where = _plain(self.where)
        return any(re.search(rf" {_plain(word).strip()}s? ", where) for word in cause.words)

    def holds(self, gain: float) -> bool:
        """Returns whether the finding's interval contains a measured gain; a floor ("at least") has no upper end."""
        low = -math.inf if self.low is None else self.low
        if self.kind == "floor":
            return gain >= low - FLOOR_SLACK
        return low <= gain <= (math.inf if self.high is None else self.high)

    def is_near(self, gain: float) -> bool:
        """Returns whether the middle of the finding's interval is within a quarter of a measured gain."""
        return self.mid is not None and abs(self.mid - gain) <= WITHIN_FRAC * gain

    def __str__(self) -> str:
        if self.low is None and self.mid is None and self.high is None:
            return "no size"
        middle = "" if self.mid is None else f"{self.mid:+.0%} "
        return f"{middle}[{_percent(self.low)}, {_percent(self.high)}] {self.kind}".strip()


def findings_of(document: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings in the document that `autotune explain --json` prints, in the same order."""
    explained = document.get("explained") or [{}]  # the requested trial comes first
    return [Finding.of(each) for each in explained[0].get("findings") or []]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A planted cause and the finding of the same class.

    Attributes:
        cause: the planted cause.
        planted: the gain from switching the cause off; None if it was not measured.
        truth: the gain that the finding states: that of its setting, otherwise `planted`; None if it was not measured.
        finding: the first finding of the cause's class; None if there is none.
        place: the finding's rank among all findings, from 1.
        is_place_right: whether the finding names the right place.
    """

    cause: Cause
    planted: Gain | None
    truth: Gain | None
    finding: Finding | None = None
    place: int | None = None
    is_place_right: bool = False

    @property
    def is_inside_planted(self) -> bool:
        """Returns whether the finding's interval contains the gain from switching the cause off."""
        return self.finding is not None and self.planted is not None and self.finding.holds(self.planted.ratio - 1)

    @property
    def is_near_planted(self) -> bool:
        """Returns whether the finding's middle is near the gain from switching the cause off."""
        return self.finding is not None and self.planted is not None and self.finding.is_near(self.planted.ratio - 1)

    @property
    def gain(self) -> float | None:
        """Returns the true gain, 0.38 for 38 %."""
        return self.truth.ratio - 1 if self.truth else None

    @property
    def is_inside(self) -> bool:
        """Returns whether the finding's interval contains the measured gain."""
        return self.finding is not None and self.gain is not None and self.finding.holds(self.gain)

    @property
    def is_near(self) -> bool:
        """Returns whether the finding's middle is near the measured gain."""
        return self.finding is not None and self.gain is not None and self.finding.is_near(self.gain)

    @property
    def is_floor_too_high(self) -> bool:
        """Returns whether the finding is a floor and the measured gain is clearly below it."""
        return self.finding is not None and self.finding.kind == "floor" and self.gain is not None and not self.is_inside


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A program and its findings; the findings are None if the program was not explained."""

    program: Program
    findings: Sequence[Finding] | None
    judged: Sequence[Judged]

    @classmethod
    def of(cls, program: Program, truths: Gains, findings: Sequence[Finding] | None) -> Verdict:
        """Returns the verdict on a program's findings, given in the order in which they were printed."""
        judged = []
        for cause in program.causes:
            planted = truths.gain(program, cause.switch)
            place, finding = next(((n, each) for n, each in enumerate(findings or (), 1) if each.is_of(cause)), (None, None))
            is_right = finding is not None and finding.is_at(program, cause)
            truth = truths.setting_gain(program, finding.setting) if finding and finding.setting else planted
            judged.append(
                Judged(cause=cause, planted=planted, truth=truth, finding=finding, place=place, is_place_right=is_right)
            )
        return cls(program=program, findings=findings, judged=judged)

    @property
    def is_first_and_right(self) -> bool:
        """Returns whether the first finding is the program's only cause, with the right place."""
        return self.judged[0].place == 1 and self.judged[0].is_place_right

    @property
    def are_all_early(self) -> bool:
        """Returns whether all causes are among the first NUM_FIRST findings."""
        return all(one.place is not None and one.place <= NUM_FIRST for one in self.judged)

    @property
    def false_findings(self) -> list[Finding]:
        """Returns the large findings of a program without a planted cause."""
        return [each for each in self.findings or () if each.size >= HEALTHY_GAIN]

    def rows(self) -> list[list[str]]:
        """Returns a row of the table for every cause; one row for a program without a planted cause."""
        first = self.findings[0] if self.findings else None
        told = "not explained" if self.findings is None else f"{first.cause} ({first.where})" if first else "nothing"
        if not self.program.causes:
            false = len(self.false_findings)
            seen = "" if self.findings is None else f"{false} too large" if false else "none too large"
            return [[self.program.name, "none", seen, "", str(first or ""), "", "", "", "", told]]
        return [self._row(one, told) for one in self.judged]

    def _row(self, one: Judged, told: str) -> list[str]:
        planted = str(one.planted or "not measured")
        if self.findings is None or one.finding is None:
            return [self.program.name, one.cause.kind, "" if self.findings is None else "no", "", "", planted, "", "", "", told]
        place = "first" if one.place == 1 else f"number {one.place}"
        known = one.truth is not None
        answers = [_word(one.is_inside) if known else "", _word(one.is_near) if known else ""]
        setting = f"{one.finding.setting}: {one.truth or 'not measured'}" if one.finding.setting else ""
        stated = [_word(one.is_place_right), str(one.finding), planted, setting]
        return [self.program.name, one.cause.kind, place, *stated, *answers, told]


HEADER = (
    "program", "planted", "found", "place right", "stated", "without the cause", "with the setting", "inside", "within 25 %",
    "first finding",
)  # fmt: skip


def report(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """Returns the table with a line for each goal, and whether all goals are reached. A program not explained is a failure."""
    rows = [row for verdict in verdicts for row in verdict.rows()]
    goals = _goals(verdicts)
    return "\n".join([table(HEADER, rows), "", *(line for line, _ in goals)]), all(is_reached for _, is_reached in goals)


def _goals(verdicts: Sequence[Verdict]) -> list[tuple[str, bool]]:
    """Returns, for each goal whose programs were requested, a line and whether the goal is reached."""
    single = [verdict for verdict in verdicts if len(verdict.program.causes) == 1]
    pairs = [verdict for verdict in verdicts if len(verdict.program.causes) > 1]
    healthy = [verdict for verdict in verdicts if not verdict.program.causes]
    goals = []
    if single:
        num = len(single)
        judged = [verdict.judged[0] for verdict in single]
        counts = (
            ("cause first, place right", sum(verdict.is_first_and_right for verdict in single), GOAL_FIRST),
            ("gain inside the interval", sum(one.is_inside for one in judged), GOAL_INSIDE),
            ("middle within 25 %", sum(one.is_near for one in judged), GOAL_WITHIN),
        )
        for name, count, of_14 in counts:
            least = of_14 if num == 14 else math.ceil(of_14 / 14 * num)
            goals.append(_goal(name, f"{count} of {num}", f"at least {least}", is_reached=count >= least))
        inside, near = sum(one.is_inside_planted for one in judged), sum(one.is_near_planted for one in judged)
        goals.append(
            (f"compared with the gain without the cause, also for settings: inside {inside}, within 25 % {near}", True)
        )
        high = sum(one.is_floor_too_high for one in judged)
        goals.append(_goal("floors too high", str(high), "none by more than 3 points", is_reached=high == 0))
    if pairs:
        count, least = sum(verdict.are_all_early for verdict in pairs), math.ceil(GOAL_PAIRS_FRAC * len(pairs))
        told = f"{count} of {len(pairs)}"
        goals.append(_goal("both among the first three", told, f"at least {least}", is_reached=count >= least))
    if healthy:
        false = sum(len(verdict.false_findings) for verdict in healthy)
        all_seen = all(verdict.findings is not None for verdict in healthy)
        goals.append(_goal("findings of 10 % in healthy", str(false), "none", is_reached=all_seen and false == 0))
    missing = [verdict.program.name for verdict in verdicts if verdict.findings is None]
    if missing:
        goals.append((f"not explained: {', '.join(missing)}", False))
    return goals


def _goal(name: str, told: str, goal: str, *, is_reached: bool) -> tuple[str, bool]:
    return f"{name:<28}{told:<10}goal {goal}: {'reached' if is_reached else 'MISSED'}", is_reached


def _lines(where: str, path: Path) -> Iterable[tuple[int, int]]:
    """Yields the line ranges (first, last) that a place names in the program's file: `photos.py:41`, `photos.py:41-44`."""
    name = rf"(?<![\w-]){re.escape(path.name)}"
    for match in re.finditer(name + r'"?,?\s*(?::|line|"line":)\s*(\d+)(?:\s*-\s*(\d+))?', where):
        yield int(match[1]), int(match[2] or match[1])


def _plain(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:+.0%}"


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"
