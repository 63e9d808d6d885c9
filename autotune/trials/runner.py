"""Launches trials, judges how they ended, and writes their records."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import BadInput
from autotune.failures import LONGER, classify, not_finite, root
from autotune.harness.explain.documents import document_file
from autotune.harness.protocol import STDERR_FILE, STDOUT_FILE, MeasureRules, RankResult, Spec
from autotune.launchers.base import Ended, Launch
from autotune.monitors.disturbances import THERMAL, own_share
from autotune.monitors.sealing import first_attempt, seal
from autotune.records import Kind, Outcome, TrialRecord, TrialRequest
from autotune.run_dir import StudyFolder
from autotune.trials import health
from autotune.trials.events import Listener
from autotune.trials.inputs import StudyInputs
from autotune.trials.launching import launch, meaningful
from autotune.trials.not_finite import EXCUSABLE, NOT_FINITE
from autotune.trials.objective import Goal
from autotune.trials.places import Place, slot_number
from autotune.trials.settings import memory_seen_bytes
from autotune.trials.trial_metrics import metrics, numbers
from autotune.trials.warm import WarmStarts

QUIET_MAX_S = 30.0  # longest wait for a disturbance to end before the next attempt
QUIET_BUDGET_FRAC = 0.05  # a wait of this kind also takes at most this share of the study's budget
# autotune does not wait for a quiet machine if that may take more than this share of the time left for the next trial. It waits
# for a free device for at most this share of that time.
QUIET_LEFT_FRAC = 0.25
# A trial ends its window this long before its deadline, so that its processes have time to exit: LEAVE_S plus the time that the
# baseline took to exit, but at most LEAVE_MAX_S.
LEAVE_S, LEAVE_MAX_S = 1.0, 10.0
COOL_DOWN_S = 10.0  # minimum rest for a device that was too hot
TOO_SHORT = "the program ended before the pass had observed enough steps"
MADE_OF = ("torch", "device_name")  # facts that a program reports; if one of them changes, it counts as a different program


@dataclass(kw_only=True)
class Request(TrialRequest):
    """A configuration to measure, and how.

    Attributes:
        rules: when to stop measuring.
        target: loaders to change, as the baseline found them; None in the baseline itself.
        race_below_per_s: the window ends early once the rate is certainly below this; None for never.
        promote_above_per_s: a rate that may reach this is measured to a narrower interval; None for never.
        max_s: wall time that the trial may take; None for no limit besides the limits of the phases.
        ends_s: moment on the study's clock at which the trial must be over, finished or not; None for no deadline.
        retry_max_s: a second attempt is made only if the first took no longer than this; None for no limit.
        cold_compile_s: seconds that compiling with this configuration's compile mode took in this study with an empty cache.
        first_steps: fields of the spec for a run that does not measure a rate; {} for other runs. They are
            `mode`, `seed`, `max_steps` and `max_s` for a comparison of losses, `mode` and `explain` for a pass of explain.
        skipped: stages of the loader to skip, see `Spec.skipped`; () except in a check of what a stage costs.
        is_fixed: whether a corrected version of the study's program runs, see `explain --fixed`.
    """

    rules: MeasureRules
    target: list[dict[str, Any]] | None = None
    race_below_per_s: float | None = None
    promote_above_per_s: float | None = None
    max_s: float | None = None
    ends_s: float | None = None
    retry_max_s: float | None = None
    cold_compile_s: float = 0.0
    first_steps: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    is_fixed: bool = False


@dataclass(kw_only=True)
class Finished:
    """A trial's record and its ranks' results, and whether the record is on disk."""

    record: TrialRecord
    results: list[RankResult] = field(default_factory=list)
    is_kept: bool = False


class StoppedNow(Exception):
    """The user stopped the running trial. Carries its record."""

    def __init__(self, finished: Finished) -> None:
        super().__init__()
        self.finished = finished


class TrialRunner:
    """Launches, judges and records the trials of a study. A running trial is a `RunningTrial`.

    A trial whose window was disturbed from outside has no value. The next attempt, of this trial or another, waits a limited
    time for the disturbance to end. A machine that never gets quiet is accepted as it is (see `health.Level`).

    Attributes:
        program: facts about interpreter, torch and device from the baseline; {} until it has run.
        goal: the study's goal; completed by the baseline.
        baseline_losses: losses of the baseline's first steps; [] until it has run.
        warm: which trials may start warm; completed by the baseline.
        excused: what is not finite even in the unchanged program, see `Facts.excused`; no trial fails because of it.
        cycle: `Spec.cycle` of all later trials, learned from the baseline; None until then.
        leave_s: how long before its deadline a trial ends its window; learned from the time that the baseline took to exit.
        inputs: the study's inputs.
        listener: receives the events.
        alone: the place where a trial has the machine to itself.
        beside: the slots, on which trials run in parallel; [] if there is only one.

    Args:
        inputs: the study's inputs.
        folder: the study's folder.
        listener: receives the events.
        earlier: trials of earlier runs of the study, by number.
    """

    def __init__(
        self, inputs: StudyInputs, folder: StudyFolder, listener: Listener, *, earlier: Sequence[TrialRecord] = ()
    ) -> None:
        self.program: dict[str, Any] = {}
        self.goal = Goal.of(inputs.config)
        self.baseline_losses: list[float | None] = []
        self.excused: frozenset[str] = frozenset()
        self.warm = WarmStarts(inputs.config.launch.warm)
        self.cycle: dict[str, float] | None = None
        self.leave_s = LEAVE_S
        self.inputs, self.folder, self.listener = inputs, folder, listener
        self.alone = Place(inputs.launcher, inputs)
        self.beside = [Place(launcher, inputs) for launcher in inputs.launcher.beside()]
        self._level = health.Level(earlier)
        self._told_why_fresh: set[str] = set()
        self._knob_reports: dict[str, dict[str, Any]] = {}

    def announce(self, request: Request) -> None:
        """Records that a trial begins, and tells the listener.

        Raises:
            FolderLost: the trial cannot be recorded, and so does not count.
        """
        self.folder.write_request(TrialRequest(**request.shared(), started_at=self.inputs.clock.time()))
        self.listener.trial_started(request.number, request.kind, request.changed, request.why)

    def with_inputs(self, inputs: StudyInputs) -> TrialRunner:
        """Returns a runner for another program, with everything that this runner has learned."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def close(self) -> None:
        """Releases the monitors of the machine."""
        for place in (self.alone, *self.beside):
            place.close()

    def leave_out(self, slots: Collection[str]) -> None:
        """Removes slots, by number, from `beside`; no trial may run there now."""
        for place in self.beside:
            if place.number in slots:
                place.close()
        self.beside = [place for place in self.beside if place.number not in slots]

    def release_slots(self) -> None:
        """Empties `beside`, and gives back what trials that run alone do not use; no trial may run now."""
        for place in self.beside:
            place.close()
        self.beside = []
        self.inputs.launcher.release()

    def can_do_without(self, slot: str) -> bool:
        """Whether the study can go on without a slot, given by number. The first is needed for trials that run alone."""
        return any(part.slot and slot_number(part.slot.name) == slot for part in self.inputs.launcher.beside()[1:])

    def finish(self, request: Request, finished: Finished, place: Place) -> Finished:
        """Judges a trial whose last attempt is over, and writes its record."""
        self._check_program(finished)
        if finished.record.outcome is Outcome.disturbed and self._level.is_stuck(request.kind):
            place.disturbed_by = []
            self.listener.notice(self._level.accept(finished.record))
        if request.kind is Kind.baseline and finished.results:
            self.goal.learn(finished.results, capacity_bytes=memory_seen_bytes(self.inputs, finished.results[0]))
        # This comes last, when the numbers are final.
        self.goal.judge(finished.record, finished.results, cold_compile_s=request.cold_compile_s)
        return self.keep(finished)

    def record(self, request: Request, spec: Spec, ended: Ended, place: Place) -> TrialRecord:
        """Returns the record of an attempt that is over."""
        facts = ended.facts(spec, device_used_frac=place.watch.used_frac())
        facts.excused = self.excused if request.changed and not request.skipped else EXCUSABLE
        outcome, reason = classify(facts)
        if outcome is Outcome.ok and self._has_seen_nothing(request, spec, ended):
            outcome, reason = Outcome.error, f"{TOO_SHORT}. {LONGER}"
        record = TrialRecord(
            **request.shared(),
            outcome=outcome,
            reason=reason,
            seconds=ended.seconds,
            start=ended.start,
            spared_s=ended.spared_s,
            evidence=_evidence(ended, root(facts)),
            metrics=metrics(ended.results, place.watch.metrics()),
            **numbers(ended.results),
        )
        if outcome.has_value and (lost := not_finite(facts)):
            record.evidence[NOT_FINITE] = lost
        if request.kind is Kind.explain or not outcome.has_value or record.value is None:
            record.value, record.ci, record.why_no_ci = None, None, ""
        return record

    def _has_seen_nothing(self, request: Request, spec: Spec, ended: Ended) -> bool:
        """Whether a pass of explain wrote nothing, because the program ended by itself before or soon after the pass began."""
        document = self.folder.trial_path(request.number) / document_file(spec.explain, 0)
        return request.kind is Kind.explain and ended.results[0].status == "ended" and not document.exists()

    def keep_logs(self, first: TrialRecord) -> None:
        """Renames the logs of the latest attempt, which the next attempt would overwrite. Logs renamed earlier are lost."""
        folder = self.folder.trial_path(first.number)
        for name in (STDOUT_FILE, STDERR_FILE):
            with contextlib.suppress(OSError):
                (folder / name).replace(folder / first_attempt(name))

    def tell_why_fresh(self, record: TrialRecord) -> None:
        """Notifies, once per reason, why a trial that was allowed to start warm did not."""
        why = str(record.evidence.get("why_fresh") or "")
        if why and why not in self._told_why_fresh:
            self._told_why_fresh.add(why)
            self.listener.notice(f"Trial {record.number} starts in a fresh interpreter: {why}.")

    def learn_leaving(self, baseline: TrialRecord) -> None:
        """Learns from the baseline how long a trial's processes take to exit."""
        self.leave_s = min(LEAVE_S + leave_s(baseline), LEAVE_MAX_S)

    def _most_s(self, request: Request, earlier: TrialRecord | None) -> float | None:
        """Returns the wall-time limit that the launcher enforces. The tuner itself ends the trial at `request.ends_s`."""
        if request.max_s is None:
            return None
        if request.ends_s is None:  # the baseline: both attempts share its time
            return request.max_s - (earlier.seconds if earlier else 0.0)
        return min(request.max_s, max(0.0, request.ends_s - self.inputs.clock.monotonic()) + LEAVE_MAX_S)

    def _window_ends_s(self, request: Request, most_s: float | None) -> float | None:
        """Returns the moment on the study's clock when a trial's window ends even if it is not full; None for no such moment.

        The moment is before the trial's deadline and the launcher's limit, so a trial that is only unsteady is measured instead
        of being cut off. None for the baseline, because a study without a baseline has no result.
        """
        if request.kind is Kind.baseline:
            return None
        limits = [request.ends_s, None if most_s is None else self.inputs.clock.monotonic() + most_s]
        first = min((limit for limit in limits if limit is not None), default=None)
        return None if first is None else first - self.leave_s

    def judge(self, record: TrialRecord, results: Sequence[RankResult], place: Place, *, began_s: float) -> None:
        """Records disturbances from the machine; voids the measurement if they exceed the accepted level.

        Args:
            record: an attempt that has ended.
            results: results of its ranks.
            place: where it ran.
            began_s: when it began, on the study's clock.
        """
        found, use = place.watch.disturbances(), place.watch.cpu_use
        health.note(record, found)
        if why := own_share(use):
            record.evidence[health.OWN_SHARE] = why
        is_repeated = self.inputs.command.is_recipe and not self.inputs.config.data.root  # a recipe's own data fit into memory
        memory_bytes = int(self.inputs.machine.get("memory_bytes") or 0)
        if not is_repeated and (why := health.page_cache(use, results, memory_bytes)):
            record.evidence[health.PAGE_CACHE] = why
        if self.inputs.config.measure.quiet and record.outcome.has_value and (beyond := self._level.beyond(found)):
            health.disturb(record, beyond)
            place.disturbed_by = beyond
        self._level.note(record.outcome, began_s=began_s, ended_s=self.inputs.clock.monotonic())

    def await_quiet(self, place: Place, ends_s: float | None) -> None:
        """Waits a bounded time for the last trial's disturbance to end, and announces the wait.

        Does not wait if little time is left, or if other trials run in parallel, because they would not be polled meanwhile.
        """
        disturbed_by, place.disturbed_by = place.disturbed_by, []
        if not disturbed_by or place is not self.alone:
            return
        clock, minutes = self.inputs.clock, self.inputs.config.study.budget.minutes
        max_s = QUIET_MAX_S if minutes is None else min(QUIET_MAX_S, QUIET_BUDGET_FRAC * 60 * minutes)
        if ends_s is not None and ends_s - clock.monotonic() < max_s / QUIET_LEFT_FRAC:
            return
        words = "; ".join(one.words for one in disturbed_by)
        self.listener.notice(f"The last trial was disturbed: {words}. Waiting for a quiet machine, {max_s:.0f} s at most.")
        kinds, begun_s = {one.kind for one in disturbed_by}, clock.monotonic()
        rest_s = min(COOL_DOWN_S, max_s) if THERMAL in kinds else 0.0
        while (waited_s := clock.monotonic() - begun_s) < max_s:
            is_over = not any(one.kind in kinds for one in self._level.beyond(place.watch.at_rest()))
            if is_over and waited_s >= rest_s:
                return

    def keep(self, finished: Finished) -> Finished:
        """Writes a trial's record.

        Raises:
            StoppedNow: on KeyboardInterrupt; the record is written.
        """
        record = finished.record
        # Secrets are removed before the record is written, because from then on other commands show the trial's files.
        seal(self.folder.trial_path(record.number), self.inputs.secrets)
        record.reason = self.inputs.secrets.text(record.reason)
        record.evidence = self.inputs.secrets.document(record.evidence)
        record.knob_reports = self._shared(self.inputs.secrets.document(record.knob_reports))
        try:
            self.folder.write_trial(record)
        except KeyboardInterrupt:  # interrupted while writing: write it again, so that nothing measured is lost
            self.folder.write_trial(record)
            raise StoppedNow(finished) from None
        finished.is_kept = True
        self.listener.trial_ended(record)
        return finished

    def _shared(self, reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the reports; equal ones become one object for all trials, because most trials have the same reports."""
        return {key: self._knob_reports.setdefault(repr(report), report) for key, report in reports.items()}

    def _check_program(self, finished: Finished) -> None:
        """Checks that the program runs with the same torch and on the same device as the study's other trials."""
        found = finished.results[0].facts if finished.results else {}
        changes = [
            f"{name} {found[name]!r} instead of {self.program[name]!r}"
            for name in MADE_OF
            if self.program.get(name) and found.get(name) and self.program[name] != found[name]
        ]
        if changes:
            raise BadInput(
                f"STUDY: the program is not the one that {self.folder.name!r} measured, got {'; '.join(changes)}. New trials "
                "cannot be compared with the old ones. Start a new study with `autotune run`, or undo the change and resume."
            )

    def launch(self, request: Request, earlier: TrialRecord | None) -> Launch:
        """Returns the launch of an attempt. `earlier` is the first attempt's record if this is the second, else None."""
        inputs, is_seeded = self.inputs, "seed" in request.first_steps and "PYTHONHASHSEED" not in os.environ
        pinned = meaningful(inputs.space.pinned, {**inputs.command.placeholders, **request.knobs})
        most_s = self._most_s(request, earlier)
        return launch(
            inputs.config,
            inputs.command,
            pinned=pinned,
            changed=request.changed,
            knobs=request.knobs,
            machine=inputs.machine,
            folder=self.folder.trial_path(request.number),
            study=self.folder.path,
            env={"PYTHONHASHSEED": "0"} if is_seeded else {},  # otherwise the order of a set of strings is random
            total_s=most_s,
            warm=() if earlier else self.warm.modules(request.kind, changed=request.changed, pinned=pinned),
            is_warm_whole=self.warm.is_whole,
            number=request.number,
            target=request.target,
            rules=request.rules,
            race_below_per_s=request.race_below_per_s,
            promote_above_per_s=request.promote_above_per_s,
            cycle=self.cycle,
            end_s=self._window_ends_s(request, most_s),
            skipped=list(request.skipped),
            **request.first_steps,
        )


def leave_s(record: TrialRecord) -> float:
    """Returns the seconds from the end of a trial's window until its last process ended."""
    return max(0.0, record.attempt_s - sum(seconds for phase, seconds in record.phases_s.items() if phase != "exit"))


def _evidence(ended: Ended, first: RankResult | None) -> dict[str, Any]:
    said = [why for result in ended.results if (why := (result.loss or {}).get("why_no_curve"))]
    return {
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "cause": ended.cause,
        "phase": ended.phase,
        "problems": ended.problems,
        "error": first.error if first else None,
        **({"why_no_losses": str(said[0])} if said else {}),
        **ended.evidence,
    }
