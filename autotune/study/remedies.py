"""Tries the remedies of a trial's findings: measures the program alternately with and without a remedy.

The trials that do so are checks. Neither the search nor the verdict uses checks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autotune.explain import checks
from autotune.explain.evidence import Evidence
from autotune.explain.findings import Finding
from autotune.explain.trials import configuration_with, noise_or_usual
from autotune.explained import WITHOUT
from autotune.quantities import seconds_text
from autotune.records import SKIPPED, Kind, Knobs, Outcome, TrialRecord, last_round
from autotune.studies import call
from autotune.trials.session import OutOfTime, Session

MAX_CHECKS = 3  # at most this many findings get a new check each time a trial is explained; failed attempts do not count
# When `autotune explain` has tried all findings, it uses the time left to repeat checks whose intervals are wider than
# WIDE_FRAC of the rate, up to MAX_PAIRS pairs each.
WIDE_FRAC, MAX_PAIRS = 0.1, 8
# If a check that skips stages ended with an outcome in FAILED, it is repeated only with --retry, or after the program was
# edited. Outcomes in MAY_PASS may be due to chance, so notes about such checks name --retry.
MAY_PASS = (Outcome.crash, Outcome.timeout, Outcome.device_oom, Outcome.host_oom)
FAILED = (Outcome.error, Outcome.invalid, *MAY_PASS)
Pair = tuple[float, float]  # score with the remedy, score without
ORDER = (True, False, False, True)  # True: with the remedy; in ABBA order, a drift of the machine affects both sides alike


class Side(NamedTuple):
    """One side of a comparison: session, knobs, text shown for its trials, skipped stages, if it runs the corrected program."""

    session: Session
    knobs: Knobs
    why: str
    skipped: tuple[str, ...] = ()
    is_fixed: bool = False


class Remedies:
    """The checks of one trial's findings. A check tries the setting that a finding proposes, or skips the costly stages.

    Args:
        session: the study.
        evidence: what is known about the trial.
        ends_s: time on the study's clock by which checks are expected to end; None without a limit.
        is_retrying: whether to try a finding again if its trial failed before.
    """

    def __init__(self, session: Session, evidence: Evidence, *, ends_s: float | None, is_retrying: bool) -> None:
        self._session, self._evidence, self._record = session, evidence, evidence.record
        self._ends_s, self._is_retrying = ends_s, is_retrying
        self._num_before = len(session.records)

    def try_all(self, findings: Sequence[Finding], tried: dict[int, checks.Check], *, is_repeating: bool) -> None:
        """Tries findings while there is time, in one round each (see ORDER). Rounds of earlier calls count.

        Args:
            findings: the findings, the largest gain first.
            tried: gets each check as soon as it is made: index of a finding -> its check.
            is_repeating: whether uncertain checks are repeated in the time left.
        """
        pairs: dict[int, list[Pair]] = {}  # index of a finding -> its pairs
        num_new = 0
        for index, finding in enumerate(findings):
            if not is_open(finding):
                continue
            found = self._pairs_before(finding)
            if not found and num_new < MAX_CHECKS and (found := self._try(finding)):
                num_new += 1
            if found:
                pairs[index], tried[index] = found, self._check_of(finding, found)
        while is_repeating and (least := _least_certain(tried, pairs)) is not None:
            if not (found := self._try(findings[least])):
                break
            pairs[least] += found
            tried[least] = self._check_of(findings[least], pairs[least])

    def notes(self, findings: Sequence[Finding]) -> list[str]:
        """Returns why findings were not measured, and which commands try them. Only the first untried finding gets a note."""
        texts, untried = [], None
        for index, finding in enumerate(findings):
            if trial := self._ended_without(finding):
                texts.append(self._ended_text(findings[: index + 1], trial))
            elif is_open(finding) and untried is None:
                untried = finding
        return [*texts, self._untried_text(untried)] if untried else texts

    def _pairs_before(self, finding: Finding) -> list[Pair]:
        """Returns the pairs of all complete rounds that tried a finding's remedy, unless the program was edited since."""
        record, changed = self._record, self._session.resolved.changed
        knobs, skipped = self._remedied(finding)
        sides = (changed(record.knobs), ()), (changed(knobs), skipped)
        rounds: dict[int | None, list[TrialRecord]] = {}
        for one in self._checks():
            if one.origin == finding.cause and one.started_at >= self._evidence.edited_at:
                rounds.setdefault(one.round, []).append(one)
        pairs: list[Pair] = []
        for trials in rounds.values():
            ran = [(one.changed, tuple(one.evidence.get(SKIPPED, ()))) for one in trials]
            if ran == [sides[is_new] for is_new in ORDER] and all(map(is_measured, trials)):
                pairs += _paired([one.score or 0.0 for one in trials])
        return pairs

    def _try(self, finding: Finding) -> list[Pair]:
        """Measures what a finding's remedy gains in one round. Returns the round's pairs; [] if it was not completed."""
        session, record, cause = self._session, self._record, finding.cause
        knobs, skipped = self._remedied(finding)
        has_failed = not self._is_retrying and self._failed_without(finding) is not None
        is_late = self._ends_s is not None and session.inputs.clock.monotonic() + self._pairs_s(finding) > self._ends_s
        if has_failed or is_late:
            return []
        new = f"{cause}: {'without it' if skipped else 'with the remedy'}"
        sides = Side(session, record.knobs, f"{cause}: as it was"), Side(session, knobs, new, skipped)
        pairs = measured_pairs(record, cause, sides, self._ends_s)
        return pairs if len(pairs) == len(ORDER) // 2 else []  # a single pair shows no spread

    def _check_of(self, finding: Finding, pairs: Sequence[Pair]) -> checks.Check:
        how = WITHOUT if self._remedied(finding)[1] else checks.PAIRS
        return check_of(self._session, self._record, finding, pairs, how=how)

    def _checks(self, start: int = 0) -> Iterator[TrialRecord]:
        """Yields the checks of the trial, except those among the study's first `start` trials."""
        records = self._session.records[start:]
        return (one for one in records if one.kind is Kind.check and one.repeats == self._record.number)

    def _failed_without(self, finding: Finding) -> TrialRecord | None:
        """Returns the last trial that skipped the stages of a finding and failed; None if there is none.

        A trial does not count if the program has been changed since.
        """
        if not is_open(finding) or finding.value is not None or finding.without is None:
            return None
        skipped, edited_at = list(finding.without.stages), self._evidence.edited_at
        tried = [one for one in self._checks() if one.evidence.get(SKIPPED) == skipped and one.outcome in FAILED]
        return next((one for one in reversed(tried) if one.started_at >= edited_at), None)

    def _ended_without(self, finding: Finding) -> TrialRecord | None:
        """Returns the trial that ended without measuring a finding, in this call or an earlier one; None if there is none."""
        if not is_open(finding):
            return None
        new = self._checks(self._num_before)
        ended = [one for one in new if one.origin == finding.cause and not is_measured(one)]
        ended = [one for one in ended if one.outcome is not Outcome.interrupted]  # they lacked time: see `_untried_text`
        return self._failed_without(finding) or next(iter(ended), None)

    def _ended_text(self, findings: Sequence[Finding], trial: TrialRecord) -> str:
        """Returns why the last of some findings was not measured, and the command that tries all of them again."""
        finding = findings[-1]
        without = f" without {finding.without.name}" if finding.without and finding.value is None else ""
        why = f" ({trial.reason})" if trial.reason else ""
        text = f"{finding.cause}: not measured{without}, because trial {trial.number} ended as {trial.outcome}{why}"
        if trial.outcome not in MAY_PASS:
            return text
        needed_s = sum(self._pairs_s(one) for one in findings if is_open(one))
        return f"{text}; `{self._command(needed_s)} --retry` tries it again"

    def _untried_text(self, finding: Finding) -> str:
        """Returns what trying a finding takes, and the command that tries it."""
        needed_s = self._pairs_s(finding)
        command = self._command(needed_s)
        return f"{finding.cause}: not tried yet: two pairs take {seconds_text(needed_s)}; `{command}` tries it"

    def _command(self, needed_s: float) -> str:
        minutes = math.ceil(needed_s / 60)
        return f"autotune explain {call(self._session.folder)} --trial {self._record.number} --minutes {minutes}"

    def _remedied(self, finding: Finding) -> tuple[Knobs, tuple[str, ...]]:
        """Returns the knobs to set and the stages to skip in order to measure what a finding's remedy gains."""
        if finding.value is not None:
            return configuration_with(self._record, finding.knob, finding.value, self._session.resolved), ()
        return self._record.knobs, finding.without.stages if finding.without else ()

    def _pairs_s(self, finding: Finding) -> float:
        """Returns the expected seconds of one round. At most one of its trials compiles; the others use the cache."""
        changed = self._remedied(finding)[0]
        each_s = self._session.again_start_s(self._record) + self._record.phases_s.get("steady", 0.0)
        return len(ORDER) * min(self._record.fresh_s, each_s) + self._session.compile_s(self._record, changed)


