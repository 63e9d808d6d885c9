"""Explains trials of a study: runs the passes, finds what costs time, and tries settings to measure what they gain.

A pass runs a trial's configuration again while it records details: "lines", "trace" or "memory". A check measures what a
finding's remedy gains. Passes and checks are trials of separate kinds. Neither the search nor the verdict uses them.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autotune.config.command import CommandTemplate
from autotune.errors import BadInput
from autotune.explain import checks, explanation
from autotune.explain.evidence import Evidence, operations_of
from autotune.explain.explanation import Document
from autotune.explain.findings import Finding, found, ranked
from autotune.explain.gains import Gain
from autotune.explain.tables import Explanation, explained, read_tables, write_tables
from autotune.explain.trials import Tried, configuration_with, noise_known
from autotune.explained import FIXED, WITHOUT, entry_of
from autotune.harness.explain.documents import LINES, MEMORY, PASSES, TRACE
from autotune.knobs.catalogue import CATALOGUE
from autotune.plain_json import from_json
from autotune.quantities import seconds_text
from autotune.records import SKIPPED, Kind, Knobs, Outcome, Summary, Tier, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.space import SearchSpace, resolve
from autotune.studies import call
from autotune.trials.budget import without_window_s
from autotune.trials.session import OutOfTime, Session

# A pass is expected to take PASS_S seconds or PASS_STEPS steps, whichever is longer, but at most PASS_MAX_S seconds.
PASS_S = {LINES: 6.0, TRACE: 4.0, MEMORY: 5.0}
PASS_STEPS = {LINES: 20, TRACE: 10, MEMORY: 4}
PASS_MAX_S = {LINES: 16.0, TRACE: 22.0, MEMORY: math.inf}
MAX_SHOWN = 12  # a message names at most this many trials
MAX_CHECKS = 3  # at most this many findings get a new check each time a trial is explained; failed attempts do not count
# When `autotune explain` has tried all findings, it repeats checks in the time left, as long as their intervals are wider than
# WIDE_FRAC of the rate, each up to MAX_PAIRS pairs.
WIDE_FRAC, MAX_PAIRS = 0.1, 8
# If a check that skips stages ended with an outcome in FAILED, it is repeated only with --retry, or after the program was
# edited. Outcomes in MAY_PASS may be due to chance, so a note about them names --retry.
MAY_PASS = (Outcome.crash, Outcome.timeout, Outcome.device_oom, Outcome.host_oom)
FAILED = (Outcome.error, Outcome.invalid, *MAY_PASS)
# Largest allowed ratio of a step's time under the pass "lines" to its time in the trial. Above this, the pass does not show how
# the measured program spends a step.
MAX_SLOWDOWN = 1.5
Pair = tuple[float, float]  # score with the remedy, score without
ORDER = (True, False, False, True)  # True: with the remedy; in ABBA order, a drift of the machine affects both sides alike


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to explain.

    Attributes:
        trial: number of the trial; None for the best.
        passes: passes to run, unless they have run before.
        minutes: time for checks, after the passes; a check that would not fit is not started.
        fixed: a version of the program with the fix, to measure against the study's program; None if there is none.
        finding: number of the finding that `fixed` fixes, from 1.
        pairs: number of pairs of the two programs to measure.
        is_retrying: whether to try a finding again if its trial failed before.
    """

    trial: int | None = None
    passes: tuple[str, ...] = PASSES
    minutes: float = 2.0
    fixed: CommandTemplate | None = None
    finding: int = 1
    pairs: int = 2
    is_retrying: bool = False


class Side(NamedTuple):
    """One side of a comparison: session, knobs, name, skipped stages, whether it runs the fixed program."""

    session: Session
    knobs: Knobs
    why: str
    skipped: tuple[str, ...] = ()
    is_fixed: bool = False


NEW_CONFIGURATION_KINDS = (Kind.baseline, Kind.search, Kind.attribution)  # kinds of trials that may measure a new configuration


