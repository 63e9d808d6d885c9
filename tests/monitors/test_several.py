"""The devices of several ranks, on a fake of NVML. Not tested on GPUs yet."""

from types import SimpleNamespace

import pytest

from autotune.clock import VirtualClock
from autotune.monitors.gate import MemoryGate
from autotune.monitors.nvml import MIB, NoDevice, NvmlDevice, SeveralDevices, as_one
from tests.machine.fakes import FakeNvml
from tests.monitors.test_nvml import used


@pytest.fixture
def pair():
    """Returns the fake NVMLs of two devices, and one monitor of both devices."""
    nvmls = [FakeNvml(nvmlDeviceGetUUID=f"GPU-{n}", nvmlDeviceGetDefaultApplicationsClock=2000) for n in (1, 2)]
    return nvmls, as_one([NvmlDevice(nvml, "handle", VirtualClock().monotonic) for nvml in nvmls])


def test_metrics_are_those_of_the_worst_device_and_power_is_the_mean(pair):
    nvmls, devices = pair
    nvmls[1].answers |= {
        "nvmlDeviceGetMemoryInfo": used(600),
        "nvmlDeviceGetPowerUsage": 500_000,
        "nvmlDeviceGetClockInfo": 1000,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x40,
    }
    devices.sample(is_steady=True)
    metrics = devices.metrics()
    assert metrics["gpu.power_w"] == 400.0
    assert metrics["gpu.memory_used_bytes"] == 600 * MIB
    assert metrics["gpu.sm_clock_frac"] == 0.5
    assert metrics["gpu.slowdown_thermal_frac"] == 1.0
    assert metrics["gpu.utilisation_frac"] == 0.5
    assert devices.memory_used_frac() == 0.6
    devices.restart()
    assert devices.metrics() == {}


def test_gate_waits_for_every_device_and_names_the_one_that_is_held(pair):
    nvmls, devices = pair
    clock = VirtualClock()
    gate = MemoryGate(devices, clock=clock.monotonic)
    assert gate.wait(1.0, clock.sleep) == ""
    nvmls[0].answers["nvmlDeviceGetMemoryInfo"] = used(300)
    assert gate.wait(1.0, clock.sleep) == "", "a small change by other processes is allowed on each device"
    nvmls[1].answers["nvmlDeviceGetMemoryInfo"] = used(900)
    message = gate.wait(1.0, clock.sleep)
    assert message.startswith("device GPU-2: 800 MiB more in use")
    assert "GPU-1" not in message


def test_windows_and_compute_processes_cover_every_device(pair):
    nvmls, devices = pair
    running = [[SimpleNamespace(pid=pid, usedGpuMemory=None)] for pid in (7, 8)]
    for nvml, processes in zip(nvmls, running, strict=True):
        nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes
    assert set(devices.compute_processes()) == {7, 8}
    devices.open_window()
    devices.close_window()
    for nvml in nvmls:
        assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 2
    devices.close()
    assert [nvml.asked[-1] for nvml in nvmls] == ["nvmlShutdown"] * 2


def test_as_one_returns_a_single_device_itself_and_a_null_object_for_none(pair):
    one = NvmlDevice(pair[0][0], "handle")
    assert as_one([one, NoDevice()]) is one
    assert isinstance(as_one([NoDevice()]), NoDevice)
    assert isinstance(pair[1], SeveralDevices)
