"""Runs one trial: its attempts, and how it ends."""

from __future__ import annotations

import math
import os

from autotune.harness.protocol import Spec
from autotune.launchers.base import Ended
from autotune.quantities import seconds_text
from autotune.records import FIXED, SKIPPED, Kind, Outcome, TrialRecord
from autotune.run_dir import FULL
from autotune.trials import health
from autotune.trials.losses import exploded
from autotune.trials.places import Place
from autotune.trials.quarantine import sticky_fault
from autotune.trials.runner import QUIET_LEFT_FRAC, Finished, Request, StoppedNow, TrialRunner

# Outcomes that may be due to chance, so that the trial is attempted once more. Running out of memory is not one of them.
CHANCE = frozenset({Outcome.crash, Outcome.timeout, Outcome.disturbed})
# Outcomes that a full or read-only disk may have caused. The disk is checked before they are attributed to the configuration.
UNWRITTEN = frozenset({Outcome.error, Outcome.crash, Outcome.timeout})
NO_ROOM = tuple(os.strerror(number) for number in FULL)
# Kinds of hangs that are not due to chance: a rank missing from a collective, an endless loop in the program.
NO_CHANCE = ("collective", "user code")
GATE_S = 30.0  # longest wait until the device's memory use is back at its idle level
BASELINE_BUDGET_FRAC = 0.1  # a disturbed baseline that took more than this share of the study's time is not repeated
NODE_LOST = "node_lost"  # evidence key of a trial that was cut off because its machine was lost
TIME_UP, USERS_STOP = "the trial's time was up", "interrupted by the user"


