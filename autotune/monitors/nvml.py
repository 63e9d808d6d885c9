"""Monitors GPUs while trials run, through NVML (package nvidia-ml-py): samples and counters of a device.

Nothing here resets a device or changes clocks or power. A value that a device does not support, or that this user is not
allowed to read, is queried once and is None from then on, never zero. Without a GPU, the null object `NoDevice` is used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import psutil

from autotune.machine.nvml import OF_WHOLE_GPU, SLOWDOWN_QUESTIONS, SLOWDOWNS, is_divided, library, text_of
from autotune.monitors.cpu import command_text

Value = TypeVar("Value")

MIB = 1 << 20
PERMANENT_ERRORS = (3, 4, 13)  # NVML_ERROR_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND
NONE_FOUND = 6  # NVML_ERROR_NOT_FOUND
# For each cause, NVML counts how long the cause has held the clocks down, in nanoseconds since the driver was loaded. Drivers
# from 550 on have these counters as field values, older ones as policies of nvmlDeviceGetViolationStatus.
SLOWDOWN_FIELDS = {
    "power_cap": ("NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP",),
    "thermal": ("NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN"),
    "power_brake": ("NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",),
}
SLOWDOWN_POLICIES = {"power_cap": "NVML_PERF_POLICY_POWER", "thermal": "NVML_PERF_POLICY_THERMAL"}
BUSY_FRAC = 0.5  # a device that is less busy lowers its clocks on its own, so its clocks say nothing about slowdowns
# How the metrics of several devices are combined. For metrics by which a trial is judged (these and slowdowns), the worst
# device's value is taken, because all ranks wait for that device. Every other metric is the mean over the devices. The total
# power is thus the mean power times the number of ranks.
_WORST: dict[str, Callable[[list[float]], float]] = {"gpu.memory_used_bytes": max, "gpu.sm_clock_frac": min}
_SLOWDOWN = "gpu.slowdown_"


@dataclass(frozen=True, kw_only=True)
class DeviceSample:
    """One sample of a device; None means unknown.

    Attributes:
        time_s: monotonic clock.
        is_steady: whether the trial was in its measured window.
        utilisation_frac: fraction of NVML's last sample period during which a kernel was running.
        memory_used_bytes: memory in use by all processes on the device.
        power_w: power draw now.
        energy_j: energy used since the driver was loaded; the difference of two samples is the energy used between them.
        sm_clock_mhz: clock of the multiprocessors.
        slowdowns: causes that hold the clocks down now, names from SLOWDOWNS; None if unknown.
    """

    time_s: float
    is_steady: bool
    utilisation_frac: float | None
    memory_used_bytes: int | None
    power_w: float | None
    energy_j: float | None
    sm_clock_mhz: float | None
    slowdowns: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class DeviceCounters:
    """NVML's counters since the driver was loaded; the difference of two readings is what happened between them.

    Attributes:
        time_s: monotonic clock.
        slowdown_s: name from SLOWDOWN_FIELDS -> time for which this cause held the clocks down; absent if unknown.
        energy_j: energy used since the driver was loaded; None if unknown.
    """

    time_s: float
    slowdown_s: dict[str, float]
    energy_j: float | None


class DeviceMonitor:
    """Monitors one device, or all ranks' devices, from the tuner's process. This base class reports everything as unknown.

    Order of the calls: `restart`, `sample` about once a second, `open_window` when the measured window opens, further samples,
    `close_window` when the window ends, `metrics`.
    """

    uuid: str | None = None

    @property
    def devices(self) -> Sequence[DeviceMonitor]:
        """The monitors of the individual devices."""
        return [self]

    def sample(self, *, is_steady: bool) -> DeviceSample | None:
        """Takes and returns a sample; None without a device."""
        return None

    def metrics(self) -> dict[str, float]:
        """Returns {name in the tracker: value} of the metrics since the last `restart`; unknown metrics are absent.

        Returns:
            gpu.utilisation_frac, gpu.sm_clock_mhz: means over the steady samples.
            gpu.power_w: mean power, by the energy counter if there is one, else over the steady samples. Multiplied by the
            window's seconds and divided by its number of training samples (or tokens), it gives the energy per sample.
            gpu.memory_used_bytes: largest of all samples.
            gpu.slowdown_{name}_frac: share of the window in which this cause held the clocks down, by NVML's counters. For
            causes without a counter, the share of the steady samples.
            gpu.energy_j: energy used in the window, by the counter. gpu.energy_s: the window's seconds.
            gpu.sm_clock_frac: clock as a share of the default clock, mean over the steady samples in which the device was
            busy and under no power cap.
        """
        return {}

    def open_window(self) -> None:
        """Takes the first reading of the counters."""

    def close_window(self) -> None:
        """Takes the last reading of the counters, and nothing else: the trial's processes may have exited by now."""

    def compute_processes(self) -> dict[int, float | None]:
        """Returns the processes that compute on the device: id -> recent share of its multiprocessors, None if unknown.

        The ids are the host's. In a container they may mean nothing, and NVML may list no processes.
        """
        return {}

    def restart(self) -> None:
        """Discards all samples and readings of counters, so that a new trial can begin."""

    def memory_used_bytes(self) -> int | None:
        """Returns the device memory in use by all processes together; None if unknown."""
        return None

    def memory_used_frac(self) -> float | None:
        """Returns the largest share of device memory in use among the samples since `restart`; None if unknown."""
        return None

    def holders(self) -> list[str]:
        """Returns the processes that hold device memory, "1234 (python train.py, 812 MiB)"."""
        return []

    def close(self) -> None:
        """Shuts NVML down."""


