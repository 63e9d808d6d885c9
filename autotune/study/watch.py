"""Watches the machine round each trial: waits for a clean device before it, samples while it runs, sums up after it."""

from __future__ import annotations

import os

from autotune.config.schema import DeviceOptions
from autotune.harness.protocol import Progress
from autotune.monitors.host import HostMonitor, read_times
from autotune.monitors.nvml import DeviceMonitor, MemoryGate, NoDevice, open_device
from autotune.study.plan import Clock

PAUSE_S = 1.0  # between two looks at the device


class MachineWatch:
    """One for a study; sampled from the study's own thread, between two looks at the trial."""

    def __init__(self, device: DeviceMonitor, clock: Clock) -> None:
        self._clock = clock
        self._host = HostMonitor(read_times, clock.monotonic)
        self._looked_s = 0.0
        self.use(device)

    def use(self, device: DeviceMonitor) -> None:
        """Watches this device from now on; what it holds now counts as its idle state."""
        self._device = device
        self._gate = MemoryGate(device, clock=self._clock.monotonic)

    def before(self) -> str:
        """Waits until the device is free and begins a new span; returns who holds the device, or ""."""
        held = self._gate.wait(sleep=self._clock.sleep)
        self._device.restart()
        self._host.restart()
        return held

    def look(self, progress: Progress | None) -> None:
        """Samples the device, at most once a PAUSE_S."""
        now_s = self._clock.monotonic()
        if now_s - self._looked_s >= PAUSE_S:
            self._looked_s = now_s
            self._device.sample(is_steady=progress is not None and progress.phase == "steady")

    def metrics(self) -> dict[str, float]:
        """Returns what was seen since `before`, by name for the tracker."""
        return {**self._device.metrics(), **self._host.metrics()}

    def used_frac(self) -> float | None:
        """Returns the largest share of the device's memory seen in use since `before`; None unknown."""
        return self._device.memory_used_frac()

    def close(self) -> None:
        """Gives NVML back."""
        self._device.close()


def configured_device(device: DeviceOptions) -> DeviceMonitor:
    """Returns the monitor of the device that trials run on, as NVML counts; the null object without one.

    NVML is blind to CUDA_VISIBLE_DEVICES, which may hold numbers or UUIDs of its own.
    """
    if device.kind == "cpu":
        return NoDevice()
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    entry = visible[device.index] if device.index < len(visible) else str(device.index)
    return open_device(index=int(entry)) if entry.isdigit() else open_device(uuid=entry)