def is_open(finding: Finding) -> bool:
    """Whether a finding can be tried and has not been tried yet."""
    return finding.check is None and (finding.value is not None or finding.without is not None)


def is_measured(one: TrialRecord) -> bool:
    """Whether a check has a rate. It may violate a constraint, because it is not a candidate for the best."""
    return bool(one.score) and one.outcome in (Outcome.ok, Outcome.infeasible)


def measured_pairs(record: TrialRecord, cause: str, sides: Sequence[Side], ends_s: float | None) -> list[Pair]:
    """Measures two sides in the order of ORDER and returns the complete pairs. A failure ends the round.

    Args:
        record: the trial that is explained.
        cause: cause of the finding.
        sides: the side without the remedy, the side with it.
        ends_s: time on the study's clock by which the trials have to end; None without a limit.
    """
    records = sides[0].session.records
    number = 1 + last_round(records, Kind.check)
    scores: list[float] = []
    with contextlib.suppress(OutOfTime):
        for is_new in ORDER:
            session, knobs, why, skipped, is_fixed = sides[is_new]
            made = session.measure_check(
                record, knobs, cause=cause, round_number=number, why=why, ends_s=ends_s, skipped=skipped, is_fixed=is_fixed
            )
            if not is_measured(made):
                break
            scores.append(made.score or 0.0)
    return _paired(scores)