def explainable(
    number: int | None, records: Sequence[TrialRecord], summary: Summary, folder: StudyFolder
) -> tuple[TrialRecord, str]:
    """Returns the trial to explain, and its role in the study.

    Args:
        number: the trial's number; None for the best.
        records: the study's trials.
        summary: the study's summary.
        folder: the study's folder.

    Raises:
        BadInput: the trial does not exist or has no measurement; the error names the trials that can be explained.
    """
    best = (summary.get("best") or {}).get("trial", 0)
    able = {
        one.number: one
        for one in records
        if one.kind in NEW_CONFIGURATION_KINDS and one.repeats is None and one.value is not None
    }
    if number is None and not able:
        raise BadInput(
            f"STUDY: none of its trials has a measurement to explain, got {folder.name!r}. "
            f"Continue it: autotune resume {call(folder)}"
        )
    number = best if number is None else number
    if number in able:
        roles = {0: explanation.BASELINE, best: explanation.BEST}
        return able[number], roles.get(number, explanation.ASKED)
    there = {one.number: one for one in records}
    shown = ", ".join(map(str, list(able)[:MAX_SHOWN])) + (" and others" if len(able) > MAX_SHOWN else "")
    can = f"Can be explained: {shown}." if able else "None of its trials can be explained."
    if number not in there:
        raise BadInput(f"--trial: no such trial of {folder.name!r}, got {number}. {can}")
    one = there[number]
    if one.repeats is not None and one.repeats in able:
        raise BadInput(f"--trial: trial {number} only repeats trial {one.repeats}. Explain that trial: --trial {one.repeats}.")
    if one.value is not None:
        raise BadInput(f"--trial: trial {number} is of kind {one.kind}, which has no configuration of its own. {can}")
    reason = f" ({one.reason})" if one.reason else ""
    raise BadInput(f"--trial: trial {number} has no measurement, because it ended as {one.outcome}{reason}. {can}")


def pass_s(record: TrialRecord, which: str) -> float:
    """Returns the expected seconds of a trial that runs one pass of a configuration."""
    steps_s = PASS_STEPS[which] * record.metrics.get("step_p50_s", 0.0)
    return without_window_s(record) + max(PASS_S[which], min(steps_s, PASS_MAX_S[which]))


def planned_s(baseline: TrialRecord) -> list[float]:
    """Returns the expected seconds of each pass at the end of a study, in order, assuming the baseline's step time."""
    return [pass_s(baseline, which) for which in (LINES, LINES, TRACE, MEMORY, TRACE, MEMORY)]


