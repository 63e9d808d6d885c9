"""The GPU while trials run, through NVML (package nvidia-ml-py): counters by device, and the gate before a trial.

Nothing here resets a device or changes clocks or power. What a device does not support, or this user may not read, is None
for good: asked once, never again, never zero. Without a GPU every function works on a null object.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

Value = TypeVar("Value")

MIB = 1 << 20
FOR_GOOD = (3, 4, 13)  # NVML_ERROR_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND
# Bits of NVML's clock event reasons that mean lost speed, by the name people know them under.
SLOWDOWNS = {
    0x04: "power_cap",
    0x08: "hardware",
    0x20: "thermal",  # software thermal slowdown
    0x40: "thermal",  # hardware thermal slowdown
    0x80: "power_brake",
}


@dataclass(frozen=True, kw_only=True)
class DeviceSample:
    """One look at a device; None is unknown.

    Attributes:
        time_s: monotonic clock.
        is_steady: whether the trial was in its measured window.
        utilisation_frac: share of the last sample period in which a kernel ran.
        memory_used_bytes: by every process on the device.
        power_w: drawn now.
        energy_j: since the driver was loaded; a difference of two is what was used between them.
        sm_clock_mhz: of the multiprocessors.
        slowdowns: names out of SLOWDOWNS that hold the clocks down now; None unknown.
    """

    time_s: float
    is_steady: bool
    utilisation_frac: float | None
    memory_used_bytes: int | None
    power_w: float | None
    energy_j: float | None
    sm_clock_mhz: float | None
    slowdowns: tuple[str, ...] | None


class DeviceMonitor(ABC):
    """Watches one device for the study, from the tuner's process. `sample` about once a second while a trial runs."""

    uuid: str | None = None

    @abstractmethod
    def sample(self, *, is_steady: bool) -> DeviceSample | None:
        """Takes and returns a sample; None without a device."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns what the samples since the last `restart` say, by name for the tracker; unknown is absent.

        Returns:
            gpu.utilisation_frac, gpu.sm_clock_mhz (means over the steady samples), gpu.power_w (by the energy counter's
            difference, else the samples' mean; times the window's seconds over its work units: energy of one),
            gpu.memory_used_bytes (largest of all samples), gpu.slowdown_{name}_frac (share of the steady samples).
        """

    @abstractmethod
    def restart(self) -> None:
        """Forgets the samples: a new trial begins."""

    @abstractmethod
    def memory_used_bytes(self) -> int | None:
        """Returns the device memory in use by every process; None unknown."""

    @abstractmethod
    def memory_used_frac(self) -> float | None:
        """Returns the largest share of the device's memory among the samples since `restart`; None unknown."""

    @abstractmethod
    def holders(self) -> list[str]:
        """Returns the processes that hold device memory, "1234 (python train.py, 812 MiB)"."""

    @abstractmethod
    def close(self) -> None:
        """Gives NVML back."""


class NoDevice(DeviceMonitor):
    """No GPU, no NVML, or no permission: knows nothing."""

    def sample(self, *, is_steady: bool) -> None:
        """Returns None."""

    def metrics(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def restart(self) -> None:
        """Does nothing."""

    def memory_used_bytes(self) -> None:
        """Returns None."""

    def memory_used_frac(self) -> None:
        """Returns None."""

    def holders(self) -> list[str]:
        """Returns none."""
        return []

    def close(self) -> None:
        """Does nothing."""


class NvmlDevice(DeviceMonitor):
    """One device through NVML.

    Args:
        nvml: the pynvml module, initialised; a fake in tests.
        handle: the device's NVML handle.
        clock: seconds, monotonic.
    """

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._unsupported: set[str] = set()
        self._samples: list[DeviceSample] = []
        self.uuid = self._ask("nvmlDeviceGetUUID", _text)
        self._capacity_bytes = self._ask("nvmlDeviceGetMemoryInfo", lambda info: int(info.total))

    def sample(self, *, is_steady: bool) -> DeviceSample:
        """See `DeviceMonitor.sample`."""
        sample = DeviceSample(
            time_s=self._clock(),
            is_steady=is_steady,
            utilisation_frac=self._ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100),
            memory_used_bytes=self.memory_used_bytes(),
            power_w=self._ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3),
            energy_j=self._ask("nvmlDeviceGetTotalEnergyConsumption", lambda millijoules: millijoules / 1e3),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", float, getattr(self._nvml, "NVML_CLOCK_SM", 1)),
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
            **_slowdown_shares(steady),
        }
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def restart(self) -> None:
        """See `DeviceMonitor.restart`."""
        self._samples.clear()

    def memory_used_bytes(self) -> int | None:
        """See `DeviceMonitor.memory_used_bytes`."""
        return self._ask("nvmlDeviceGetMemoryInfo", lambda info: int(info.used))

    def memory_used_frac(self) -> float | None:
        """See `DeviceMonitor.memory_used_frac`."""
        used = [sample.memory_used_bytes for sample in self._samples if sample.memory_used_bytes is not None]
        return max(used) / self._capacity_bytes if used and self._capacity_bytes else None

    def holders(self) -> list[str]:
        """See `DeviceMonitor.holders`. In a container the ids may be the host's, which we cannot name."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", list) or []
        return [_holder(process.pid, getattr(process, "usedGpuMemory", None)) for process in processes]

    def close(self) -> None:
        """See `DeviceMonitor.close`."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:  # the driver may be gone at the end; nothing is left to give back
            return

    def _slowdowns(self) -> tuple[str, ...] | None:
        # The first name is the current one; drivers before 535 know the second only.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self._ask(name, int)
            if bits is not None:
                return tuple(dict.fromkeys(slowdown for bit, slowdown in SLOWDOWNS.items() if bits & bit))
        return None

    def _ask(self, name: str, read: Callable[[Any], Value], *arguments: Any) -> Value | None:
        if name in self._unsupported:
            return None
        try:
            return read(getattr(self._nvml, name)(self._handle, *arguments))
        except self._nvml.NVMLError as error:  # others pass: a busy driver answers the next time
            if getattr(error, "value", None) in FOR_GOOD:
                self._unsupported.add(name)
        except AttributeError:  # an older nvidia-ml-py
            self._unsupported.add(name)
        return None