class NoDevice(DeviceMonitor):
    """Stands for a device that cannot be monitored: no GPU, no NVML, or no permission."""


class NvmlDevice(DeviceMonitor):
    """Monitors one device through NVML."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._unsupported: set[str] = set()
        self._samples: list[DeviceSample] = []
        self._window: list[DeviceCounters] = []
        self._used_until_us = 0  # time up to which the processes' shares have been read, on NVML's clock
        self.uuid = self._ask("nvmlDeviceGetUUID", text_of)
        if (self.uuid or "").startswith("MIG-") or self._ask("nvmlDeviceGetMigMode", is_divided):
            self._unsupported.update(OF_WHOLE_GPU)
        self._capacity_bytes = self._ask("nvmlDeviceGetMemoryInfo", lambda info: int(info.total))
        self._default_clock_mhz = self._ask("nvmlDeviceGetDefaultApplicationsClock", float, self._sm_clock)

    @property
    def _sm_clock(self) -> int:
        return int(getattr(self._nvml, "NVML_CLOCK_SM", 1))

    def sample(self, *, is_steady: bool) -> DeviceSample:
        """See `DeviceMonitor.sample`."""
        sample = DeviceSample(
            time_s=self._clock(),
            is_steady=is_steady,
            utilisation_frac=self._ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100),
            memory_used_bytes=self.memory_used_bytes(),
            power_w=self._ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3),
            energy_j=self._ask("nvmlDeviceGetTotalEnergyConsumption", lambda millijoules: millijoules / 1e3),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", float, self._sm_clock),
            slowdowns=self._slowdowns(),
        )
        self._samples.append(sample)
        return sample

    def metrics(self) -> dict[str, float]:
        """See `DeviceMonitor.metrics`."""
        steady = [sample for sample in self._samples if sample.is_steady]
        metrics = {
            "gpu.utilisation_frac": _mean([sample.utilisation_frac for sample in steady]),
            "gpu.power_w": _power_w(steady),
            "gpu.sm_clock_mhz": _mean([sample.sm_clock_mhz for sample in steady]),
            "gpu.memory_used_bytes": max((s.memory_used_bytes for s in self._samples if s.memory_used_bytes), default=None),
            "gpu.sm_clock_frac": self._clock_frac(steady),
            **_slowdown_shares(steady),
            **_counted(self._window),
        }
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def restart(self) -> None:
        """See `DeviceMonitor.restart`."""
        self._samples.clear()
        self._window.clear()

    def open_window(self) -> None:
        """See `DeviceMonitor.open_window`."""
        self._window = [self._counters()]

    def close_window(self) -> None:
        """See `DeviceMonitor.close_window`."""
        self._window = [*self._window[:1], self._counters()]

    def compute_processes(self) -> dict[int, float | None]:
        """See `DeviceMonitor.compute_processes`."""
        present = self._ask("nvmlDeviceGetComputeRunningProcesses", lambda found: [process.pid for process in found]) or []
        shares: dict[int, float | None] = dict.fromkeys(present)
        # NVML answers NONE_FOUND if no process has computed since the last call. Then there are no samples, and shares are 0.
        samples: list[Any] | None = self._ask("nvmlDeviceGetProcessUtilization", list, self._used_until_us, if_none_found=[])
        if samples is not None:
            shares = dict.fromkeys(present, 0.0)
        for sample in samples or []:
            if sample.smUtil > 100:  # the sample is invalid, including its time
                continue
            self._used_until_us = max(self._used_until_us, int(sample.timeStamp))
            if sample.pid in shares:
                shares[sample.pid] = max(shares[sample.pid] or 0.0, sample.smUtil / 100)
        return shares

    def memory_used_bytes(self) -> int | None:
        """See `DeviceMonitor.memory_used_bytes`."""
        return self._ask("nvmlDeviceGetMemoryInfo", lambda info: int(info.used))

    def memory_used_frac(self) -> float | None:
        """See `DeviceMonitor.memory_used_frac`."""
        used = [sample.memory_used_bytes for sample in self._samples if sample.memory_used_bytes is not None]
        return max(used) / self._capacity_bytes if used and self._capacity_bytes else None

    def holders(self) -> list[str]:
        """See `DeviceMonitor.holders`. In a container, processes with ids of the host cannot be named."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", list) or []
        return [_holder(process.pid, getattr(process, "usedGpuMemory", None)) for process in processes]

    def close(self) -> None:
        """See `DeviceMonitor.close`."""
        with contextlib.suppress(Exception):  # the driver may be gone by now; then nothing is left to shut down
            self._nvml.nvmlShutdown()

    def _counters(self) -> DeviceCounters:
        counted = {name: self._slowdown_s(name) for name in SLOWDOWN_FIELDS}
        return DeviceCounters(
            time_s=self._clock(),
            slowdown_s={name: seconds for name, seconds in counted.items() if seconds is not None},
            energy_j=self._ask("nvmlDeviceGetTotalEnergyConsumption", lambda millijoules: millijoules / 1e3),
        )

    def _slowdown_s(self, name: str) -> float | None:
        fields = [number for field in SLOWDOWN_FIELDS[name] if (number := getattr(self._nvml, field, None)) is not None]
        values = self._ask("nvmlDeviceGetFieldValues", list, fields) if fields else None
        if values and all(value.nvmlReturn == 0 for value in values):
            return sum(int(value.value.ullVal) for value in values) / 1e9
        policy = getattr(self._nvml, SLOWDOWN_POLICIES.get(name, ""), None)
        if policy is None:
            return None
        return self._ask("nvmlDeviceGetViolationStatus", lambda status: int(status.violationTime) / 1e9, policy)

    def _clock_frac(self, steady: list[DeviceSample]) -> float | None:
        """Returns the mean clock as a share of the default clock; None if unknown. Ignores idle and power-capped samples."""
        if not self._default_clock_mhz:
            return None
        busy = [s for s in steady if (s.utilisation_frac is None or s.utilisation_frac >= BUSY_FRAC)]
        clock_mhz = _mean([s.sm_clock_mhz for s in busy if "power_cap" not in (s.slowdowns or ())])
        return None if clock_mhz is None else clock_mhz / self._default_clock_mhz

    def _slowdowns(self) -> tuple[str, ...] | None:
        for name in SLOWDOWN_QUESTIONS:
            bits = self._ask(name, int)
            if bits is not None:
                return tuple(dict.fromkeys(slowdown for bit, slowdown in SLOWDOWNS.items() if bits & bit))
        return None

    def _ask(
        self, name: str, read: Callable[[Any], Value], *arguments: Any, if_none_found: Value | None = None
    ) -> Value | None:
        """Returns an NVML function's result, converted by `read`; None if it fails, `if_none_found` for NONE_FOUND."""
        if name in self._unsupported:
            return None
        try:
            return read(getattr(self._nvml, name)(self._handle, *arguments))
        except Exception as error:
            code = getattr(error, "value", None)  # None if not an NVMLError, as with some releases or under WSL
            if code is None or code in PERMANENT_ERRORS:  # other codes are transient, as of a busy driver
                self._unsupported.add(name)
            return if_none_found if code == NONE_FOUND else None