class Explaining:
    """Explains trials of one study.

    Attributes:
        document: what is known so far, see `explain/explanation.py`; None before anything was tried.
    """

    def __init__(self, session: Session, document: Document | None = None) -> None:
        self._session = session
        self.document = document
        self._is_retrying = False

    # At the end of a study --------------------------------------------------------------------------------------------------

    def run(self, best: TrialRecord) -> None:
        """Explains the best trial and the baseline in at most a tenth of the study's time. Leaves out what does not fit."""
        session, baseline = self._session, self._session.baseline
        session.budget.explain_s = 0.0  # from now on, the time kept for explaining may be used
        ends_s = session.inputs.clock.monotonic() + min(session.budget.explain_max_s, session.budget.left_s)
        targets = [best] if best is baseline else [best, baseline]
        planned = [(record, LINES) for record in targets]
        planned += [(record, which) for record in targets for which in (TRACE, MEMORY)]
        missing = [(record, which) for record, which in planned if which not in self._passes(record)]
        if missing == planned and not self._is_time_for(pass_s(*planned[0]), ends_s):
            self._skip(pass_s(*planned[0]), ends_s - session.inputs.clock.monotonic())
            return
        for record, which in missing:
            if self._is_time_for(pass_s(record, which), ends_s):
                self._run_pass(record, which, ends_s=ends_s)
        for record in reversed(targets):  # the best comes last, so that its checks can use all the time left
            self.explain(record, explanation.BASELINE if record is baseline else explanation.BEST, ends_s=ends_s)

    def _is_time_for(self, seconds: float, ends_s: float | None) -> bool:
        return ends_s is None or self._session.inputs.clock.monotonic() + seconds <= ends_s

    def _run_pass(self, record: TrialRecord, which: str, *, ends_s: float | None) -> None:
        """Runs a pass. Repeats it once if a signal killed it, which may be chance, since the trial itself ended well."""
        made = self._session.explain(record, which, ends_s=ends_s)
        is_killed = made.outcome is Outcome.crash and made.evidence.get("signal")
        if is_killed and self._is_time_for(pass_s(record, which), ends_s):
            self._session.explain(record, which, ends_s=ends_s)

    def _skip(self, needed_s: float, left_s: float) -> None:
        most_s = self._session.budget.explain_max_s
        what, most_s = ("a tenth of the study's time", most_s) if most_s < needed_s else ("the time left", max(left_s, 0.0))
        times = f"a pass takes {seconds_text(needed_s)}, {what} is {seconds_text(most_s)}"
        text = f"{times}; `autotune explain {call(self._session.folder)}` runs the passes"
        self.document = explanation.empty(text)
        self._session.listener.notice(f"Not explained: {text}.")

    # On request -------------------------------------------------------------------------------------------------------------

    def run_asked(self, wanted: Wanted, record: TrialRecord, role: str) -> None:
        """Runs the requested passes that a trial lacks, explains the trial, and tries the settings that findings propose."""
        session, before = self._session, self._passes(record)
        if wanted.fixed:
            self._compare(wanted.fixed, wanted, record)
            return
        is_slowed = LINES in before and _slowed(self._evidence(record, self._read(record, LINES)))
        for which in wanted.passes:
            if which not in before or before[which].outcome is not Outcome.ok or (which == LINES and is_slowed):
                self._run_pass(record, which, ends_s=None)
                if which == LINES and _slowed(self._evidence(record, self._read(record, LINES))):  # it may have been chance
                    self._run_pass(record, which, ends_s=None)
        self._is_retrying = wanted.is_retrying
        self.explain(record, role, ends_s=session.inputs.clock.monotonic() + wanted.minutes * 60, is_repeating=True)

    def explain(self, record: TrialRecord, role: str, *, ends_s: float | None, is_repeating: bool = False) -> None:
        """Finds what costs time in a trial, from the passes that ran, and checks findings while there is time.

        Args:
            record: the trial.
            role: its role in the study.
            ends_s: when the checks end, as the study's clock shows it; None if nothing limits them.
            is_repeating: whether uncertain checks are repeated in the time left.
        """
        passes = self._passes(record)
        if not passes:
            return
        read = self._read(record, *PASSES)
        evidence = self._evidence(record, read)
        more = [note for name, one in passes.items() if (note := _failed(name, one))]
        if slowed := _slowed(evidence):
            more.append(f"{slowed}; `autotune explain {call(self._session.folder)}` repeats the pass")
            evidence = replace(evidence, lines=())
        notes = read.passes.notes(name for name, one in passes.items() if one.outcome is Outcome.ok)
        findings, made = checks.by_trials(found(evidence), evidence)
        self._keep(evidence, role, findings, made, notes=[*more, *notes])
        num_before, tried = len(self._session.records), dict[int, checks.Check]()
        try:
            self._try_all(evidence, findings, tried, ends_s, is_repeating=is_repeating)
        finally:  # if the user stops it, the checks made until then are kept
            findings = [checks.with_check(one, tried[index]) if index in tried else one for index, one in enumerate(findings)]
            if tried or any(one.unskippable or _is_open(one) for one in findings):
                findings = [found for one in findings for found in _still_open(one, evidence)]
                ended = {id(one): trial for one in findings if (trial := self._ended_without(evidence, one, num_before))}
                more += [self._ended_text(record, finding, ended[id(finding)]) for finding in findings if id(finding) in ended]
                more += [self._untried(record, one) for one in findings if _is_open(one) and id(one) not in ended][:1]
                more += list(dict.fromkeys(map(_unskippable_text, filter(_is_unskippable, findings))))
                self._keep(evidence, role, ranked(findings), list(tried.values()), notes=[*more, *notes])

    def _keep(
        self, evidence: Evidence, role: str, findings: Sequence[Finding], made: Sequence[checks.Check], *, notes: Sequence[str]
    ) -> None:
        passes = self._passes(evidence.record)
        added = explanation.entry(evidence, role, findings, passes=passes, notes=notes)
        document = explanation.with_entry(self.document or explanation.empty(), added, made)
        self.document = self._session.inputs.secrets.document(document)
        self._session.folder.write_explanation(self.document)

    def _passes(self, record: TrialRecord) -> dict[str, TrialRecord]:
        return explanation.passes_of(record.number, self._session.records)

    def _read(self, record: TrialRecord, *wanted: str) -> Explanation:
        """Returns what the passes of a trial wrote; if there is a trace, also writes the tables made from it."""
        session, passes = self._session, self._passes(record)
        ran = {name: one for name, one in passes.items() if name in wanted and one.outcome is Outcome.ok}
        folders = explanation.folders_of(ran, session.folder.path / "trials")
        made = explained(list(folders.values()), mask=session.inputs.secrets.message)
        if TRACE in folders and not made.tables.traces:  # `prune` removed the traces, but kept the tables made from them
            with contextlib.suppress(OSError, ValueError):
                return replace(made, tables=read_tables(folders[TRACE]))
        if TRACE in folders:
            write_tables(made.tables, folders[TRACE])
        return made

    def _evidence(self, record: TrialRecord, made: Explanation) -> Evidence:
        session = self._session
        assert session.host_context is not None
        everything = SearchSpace(domains=dict.fromkeys(CATALOGUE), pinned={}, tiers=Tier.training)
        space = resolve(everything, session.host_context, passed=session.inputs.command.placeholders)
        noise = noise_known(session.records, session.earlier_noise)
        return Evidence(
            record=record,
            cwd=session.inputs.command.cwd or "",
            host_context=session.host_context,
            lines=made.passes.of(LINES),
            memory=made.passes.of(MEMORY),
            operations=operations_of(made.tables),
            domains={key: domain.values for key, domain in space.domains.items()},
            tried=Tried(record=record, records=session.records, space=session.resolved, noise=noise),
        )

    # Checks -----------------------------------------------------------------------------------------------------------------

    def _try_all(
        self,
        evidence: Evidence,
        findings: Sequence[Finding],
        tried: dict[int, checks.Check],
        ends_s: float | None,
        *,
        is_repeating: bool,
    ) -> None:
        """Tries findings while there is time, the largest gains first, in one ABBA round each, and may repeat uncertain ones.

        A finding is tried with the setting that it proposes, or without the stages that cost too much. Rounds of earlier calls
        count. Adds each check to `tried` when it is made: index of a finding -> its check.
        """
        pairs: dict[int, list[Pair]] = {}  # index of a finding -> its pairs
        num_new = 0
        for index, finding in enumerate(findings):
            if not _is_open(finding):
                continue
            found = self._pairs_before(evidence, finding)
            if not found and num_new < MAX_CHECKS and (found := self._try(evidence, finding, ends_s)):
                num_new += 1
            if found:
                pairs[index], tried[index] = found, self._check_of(evidence, finding, found)
        while is_repeating and (least := _least_certain(tried, pairs)) is not None:
            if not (found := self._try(evidence, findings[least], ends_s)):
                break
            pairs[least] += found
            tried[least] = self._check_of(evidence, findings[least], pairs[least])

    def _pairs_before(self, evidence: Evidence, finding: Finding) -> list[Pair]:
        """Returns the pairs of all complete rounds that tried a finding's remedy, unless the program was edited since."""
        record, changed = evidence.record, self._session.resolved.changed
        knobs, skipped = self._remedied(record, finding)
        sides = (changed(record.knobs), ()), (changed(knobs), skipped)
        rounds: dict[int | None, list[TrialRecord]] = {}
        for one in self._session.records:
            if _is_check_of(one, record) and one.origin == finding.cause and one.started_at >= evidence.edited_at:
                rounds.setdefault(one.round, []).append(one)
        pairs: list[Pair] = []
        for trials in rounds.values():
            ran = [(one.changed, tuple(one.evidence.get(SKIPPED, ()))) for one in trials]
            if ran == [sides[is_new] for is_new in ORDER] and all(map(_is_measured, trials)):
                pairs += _paired([one.score or 0.0 for one in trials])
        return pairs

    def _try(self, evidence: Evidence, finding: Finding, ends_s: float | None) -> list[Pair]:
        """Measures what a finding's remedy gains in one ABBA round. Returns its pairs; [] if it was not measured."""
        session, record, cause = self._session, evidence.record, finding.cause
        knobs, skipped = self._remedied(record, finding)
        has_failed = not self._is_retrying and self._failed_without(evidence, finding) is not None
        if has_failed or not self._is_time_for(self._pairs_s(record, knobs), ends_s):
            return []
        new = f"{cause}: {'without it' if skipped else 'with the remedy'}"
        sides = Side(session, record.knobs, f"{cause}: as it was"), Side(session, knobs, new, skipped)
        pairs = self._abba(record, cause, sides, ends_s)
        return pairs if len(pairs) == len(ORDER) // 2 else []  # a single pair shows no spread

    def _check_of(self, evidence: Evidence, finding: Finding, pairs: Sequence[Pair]) -> checks.Check:
        how = WITHOUT if self._remedied(evidence.record, finding)[1] else checks.PAIRS
        return self._check(evidence.record, finding, pairs, how=how)

    def _failed_without(self, evidence: Evidence, finding: Finding) -> TrialRecord | None:
        """Returns the last trial that skipped the stages of a finding and failed; None if there is none.

        A trial does not count if the program has been changed since.
        """
        if not _is_open(finding) or finding.value is not None or finding.without is None:
            return None
        skipped, edited_at = list(finding.without.stages), evidence.edited_at
        tried = (one for one in reversed(self._session.records) if _is_check_of(one, evidence.record))
        failed = (one for one in tried if one.evidence.get(SKIPPED) == skipped and one.outcome in FAILED)
        return next((one for one in failed if one.started_at >= edited_at), None)

    def _ended_without(self, evidence: Evidence, finding: Finding, num_before: int) -> TrialRecord | None:
        """Returns the trial that ended without measuring a finding, in this call or an earlier one; None if there is none."""
        if not _is_open(finding):
            return None
        new = (one for one in self._session.records[num_before:] if _is_check_of(one, evidence.record))
        ended = [one for one in new if one.origin == finding.cause and not _is_measured(one)]
        ended = [one for one in ended if one.outcome is not Outcome.interrupted]  # those lacked time: see `_untried`
        return self._failed_without(evidence, finding) or next(iter(ended), None)

    def _ended_text(self, record: TrialRecord, finding: Finding, trial: TrialRecord) -> str:
        without = f" without {finding.without.name}" if finding.without and finding.value is None else ""
        why = f" ({trial.reason})" if trial.reason else ""
        text = f"{finding.cause}: not measured{without}, because trial {trial.number} ended as {trial.outcome}{why}"
        return f"{text}; `{self._command(record, finding)} --retry` tries it again" if trial.outcome in MAY_PASS else text

    def _remedied(self, record: TrialRecord, finding: Finding) -> tuple[Knobs, tuple[str, ...]]:
        """Returns the knobs to set and the stages to skip in order to measure what a finding's remedy gains."""
        if finding.value is not None:
            return configuration_with(record, finding.knob, finding.value, self._session.resolved), ()
        return record.knobs, finding.without.stages if finding.without else ()

    def _pairs_s(self, record: TrialRecord, changed: Knobs) -> float:
        """Returns the expected seconds of one ABBA round. Only the first trial compiles; the others use the cache."""
        return len(ORDER) * record.fresh_s + self._session.compile_s(record, changed)

    def _abba(self, record: TrialRecord, cause: str, sides: Sequence[Side], ends_s: float | None) -> list[Pair]:
        """Measures two sides in the order of ORDER and returns the complete pairs. A failure ends the round."""
        number = 1 + max((one.round or 0 for one in self._session.records if one.kind is Kind.check), default=0)
        scores: list[float] = []
        with contextlib.suppress(OutOfTime):
            for is_new in ORDER:
                session, knobs, why, skipped, is_fixed = sides[is_new]
                made = session.measure_check(
                    record,
                    knobs,
                    cause=cause,
                    round_number=number,
                    why=why,
                    ends_s=ends_s,
                    skipped=skipped,
                    is_fixed=is_fixed,
                )
                if not _is_measured(made):
                    break
                scores.append(made.score or 0.0)
        return _paired(scores)

    def _check(self, record: TrialRecord, finding: Finding, pairs: Sequence[Pair], **how: str) -> checks.Check:
        noise = noise_known(self._session.records, self._session.earlier_noise)
        return checks.check_of(finding, checks.measured_gain(pairs, noise), trial=record.number, num_pairs=len(pairs), **how)

    def _untried(self, record: TrialRecord, finding: Finding) -> str:
        """Returns what trying a finding takes, and the command that tries it."""
        needed_s = self._pairs_s(record, self._remedied(record, finding)[0])
        command = self._command(record, finding)
        return f"{finding.cause}: not tried yet: two pairs take {seconds_text(needed_s)}; `{command}` tries it"

    def _command(self, record: TrialRecord, finding: Finding) -> str:
        """Returns the command that has enough time to try a finding."""
        minutes = math.ceil(self._pairs_s(record, self._remedied(record, finding)[0]) / 60)
        return f"autotune explain {call(self._session.folder)} --trial {record.number} --minutes {minutes}"

    def _compare(self, fixed: CommandTemplate, wanted: Wanted, record: TrialRecord) -> None:
        """Measures the fixed and the study's program alternately, and compares the gain with the finding's prediction.

        Raises:
            BadInput: the trial was not explained, or has no finding with this number.
        """
        session = self._session
        finding = _chosen(entry_of(self.document, record.number), wanted, session.folder)
        other = replace(session, runner=session.runner.with_inputs(replace(session.inputs, command=fixed)))
        sides = (
            Side(session, record.knobs, f"{finding.cause}: the unchanged program"),
            Side(other, record.knobs, f"{finding.cause}: the fixed program", is_fixed=True),
        )
        pairs: list[Pair] = []
        try:
            for _ in range((wanted.pairs + 1) // 2):
                pairs += self._abba(record, f"fixed: {finding.cause}", sides, None)
                last = session.records[-1]
                if not _is_measured(last) and last.why == sides[True].why:
                    raise BadInput(f"COMMAND: the fixed program could not be measured, got {last.outcome}: {last.reason}.")
        finally:  # if the user stops it, the pairs that were measured until then count
            if pairs:
                remedy = session.inputs.secrets.message(shlex.join(fixed.argv({})))
                made = self._check(record, finding, pairs, how=FIXED, remedy=remedy)
                self.document = explanation.with_check(self.document or explanation.empty(), made)
                session.folder.write_explanation(self.document)
        if not pairs:
            raise BadInput(f"STUDY: {session.folder.name!r} could not be measured again. Try once more on a quiet machine.")


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


def _still_open(finding: Finding, evidence: Evidence) -> list[Finding]:
    """Returns [finding], without its setting if trials have refuted that meanwhile; [] if no remedy is left."""
    if not (finding.knob and _is_open(finding) and evidence.is_refuted(finding.knob, finding.value)):
        return [finding]
    return [checks.without_setting(finding)] if finding.code else []


def _chosen(entry: dict[str, Any] | None, wanted: Wanted, folder: StudyFolder) -> Finding:
    """Returns the finding that a fixed program addresses. Its gain is the predicted one, not one that a check measured.

    If a check skipped stages (WITHOUT), the gain derived from that check stays, because it is a prediction, too.

    Raises:
        BadInput: there is no such finding.
    """
    if entry is None:
        raise BadInput(
            f"--fixed: this trial of study {folder.name!r} was not explained yet. Run `autotune explain {call(folder)}` first."
        )
    if not entry["findings"]:
        raise BadInput(f"--fixed: explaining trial {entry['trial']} found nothing that a changed program could fix.")
    if wanted.finding > len(entry["findings"]):
        there = f"1 to {len(entry['findings'])}"
        raise BadInput(f"--finding: no such finding of trial {entry['trial']}, got {wanted.finding}. There are: {there}.")
    finding = Finding.from_json(entry["findings"][wanted.finding - 1])
    check = finding.check or {}
    is_other = check.get("how") == WITHOUT  # such a check predicts what is gained if the cause costs no time at all
    return replace(finding, gain=from_json(check["predicted"], Gain)) if check and not is_other else finding


def _slowed(evidence: Evidence) -> str:
    """Returns a note if steps in the pass "lines" took too long for the pass to represent the trial; "" otherwise."""
    slowdown = evidence.slowdown
    if slowdown is None or slowdown <= MAX_SLOWDOWN:
        return ""
    why = "the machine was busy, or the pass slowed the program"
    return f"{LINES}: a step took {slowdown:.1f} times as long as in the trial: {why}"


def _is_check_of(one: TrialRecord, record: TrialRecord) -> bool:
    return one.kind is Kind.check and one.repeats == record.number


def _is_measured(one: TrialRecord) -> bool:
    """Whether a check has a rate. A check that violates a constraint counts, too: it is not a candidate for the best."""
    return bool(one.score) and one.outcome in (Outcome.ok, Outcome.infeasible)


def _is_unskippable(finding: Finding) -> bool:
    return bool(finding.unskippable) and finding.check is None and finding.value is None


def _unskippable_text(finding: Finding) -> str:
    return f"{finding.cause}: cannot be skipped to measure what it costs: {finding.unskippable}"


def _is_open(finding: Finding) -> bool:
    """Whether a finding can be tried and has not been tried yet."""
    return finding.check is None and (finding.value is not None or finding.without is not None)


def _failed(name: str, record: TrialRecord) -> str:
    if record.outcome is Outcome.ok:
        return ""
    return f"{name}: the pass ended as {record.outcome}{f', {record.reason}' if record.reason else ''}"