class RunningTrial:
    """A trial, from its launch to its record. Makes a second attempt if the first may have failed by chance.

    If the baseline's first attempt was only disturbed and its second attempt fails, it gets a third: a study needs a baseline.

    Attributes:
        request: what it measures.
        place: where it runs.
        neighbours: largest number of other trials that ran at the same time; counted by the schedule.

    Args:
        runner: launches and records it.
        request: what to measure.
        place: where to run it.

    Raises:
        StoppedNow: on KeyboardInterrupt; the trial was recorded as interrupted.
        FolderLost: the trial cannot be recorded, and so does not count.
        BadInput: the program cannot be started.
    """

    def __init__(self, runner: TrialRunner, request: Request, place: Place) -> None:
        self.request, self.place, self.neighbours = request, place, 0
        self._runner, self._inputs, self._listener = runner, runner.inputs, runner.listener
        self._first: TrialRecord | None = None  # the attempt before the latest one, joined with those before it
        self._over: Finished | None = None  # the trial, once its last attempt is over
        self._is_begun = False  # whether the processes of the latest attempt were started
        self._waiting = ""
        runner.announce(request)
        self._attempt()

    def look(self) -> Finished | None:
        """Returns None while the trial runs, then the finished trial, whose record is written.

        Raises:
            StoppedNow: on KeyboardInterrupt between two attempts, or while the record was written.
            FolderLost: the trial cannot be recorded, and so does not count.
            NoNode: no node is available here. The next call returns the trial, which was stopped.
            BadInput: the program differs from that of the study's other trials.
        """
        if (ended := self._poll()) is None:
            return None
        finished, first = self._finished(ended), self._first
        record, runner, request = finished.record, self._runner, self.request
        if record.outcome in UNWRITTEN:
            runner.folder.check()
        if first is None or self._has_worked(first, record):
            is_by_chance = record.outcome in CHANCE or NODE_LOST in record.evidence or bool(sticky_fault(record))
            is_by_chance = is_by_chance or _lacked_room(record) or first is not None
            if (runner.warm.is_doubtful(record) or is_by_chance) and self._may_be_repeated(record):
                self._tell_second_attempt(record)
                runner.keep_logs(record)
                self._first = record
                self._attempt()
                return None
        elif runner.warm.is_doubtful(first) and (notice := runner.warm.judge(first, record)):
            self._listener.notice(notice)
        self._over = finished
        return runner.finish(request, finished, self.place)

    @property
    def is_waiting(self) -> bool:
        """Whether the trial waits for a node, for a known reason."""
        return bool(self._waiting)

    @property
    def kept(self) -> Finished | None:
        """The finished trial if its record is on disk; None otherwise."""
        return self._over if self._over and self._over.is_kept else None

    def move(self, place: Place) -> None:
        """Ends the wait for a node, and starts the attempt on another slot. Raises the same errors as the constructor."""
        self._running.stop("another slot is free")
        self.place, self._waiting = place, ""
        self._attempt()

    def request_stop(self) -> None:
        """Begins to end the trial because the user asked to, without waiting for it; `stop` must follow."""
        if self._is_begun and not self.kept:
            self._running.request_stop(USERS_STOP)

    def stop(self) -> Finished:
        """Ends the trial because the user asked to, and returns it; its record is written."""
        if kept := self.kept:  # a listener was interrupted while it handled the end of this trial
            return kept
        if self._first and not self._is_begun:
            return self._runner.keep(Finished(record=self._first))
        self._running.stop(USERS_STOP)
        while (ended := self._poll(is_ending=True)) is None:
            self._inputs.clock.sleep(self._inputs.poll_s)
        finished = self._over = self._finished(ended)
        return self._judged(finished) or self._runner.keep(finished)

    def abandon(self) -> Finished | None:
        """Ends the trial's processes after a fault. Returns the trial, and writes its record, if it was measured by then."""
        if not self._is_begun:  # the fault occurred between two attempts, and the first attempt does not count
            return None
        if kept := self.kept:  # a listener failed while it handled the end of this trial
            return kept
        try:
            ended = self._poll(is_ending=True)
        finally:  # also if polling raises the same error again; does nothing if the processes have ended
            self._running.stop("autotune failed")
        if ended is None:
            return None
        self._over = self._finished(ended)
        return self._judged(self._over)

    def _judged(self, finished: Finished) -> Finished | None:
        """Judges a trial that was measured, and writes its record; returns None for any other trial."""
        return self._runner.finish(self.request, finished, self.place) if finished.record.outcome.has_value else None

    def _has_worked(self, first: TrialRecord, record: TrialRecord) -> bool:
        """Whether a baseline that worked in its first attempt, although disturbed, has failed in the attempt of `record`."""
        is_failure = not (record.outcome.has_value or record.outcome.is_no_answer)
        return self.request.kind is Kind.baseline and first.outcome is Outcome.disturbed and is_failure

    def _may_be_repeated(self, first: TrialRecord) -> bool:
        """Whether there is time and reason for another attempt at a trial that may have failed by chance."""
        request, inputs = self.request, self._inputs
        is_used_up = request.max_s is not None and first.seconds >= request.max_s
        is_hanging = is_used_up or first.evidence.get("hang", {}).get("kind") in NO_CHANCE
        may_be_warm = self._runner.warm.is_doubtful(first) and first.evidence.get("phase") != "compile"
        if is_hanging and not may_be_warm:
            return False  # a hang is repeated only if a warm start may have caused it; a trial that still compiles is just slow
        if request.ends_s is not None and inputs.clock.monotonic() + first.seconds > request.ends_s:
            return False  # a second attempt would not end in time
        if request.kind is Kind.baseline and first.outcome is Outcome.disturbed:
            minutes = inputs.config.study.budget.minutes  # the time left is worth more than a quieter baseline
            return minutes is None or first.seconds <= BASELINE_BUDGET_FRAC * 60 * minutes
        return request.retry_max_s is None or first.seconds <= request.retry_max_s

    def _tell_second_attempt(self, first: TrialRecord) -> None:
        """Announces a second attempt after a lost node, a full disk or a timeout: it may take as long as the first."""
        if NODE_LOST in first.evidence:
            self._listener.notice(f"Trial {first.number} was cut off: {first.reason}. It is repeated on another node.")
        if first.outcome is Outcome.timeout or _lacked_room(first):
            how = f"{first.outcome} after {seconds_text(first.seconds)}: {first.reason}"
            self._listener.notice(f"Trial {first.number} ended as {how}. It is repeated.")

    def _attempt(self) -> None:
        runner, request, place, first = self._runner, self.request, self.place, self._first
        self._is_begun = False
        self._started_at, self._began_s = self._inputs.clock.time(), self._inputs.clock.monotonic()
        try:
            runner.await_quiet(place, request.ends_s)
            left_s = math.inf if request.ends_s is None else request.ends_s - self._inputs.clock.monotonic()
            self._held = place.watch.before(max_s=min(GATE_S, max(0.0, QUIET_LEFT_FRAC * left_s)))
        except KeyboardInterrupt:
            record = first or self._unstarted(runner.launch(request, first).spec)
            raise StoppedNow(runner.keep(Finished(record=record))) from None
        if self._held:
            self._listener.notice(self._held)
        prepared = runner.launch(request, first)  # only now, because the spec contains the time that is left
        self._spec, self._started_at, self._began_s = prepared.spec, self._inputs.clock.time(), self._inputs.clock.monotonic()
        try:
            self._running = place.launcher.start(prepared)
            self._is_begun = True
        except KeyboardInterrupt:  # a warm server may take seconds to start
            raise StoppedNow(runner.keep(Finished(record=self._unstarted(prepared.spec)))) from None

    def _unstarted(self, spec: Spec) -> TrialRecord:
        """Returns the record of a trial that the user stopped before its processes were started; it is not written yet."""
        seconds = self._inputs.clock.monotonic() - self._began_s
        unstarted = Ended.stopped(USERS_STOP, phase="spawn", seconds=seconds)
        record = self._runner.record(self.request, spec, unstarted, self.place)
        record.started_at = self._started_at
        return record

    def _poll(self, *, is_ending: bool = False) -> Ended | None:
        """Polls the processes and the machine; ends the trial when its time is up. Returns None while the processes run."""
        running, watch, ends_s, clock = self._running, self.place.watch, self.request.ends_s, self._inputs.clock
        while (ended := running.poll()) is None:
            if (why := self.place.launcher.why_waiting()) != self._waiting:
                self._waiting = why
                self._listener.notice(f"Waiting for a node: {why}." if why else "A node is ready.")
            if not is_ending and ends_s is not None and clock.monotonic() >= ends_s:
                running.stop(TIME_UP)
                continue
            progress = running.progress()
            watch.look(progress)
            if progress:
                self._listener.progress(progress, self.request.number)
            return None
        watch.ended()
        return ended

    def _finished(self, ended: Ended) -> Finished:
        """Returns an attempt that has ended, with its record, which is not written yet."""
        runner, request, place, first = self._runner, self.request, self.place, self._first
        record = runner.record(request, self._spec, ended, place)
        runner.tell_why_fresh(record)
        # Losses are judged before disturbances: accepting a disturbance later restores the outcome from before `judge`.
        if not request.skipped and record.outcome.has_value and (why := exploded(record.losses, runner.baseline_losses)):
            record.outcome, record.reason, record.value, record.ci = Outcome.parity, why, None, None
        if request.kind is Kind.explain:
            health.note(record, place.watch.disturbances())
        elif not request.first_steps:  # a run with `first_steps` measures no rate
            runner.judge(record, ended.results, place, began_s=self._began_s)
        record.started_at = first.started_at if first else self._started_at
        place.watch.follow(ended.results)
        if self._held:
            record.evidence["device_held"] = self._held
        if "seed" in request.first_steps:
            record.evidence["seed"] = request.first_steps["seed"]
        if request.skipped:
            record.evidence[SKIPPED] = list(request.skipped)
        if request.is_fixed:
            record.evidence[FIXED] = True
        record.slot, record.host, record.neighbours = place.name, place.host, self.neighbours
        if first:
            _join(record, first)
        return Finished(record=record, results=list(ended.results))


