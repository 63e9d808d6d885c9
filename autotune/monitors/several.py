"""Monitors the devices of a multi-process trial as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from autotune.monitors.nvml import DeviceMonitor, NoDevice

# How the metrics of several devices are combined. For metrics that decide about a trial, the worst device's value is taken,
# because all ranks wait for that device. Every other metric is the mean over the devices; mean power times the number of ranks
# is total power.
_WORST: dict[str, Callable[[list[float]], float]] = {"gpu.memory_used_bytes": max, "gpu.sm_clock_frac": min}
_SLOWDOWN = "gpu.slowdown_"


class SeveralDevices(DeviceMonitor):
    """Several devices, in the order of the ranks, as one. The worst device decides about a trial.

    `memory_used_bytes` and `holders` report nothing here: the memory gate asks each of `devices` instead.
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
        """See `DeviceMonitor.metrics`: means over the devices, or the worst device for metrics that trials are judged by."""
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
