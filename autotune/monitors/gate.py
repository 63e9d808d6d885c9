"""Holds the next trial back until the devices' memory is free again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autotune.monitors.nvml import MIB, DeviceMonitor


class MemoryGate:
    """Lets a trial start only when each device's memory use is back at the idle level.

    Judges by memory, not by processes: in a container, NVML gives the host's process ids, or none.

    Args:
        monitor: monitors the devices; their memory use at construction is the idle level.
        slack_bytes: how many bytes above the idle level still count as idle, since other programs' contexts vary in size.
        clock: seconds, monotonic.
    """

    def __init__(
        self, monitor: DeviceMonitor, *, slack_bytes: int = 256 * MIB, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._levels = [_Level(device, slack_bytes) for device in monitor.devices]
        self._clock = clock

    def wait(self, deadline_s: float = 30.0, sleep: Callable[[float], None] = time.sleep) -> str:
        """Waits until the memory is free again and returns ""; at the deadline returns sentences that name the holders."""
        give_up_s = self._clock() + deadline_s
        while held := [level for level in self._levels if level.excess_bytes() > 0]:
            if self._clock() >= give_up_s:
                return f"{'; '.join(self._words(held, deadline_s))}. End what holds the memory, or wait until it ends"
            sleep(0.2)
        return ""

    def _words(self, held: Sequence[_Level], deadline_s: float) -> list[str]:
        found = []
        for level in held:
            name = f"device {level.monitor.uuid}" if len(self._levels) > 1 and level.monitor.uuid else "device"
            holders = ", ".join(level.monitor.holders()) or "a process that cannot be seen from here"
            excess = f"{level.excess_bytes() / MIB:.0f} MiB more in use than when the study began"
            found.append(f"{name}: {excess}, still after {deadline_s:g} s, held by {holders}")
        return found


class _Level:
    """Compares the memory use of one device with its idle level."""

    def __init__(self, monitor: DeviceMonitor, slack_bytes: int) -> None:
        self.monitor, self._slack_bytes = monitor, slack_bytes
        self._idle_bytes = monitor.memory_used_bytes()

    def excess_bytes(self) -> int:
        """Returns the bytes above the idle level, 0 if within the slack or unknown. Lowers the level if less is in use."""
        used = self.monitor.memory_used_bytes()
        if used is None or self._idle_bytes is None:
            return 0
        self._idle_bytes = min(self._idle_bytes, used)
        return used - self._idle_bytes if used > self._idle_bytes + self._slack_bytes else 0
