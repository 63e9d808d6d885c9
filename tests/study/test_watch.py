import pytest

from autotune.config.schema import DeviceOptions
from autotune.harness.protocol import Progress
from autotune.monitors.nvml import NoDevice
from autotune.study import watch
from autotune.testing.clock import VirtualClock
from autotune.testing.fake_launcher import Surface


class Holding(NoDevice):
    used, looks = 0, ()

    def memory_used_bytes(self):
        return self.used

    def holders(self):
        return ["77 (someone)"]

    def sample(self, *, is_steady):
        self.looks = (*self.looks, is_steady)


def test_next_trial_waits_for_the_device_s_memory_and_says_who_holds_it():
    clock, device = VirtualClock(), Holding()
    machine = watch.MachineWatch(device, clock)
    assert machine.before() == ""
    device.used = 2**34
    assert "77 (someone)" in machine.before()


def test_device_is_looked_at_once_a_second_at_most():
    clock, device = VirtualClock(), Holding()
    machine = watch.MachineWatch(device, clock)
    for _ in range(40):
        machine.look(Progress(time_s=0.0, phase="steady"))
        clock.sleep(0.125)
    assert device.looks == (True,) * 5


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [("", 0, {"index": 0}), ("2,3", 1, {"index": 3}), ("GPU-abc", 0, {"uuid": "GPU-abc"}), ("1", 4, {"index": 4})],
)
def test_device_is_the_one_the_program_sees(monkeypatch, visible, index, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []
    monkeypatch.setattr(watch, "open_device", lambda **which: asked.append(which))
    watch.configured_device(DeviceOptions(index=index))
    assert asked == [expected]


def test_nothing_is_watched_on_the_cpu():
    assert isinstance(watch.configured_device(DeviceOptions(kind="cpu")), NoDevice)


def test_who_holds_the_device_is_told_and_kept_as_evidence(bench):
    class TakenLater(Holding):
        num_asked = 0

        def memory_used_bytes(self):
            self.num_asked += 1
            return 0 if self.num_asked == 1 else 2**34

    study = bench(Surface(), "study.budget.trials=1", device=TakenLater())
    study.run()
    assert "77 (someone)" in study.trials[0].evidence["device_held"]
    assert study.trials[0].evidence["device_held"] in study.listener.named("notice")