def _lacked_room(record: TrialRecord) -> bool:
    """Whether a trial failed because a disk was full, which says nothing about its configuration."""
    said = f"{record.reason} {record.evidence.get('log_tail', '')}"
    return record.outcome in UNWRITTEN and any(text in said for text in NO_ROOM)


def _join(record: TrialRecord, earlier: TrialRecord) -> None:
    """Adds the earlier attempts to the record of the latest. Their time is part of the trial's cost."""
    record.evidence["earlier_attempt"] = {"outcome": earlier.outcome, "reason": earlier.reason, "seconds": earlier.seconds}
    for key in ("files_left", "files_new", "files_unguarded"):
        record.evidence[key] = {**earlier.evidence.get(key, {}), **record.evidence.get(key, {})}
    # Of a file that both have changed, the first attempt's copy is the user's version.
    record.evidence["files_aside"] = {**record.evidence.get("files_aside", {}), **earlier.evidence.get("files_aside", {})}
    kept = {*record.evidence.get("files_kept", []), *earlier.evidence.get("files_kept", [])}
    record.evidence["files_kept"] = sorted(kept - record.evidence["files_aside"].keys())
    record.seconds += earlier.seconds
    now, before = ("third", "second") if "earlier_attempt" in earlier.evidence else ("second", "first")
    note = f"{now} attempt; the {before} ended as {earlier.outcome}"
    record.reason = f"{record.reason} ({note})" if record.reason else note
