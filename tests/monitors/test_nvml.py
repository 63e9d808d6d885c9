"""The monitor of a device, on a fake of NVML."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from autotune.clock import VirtualClock
from autotune.monitors.gate import MemoryGate
from autotune.monitors.nvml import MIB, SLOWDOWN_FIELDS, NoDevice, NvmlDevice, open_device
from tests.machine.fakes import FakeNvml

NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, NOT_FOUND = 3, 4, 999, 6


def used(mebibytes):
    return SimpleNamespace(total=1000 * MIB, used=mebibytes * MIB)


def test_metrics_come_from_the_steady_samples():
    nvml, clock = FakeNvml(), VirtualClock(0.0)
    device = NvmlDevice(nvml, "handle", clock.monotonic)
    for seconds, joules, rate, reasons, is_steady in [(0, 1, 5, 0x40, False), (1, 10, 80, 0x24, True), (3, 40, 90, 0, True)]:
        clock.now_s = seconds
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = joules * 1000
        nvml.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=rate)
        nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = reasons
        nvml.answers["nvmlDeviceGetMemoryInfo"] = used(900 - rate)
        device.sample(is_steady=is_steady)
    assert device.metrics() == {
        "gpu.utilisation_frac": pytest.approx(0.85),
        "gpu.power_w": 15.0,  # (40 - 10) J / (3 - 1) s
        "gpu.sm_clock_mhz": 1410.0,
        "gpu.memory_used_bytes": 895 * MIB,
        "gpu.slowdown_power_cap_frac": 0.5,
        "gpu.slowdown_hardware_frac": 0.0,
        "gpu.slowdown_thermal_frac": 0.5,
        "gpu.slowdown_power_brake_frac": 0.0,
    }
    assert device.memory_used_frac() == pytest.approx(0.895)
    device.restart()
    assert device.metrics() == {}
    assert device.memory_used_frac() is None


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_unsupported_query_is_unknown_and_asked_only_once(code):
    name = "nvmlDeviceGetUtilizationRates"
    nvml = FakeNvml(**{name: FakeNvml.NVMLError(code)})
    device = NvmlDevice(nvml, "handle")
    assert device.sample(is_steady=True).utilisation_frac is None
    assert device.sample(is_steady=True).utilisation_frac is None
    assert nvml.asked.count(name) == 1
    assert "gpu.utilisation_frac" not in device.metrics()


@pytest.mark.parametrize(
    ("answers", "is_known"),
    [
        ({"nvmlDeviceGetMigMode": [0, 1]}, True),
        ({"nvmlDeviceGetMigMode": FakeNvml.NVMLError(NOT_SUPPORTED)}, True),
        ({"nvmlDeviceGetMigMode": [1, 1]}, False),
        ({"nvmlDeviceGetUUID": "MIG-1"}, False),
    ],
)
def test_energy_of_a_whole_gpu_is_not_reported_for_a_mig_slice(answers, is_known):
    sample = NvmlDevice(FakeNvml(**answers), "handle").sample(is_steady=True)
    assert (sample.power_w is not None, sample.energy_j is not None) == (is_known, is_known)
    assert sample.memory_used_bytes == 100 * MIB


def test_query_that_fails_temporarily_is_asked_again():
    nvml = FakeNvml(nvmlDeviceGetPowerUsage=FakeNvml.NVMLError(UNKNOWN))
    device = NvmlDevice(nvml, "handle")
    assert device.sample(is_steady=True).power_w is None
    nvml.answers["nvmlDeviceGetPowerUsage"] = 1000
    assert device.sample(is_steady=True).power_w == 1.0


def test_slowdowns_are_read_under_the_name_of_older_drivers():
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x80)
    del nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    assert NvmlDevice(nvml, "handle").sample(is_steady=True).slowdowns == ("power_brake",)


def test_sampled_power_is_used_if_the_energy_counter_was_reset():
    nvml, clock = FakeNvml(), VirtualClock(0.0)
    device = NvmlDevice(nvml, "handle", clock.monotonic)
    device.sample(is_steady=True)
    clock.now_s, nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = 1.0, 0
    device.sample(is_steady=True)
    assert device.metrics()["gpu.power_w"] == 300.0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_without_driver_or_device_there_is_a_null_object(call):
    device = open_device(nvml=FakeNvml(**{call: FakeNvml.NVMLError(NOT_FOUND)}))
    assert isinstance(device, NoDevice)
    assert device.sample(is_steady=True) is None
    assert device.metrics() == {}
    assert device.holders() == []
    assert MemoryGate(device).wait() == ""
    device.restart()
    device.close()


def test_a_device_is_found_by_uuid_and_closed():
    nvml = FakeNvml()
    device = open_device(uuid="GPU-1", nvml=nvml)
    assert device.uuid == "GPU-1"
    device.close()
    assert nvml.asked[-1] == "nvmlShutdown"
    assert "nvmlDeviceGetHandleByUUID" in nvml.asked


@pytest.mark.parametrize(
    ("uuid", "found"), [("GPU-ab", None), ("GPU-abc", "GPU-abc1"), ("GPU-abd2", "GPU-abd2"), ("GPU-x", None)]
)
def test_unique_prefix_of_a_uuid_identifies_a_device(uuid, found):
    uuids = ["GPU-abc1", "GPU-abd2"]

    def by_uuid(whole):
        if whole not in uuids:
            raise FakeNvml.NVMLError(NOT_FOUND)
        return whole

    nvml = FakeNvml(
        nvmlDeviceGetCount=2,
        nvmlDeviceGetHandleByIndex=lambda index: uuids[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
    )
    assert open_device(uuid=uuid, nvml=nvml).uuid == found


def test_real_nvml_opens_a_device_or_a_null_object():
    device = open_device()
    device.sample(is_steady=True)
    device.close()


def test_gate_waits_until_memory_is_released():
    nvml, clock = FakeNvml(), VirtualClock(0.0)
    gate = MemoryGate(NvmlDevice(nvml, "handle"), slack_bytes=50 * MIB, clock=clock.monotonic)
    levels = iter([used(900), used(400), used(149)])

    def sleep(seconds):
        clock.sleep(seconds)
        nvml.answers["nvmlDeviceGetMemoryInfo"] = next(levels)

    nvml.answers["nvmlDeviceGetMemoryInfo"] = used(900)
    assert gate.wait(10.0, sleep) == ""
    assert next(levels, None) is None


def test_gate_names_the_processes_that_hold_memory_at_its_deadline():
    clock = VirtualClock(0.0)
    holders = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=300 * MIB), SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)]
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=holders)
    gate = MemoryGate(NvmlDevice(nvml, "handle"), clock=clock.monotonic)
    nvml.answers["nvmlDeviceGetMemoryInfo"] = used(600)
    message = gate.wait(5.0, clock.sleep)
    assert "500 MiB more in use" in message
    assert f"{os.getpid()} (" in message
    assert ", 300 MiB)" in message
    assert "of another container or user" in message


def test_holder_of_memory_is_named_without_its_arguments(tmp_path):
    (tmp_path / "other.py").write_text("print('started', flush=True)\ninput()\n")
    command = [sys.executable, str(tmp_path / "other.py"), "-phunter2"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline()
        nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=other.pid, usedGpuMemory=MIB)])
        (holder,) = NvmlDevice(nvml, "handle").holders()
    finally:
        other.communicate(b"\n")
    assert holder.startswith(f"{other.pid} (python")
    assert holder.endswith(" other.py, 1 MiB)")


def test_idle_level_of_the_gate_follows_a_decrease_of_memory():
    nvml, clock = FakeNvml(nvmlDeviceGetMemoryInfo=used(900)), VirtualClock(0.0)
    gate = MemoryGate(NvmlDevice(nvml, "handle"), slack_bytes=50 * MIB, clock=clock.monotonic)
    nvml.answers["nvmlDeviceGetMemoryInfo"] = used(100)
    assert gate.wait(1.0, clock.sleep) == ""
    nvml.answers["nvmlDeviceGetMemoryInfo"] = used(500)
    assert "400 MiB" in gate.wait(1.0, clock.sleep)
    assert "cannot be seen" in gate.wait(1.0, clock.sleep)


def test_gate_waits_only_once_for_memory_that_another_program_holds():
    nvml, clock = FakeNvml(nvmlDeviceGetMemoryInfo=used(100)), VirtualClock(0.0)
    gate = MemoryGate(NvmlDevice(nvml, "handle"), slack_bytes=50 * MIB, clock=clock.monotonic)

    def waited_s():
        begun_s = clock.now_s
        assert gate.wait(30.0, clock.sleep) or nvml.answers["nvmlDeviceGetMemoryInfo"] == used(100)
        return clock.now_s - begun_s

    found = []
    for mib in (500, 500, 900, 500, 100, 500):  # with 900, the last trial still holds memory, too
        nvml.answers["nvmlDeviceGetMemoryInfo"] = used(mib)
        found.append(waited_s())
    assert [seconds > 29 for seconds in found] == [True, False, True, False, False, True]


def field(nanoseconds, status=0):
    return SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(ullVal=nanoseconds))


def with_fields(nvml):
    """Adds the names of the counters of newer drivers to the fake."""
    for number, name in enumerate(name for names in SLOWDOWN_FIELDS.values() for name in names):
        setattr(nvml, name, number)
    return nvml


def window(nvml, before, after, seconds=4.0):
    """Returns the metrics of a window between two states of the counters."""
    clock = VirtualClock(0.0)
    device = NvmlDevice(nvml, "handle", clock.monotonic)
    nvml.answers.update(before)
    device.open_window()
    clock.now_s = seconds
    nvml.answers.update(after)
    device.close_window()
    return device.metrics()


def test_counters_give_the_fraction_of_the_window_with_reduced_clocks():
    counters = [{"nvmlDeviceGetFieldValues": [field(ns)] * n} for n, ns in ((1, 10**9), (1, 3 * 10**9))]
    energy = [{"nvmlDeviceGetTotalEnergyConsumption": joules * 1000} for joules in (500, 1300)]
    metrics = window(with_fields(FakeNvml()), counters[0] | energy[0], counters[1] | energy[1])
    assert metrics["gpu.slowdown_thermal_frac"] == 0.5
    assert metrics["gpu.slowdown_power_brake_frac"] == 0.5
    assert (metrics["gpu.energy_j"], metrics["gpu.energy_s"]) == (800.0, 4.0)


def test_violation_times_of_older_drivers_give_the_fraction_of_slowdown():
    nvml = FakeNvml()
    nvml.NVML_PERF_POLICY_THERMAL = 1
    status = [{"nvmlDeviceGetViolationStatus": SimpleNamespace(violationTime=ns)} for ns in (0, 2 * 10**8)]
    metrics = window(nvml, *status)
    assert metrics["gpu.slowdown_thermal_frac"] == pytest.approx(0.05)
    assert "gpu.slowdown_power_brake_frac" not in metrics, "an unknown fraction is not 0"


@pytest.mark.parametrize(
    "answer", [[field(0, status=NOT_SUPPORTED)], FakeNvml.NVMLError(NOT_SUPPORTED), FakeNvml.NVMLError(UNKNOWN)]
)
def test_a_counter_that_is_not_supported_is_unknown(answer):
    nvml = with_fields(FakeNvml(nvmlDeviceGetFieldValues=answer))
    assert not [name for name in window(nvml, {}, {}) if name.startswith("gpu.slowdown")]


def test_counter_that_was_reset_gives_no_slowdown_metric():
    nvml = with_fields(FakeNvml())
    metrics = window(nvml, {"nvmlDeviceGetFieldValues": [field(9)]}, {"nvmlDeviceGetFieldValues": [field(1)]})
    assert not [name for name in metrics if name.startswith("gpu.slowdown")]


def test_clock_fraction_uses_only_busy_samples_without_a_power_cap():
    nvml = FakeNvml(nvmlDeviceGetDefaultApplicationsClock=2000)
    device = NvmlDevice(nvml, "handle")
    for mhz, busy, reasons in [(1000, 90, 0), (1400, 90, 0), (200, 10, 0), (300, 90, 0x04)]:
        nvml.answers["nvmlDeviceGetClockInfo"] = mhz
        nvml.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=busy)
        nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = reasons
        device.sample(is_steady=True)
    assert device.metrics()["gpu.sm_clock_frac"] == pytest.approx(0.6)


def test_compute_processes_have_their_share_if_nvml_reports_it():
    running = [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=None)]
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=running)
    device = NvmlDevice(nvml, "handle")
    assert device.compute_processes() == {7: None, 8: None}
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=running)
    nvml.answers["nvmlDeviceGetProcessUtilization"] = [
        SimpleNamespace(pid=7, timeStamp=5, smUtil=30), SimpleNamespace(pid=7, timeStamp=9, smUtil=10),
        SimpleNamespace(pid=99, timeStamp=9, smUtil=50),
    ]  # fmt: skip
    assert NvmlDevice(nvml, "handle").compute_processes() == {7: 0.3, 8: 0.0}


def test_compute_processes_without_recent_samples_have_a_share_of_zero():
    running = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=running, nvmlDeviceGetProcessUtilization=FakeNvml.NVMLError(NOT_FOUND))
    device = NvmlDevice(nvml, "handle")
    assert device.compute_processes() == {7: 0.0}  # NVML finds no sample since the last call
    nvml.answers["nvmlDeviceGetProcessUtilization"] = FakeNvml.NVMLError(UNKNOWN)
    assert device.compute_processes() == {7: None}


def test_an_invalid_sample_does_not_hide_later_ones():
    samples = [SimpleNamespace(pid=0, timeStamp=2**60, smUtil=2**31), SimpleNamespace(pid=7, timeStamp=5, smUtil=30)]
    asked = []

    def since(_, used_until_us):
        asked.append(used_until_us)
        return samples

    running = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=running, nvmlDeviceGetProcessUtilization=since)
    device = NvmlDevice(nvml, "handle")
    assert [device.compute_processes() for _ in range(2)] == [{7: 0.3}] * 2
    assert asked == [0, 5]


def test_uuid_that_is_not_valid_text_is_unknown():
    def garbage(_):
        return b"\xf8\xf8".decode()  # as nvidia-ml-py does with what version 555 of the driver returns under WSL

    device = open_device(nvml=FakeNvml(nvmlDeviceGetUUID=garbage))
    assert device.uuid is None
    assert device.sample(is_steady=True).power_w == 300.0
