"""Trials that end at the same time: all of them are recorded and passed on, even if handling one of them fails."""

from types import SimpleNamespace

import pytest

from autotune.clock import VirtualClock
from autotune.errors import BadInput
from autotune.records import Kind
from autotune.trials import schedule
from autotune.trials.schedule import Ending, Schedule
from tests.support.fake_launcher import FakeRunning, Surface


class StubTrial:
    """A trial that has ended, still runs (`is_over=False`), or fails when it is polled (`fault`) or stopped (`stop_fault`).

    With `fails_late=True`, the failure comes after the trial's record was written, as from a user's `on_trial` function.
    """

    def __init__(self, number, *, is_over=True, fault=None, stop_fault=None, fails_late=False):
        self.number, self.neighbours, self.place, self.request, self.is_waiting = number, 0, number, self, False
        self.kind = Kind.final
        self._is_over, self._fault, self._stop_fault = is_over, fault, stop_fault
        self.kept, self._fails_late, self.is_asked = None, fails_late, False

    def look(self):
        if self._fault:
            raise self._fault
        return self._ended() if self._is_over else None

    def abandon(self):
        if self._fails_late:
            self._is_over = True
        self.look()

    def request_stop(self):
        self.is_asked = True

    def stop(self):
        if self._stop_fault and not self._fails_late:
            raise self._stop_fault
        return self._ended(self._stop_fault)

    def _ended(self, fault=None):
        self.kept = self.number
        if fault:
            raise fault
        return self.number


@pytest.fixture
def added():
    return []


@pytest.fixture
def run(added, monkeypatch):
    """Returns a function that runs trials in parallel, and calls `take` with those that have finished."""
    monkeypatch.setattr(schedule, "RunningTrial", lambda _, trial, __: trial)
    runner = SimpleNamespace(alone=None, beside=[])
    slots = Schedule(runner, added.append, lambda: None, clock=VirtualClock(), poll_s=0.1)

    def run_all(trials, take):
        left = iter(trials)
        slots.run_beside(lambda: next(left), range(len(trials)), take)

    run_all.stop = slots.stop
    return run_all


def test_error_while_handling_one_trial_does_not_stop_the_handling_of_others(run, added):
    taken = []

    def take(number):
        taken.append(number)
        if number == 1:
            raise Ending("the device is faulty")

    with pytest.raises(Ending, match="the device is faulty"):
        run([StubTrial(1), StubTrial(2), StubTrial(3)], take)
    assert taken == added == [1, 2, 3]


def test_error_of_one_trial_does_not_prevent_recording_others_that_have_ended(run, added):
    taken = []
    with pytest.raises(BadInput, match="no node"):
        run([StubTrial(1), StubTrial(2, fault=BadInput("no node")), StubTrial(3), StubTrial(4, is_over=False)], taken.append)
    assert added == [1, 3]
    assert taken == [1]


def test_trials_that_fail_after_their_records_were_written_are_recorded(run, added):
    with pytest.raises(BadInput, match="no node"):
        run([StubTrial(1, fault=BadInput("no node")), StubTrial(2, is_over=False, fails_late=True)], [].append)
    assert added == [2]


def test_trial_that_fails_after_it_was_stopped_and_written_is_recorded(run, added):
    def interrupted(_):
        run.stop()

    with pytest.raises(LookupError, match="enough"):
        run([StubTrial(1), StubTrial(2, is_over=False, stop_fault=LookupError("enough"), fails_late=True)], interrupted)
    assert added == [1, 2]


def test_trial_that_cannot_be_stopped_does_not_prevent_stopping_others(run, added):
    def take(_):
        run.stop()

    with pytest.raises(OSError, match="disk"):
        run([StubTrial(1), StubTrial(2, is_over=False, stop_fault=OSError("disk")), StubTrial(3, is_over=False)], take)
    assert added == [1, 3]


def test_all_running_trials_are_asked_to_end_before_the_first_is_waited_for(run, monkeypatch):
    trials = [StubTrial(1), StubTrial(2, is_over=False), StubTrial(3, is_over=False)]
    stop, seen = StubTrial.stop, []

    def noted(self):
        seen.append([trial.is_asked for trial in trials])
        return stop(self)

    monkeypatch.setattr(StubTrial, "stop", noted)
    run(trials, lambda _: run.stop())
    assert seen == [[False, True, True]] * 2


@pytest.mark.parametrize("fault", [BadInput("no node"), KeyboardInterrupt()], ids=["fault", "interrupt"])
def test_trials_that_end_while_another_raises_are_scored_and_recorded(bench, monkeypatch, fault):
    poll, ended = FakeRunning.poll, []

    def faulty(self):
        running = self._launcher.running
        if len(running) == 3 and self is running[0]:
            for other in running[1:]:
                other._finish(None, 1.0)
                ended.append(other._launch.spec.trial)
            raise fault
        return poll(self)

    monkeypatch.setattr(FakeRunning, "poll", faulty)
    study = bench(Surface(), "search.sampler=random", minutes=60, num_slots=3)
    if isinstance(fault, KeyboardInterrupt):
        assert study.run()["status"] == "interrupted"
    else:
        with pytest.raises(BadInput, match="no node"):
            study.run()
    assert len(ended) == 2
    scores = {trial.number: trial.scores for trial in study.trials}
    assert all(scores[number] for number in ended)


def test_trials_that_cannot_be_polled_are_still_stopped(bench, monkeypatch):
    """Polling fails for every trial, for example because the progress display is broken."""
    poll, stop, stopped = FakeRunning.poll, FakeRunning.stop, []

    def faulty(self):
        if len(self._launcher.running) == 3:
            raise OSError("the screen is gone")
        return poll(self)

    def noted(self, reason):
        stopped.append(self._launch.spec.trial)
        stop(self, reason)

    monkeypatch.setattr(FakeRunning, "poll", faulty)
    monkeypatch.setattr(FakeRunning, "stop", noted)
    with pytest.raises(OSError, match="the screen is gone"):
        bench(Surface(), "search.sampler=random", minutes=60, num_slots=3).run()
    assert len(set(stopped)) == 3
