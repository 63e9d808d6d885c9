"""Holds the next trial back until the devices' memory is free again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autotune.monitors.nvml import MIB, DeviceMonitor


class MemoryGate:
    """Delays a trial until each device's memory use is back at the idle level, within a time limit.

    Judges by memory, not by processes: in a container, NVML gives the host's process ids, or none.

    Args:
        monitor: monitors the devices; their memory use at construction is the idle level.
        slack_bytes: how many bytes above the idle level still count as idle. CUDA contexts of other programs vary in size.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, monitor: DeviceMonitor, *, slack_bytes: int = 256 * MIB, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._levels = [_Level(device, slack_bytes) for device in monitor.devices]
        self._clock = clock

    def wait(self, deadline_s: float = 30.0, sleep: Callable[[float], None] = time.sleep) -> str:
        """Waits up to `deadline_s` seconds until the memory is free again.

        Gives up at once if an earlier call gave up on the same memory: another program may hold it for hours.

        Returns:
            "" if the memory is free; otherwise sentences that name the processes that hold it.
        """
        give_up_s = self._clock() + deadline_s
        while held := [level for level in self._levels if level.excess_bytes() > 0]:
            if (is_late := self._clock() >= give_up_s) or not any(level.is_worth_waiting for level in held):
                for level in held:
                    level.give_up()
                words = self._words(held, f"still after {deadline_s:g} s" if is_late else "still after an earlier wait")
                return f"{'; '.join(words)}. End what holds the memory, or wait until it ends"
            sleep(0.2)
        return ""

    def _words(self, held: Sequence[_Level], since: str) -> list[str]:
        found = []
        for level in held:
            name = f"device {level.monitor.uuid}" if len(self._levels) > 1 and level.monitor.uuid else "device"
            holders = ", ".join(level.monitor.holders()) or "a process that cannot be seen from here"
            excess = f"{level.excess_bytes() / MIB:.0f} MiB more in use than when the study began"
            found.append(f"{name}: {excess}, {since}, held by {holders}")
        return found


class _Level:
    """Compares the memory use of one device with its idle level."""

    def __init__(self, monitor: DeviceMonitor, slack_bytes: int) -> None:
        self.monitor, self._slack_bytes = monitor, slack_bytes
        self._idle_bytes = monitor.memory_used_bytes()
        # Memory use when a wait was last given up. None before that, and once the memory is free again.
        self._given_up_bytes: int | None = None

    def excess_bytes(self) -> int:
        """Returns the bytes above the idle level; 0 if within the slack or unknown. Lowers the idle level if less is in use."""
        used = self.monitor.memory_used_bytes()
        if used is None or self._idle_bytes is None:
            return 0
        self._idle_bytes = min(self._idle_bytes, used)
        if used > self._idle_bytes + self._slack_bytes:
            return used - self._idle_bytes
        self._given_up_bytes = None
        return 0

    @property
    def is_worth_waiting(self) -> bool:
        """Whether waiting may help: no wait was given up, or memory use has grown since (a trial may be just ending)."""
        used = self.monitor.memory_used_bytes()
        return used is None or self._given_up_bytes is None or used > self._given_up_bytes + self._slack_bytes

    def give_up(self) -> None:
        """Notes the present memory use as not worth another wait."""
        self._given_up_bytes = self.monitor.memory_used_bytes()
