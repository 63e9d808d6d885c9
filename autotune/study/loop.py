"""Runs a study: baseline, search, finals with attribution.

A trial's record is on disk as soon as the trial has ended, so an interrupted study can be resumed. The summary is updated
within seconds; with more than 100 trials, within ten minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Iterator
from typing import Any

from autotune.compare import noise
from autotune.compare.attribution import Attributor
from autotune.compare.decision import Decision
from autotune.compare.finals import Finals
from autotune.compare.pareto import confirm_front
from autotune.compare.tiers import TierFinals
from autotune.compare.verify import VERIFIED, Verification
from autotune.detected import missing_processes
from autotune.errors import BadInput, FolderLost, NothingWorked
from autotune.harness.protocol import RankResult
from autotune.knobs.catalogue import knob
from autotune.machine import host_context
from autotune.monitors.sealing import seal_leftovers
from autotune.records import StudyRecord, Summary
from autotune.run_dir import CUT_OFF, FULL, StudyFolder, is_study
from autotune.space import ResolvedSpace, resolve
from autotune.study.earlier_studies import earlier_noise, inherit, why_nothing
from autotune.study.explaining import Explaining, Wanted, explainable, planned_s
from autotune.study.failed_baseline import why_nothing_worked
from autotune.study.proposals import Search
from autotune.study.recording import Recording
from autotune.study.resuming import Earlier, read_earlier
from autotune.study.summary import Standing
from autotune.study.tracker import Tracker
from autotune.study.writing import Writer
from autotune.trials.budget import Budget, Costs
from autotune.trials.events import Listener, Masked
from autotune.trials.identity import about, changed_variables, differences
from autotune.trials.inputs import StudyInputs
from autotune.trials.interrupts import Interrupts
from autotune.trials.quarantine import quarantine
from autotune.trials.runner import TrialRunner
from autotune.trials.schedule import Ending
from autotune.trials.session import OutOfTime, Session
from autotune.trials.settings import memory_of_process_bytes, memory_seen_bytes
from autotune.trials.trial_metrics import cycle
from autotune.wording import cycles_text, unwatched_text

ALLOWS_DUPLICATES = "KMP_DUPLICATE_LIB_OK"  # lets two OpenMP runtimes be loaded; importing threadpoolctl sets it


def run_study(inputs: StudyInputs, folder: StudyFolder, listener: Listener) -> Summary:
    """Runs a study to its verdict and returns its summary, which is on disk by then.

    An interrupt raises no exception: the summary then has the status "interrupted" and the results so far.

    Raises:
        NothingWorked: the baseline or all of the first configurations failed; the error has the reason and the end of the log.
        FolderLost: the study's folder can no longer be written.
        BadInput: another autotune process is working on the study.
    """
    return _run(inputs, folder, listener, is_new=True)


def resume_study(inputs: StudyInputs, folder: StudyFolder, listener: Listener) -> Summary:
    """Resumes a study, no matter how it ended, and returns its summary, as `run_study` does.

    Finished trials are neither repeated nor lost. Trials that were cut off are repeated. Time already used counts against the
    budget.

    Raises:
        BadInput: as in `run_study`, or machine or program differ from those of the earlier trials; the error names the
            differences.
    """
    return _run(inputs, folder, listener, is_new=False)


def explain_study(inputs: StudyInputs, folder: StudyFolder, listener: Listener, wanted: Wanted) -> Summary:
    """Explains a trial of a study that has ended, and returns the study's summary with the explanation added.

    Args:
        inputs: the inputs of the study, without a budget.
        folder: the study's folder.
        listener: receives events and notices.
        wanted: what to explain.

    Raises:
        BadInput: there is no such trial, it cannot be explained, or machine or program differ from the study's.
        KeyboardInterrupt: the user interrupted it; the results so far are on disk.
    """
    folder.mask = inputs.secrets.stored
    with folder.claimed(), _one_blas_thread(), Interrupts(listener.notice) as interrupts:
        return _Study(inputs, folder, Masked(listener, inputs.secrets), interrupts, read_earlier(folder)).explain(wanted)


def _run(inputs: StudyInputs, folder: StudyFolder, unmasked: Listener, *, is_new: bool) -> Summary:
    folder.mask, listener = inputs.secrets.stored, Masked(unmasked, inputs.secrets)
    try:
        with folder.claimed() as problem, _one_blas_thread(), Interrupts(listener.notice) as interrupts:
            if problem:
                listener.notice(
                    f"{folder.path} cannot be locked ({problem}), as on some network file systems: run only one autotune on it."
                )
            earlier = None if is_new else read_earlier(folder)
            return _Study(inputs, folder, listener, interrupts, earlier).run()
    except FolderLost:
        folder.discard()
        raise


def _one_blas_thread() -> contextlib.AbstractContextManager[object]:
    """Limits the linear algebra of this process to one thread.

    The matrices are small, so several threads would gain nothing. They would wait for each other while trials use the cores.
    """
    was_set = ALLOWS_DUPLICATES in os.environ
    from threadpoolctl import ThreadpoolController

    if not was_set:
        os.environ.pop(ALLOWS_DUPLICATES, None)
    limit: contextlib.AbstractContextManager[object] = ThreadpoolController().limit(limits=1, user_api="blas")
    return limit


class _Study:
    """One run of a study. Other classes do the work; this class defines the order."""

    def __init__(
        self, inputs: StudyInputs, folder: StudyFolder, listener: Listener, interrupts: Interrupts, earlier: Earlier | None
    ) -> None:
        budget = inputs.config.study.budget
        self._inputs, self._folder, self._listener, self._earlier = inputs, folder, listener, earlier
        self._budget = Budget(
            clock=inputs.clock,
            total_s=None if budget.minutes is None else budget.minutes * 60,
            max_trials=budget.trials,
            before_s=earlier.spent_s if earlier else 0.0,
            started=inputs.began_s,
        )
        self._session = Session(
            inputs=inputs,
            folder=folder,
            listener=listener,
            interrupts=interrupts,
            runner=TrialRunner(inputs, folder, listener, earlier=earlier.records if earlier else ()),
            quarantine=quarantine(inputs, folder, lambda: self._executable),
            budget=self._budget,
            about=_about_at_first(inputs, folder, earlier),
            after_trial=self._note_trial,
            while_waiting=self._write_when_due,
            records=list(earlier.records) if earlier else [],
        )
        self._executable: str | None = None  # the program's own interpreter, from the baseline
        self._decision: Decision | None = None
        self._finals: Finals | Verification | None = None
        self._attributor = Attributor(self._session)
        self._tiers = TierFinals(self._session)
        self._explaining = Explaining(self._session, folder.read_explanation() if earlier else None)
        self._writer = Writer(folder, listener, inputs.clock, is_best_written=not inputs.is_recording)
        self._tracker = Tracker(inputs, folder, listener, interrupts)

    def run(self) -> Summary:
        if self._earlier:
            self._check_identity(self._session.about.identity)
        try:
            self._open()
            status, reason, failure = self._outcome()
            if self._finals and self._decision is None:  # the user interrupted the finals
                self._decision = self._finals.decision if self._finals.decision.finalist else None
            summary = self._write(status, reason)
        except BaseException as fault:
            cause = self._cause_of(fault)
            self._abandon(cause)
            if cause is fault:
                raise
            raise cause from fault
        self._close(summary)
        if failure:
            raise failure
        return summary

    def _outcome(self) -> tuple[str, str, NothingWorked | None]:
        """Returns the final status, its reason, and the exception to raise once everything is on disk (or None)."""
        try:
            self._baseline()
            if self._inputs.is_recording:
                is_over, reason = Recording(self._session).run()
                return "complete" if is_over else "interrupted", reason, None
            if self._inputs.verify:
                self._finals, ended_because = Verification(self._session, self._inputs.verify), VERIFIED
            else:
                ended_because = self._search()
                self._finals = Finals(self._session, self._attributor.run, self._attributor.known_part)
            self._decision = self._finals.run()
            if not self._inputs.verify:
                self._confirm_others(self._decision)
                self._explain()
        except (Ending, KeyboardInterrupt) as ending:
            self._session.schedule.stop()
            return "interrupted", str(ending) or self._session.interrupts.reason, None
        except NothingWorked as failure:
            return "failed", str(failure).partition("\n")[0], failure
        return "complete", ended_because, None

    def _search(self) -> str:
        """Searches, unless an earlier run with at least this budget has done so; returns why the search ended."""
        session = self._session
        if session.about.search_ended:
            session.schedule.stay_alone()
        else:
            session.about.search_ended = (self._inputs.search or Search)(session).run()
            self._folder.write_study(session.about)
        session.listener.notice(f"The search is over: {session.about.search_ended}.")
        return session.about.search_ended

    def _confirm_others(self, decision: Decision) -> None:
        """Uses the remaining time to measure other reported configurations again: the best of each tier, the Pareto front."""
        with contextlib.suppress(OutOfTime):
            if decision.is_better and decision.finalist:
                self._tiers.run(decision.finalist)
            if len(self._session.runner.goal.names) > 1:
                confirm_front(self._session, set(decision.values))

    def _explain(self) -> None:
        """Explains the best trial and the baseline. The verdict is final by then, so passes may fail or be interrupted."""
        if self._inputs.config.explain.auto and (best := self._write("running")["best"]):
            try:
                self._explaining.run(next(one for one in self._session.records if one.number == best["trial"]))
            except (Ending, BadInput, KeyboardInterrupt) as reason:  # BadInput: no node is available, or the program was edited
                self._session.schedule.stop()
                if why := str(reason).partition("\n")[0]:
                    self._listener.notice(f"Not everything was explained: {why}")

    def explain(self, wanted: Wanted) -> Summary:
        """Explains a trial of a study that has ended."""
        try:
            summary = self._explained(wanted)
        finally:
            self._release()
            self._session.runner.close()
        self._listener.finished(summary)  # before the wait for the tracker
        self._tracker.start()
        self._tracker.wait(self._left_s())
        return summary

    def _explained(self, wanted: Wanted) -> Summary:
        """Runs passes and checks; returns the study's summary with what they found."""
        session, first = self._session, self._earlier.first if self._earlier else None
        if first is None:
            got = f"got {self._folder.name!r}"
            raise BadInput(f"STUDY: its baseline was not measured, {got}. Name a study whose baseline was measured.")
        self._check_identity(session.about.identity, "explained")
        self._learn(first)
        summary = self._folder.read_summary()
        if summary["status"] == "running":  # its process was killed: otherwise, this process could not have locked the study
            summary |= {"status": "interrupted", "reason": CUT_OFF}
        record, role = explainable(wanted.trial, session.records, summary, self._folder)
        session.after_trial = lambda: self._amend(summary)
        try:
            self._explaining.run_asked(wanted, record, role)
        except Ending as ending:
            if str(ending):  # the program was edited, or the device is faulty
                raise BadInput(f"STUDY: {ending}.") from None
            raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            session.schedule.stop()
            raise
        finally:
            self._amend(summary)
            self._writer.report(summary)
        return summary

    def _amend(self, summary: Summary) -> None:
        self._writer.amend(summary, self._session.records, self._explaining.document)

    def _open(self) -> None:
        if self._earlier:
            self._folder.tidy()
            self._end_leftovers()  # removes secrets, so it comes before records: a trial with a record counts as free of them
            for record in self._earlier.cut_off:
                self._folder.write_trial(record)
            if self._earlier.first is None:
                self._folder.forget_progress(0)
        self._folder.write_config(self._inputs.yaml)
        self._folder.write_study(self._session.about)
        self._write("running")
        if not self._earlier:
            self._end_leftovers()
        self._listener.started(self._session.about)
        if self._earlier and self._earlier.records:
            self._listener.resumed(self._earlier.records, self._earlier.spent_s)
            if changed := changed_variables(self._earlier.about.machine, self._inputs.machine):
                self._listener.notice(
                    f"The environment differs from that of the earlier trials: {'; '.join(changed)}. If this changes how fast "
                    "the program trains, stop, set the variables as before, and resume again."
                )
        self._tracker.start()

    def _end_leftovers(self) -> None:
        """Ends the processes that an earlier tuner left running for this study, and removes secrets from their files."""
        for line in self._inputs.launcher.sweep(self._folder.path):
            self._listener.notice(line)
        seal_leftovers(self._folder.path, self._inputs.secrets)

    def _check_identity(self, now: dict[str, Any], doing: str = "resumed") -> None:
        """Raises BadInput if machine, program or search space differ from those of the trials of earlier runs."""
        earlier = self._earlier
        if earlier is None or not earlier.records:
            return
        if found := differences(earlier.about.identity, now):
            raise BadInput(
                f"STUDY: {self._folder.name!r} cannot be {doing} here and now, because its trials cannot be compared with new "
                f"ones: {'; '.join(found)}. Undo the change, or start a new study with `autotune run`."
            )

    def _baseline(self) -> None:
        """Measures trial 0, or takes it from an earlier run; then resolves the search space, which depends on it."""
        session, earlier = self._session, self._earlier
        first = earlier.first if earlier else None
        if first is None:
            first = self._measured_baseline()
        record = session.baseline
        space = self._learn(first)
        if earlier is None or earlier.first is None:
            self._announce_dropped(space.dropped)
        session.runner.goal.check_baseline(record)
        session.about = about(self._inputs, self._folder, session.about, space=space, first=first)
        self._check_identity(session.about.identity)
        record.knobs = space.baseline  # only now is it known what the program sets by itself
        session.recount()
        self._reuse_earlier_studies()
        self._budget.reserve(record)
        if self._inputs.config.explain.auto and not (self._inputs.is_recording or self._inputs.verify):
            self._budget.reserve_passes(planned_s(record))
        self._folder.write_trial(record)
        self._folder.write_study(session.about)
        self._write("running")
        self._listener.started(session.about)
        if not (self._inputs.is_recording or self._inputs.verify):
            self._listener.planned(session.outlook())

    def _learn(self, first: RankResult) -> ResolvedSpace:
        """Passes the baseline's facts to the session, and returns the search space that follows from them."""
        session = self._session
        self._executable = first.facts.get("executable")
        session.host_context = host_context(self._inputs.machine, first, is_recipe=self._inputs.command.is_recipe)
        session.target = first.target
        session.runner.program = dict(first.facts)
        session.runner.warm.learn(first)
        session.runner.learn_leaving(session.baseline)
        session.runner.baseline_losses = session.baseline.losses
        session.runner.cycle = cycle(first)
        session.learn_excuses()
        session.space = space = _resolved(self._inputs, first)
        session.costs = Costs({key: knob(key).start_costs for _, key, _ in space.costly()})
        for searched in session.searched:
            session.costs.learn(searched)
        session.memory_capacity_bytes = memory_of_process_bytes(self._inputs, first)
        session.runner.goal.learn([first], capacity_bytes=memory_seen_bytes(self._inputs, first))
        return space

    def _reuse_earlier_studies(self) -> None:
        """Reuses results of earlier studies before the search begins. A resumed study keeps the results that it began with."""
        session, inputs = self._session, self._inputs
        is_new = not session.about.warm_start and session.num_searched <= 0
        if is_new and not inputs.is_recording:
            session.about.noise = noise.as_json(earlier_noise(session)) or {}
        session.earlier_noise = noise.from_json(session.about.noise)
        if inputs.is_recording or inputs.verify or not is_new:
            return
        session.about.warm_start = inputs.secrets.document(inherit(session))
        if not session.about.warm_start and (why := why_nothing(session)):
            self._listener.notice(why)

    def _announce_dropped(self, dropped: dict[str, str]) -> None:
        """Tells the user why knobs that the user named are not searched. For all others, `autotune inspect` shows why."""
        for key in sorted(self._inputs.space.typed & dropped.keys()):
            self._listener.notice(f"{key} is not searched here: {dropped[key]}.")

    def _measured_baseline(self) -> RankResult:
        session, earlier = self._session, self._earlier
        if earlier and earlier.why_no_baseline:
            self._listener.notice(f"The baseline is measured again: {earlier.why_no_baseline}.")
        results = session.measure_baseline()
        record = session.baseline
        if earlier and (failed := earlier.failed_baseline):
            record.evidence["earlier_run"] = {"outcome": failed.outcome, "reason": failed.reason, "seconds": failed.seconds}
        if not record.outcome.has_value or record.value is None:
            raise NothingWorked(why_nothing_worked(record, self._folder, results, self._inputs))
        if missing := missing_processes(results[0], self._inputs.command.argv({})):
            self._listener.notice(missing)
        watched = str(record.evidence.get("node", {}).get("host") or platform.node())
        for said in filter(None, (unwatched_text(record.ranks, watched), cycles_text(record.metrics))):
            self._listener.notice(f"{said}.")
        return results[0]

    def _write(self, status: str, reason: str = "") -> Summary:
        standing = Standing(
            status=status,
            reason=reason,
            seconds=self._budget.spent_s,
            decision=self._decision,
            attribution=self._attributor.found,
            tiers=self._tiers.decisions,
            explanation=self._explaining.document,
        )
        return self._writer.write(self._session.about, self._session.records, standing)

    def _note_trial(self) -> None:
        self._writer.note_trial()
        self._write_when_due()

    def _write_when_due(self) -> None:
        self._writer.write_when_due(len(self._session.records), lambda: self._write("running"))

    def _release(self) -> None:
        """Releases the machines that trials ran on."""
        self._inputs.launcher.close()
        for line in self._inputs.launcher.unended():
            self._listener.notice(line)

    def _close(self, summary: Summary) -> None:
        self._release()
        self._session.runner.close()
        self._listener.finished(summary)
        self._tracker.wait(self._left_s(is_complete=summary["status"] == "complete"))
        self._folder.tidy()  # killed processes may have left temporary files

    def _cause_of(self, fault: BaseException) -> BaseException:
        """Returns FolderLost if the study's folder cannot be written, which explains the error; else the error itself."""
        if isinstance(fault, Exception) and not isinstance(fault, FolderLost):
            try:
                self._folder.check()
            except FolderLost as lost:
                return lost
            if full := next((one for one in _chain(fault) if isinstance(one, OSError) and one.errno in FULL), None):
                return self._folder.lost(full)  # the disk was full, but has space again by now
        return fault

    def _abandon(self, fault: BaseException) -> None:
        """Ends all subprocesses after a fault and writes the failure to the summary, if that is still possible."""
        for let_go in (self._release, self._session.runner.close):
            with contextlib.suppress(Exception):
                let_go()
        self._tracker.terminate()
        if not isinstance(fault, FolderLost) and is_study(self._folder.path):  # else no study has begun
            is_ours = not isinstance(fault, BadInput | KeyboardInterrupt)
            told = str(fault).partition("\n")[0] or self._session.interrupts.reason
            reason = f"internal error: {fault!r}" if is_ours else told
            with contextlib.suppress(FolderLost):
                self._write("failed" if is_ours else "interrupted", self._inputs.secrets.text(reason))

    def _left_s(self, *, is_complete: bool = True) -> float | None:
        """Returns the seconds that a study may wait for the tracker: what its budget leaves, or None without a budget.

        Returns 0 if the study has a budget and is not complete.
        """
        total_s = self._budget.total_s
        return None if total_s is None else total_s - self._budget.spent_s if is_complete else 0.0


def _chain(fault: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and its causes."""
    while fault is not None:
        yield fault
        fault = fault.__cause__ or fault.__context__


def _about_at_first(inputs: StudyInputs, folder: StudyFolder, earlier: Earlier | None) -> StudyRecord:
    if earlier is None:
        return about(inputs, folder, None)
    before, first = dataclasses.replace(earlier.about, spent_s=earlier.spent_s), earlier.first
    budget, minutes = inputs.config.study.budget, inputs.config.study.budget.minutes
    total_s = None if minutes is None else 60 * minutes
    if _is_larger(total_s, before.budget_s) or _is_larger(budget.trials, before.budget_trials):
        before.search_ended = ""
    return about(inputs, folder, before, space=_resolved(inputs, first) if first else None, first=first)


def _is_larger(limit: float | None, earlier: float | None) -> bool:
    """Whether a limit is larger than an earlier one; None stands for no limit."""
    return earlier is not None and (limit is None or limit > earlier)


def _resolved(inputs: StudyInputs, first: RankResult) -> ResolvedSpace:
    here = host_context(inputs.machine, first, is_recipe=inputs.command.is_recipe)
    return resolve(inputs.space, here, passed=inputs.command.placeholders)
