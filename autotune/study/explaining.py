"""Explains trials of a study: runs passes, finds what costs time, and lets remedies.py try the remedies.

A pass is a trial that runs the configuration of an explained trial again and records details: "lines", "trace" or "memory".
Neither the search nor the verdict uses passes.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.config.command import CommandTemplate
from autotune.errors import BadInput
from autotune.explain import checks, explanation
from autotune.explain.evidence import Evidence, operations_of
from autotune.explain.explanation import Document
from autotune.explain.findings import Finding, found, ranked
from autotune.explain.gains import Gain
from autotune.explain.tables import Explanation, explained, read_tables, with_earlier, write_tables
from autotune.explain.trials import Tried, noise_or_usual
from autotune.explained import FIXED, WITHOUT, entry_of
from autotune.harness.explain.documents import LINES, MEMORY, PASSES, TRACE
from autotune.knobs.catalogue import CATALOGUE
from autotune.plain_json import from_json
from autotune.quantities import seconds_text
from autotune.records import Kind, Outcome, Summary, Tier, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.space import SearchSpace, resolve
from autotune.studies import call
from autotune.study.remedies import Pair, Remedies, Side, check_of, is_measured, is_open, measured_pairs
from autotune.trials import health
from autotune.trials.budget import again_start_s
from autotune.trials.session import Session

# A pass is expected to take PASS_S seconds or PASS_STEPS steps, whichever is longer, but at most PASS_MAX_S seconds.
PASS_S = {LINES: 6.0, TRACE: 4.0, MEMORY: 5.0}
PASS_STEPS = {LINES: 20, TRACE: 10, MEMORY: 4}
PASS_MAX_S = {LINES: 16.0, TRACE: 22.0, MEMORY: math.inf}
MAX_SHOWN = 12  # a message names at most this many trials
# Largest allowed ratio of a step's time under the pass "lines" to its time in the trial. Above this, the pass does not show how
# the measured program spends a step.
MAX_SLOWDOWN = 1.5


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to explain.

    Attributes:
        trial: number of the trial; None for the best.
        passes: passes to run, unless they have run before.
        minutes: time for checks, after the passes; a check that would not fit is not started.
        fixed: command of a fixed version of the program, to measure against the study's program; None if there is none.
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


def pass_s(record: TrialRecord, which: str, start_s: float) -> float:
    """Returns the expected seconds of a pass of a trial: `start_s` for everything but its steps, plus the time of the steps."""
    steps_s = PASS_STEPS[which] * record.metrics.get("step_p50_s", 0.0)
    return start_s + max(PASS_S[which], min(steps_s, PASS_MAX_S[which]))


def planned_s(baseline: TrialRecord) -> list[float]:
    """Returns the expected seconds of each pass at the end of a study, in order, assuming the baseline's step time."""
    return [pass_s(baseline, which, again_start_s(baseline)) for which in (LINES, LINES, TRACE, MEMORY, TRACE, MEMORY)]


