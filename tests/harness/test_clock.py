"""The clock of a GPU, with fake events whose times the test sets."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.harness.clock import RUN_AHEAD, CudaClock, Finished, HostClock, make_clock
from autotune.harness.explain.phase_marks import MAX_EVENTS, DevicePhases, Marks
from autotune.harness.explain.sources import Sources
from autotune.harness.explain.syncs import SyncSites
from autotune.harness.modules import ModuleWatch
from tests.harness.contexts import context


class Event:
    def __init__(self, device: "Device") -> None:
        self.device = device

    def record(self, stream: Any) -> None:
        assert not self.device.is_capturing, "a captured event has no time, and reading it ends the capture"
        self.device.streams.append(stream)
        self.device.queued_s += 0.01
        self.at_s = self.device.queued_s

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at_s - self.at_s)


class Device:
    """A fake of torch.cuda. Each recorded event stands for 10 ms of work."""

    now_s = queued_s = 0.0
    is_capturing = False
    current = ""  # name of a stream that the program has made the current one

    def __init__(self) -> None:
        self.streams: list[Any] = []  # streams on which events were recorded
        self.waited: list[Any] = []  # devices that the host waited for

    def Event(self, enable_timing: bool) -> Event:
        return Event(self)

    def synchronize(self, index: Any = None) -> None:
        self.waited.append(index)
        self.now_s = self.queued_s

    def current_stream(self, index: Any = None) -> str:
        return self.current or f"stream of {index}"

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing


def clock_of(device: Device, index: int | None = None) -> Any:
    clock = CudaClock(index)
    clock._cuda, clock._synchronize = device, device.synchronize
    return clock


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def clock(device: Device) -> Any:
    return clock_of(device)


def test_steps_are_read_once_the_device_has_finished_without_waiting_for_it(clock: Any, device: Device) -> None:
    for _ in range(4):
        clock.mark(8, 0.0, False)
    assert list(clock.finished()) == []
    device.now_s = 0.031
    steps: list[Finished] = list(clock.finished())
    assert [round(step.step_s, 6) for step in steps] == [0.01, 0.01]
    assert [round(step.end_s, 6) for step in steps] == [0.01, 0.02]


def test_noise_marks_all_steps_so_far_even_if_they_finish_later(clock: Any, device: Device) -> None:
    clock.mark(8, 0.0, False)
    clock.mark(8, 0.0, False)
    clock.noise()
    clock.mark(8, 0.0, False)
    device.synchronize()
    assert [step.is_quiet for step in clock.finished()] == [False, True]


def test_host_runs_ahead_of_the_device_by_a_limited_number_of_steps(clock: Any, device: Device) -> None:
    for _ in range(50):
        clock.mark(8, 0.0, False)
        assert (device.queued_s - device.now_s) / 0.01 <= RUN_AHEAD + 1.01


def test_window_begins_after_the_step_that_the_device_had_to_wait_for(clock: Any, device: Device) -> None:
    clock.mark(8, 0.0, False)
    for _ in range(2):  # a window that restarts
        clock.open_window()
        device.queued_s += 0.5  # the host fetches a batch while the device has nothing to do
        for _ in range(3):
            clock.mark(8, 0.0, False)
        device.synchronize()
        assert [round(step.step_s, 6) for step in clock.finished()] == [0.01, 0.01]


def test_ends_of_steps_leave_out_the_steps_that_a_window_drops(clock: Any, device: Device) -> None:
    for _ in range(2):
        clock.mark(8, 0.0, False)
    device.synchronize()
    assert [round(step.end_s, 6) for step in clock.finished()] == [0.01]
    for _ in range(2):  # a window that restarts
        for _ in range(5):
            clock.mark(8, 0.0, False)
        clock.open_window()
    device.queued_s += 0.5  # the device waits for its first batch in the window
    for _ in range(3):
        clock.mark(8, 0.0, False)
    device.synchronize()
    assert [round(step.end_s, 6) for step in clock.finished()] == [0.02, 0.03]


def test_busy_time_of_a_step_counts_from_its_first_forward_pass(clock: Any, device: Device) -> None:
    for _ in range(3):
        clock.batch_is_there()
        clock.batch_is_there()  # the step's second forward pass
        clock.mark(8, 0.0, False)
    device.synchronize()
    assert [(round(s.step_s, 6), round(s.busy_s, 6)) for s in clock.finished()] == [(0.02, 0.01)] * 2


def test_waits_between_the_batches_of_a_step_are_no_busy_time(clock: Any, device: Device) -> None:
    for _ in range(3):
        for _ in range(4):
            if clock.begin is not None:  # as in `LoaderWatch`
                clock.batch_is_asked()
                clock.batch_is_asked()  # of a second loader
            device.queued_s += 0.2  # the device waits
            clock.batch_is_there()
            clock.batch_is_there()  # another model
            device.queued_s += 0.05
        assert len(clock._waits) == 3
        clock.batch_is_asked()  # the next step's batch is fetched before this step ends
        clock.mark(8, 0.0, False)
    device.synchronize()
    # An event takes 10 ms. The four times 50 ms of work include those at which a batch is asked for, and that of the end.
    assert [round(step.busy_s, 6) for step in clock.finished()] == [0.25, 0.25]


def test_batch_that_another_thread_asks_for_is_not_waited_for(clock: Any, device: Device) -> None:
    clock.batch_is_there()
    asking = threading.Thread(target=clock.batch_is_asked)
    asking.start()
    asking.join()
    assert len(device.streams) == 1


def test_clock_times_the_device_that_trains_and_not_the_current_one(device: Device) -> None:
    clock = clock_of(device, 1)
    for _ in range(3):
        clock.batch_is_there()
        clock.mark(8, 0.0, False)
    clock.open_window()
    clock.mark(8, 0.0, False)
    clock.close_window()
    assert set(device.streams) == {"stream of 1"}
    assert device.waited == [1, 1]


def test_device_that_trains_is_the_one_that_holds_the_trained_parameters() -> None:
    optimizer = SimpleNamespace(param_groups=[{"params": [SimpleNamespace(device=torch.device("cuda", 1))]}])
    optimizers, writes = SimpleNamespace(optimizers=lambda: [optimizer]), SimpleNamespace(watched=list, device_type="")
    watch: Any = ModuleWatch.__new__(ModuleWatch)
    watch.roots, watch._context = [], SimpleNamespace(optimizers=optimizers, writes=writes, losses=None)
    assert watch.device() == ("cuda", 1)
    optimizer.param_groups.clear()
    assert watch.device()[1] is None


def test_no_event_is_recorded_while_the_program_captures_a_graph(clock: Any, device: Device) -> None:
    clock.mark(8, 0.0, False)
    device.is_capturing = True
    clock.batch_is_there()
    device.is_capturing = False
    clock.mark(8, 0.0, False)
    device.synchronize()
    assert [step.busy_s for step in clock.finished()] == [pytest.approx(0.01)]


def test_phases_of_the_device_are_summed_over_all_steps(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", device)
    phases, num_steps = DevicePhases(1), MAX_EVENTS
    for _ in range(num_steps):
        phases.note("forward")
        phases.note("backward")
    device.is_capturing = True
    phases.note("optimizer")
    device.is_capturing = False
    phases.note("other")
    found = phases.seconds()
    assert (found["forward"], found["backward"]) == (pytest.approx(0.01 * num_steps), pytest.approx(0.01 * num_steps))
    assert found["optimizer"] == 0.0
    assert set(device.streams) == {"stream of 1"}


def test_copies_on_another_stream_are_not_counted_as_training_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of two streams have no defined order, so a phase between them could have a negative duration."""
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    phases = DevicePhases(1)
    phases.note("forward")
    device.current = "the stream of the program's prefetcher"
    phases.note("transfer")
    phases.note("other")
    device.current = ""
    phases.note("forward")
    assert set(device.streams) == {"stream of 1"}