def open_device(*, index: int = 0, uuid: str | None = None, nvml: Any = None) -> DeviceMonitor:
    """Returns a monitor for one device, or the null object if NVML or the device is absent.

    Args:
        index: NVML's number of the device, used if `uuid` is None. NVML counts by PCI address and ignores CUDA_VISIBLE_DEVICES.
        uuid: UUID of a device ("GPU-...") or slice ("MIG-..."), or its beginning, as CUDA_VISIBLE_DEVICES allows.
        nvml: replaces the pynvml module in tests.
    """
    nvml = nvml or library()[0]
    if nvml is None:
        return NoDevice()
    try:
        nvml.nvmlInit()
        handle = _by_uuid(nvml, uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:  # usually an NVMLError; another release of the package may raise anything
        return NoDevice()
    return NvmlDevice(nvml, handle)


def _by_uuid(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no device has this UUID, or the package wants bytes or lacks this function
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [handle for handle in handles if str(text_of(nvml.nvmlDeviceGetUUID(handle))).startswith(uuid)]
        if len(found) != 1:
            raise
        return found[0]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _power_w(steady: list[DeviceSample]) -> float | None:
    """Returns the mean power. Uses the energy counter if there is one: it also covers the time between samples."""
    known = [(sample.time_s, sample.energy_j) for sample in steady if sample.energy_j is not None]
    if len(known) >= 2:
        (first_s, first_j), (last_s, last_j) = known[0], known[-1]
        if last_s > first_s and last_j > first_j:  # reloading the driver resets the counter
            return (last_j - first_j) / (last_s - first_s)
    return _mean([sample.power_w for sample in steady])


def _slowdown_shares(steady: list[DeviceSample]) -> dict[str, float]:
    known = [sample.slowdowns for sample in steady if sample.slowdowns is not None]
    names = dict.fromkeys(SLOWDOWNS.values())
    return {f"gpu.slowdown_{name}_frac": sum(name in slowdowns for slowdowns in known) / len(known) for name in names if known}


def _counted(window: list[DeviceCounters]) -> dict[str, float]:
    """Returns metrics of the window from NVML's counters; ignores counters that are absent or were reset."""
    if len(window) < 2 or (seconds := window[1].time_s - window[0].time_s) <= 0:
        return {}
    before, after = window
    found = {}
    for name, held_s in after.slowdown_s.items():
        if name in before.slowdown_s and held_s >= before.slowdown_s[name]:
            found[f"gpu.slowdown_{name}_frac"] = (held_s - before.slowdown_s[name]) / seconds
    if before.energy_j is not None and after.energy_j is not None and after.energy_j > before.energy_j:
        found |= {"gpu.energy_j": after.energy_j - before.energy_j, "gpu.energy_s": seconds}
    return found


def _holder(pid: int, used_bytes: int | None) -> str:
    try:
        command = command_text(psutil.Process(pid))
    except (psutil.Error, OSError):
        command = "of another container or user"
    return f"{pid} ({command}{'' if used_bytes is None else f', {used_bytes / MIB:.0f} MiB'})"


class SeveralDevices(DeviceMonitor):
    """Several devices, in the order of the ranks, monitored as one.

    `memory_used_bytes` and `holders` report nothing here. `MemoryGate` asks each of `devices` instead.
    """

    def __init__(self, devices: Sequence[DeviceMonitor]) -> None:
        self._devices = list(devices)

    @property
    def devices(self) -> Sequence[DeviceMonitor]:
        """See `DeviceMonitor.devices`."""
        return self._devices

    def sample(self, *, is_steady: bool) -> None:
        """See `DeviceMonitor.sample`."""
        for device in self._devices:
            device.sample(is_steady=is_steady)

    def metrics(self) -> dict[str, float]:
        """See `DeviceMonitor.metrics`: means over the devices, or the worst device for metrics by which trials are judged."""
        known = [device.metrics() for device in self._devices]
        names = dict.fromkeys(name for metrics in known for name in metrics)
        return {name: _rule(name)([metrics[name] for metrics in known if name in metrics]) for name in names}

    def open_window(self) -> None:
        """See `DeviceMonitor.open_window`."""
        for device in self._devices:
            device.open_window()

    def close_window(self) -> None:
        """See `DeviceMonitor.close_window`."""
        for device in self._devices:
            device.close_window()

    def compute_processes(self) -> dict[int, float | None]:
        """See `DeviceMonitor.compute_processes`; if a process runs on several devices, its largest share counts."""
        shares: dict[int, float | None] = {}
        for device in self._devices:
            for pid, share in device.compute_processes().items():
                known = shares.get(pid)
                shares[pid] = known if share is None else max(share, known or 0.0)
        return shares

    def restart(self) -> None:
        """See `DeviceMonitor.restart`."""
        for device in self._devices:
            device.restart()

    def memory_used_frac(self) -> float | None:
        """See `DeviceMonitor.memory_used_frac`; takes the fullest device."""
        known = [frac for device in self._devices if (frac := device.memory_used_frac()) is not None]
        return max(known, default=None)

    def close(self) -> None:
        """See `DeviceMonitor.close`."""
        for device in self._devices:
            device.close()


def as_one(devices: Sequence[DeviceMonitor]) -> DeviceMonitor:
    """Returns one monitor for all devices that are present; the null object if no device is present."""
    there = [device for device in devices if not isinstance(device, NoDevice)]
    return there[0] if len(there) == 1 else SeveralDevices(there) if there else NoDevice()


def _rule(name: str) -> Callable[[list[float]], float]:
    return max if name.startswith(_SLOWDOWN) else _WORST.get(name, fmean)
