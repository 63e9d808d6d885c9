"""Runs one configuration to its end and says what became of it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import BadInput
from autotune.failures import classify, not_finite, root
from autotune.harness.protocol import STDERR_FILE, STDOUT_FILE, MeasureRules, RankResult, Spec
from autotune.launchers.base import Ended, Launch, Running
from autotune.monitors.sealing import first_attempt, seal
from autotune.quantities import seconds_text
from autotune.records import Kind, Knobs, Outcome, Tier, TrialRecord, TrialRequest
from autotune.run_dir import StudyFolder
from autotune.trials import health
from autotune.trials.events import Listener
from autotune.trials.finite import EXCUSABLE, NOT_FINITE
from autotune.trials.inputs import StudyInputs
from autotune.trials.launching import launch, meaningful
from autotune.trials.losses import exploded
from autotune.trials.objective import Goal
from autotune.trials.quarantine import sticky_fault
from autotune.trials.settings import memory_seen_bytes
from autotune.trials.trial_metrics import metrics, numbers
from autotune.trials.warm import WarmStarts
from autotune.trials.watch import MachineWatch, configured_device

# Where chance may be the cause a trial gets a second attempt: the same again, once. Never after want of memory.
CHANCE = frozenset({Outcome.crash, Outcome.timeout, Outcome.disturbed})
# Hangs whose place is known and that chance does not make: a rank that is missing from a collective, a loop in the program.
NO_CHANCE = ("collective", "user code")
QUIET_MAX_S = 30.0  # how long a trial that was disturbed waits for the disturbance to end, before it is tried again
QUIET_BUDGET_FRAC = 0.05  # and no longer than this share of the study's time
GATE_S = 30.0  # nor a device whose memory is still held
QUIET_LEFT_FRAC = 0.25  # nor longer than this share of what is left of it
BASELINE_BUDGET_FRAC = 0.1  # of the study's time: a baseline that took longer and was disturbed is taken as it is
TIME_UP = "the study's time was up"
LEAVE_S, LEAVE_MAX_S = 1.0, 10.0  # before its time is up a trial finishes its window, besides what leaving took the baseline
COOL_DOWN_S = 10.0  # how long a device that was too hot rests at least
MADE_OF = ("torch", "device_name")  # of the facts a program tells of itself: another one is another program


@dataclass(kw_only=True)
class Request:
    """A configuration to measure.

    Attributes:
        number, kind, knobs, changed, tier, why, origin, repeats, round: as in TrialRecord.
        rules: when to stop measuring.
        target: loaders to change, from the baseline; None in the baseline itself.
        race_below_per_s: the window ends early once the rate is certainly below this; None never.
        promote_above_per_s: the window becomes narrower where the rate may reach this; None never.
        max_s: wall time it may take; None for no bound but the phases' own.
        ends_s: moment on the study's clock at which it has to be over, whatever it has by then; None for none.
        retry_max_s: a second attempt is made only when the first took no longer than this; None for no bound.
        cold_compile_s: what compiling such a configuration took in the study when nothing was cached.
        first_steps: of the spec, for a run that ends after its first steps: mode, seed, max_steps and max_s; {} to measure.
    """

    number: int
    kind: Kind
    knobs: Knobs
    changed: Knobs
    rules: MeasureRules
    tier: Tier = Tier.exact
    why: str = ""
    origin: str = ""
    repeats: int | None = None
    round: int | None = None
    target: list[dict[str, Any]] | None = None
    race_below_per_s: float | None = None
    promote_above_per_s: float | None = None
    max_s: float | None = None
    ends_s: float | None = None
    retry_max_s: float | None = None
    cold_compile_s: float = 0.0
    first_steps: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Finished:
    """A trial's record, and what its ranks wrote."""

    record: TrialRecord
    results: list[RankResult] = field(default_factory=list)


class StoppedNow(Exception):
    """The user insisted: the running trial was ended. Carries its record."""

    def __init__(self, finished: Finished) -> None:
        super().__init__()
        self.finished = finished


