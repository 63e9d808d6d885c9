import pytest

from autotune.clock import VirtualClock
from autotune.harness.protocol import Progress, RankResult
from autotune.monitors import watch
from autotune.monitors.nvml import NoDevice, NvmlDevice
from tests.machine.fakes import FakeNvml
from tests.monitors.test_nvml import used
from tests.support.fake_launcher import Surface


class Holding(NoDevice):
    used, looks = 0, ()

    def memory_used_bytes(self):
        return self.used

    def holders(self):
        return ["77 (someone)"]

    def sample(self, *, is_steady):
        self.looks = (*self.looks, is_steady)


def test_memory_held_on_the_device_is_reported_with_its_processes_before_a_trial():
    clock, device = VirtualClock(), Holding()
    machine = watch.MachineWatch(device, clock)
    assert machine.before() == ""
    device.used = 2**34
    assert "77 (someone)" in machine.before()


def test_device_is_sampled_at_most_once_a_second():
    clock, device = VirtualClock(), Holding()
    machine = watch.MachineWatch(device, clock)
    for _ in range(40):
        machine.look(Progress(time_s=0.0, phase="steady"))
        clock.sleep(0.125)
    assert device.looks == (True,) * 5


@pytest.mark.parametrize(
    ("visible", "index", "nproc", "expected"),
    [
        (None, 0, 1, [{"index": 0}]),
        ("", 0, 1, []),
        ("0,-1,1", 1, 1, []),
        ("2,3", 1, 1, [{"index": 3}]),
        ("GPU-abc", 0, 1, [{"uuid": "GPU-abc"}]),
        ("1", 4, 1, []),
        ("4,5,GPU-c,7", 1, 3, [{"index": 5}, {"uuid": "GPU-c"}, {"index": 7}]),
    ],
)
def test_watched_devices_are_those_visible_to_the_ranks(monkeypatch, visible, index, nproc, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []
    monkeypatch.setattr(watch, "open_device", lambda **which: asked.append(which) or NoDevice())
    watch.configured_device("auto", index, nproc)
    assert asked == expected


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 0, {"uuid": "GPU-b"}),
        ("0", 0, {"uuid": "GPU-b"}),
        ("1,MIG-7", 0, {"uuid": "GPU-a"}),
        ("1,MIG-7", 1, {"uuid": "MIG-7"}),
    ],
)
def test_watched_device_among_unlike_gpus_is_the_one_with_that_number_in_cuda(monkeypatch, visible, index, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []
    monkeypatch.setattr(watch, "open_device", lambda **which: asked.append(which) or NoDevice())
    gpus = [{"uuid": "GPU-a", "cuda_number": 1}, {"uuid": "GPU-b", "cuda_number": 0}]
    watch.configured_device("auto", index, 1, gpus=gpus)
    assert asked == [expected]


def test_no_device_is_watched_on_the_cpu():
    assert isinstance(watch.configured_device("cpu", 0, 1), NoDevice)


def ranks(*uuids):
    told = [{"device_uuids": uuid.split()} for uuid in uuids]
    return [RankResult(1, "nonce", rank, len(told), 1, "measured", facts=facts) for rank, facts in enumerate(told)]


@pytest.fixture
def nvmls(monkeypatch):
    """Returns UUID -> the fake NVML of that device, for all devices opened so far."""
    opened = {}

    def open_device(uuid):
        opened[uuid] = FakeNvml(nvmlDeviceGetUUID=uuid)
        return NvmlDevice(opened[uuid], "handle")

    monkeypatch.setattr(watch, "open_device", open_device)
    return opened


@pytest.mark.parametrize("told", [("GPU-2", "GPU-3"), ("GPU-2 GPU-3",)], ids=["two ranks", "one rank on both"])
def test_devices_reported_by_the_ranks_are_watched_from_then_on(nvmls, told):
    machine = watch.MachineWatch(watch.open_device(uuid="GPU-0"), VirtualClock())
    for results in ([], ranks("", ""), ranks("GPU-0")):
        machine.follow(results)
    assert list(nvmls) == ["GPU-0"]
    machine.follow(ranks(*told))
    assert list(nvmls) == ["GPU-0", "GPU-2", "GPU-3"]
    assert nvmls["GPU-0"].asked[-1] == "nvmlShutdown"
    assert machine.before() == ""
    nvmls["GPU-3"].answers["nvmlDeviceGetMemoryInfo"] = used(900)
    assert machine.before().startswith("device GPU-3: ")
    machine.look(Progress(time_s=0.0, phase="steady"))
    assert all("nvmlDeviceGetUtilizationRates" in nvmls[uuid].asked for uuid in ("GPU-2", "GPU-3"))


def test_reported_devices_that_are_not_on_this_machine_change_nothing(monkeypatch, nvmls):
    machine = watch.MachineWatch(watch.open_device(uuid="GPU-0"), VirtualClock())
    monkeypatch.setattr(watch, "open_device", lambda uuid: NoDevice())
    machine.follow(ranks("GPU-8", "GPU-9"))
    nvmls["GPU-0"].answers["nvmlDeviceGetMemoryInfo"] = used(900)
    assert "800 MiB more in use" in machine.before()


def test_processes_that_hold_the_device_are_reported_and_kept_as_evidence(bench):
    class TakenLater(Holding):
        num_asked = 0

        def memory_used_bytes(self):
            self.num_asked += 1
            return 0 if self.num_asked == 1 else 2**34

    study = bench(Surface(), "study.budget.trials=1", device=TakenLater())
    study.run()
    assert "77 (someone)" in study.trials[0].evidence["device_held"]
    assert study.trials[0].evidence["device_held"] in study.listener.named("notice")
