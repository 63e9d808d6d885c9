"""The clock of a GPU, with events that happen when the test says so."""

from typing import Any

from autotune.harness.clock import RUN_AHEAD, CudaClock, Finished, HostClock, make_clock


class Event:
    def __init__(self, device: "Device") -> None:
        self.device = device

    def record(self) -> None:
        self.device.queued_s += 0.01
        self.at_s = self.device.queued_s

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at_s - self.at_s)


class Device:
    """Stands in for torch.cuda: every recorded event is 10 ms of work."""

    now_s = queued_s = 0.0

    def Event(self, enable_timing: bool) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        self.now_s = self.queued_s


def clock_of(device: Device) -> Any:
    clock = CudaClock()
    clock._cuda = device
    return clock


def test_steps_are_read_when_the_device_has_done_them_and_never_waited_for() -> None:
    device = Device()
    clock = clock_of(device)
    for _ in range(4):
        clock.mark(8, 0.0, False)
    assert list(clock.finished()) == []
    device.now_s = 0.031
    steps: list[Finished] = list(clock.finished())
    assert [round(step.step_s, 6) for step in steps] == [0.01, 0.01]
    assert [round(step.end_s, 6) for step in steps] == [0.01, 0.02]


def test_noise_sticks_to_the_steps_it_came_with_even_when_they_finish_later() -> None:
    device = Device()
    clock = clock_of(device)
    clock.mark(8, 0.0, False)
    clock.mark(8, 0.0, False)
    clock.noise()
    clock.mark(8, 0.0, False)
    device.synchronize()
    assert [step.is_quiet for step in clock.finished()] == [False, True]


def test_the_host_is_never_further_ahead_than_ranks_can_hear_of_the_last_step() -> None:
    device = Device()
    clock = clock_of(device)
    for _ in range(50):
        clock.mark(8, 0.0, False)
        assert (device.queued_s - device.now_s) / 0.01 <= RUN_AHEAD + 1.01


def test_the_device_rate_counts_from_the_first_forward() -> None:
    device = Device()
    clock = clock_of(device)
    for _ in range(3):
        clock.batch_is_there()
        clock.batch_is_there()  # a second forward of the step
        clock.mark(8, 0.0, False)
    device.synchronize()
    assert [(round(s.step_s, 6), round(s.busy_s, 6)) for s in clock.finished()] == [(0.02, 0.01)] * 2


def test_the_host_s_clock_takes_the_wait_off() -> None:
    clock = make_clock("cpu")
    assert isinstance(clock, HostClock)
    for _ in range(3):
        clock.mark(8, 100.0, False)
    assert [step.busy_s for step in clock.finished()] == [0.0, 0.0]