class TrialRunner:
    """Starts trials one after the other; no two are ever measured at once.

    A trial whose window was disturbed from outside has no value. The next one, its second attempt or another, waits for the
    disturbance to end, for a bounded time; when the machine stays like that, it is taken as it is (see `health.Level`).

    Attributes:
        program: what the baseline told of its interpreter, torch and device; {} until it has run.
        goal: what the study is after; the baseline completes it.
        baseline_losses: the losses of the baseline's first steps; [] until it has run.
        warm: which trials may start warm; the baseline completes it.
        excused: what the program as it is does not keep finite, see `Facts.excused`: no trial is out for it.
        cycle: `Spec.cycle` of all trials but the baseline, which completes it; None until it has run.
        leave_s: so long before its time is up a trial ends its window; the baseline tells what its processes need to leave.

    Args:
        inputs: what the study was given.
        folder: the study's.
        listener: whom to tell.
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
        self._inputs, self._folder, self._listener = inputs, folder, listener
        self._watch = MachineWatch(inputs.device or configured_device(inputs.config), inputs.clock, inputs.cpu)
        self._level = health.Level(earlier)
        self._disturbed_by: list[health.Disturbance] = []  # the last trial, until it is over
        self._told_why_fresh: set[str] = set()

    def run(self, request: Request) -> Finished:
        """Returns the finished trial, its record written to disk. A second attempt is made where chance may be the cause.

        Raises:
            StoppedNow: KeyboardInterrupt while it ran; the trial is ended and recorded as interrupted.
            FolderLost: it cannot be recorded; then it does not count.
            BadInput: it was not the program that the study measures.
        """
        self._folder.write_request(_asked(request, self._inputs.clock.time()))
        self._listener.trial_started(request.number, request.kind, request.changed, request.why)
        finished = self._attempt(request)
        record = finished.record
        is_doubtful = self.warm.is_doubtful(record)
        if (is_doubtful or record.outcome in CHANCE or sticky_fault(record)) and self._may_be_repeated(request, record):
            self._tell_second_attempt(record)
            self._keep_logs(record)
            finished = self._attempt(request, earlier=record)
            if is_doubtful and (notice := self.warm.judge(record, finished.record)):
                self._listener.notice(notice)
        self._check_program(finished)
        if finished.record.outcome is Outcome.disturbed and self._level.is_stuck(request.kind):
            self._disturbed_by = []
            self._listener.notice(self._level.accept(finished.record))
        if request.kind is Kind.baseline and finished.results:
            self.goal.learn(finished.results, capacity_bytes=memory_seen_bytes(self._inputs, finished.results[0]))
        # Last, once nothing of the numbers changes any more.
        self.goal.judge(finished.record, finished.results, cold_compile_s=request.cold_compile_s)
        return self._keep(finished)

    def close(self) -> None:
        """Gives back what watching the machine holds."""
        self._watch.close()

    def _attempt(self, request: Request, earlier: TrialRecord | None = None) -> Finished:
        try:
            self._await_quiet(request.ends_s)
        except KeyboardInterrupt:
            if earlier is None:
                raise
            raise StoppedNow(self._keep(Finished(record=earlier))) from None
        left_s = math.inf if request.ends_s is None else request.ends_s - self._inputs.clock.monotonic()
        if held := self._watch.before(max_s=min(GATE_S, max(0.0, QUIET_LEFT_FRAC * left_s))):
            self._listener.notice(held)
        prepared = self._launch(request, earlier)  # now: it is told when its time is up
        started_at = self._inputs.clock.time()
        try:
            running, is_stopped = self._inputs.launcher.start(prepared), False
        except KeyboardInterrupt:  # a warm server may take seconds to start
            unstarted = _unstarted(self._inputs.clock.time() - started_at)
            record = self._record(request, prepared.spec, unstarted)
            record.started_at = started_at
            raise StoppedNow(self._keep(Finished(record=record))) from None
        try:
            ended = self._wait(running, request.ends_s)
        except KeyboardInterrupt:
            is_stopped = True
            running.stop("interrupted by the user")
            ended = self._wait(running)
        except BaseException:
            running.stop("autotune failed")
            raise
        record = self._record(request, prepared.spec, ended)
        self._tell_why_fresh(record)
        if not request.first_steps:  # nothing is measured there
            self._judge(record, ended.results)
        record.started_at = earlier.started_at if earlier else started_at
        if record.outcome.has_value and (why := exploded(record.losses, self.baseline_losses)):
            record.outcome, record.reason, record.value, record.ci = Outcome.parity, why, None, None
        self._watch.follow(ended.results)
        if held:
            record.evidence["device_held"] = held
        if request.first_steps:
            record.evidence["seed"] = request.first_steps["seed"]
        if earlier:
            _join(record, earlier)
        finished = Finished(record=record, results=list(ended.results))
        if is_stopped:
            raise StoppedNow(self._keep(finished))
        return finished

    def _record(self, request: Request, spec: Spec, ended: Ended) -> TrialRecord:
        facts = ended.facts(spec, device_used_frac=self._watch.used_frac())
        facts.excused = self.excused if request.changed else EXCUSABLE
        outcome, reason = classify(facts)
        record = TrialRecord(
            number=request.number,
            kind=request.kind,
            knobs=request.knobs,
            changed=request.changed,
            outcome=outcome,
            reason=reason,
            tier=request.tier,
            why=request.why,
            repeats=request.repeats,
            round=request.round,
            origin=request.origin,
            seconds=ended.seconds,
            start=ended.start,
            spared_s=ended.spared_s,
            evidence=_evidence(ended, root(facts)),
            metrics=metrics(ended.results, self._watch.metrics()),
            **numbers(ended.results),
        )
        if outcome.has_value and (lost := not_finite(facts)):
            record.evidence[NOT_FINITE] = lost
        if not outcome.has_value or record.value is None:
            record.value, record.ci, record.why_no_ci = None, None, ""
        return record

    def _tell_second_attempt(self, first: TrialRecord) -> None:
        """Says that a trial failed where that would not be seen for long: the second attempt takes as much time again."""
        if first.outcome is Outcome.timeout:
            took = f"{first.outcome} after {seconds_text(first.seconds)}"
            text = f"Trial {first.number} ended as {took}: {first.reason}. Once more."
            self._listener.notice(text)

    def _keep_logs(self, first: TrialRecord) -> None:
        """Keeps what the first attempt wrote, which the second would write over."""
        folder = self._folder.trial_path(first.number)
        for name in (STDOUT_FILE, STDERR_FILE):
            with contextlib.suppress(OSError):
                (folder / name).replace(folder / first_attempt(name))

    def _tell_why_fresh(self, record: TrialRecord) -> None:
        """Says once why a trial that may start warm did not."""
        why = str(record.evidence.get("why_fresh") or "")
        if why and why not in self._told_why_fresh:
            self._told_why_fresh.add(why)
            self._listener.notice(f"Trial {record.number} starts in a fresh interpreter: {why}.")

    def learn_leaving(self, baseline: TrialRecord) -> None:
        """Takes into account what a trial's processes need to leave."""
        self.leave_s = min(LEAVE_S + leave_s(baseline), LEAVE_MAX_S)

    def _most_s(self, request: Request, earlier: TrialRecord | None) -> float | None:
        """Returns the wall time that the launcher gives a trial; what is to be over sooner, this process stops."""
        if request.max_s is None:
            return None
        if request.ends_s is None:  # the baseline: its two attempts have the budget between them
            return request.max_s - (earlier.seconds if earlier else 0.0)
        return min(request.max_s, max(0.0, request.ends_s - self._inputs.clock.monotonic()) + LEAVE_MAX_S)

    def _wait(self, running: Running, ends_s: float | None = None) -> Ended:
        while (ended := running.poll()) is None:
            if ends_s is not None and self._inputs.clock.monotonic() >= ends_s:
                running.stop(TIME_UP)
                continue
            progress = running.progress()
            self._watch.look(progress)
            if progress:
                self._listener.progress(progress)
            self._inputs.clock.sleep(self._inputs.poll_s)
        self._watch.ended()
        return ended

    def _judge(self, record: TrialRecord, results: Sequence[RankResult]) -> None:
        """Notes what the machine did meanwhile; takes the number from a trial that it disturbed by more than is borne."""
        found = self._watch.disturbances()
        health.note(record, found)
        if why := health.own_share(self._watch.cpu_use):
            record.evidence[health.OWN_SHARE] = why
        is_repeated = self._inputs.command.is_recipe and not self._inputs.config.data.root  # a recipe's own data are few files
        memory_bytes = int(self._inputs.machine.get("memory_bytes") or 0)
        if not is_repeated and (why := health.page_cache(self._watch.cpu_use, results, memory_bytes)):
            record.evidence[health.PAGE_CACHE] = why
        if self._inputs.config.measure.quiet and record.outcome.has_value and (beyond := self._level.beyond(found)):
            health.disturb(record, beyond)
            self._disturbed_by = beyond
        self._level.note(record.outcome)

    def _may_be_repeated(self, request: Request, first: TrialRecord) -> bool:
        if first.evidence.get("hang", {}).get("kind") in NO_CHANCE:
            return False
        if request.max_s is not None and first.seconds >= request.max_s:
            return False  # it took all the time there was for it: that is no accident
        if request.ends_s is not None and self._inputs.clock.monotonic() + first.seconds > request.ends_s:
            return False  # nor would the second attempt be over in time
        if request.kind is Kind.baseline and first.outcome is Outcome.disturbed:
            minutes = self._inputs.config.study.budget.minutes  # what is left is worth more than a quieter start
            return minutes is None or first.seconds <= BASELINE_BUDGET_FRAC * 60 * minutes
        return request.retry_max_s is None or first.seconds <= request.retry_max_s

    def _await_quiet(self, ends_s: float | None) -> None:
        """Waits until what disturbed the last trial is over, for a bounded time, and says so; not where little is left."""
        disturbed_by, self._disturbed_by = self._disturbed_by, []
        if not disturbed_by:
            return
        clock, minutes = self._inputs.clock, self._inputs.config.study.budget.minutes
        max_s = QUIET_MAX_S if minutes is None else min(QUIET_MAX_S, QUIET_BUDGET_FRAC * 60 * minutes)
        if ends_s is not None and ends_s - clock.monotonic() < max_s / QUIET_LEFT_FRAC:
            return
        words = "; ".join(one.words for one in disturbed_by)
        self._listener.notice(f"The last trial was disturbed: {words}. Waiting for a quiet machine, {max_s:.0f} s at most.")
        kinds, begun_s = {one.kind for one in disturbed_by}, clock.monotonic()
        rest_s = min(COOL_DOWN_S, max_s) if health.THERMAL in kinds else 0.0
        while (waited_s := clock.monotonic() - begun_s) < max_s:
            is_over = not any(one.kind in kinds for one in self._level.beyond(self._watch.at_rest()))
            if is_over and waited_s >= rest_s:
                return

    def _keep(self, finished: Finished) -> Finished:
        record = finished.record
        # Before the record: a trial that has one is ready to be shown.
        seal(self._folder.trial_path(record.number), self._inputs.secrets)
        record.reason = self._inputs.secrets.text(record.reason)
        record.evidence = self._inputs.secrets.document(record.evidence)
        record.knob_reports = self._inputs.secrets.document(record.knob_reports)
        try:
            self._folder.write_trial(record)
        except KeyboardInterrupt:  # the user insisted while it was written: nothing that was measured is lost
            self._folder.write_trial(record)
            raise StoppedNow(finished) from None
        self._listener.trial_ended(record)
        return finished

    def _check_program(self, finished: Finished) -> None:
        """Checks that the program runs on the torch and the device that the study's other trials ran on."""
        found = finished.results[0].facts if finished.results else {}
        changes = [
            f"{name} was {self.program[name]!r}, is {found[name]!r}"
            for name in MADE_OF
            if self.program.get(name) and found.get(name) and self.program[name] != found[name]
        ]
        if changes:
            raise BadInput(
                f"STUDY: the program is not the one that {self._folder.name!r} measured, got {'; '.join(changes)}. Its trials "
                "cannot be compared with those. Start a new study with `autotune run`, or bring back what changed and resume."
            )

    def _launch(self, request: Request, earlier: TrialRecord | None) -> Launch:
        inputs, is_seeded = self._inputs, bool(request.first_steps) and "PYTHONHASHSEED" not in os.environ
        pinned = meaningful(inputs.space.pinned, {**inputs.command.placeholders, **request.knobs})
        return launch(
            inputs.config,
            inputs.command,
            pinned=pinned,
            changed=request.changed,
            knobs=request.knobs,
            machine=inputs.machine,
            hidden=inputs.hidden,
            folder=self._folder.trial_path(request.number),
            study=self._folder.path,
            env={"PYTHONHASHSEED": "0"} if is_seeded else {},  # the order of sets of texts is drawn, too
            total_s=self._most_s(request, earlier),
            warm=() if earlier else self.warm.modules(request.kind, changed=request.changed, pinned=pinned),
            number=request.number,
            target=request.target,
            rules=request.rules,
            race_below_per_s=request.race_below_per_s,
            promote_above_per_s=request.promote_above_per_s,
            cycle=self.cycle,
            end_s=None if request.ends_s is None else request.ends_s - self.leave_s,
            **request.first_steps,
        )