def check_of(session: Session, record: TrialRecord, finding: Finding, pairs: Sequence[Pair], **how: str) -> checks.Check:
    """Returns the check that compares a finding's prediction with pairs; `how` and `remedy` as in `checks.check_of`."""
    noise = noise_or_usual(session.records, session.earlier_noise)
    return checks.check_of(finding, checks.measured_gain(pairs, noise), trial=record.number, num_pairs=len(pairs), **how)


def _paired(scores: Sequence[float]) -> list[Pair]:
    """Returns the complete pairs of a round, whose scores are in the order of ORDER."""
    pairs = zip(ORDER[::2], scores[::2], scores[1::2], strict=False)
    return [(one, other) if is_new_first else (other, one) for is_new_first, one, other in pairs]


def _least_certain(made: Mapping[int, checks.Check], pairs: Mapping[int, Sequence[Pair]]) -> int | None:
    """Returns the index of the finding whose check is to be repeated: the least certain; None if all are certain enough.

    Args:
        made: index of a finding -> its check.
        pairs: index of a finding that can be repeated -> its pairs.
    """
    widths = {index: made[index].measured.width for index, found in pairs.items() if len(found) < MAX_PAIRS}
    index = max(widths, key=lambda each: widths[each], default=None)
    return index if index is not None and widths[index] > WIDE_FRAC else None