def open_device(*, index: int = 0, uuid: str | None = None, nvml: Any = None) -> DeviceMonitor:
    """Returns a monitor of one device, or the null object where NVML or the device is absent.

    Args:
        index: NVML's number of the device: PCI order, blind to CUDA_VISIBLE_DEVICES. Used when `uuid` is None.
        uuid: the device's UUID, "GPU-...", or "MIG-..." for a slice; what a trial's own report names.
        nvml: stands in for the pynvml module in tests.
    """
    if nvml is None:
        try:
            import pynvml as nvml  # type: ignore[no-redef]  # lazily: a machine without a GPU never needs it
        except ImportError:
            return NoDevice()
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return NoDevice()
    return NvmlDevice(nvml, handle)


class MemoryGate:
    """Lets a trial start only when the device's memory is back where it was when the study was idle.

    Judged by memory, not by processes: containers see the host's process ids, or none.

    Args:
        monitor: of the device; asked for its memory now, which is the idle level.
        slack_bytes: how far above the idle level still counts as back: contexts of other programs breathe.
        clock: seconds, monotonic.
    """

    def __init__(
        self, monitor: DeviceMonitor, *, slack_bytes: int = 256 * MIB, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._monitor, self._slack_bytes, self._clock = monitor, slack_bytes, clock
        self._idle_bytes = monitor.memory_used_bytes()

    def wait(self, deadline_s: float = 30.0, sleep: Callable[[float], None] = time.sleep) -> str:
        """Waits until the memory is free again; returns "" then, or at the deadline who holds it, in a sentence.

        Args:
            deadline_s: how long to wait at most.
            sleep: waits between two looks.
        """
        give_up_s = self._clock() + deadline_s
        while (excess_bytes := self._excess_bytes()) > 0:
            if self._clock() >= give_up_s:
                holders = ", ".join(self._monitor.holders()) or "a process that cannot be seen from here"
                excess = f"{excess_bytes / MIB:.0f} MiB more in use than when the study began"
                return f"device: {excess}, still after {deadline_s:g} s, held by {holders}. End it, or wait for it"
            sleep(0.2)
        return ""

    def _excess_bytes(self) -> int:
        """Returns the bytes above the allowed level; 0 when unknown. The idle level follows the memory down."""
        used = self._monitor.memory_used_bytes()
        if used is None or self._idle_bytes is None:
            return 0
        self._idle_bytes = min(self._idle_bytes, used)
        return used - self._idle_bytes if used > self._idle_bytes + self._slack_bytes else 0


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _power_w(steady: list[DeviceSample]) -> float | None:
    """Returns the mean power: by the energy counter, which misses nothing between samples, where there is one."""
    known = [(sample.time_s, sample.energy_j) for sample in steady if sample.energy_j is not None]
    if len(known) >= 2:
        (first_s, first_j), (last_s, last_j) = known[0], known[-1]
        if last_s > first_s and last_j > first_j:  # the counter starts again when the driver is reloaded
            return (last_j - first_j) / (last_s - first_s)
    return _mean([sample.power_w for sample in steady])


def _slowdown_shares(steady: list[DeviceSample]) -> dict[str, float]:
    known = [sample.slowdowns for sample in steady if sample.slowdowns is not None]
    names = dict.fromkeys(SLOWDOWNS.values())
    return {f"gpu.slowdown_{name}_frac": sum(name in slowdowns for slowdowns in known) / len(known) for name in names if known}


def _holder(pid: int, used_bytes: int | None) -> str:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        command = "of another container or user"
    return f"{pid} ({command}{'' if used_bytes is None else f', {used_bytes / MIB:.0f} MiB'})"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # bytes before nvidia-ml-py 12