def leave_s(record: TrialRecord) -> float:
    """Returns what a trial took from the end of its window until its last process was gone."""
    return max(0.0, record.attempt_s - sum(seconds for phase, seconds in record.phases_s.items() if phase != "exit"))


def _asked(request: Request, started_at: float) -> TrialRequest:
    return TrialRequest(
        number=request.number,
        kind=request.kind,
        knobs=request.knobs,
        changed=request.changed,
        tier=request.tier,
        why=request.why,
        origin=request.origin,
        repeats=request.repeats,
        round=request.round,
        started_at=started_at,
    )


def _unstarted(seconds: float) -> Ended:
    """Returns what became of a trial that was called off before its first process."""
    return Ended(
        exit_code=None,
        signal=None,
        cause="stopped",
        phase="spawn",
        results=[],
        problems=[],
        seconds=seconds,
        evidence={"stop_reason": "interrupted by the user"},
    )


def _evidence(ended: Ended, first: RankResult | None) -> dict[str, Any]:
    return {
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "cause": ended.cause,
        "phase": ended.phase,
        "problems": ended.problems,
        "error": first.error if first else None,
        **({"why_no_losses": why} if (why := _why_no_losses(ended)) else {}),
        **ended.evidence,
    }


def _why_no_losses(ended: Ended) -> str:
    said = [str(result.loss.get("why_no_curve") or "") for result in ended.results if result.loss is not None]
    return next(filter(None, said), "")


def _join(record: TrialRecord, earlier: TrialRecord) -> None:
    """Notes the first attempt in the record of the second; its time is part of what the trial cost."""
    record.evidence["earlier_attempt"] = {"outcome": earlier.outcome, "reason": earlier.reason, "seconds": earlier.seconds}
    record.evidence["files_left"] = {**earlier.evidence.get("files_left", {}), **record.evidence.get("files_left", {})}
    record.seconds += earlier.seconds
    note = f"second attempt; the first ended as {earlier.outcome}"
    record.reason = f"{record.reason} ({note})" if record.reason else note