def test_wait_of_the_clock_itself_is_not_reported_as_a_synchronisation(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", device)
    clock = CudaClock()
    given = context(modules=SimpleNamespace(num_graphs=lambda: 0, is_in_evaluation=False))
    sites = SyncSites(given, Marks(given), Sources())
    sites.install()
    try:
        clock.open_window()
        clock.mark(8, 0.0, False)
        clock.close_window()
        assert sites.sites(1.0) == []
        torch.cuda.synchronize()
    finally:
        sites.uninstall()
    assert [site.kind for site in sites.sites(1.0)] == ["synchronize"]


def test_device_phases_exclude_a_step_that_is_left_out(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", device)
    phases = DevicePhases(1)
    for number in range(4):
        phases.note("forward")
        phases.step_begins()  # as in `Marks`: at the first change of phase of a step, before its event
        phases.note("backward")
        if number == 2:
            phases.leave_out_step()
    phases.note("other")
    found = phases.seconds()
    assert (found["forward"], found["backward"]) == (pytest.approx(0.04), pytest.approx(0.03))
    assert "left out" not in found


def test_long_evaluation_is_excluded_entirely_from_device_phases(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", device)
    phases = DevicePhases()
    for number_of_calls in (1, MAX_EVENTS, 1):
        phases.step_begins()
        for _ in range(number_of_calls):
            phases.note("input")
            phases.note("other")
        if number_of_calls > 1:
            phases.leave_out_step()
    phases.note("other")
    found = phases.seconds()
    assert (found["input"], found["other"]) == (pytest.approx(0.02), pytest.approx(0.02))


def test_host_clock_subtracts_the_wait_for_a_batch_from_the_busy_time() -> None:
    clock = make_clock("cpu")
    assert isinstance(clock, HostClock)
    for _ in range(3):
        clock.mark(8, 100.0, False)
    assert [step.busy_s for step in clock.finished()] == [0.0, 0.0]


def test_device_clock_excludes_time_that_is_left_out(clock: Any, device: Device) -> None:
    for _ in range(2):
        clock.mark(8, 0.0, False)
    device.queued_s += 1.0  # an evaluation
    clock.leave_out()
    clock.mark(8, 0.0, False)
    device.synchronize()
    assert [(round(step.step_s, 6), round(step.end_s, 6)) for step in clock.finished()] == [(0.01, 0.01), (0.01, 1.03)]


def test_host_clock_excludes_time_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr("autotune.harness.clock.time", SimpleNamespace(monotonic=lambda: next(times_s)))
    clock = HostClock()
    for _ in range(2):
        clock.mark(8, 0.0, False)
    clock.leave_out()
    clock.mark(8, 1.0, False)
    assert [(step.step_s, step.busy_s, step.end_s) for step in clock.finished()] == [(2.0, 2.0, 2.0), (4.0, 3.0, 13.0)]