class Explaining:
    """Explanations of trials of one study.

    Attributes:
        document: the explanations so far, see `explain/explanation.py`; None before anything was tried.
    """

    def __init__(self, session: Session, document: Document | None = None) -> None:
        self._session = session
        self.document = document
        self._is_retrying = False

    # At the end of a study --------------------------------------------------------------------------------------------------

    def run(self, best: TrialRecord) -> None:
        """Explains the best trial and the baseline in at most a tenth of the study's time. Leaves out what does not fit.

        Passes of the best trial may use all of the study's remaining time, because no other trials follow.
        """
        session, baseline = self._session, self._session.baseline
        session.budget.explain_s = 0.0  # releases the time that was reserved for explaining
        ends_s = session.inputs.clock.monotonic() + min(session.budget.explain_max_s, session.budget.left_s)
        study_ends_s = session.budget.ends_s() or ends_s
        targets = [best] if best is baseline else [best, baseline]
        planned = [(record, LINES) for record in targets]
        planned += [(record, which) for record in targets for which in (TRACE, MEMORY)]
        missing = [(record, which) for record, which in planned if which not in self._passes(record)]
        if missing == planned and not self._is_time_for(self._pass_s(*planned[0]), ends_s):
            self._skip(self._pass_s(*planned[0]), ends_s - session.inputs.clock.monotonic())
            return
        for record, which in missing:
            until_s = study_ends_s if record is best else ends_s
            if self._is_time_for(self._pass_s(record, which), until_s):
                self._run_pass(record, which, ends_s=until_s)
        for record in reversed(targets):  # baseline first; the checks of the best get the time that is left then
            self.explain(record, explanation.BASELINE if record is baseline else explanation.BEST, ends_s=ends_s)

    def _pass_s(self, record: TrialRecord, which: str) -> float:
        return pass_s(record, which, self._session.again_start_s(record))

    def _is_time_for(self, seconds: float, ends_s: float | None) -> bool:
        return ends_s is None or self._session.inputs.clock.monotonic() + seconds <= ends_s

    def _run_pass(self, record: TrialRecord, which: str, *, ends_s: float | None) -> None:
        """Runs a pass. If a signal killed it, repeats it once: this may be chance, since the explained trial ended well."""
        made = self._session.explain(record, which, ends_s=ends_s)
        is_killed = made.outcome is Outcome.crash and made.evidence.get("signal")
        if is_killed and self._is_time_for(self._pass_s(record, which), ends_s):
            self._session.explain(record, which, ends_s=ends_s)

    def _skip(self, needed_s: float, left_s: float) -> None:
        most_s = self._session.budget.explain_max_s
        what, most_s = ("a tenth of the study's time", most_s) if most_s < needed_s else ("the time left", max(left_s, 0.0))
        times = f"a pass takes {seconds_text(needed_s)}, {what} is {seconds_text(most_s)}"
        text = f"{times}; `autotune explain {call(self._session.folder)}` runs the passes"
        if not (self.document or {}).get("explained"):  # explanations from before the study was resumed stay
            self.document = explanation.empty(text)
        self._session.listener.notice(f"Not explained: {text}.")

    # On request -------------------------------------------------------------------------------------------------------------

    def run_asked(self, wanted: Wanted, record: TrialRecord, role: str) -> None:
        """Runs the requested passes that a trial lacks, explains the trial, and tries the settings proposed by findings."""
        session, before = self._session, self._passes(record)
        if wanted.fixed:
            self._compare(wanted.fixed, wanted, record)
            return
        is_slowed = LINES in before and _slowed(self._evidence(record, self._read(record, LINES)))
        for which in wanted.passes:
            is_lacking = which not in before or before[which].outcome is not Outcome.ok
            if is_lacking or (which == LINES and is_slowed) or self._is_repeated(before[which]):
                self._run_pass(record, which, ends_s=None)
                if which == LINES and _slowed(self._evidence(record, self._read(record, LINES))):  # its slowness may be chance
                    self._run_pass(record, which, ends_s=None)
        self._is_retrying = wanted.is_retrying
        self.explain(record, role, ends_s=session.inputs.clock.monotonic() + wanted.minutes * 60, is_repeating=True)

    def explain(self, record: TrialRecord, role: str, *, ends_s: float | None, is_repeating: bool = False) -> None:
        """Finds what costs time in a trial, from the passes that ran, and checks findings while there is time.

        Args:
            record: the trial.
            role: its role in the study.
            ends_s: time on the study's clock at which the checks end; None without a limit.
            is_repeating: whether uncertain checks are repeated in the time left.
        """
        passes = self._passes(record)
        if not passes:
            return
        read = self._read(record, *PASSES)
        evidence = self._evidence(record, read)
        more = [note for name, one in passes.items() if (note := _failed(name, one) or self._disturbed(name, one))]
        if slowed := _slowed(evidence):
            more.append(f"{slowed}; `autotune explain {call(self._session.folder)}` repeats the pass")
            evidence = replace(evidence, lines=())
        notes = read.passes.notes(name for name, one in passes.items() if one.outcome is Outcome.ok)
        findings, made = checks.by_trials(found(evidence), evidence)
        self._keep(evidence, role, findings, made, notes=[*more, *notes])
        tried: dict[int, checks.Check] = {}
        remedies = Remedies(self._session, evidence, ends_s=ends_s, is_retrying=self._is_retrying)
        try:
            remedies.try_all(findings, tried, is_repeating=is_repeating)
        finally:  # if the user interrupts the checks, those already made are kept
            findings = [checks.with_check(one, tried[index]) if index in tried else one for index, one in enumerate(findings)]
            if tried or any(one.unskippable or is_open(one) for one in findings):
                findings = [found for one in findings for found in _still_open(one, evidence)]
                more += remedies.notes(findings)
                unskippable = [one for one in findings if one.unskippable and one.check is None and one.value is None]
                why = "cannot be skipped to measure what it costs"
                more += dict.fromkeys(f"{one.cause}: {why}: {one.unskippable}" for one in unskippable)
                self._keep(evidence, role, ranked(findings), list(tried.values()), notes=[*more, *notes])

    def _is_repeated(self, record: TrialRecord) -> bool:
        """Whether `autotune explain` repeats a pass that was disturbed. It does not if the study accepted disturbances."""
        session = self._session
        is_accepted = not session.inputs.config.measure.quiet or health.caveat(session.records) is not None
        return bool(health.disturbed_by(record)) and not is_accepted

    def _disturbed(self, name: str, record: TrialRecord) -> str:
        if not (words := health.disturbed_by(record)):
            return ""
        again = f"; `autotune explain {call(self._session.folder)}` repeats the pass" * self._is_repeated(record)
        return f"{name}: {words}, so its times and shares may be wrong{again}"

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
        """Returns what the passes of a trial wrote. If there is a trace, the tables made from it are written to its folder."""
        session, passes = self._session, self._passes(record)
        ran = {name: one for name, one in passes.items() if name in wanted and one.outcome is Outcome.ok}
        folders = explanation.folders_of(ran, session.folder.path / "trials")
        made = explained(list(folders.values()), mask=session.inputs.secrets.message)
        if TRACE in folders and not made.tables.traces:  # `prune` removed the traces, but kept the tables made from them
            with contextlib.suppress(OSError, ValueError):
                made = with_earlier(made, read_tables(folders[TRACE]))
        if TRACE in folders:
            write_tables(made.tables, folders[TRACE])
        return made

    def _evidence(self, record: TrialRecord, made: Explanation) -> Evidence:
        session = self._session
        assert session.host_context is not None
        everything = SearchSpace(domains=dict.fromkeys(CATALOGUE), pinned={}, tiers=Tier.training)
        space = resolve(everything, session.host_context, passed=session.inputs.command.placeholders)
        noise = noise_or_usual(session.records, session.earlier_noise)
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

    def _compare(self, fixed: CommandTemplate, wanted: Wanted, record: TrialRecord) -> None:
        """Measures the corrected program and the study's program alternately; compares the gain with the finding's prediction.

        Raises:
            BadInput: the trial was not explained, or has no finding with this number.
        """
        session = self._session
        finding = to_fix(self.document, record.number, wanted.finding, session.folder)
        other = replace(session, runner=session.runner.with_inputs(replace(session.inputs, command=fixed)))
        sides = (
            Side(session, record.knobs, f"{finding.cause}: the unchanged program"),
            Side(other, record.knobs, f"{finding.cause}: the corrected program", is_fixed=True),
        )
        pairs: list[Pair] = []
        try:
            for _ in range((wanted.pairs + 1) // 2):
                pairs += measured_pairs(record, f"fixed: {finding.cause}", sides, None)
                last = session.records[-1]
                if not is_measured(last) and last.why == sides[True].why:
                    raise BadInput(f"COMMAND: the corrected program could not be measured, got {last.outcome}: {last.reason}.")
        finally:  # if the user interrupts it, the complete pairs count
            if pairs:
                remedy = session.inputs.secrets.message(shlex.join(fixed.argv({})))
                made = check_of(session, record, finding, pairs, how=FIXED, remedy=remedy)
                self.document = explanation.with_check(self.document or explanation.empty(), made)
                session.folder.write_explanation(self.document)
        if not pairs:
            raise BadInput(f"STUDY: {session.folder.name!r} could not be measured again. Try once more on a quiet machine.")


def _still_open(finding: Finding, evidence: Evidence) -> list[Finding]:
    """Returns [finding]; [] if it has no remedy left.

    If trials have refuted the finding's setting in the meantime, the setting is removed from the finding.
    """
    if not (finding.knob and is_open(finding) and evidence.is_refuted(finding.knob, finding.value)):
        return [finding]
    return [checks.without_setting(finding)] if finding.code else []


def to_fix(document: Document | None, trial: int, number: int, folder: StudyFolder) -> Finding:
    """Returns the finding that a corrected program addresses. Its gain is the predicted one, not one that a check measured.

    Exception: a check of kind WITHOUT ran the program without the costly part. Its gain stays, because it also predicts what a
    fix would achieve.

    Args:
        document: the study's explanation; None before anything was explained.
        trial: number of the explained trial.
        number: number of the finding, from 1.
        folder: the study's folder.

    Raises:
        BadInput: there is no such finding.
    """
    entry = entry_of(document, trial)
    if entry is None:
        raise BadInput(
            f"--fixed: this trial of study {folder.name!r} was not explained yet. Run `autotune explain {call(folder)}` first."
        )
    if not entry["findings"]:
        raise BadInput(f"--fixed: explaining trial {entry['trial']} found nothing that a changed program could fix.")
    if number > len(entry["findings"]):
        there = f"1 to {len(entry['findings'])}"
        raise BadInput(f"--finding: no such finding of trial {entry['trial']}, got {number}. There are: {there}.")
    finding = Finding.from_json(entry["findings"][number - 1])
    check = finding.check or {}
    is_other = check.get("how") == WITHOUT  # shows what is gained if the cause costs no time at all
    return replace(finding, gain=from_json(check["predicted"], Gain)) if check and not is_other else finding


def _slowed(evidence: Evidence) -> str:
    """Returns a note if steps in the pass "lines" took too long for the pass to represent the trial; "" otherwise."""
    slowdown = evidence.slowdown
    if slowdown is None or slowdown <= MAX_SLOWDOWN:
        return ""
    why = "the machine was busy, or the pass slowed the program"
    return f"{LINES}: a step took {slowdown:.1f} times as long as in the trial: {why}"


def _failed(name: str, record: TrialRecord) -> str:
    if record.outcome is Outcome.ok:
        return ""
    return f"{name}: the pass ended as {record.outcome}{f', {record.reason}' if record.reason else ''}"
