"""Monitors the host during trials: steal time, load, pressure (PSI), throttling, kills by the kernel's OOM killer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.harness import cores

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Counters since boot; the difference of two readings is what happened between them.

    Attributes:
        cpu_s: CPU time of all kinds, including idle time, summed over all cores.
        steal_s: CPU time that the hypervisor gave to other guests.
        pressure_s: resource ("cpu", "memory", "io") -> time during which at least one task waited for it; absent without PSI.
        throttled_s: time for which the quota of this process's cgroup throttled it; None if unknown.
    """

    cpu_s: float
    steal_s: float
    pressure_s: dict[str, float]
    throttled_s: float | None


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A cgroup's quota on the CPU time of this process.

    Attributes:
        cores: number of cores that the quota allows.
        folder: folder of the cgroup that sets the quota.
    """

    cores: float
    folder: Path

    def used_s(self) -> float | None:
        """Returns the CPU time that the cgroup has used; None if unknown."""
        if (used := _fields(self.folder / "cpu.stat").get("usage_usec")) is not None:
            return used / 1e6
        for name in (self.folder.name, "cpuacct"):  # cgroup v1 counts in a separate hierarchy, often mounted together with cpu
            text = cores.read(self.folder.parent / name / "cpuacct.usage") or cores.read(self.folder / "cpuacct.usage")
            if text.isdigit():
                return int(text) / 1e9
        return None


class HostMonitor:
    """Measures the host from construction, or from the last `restart`, until `metrics` is called."""

    def __init__(self, read: Callable[[], HostTimes], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self.restart()

    def restart(self) -> None:
        """Starts a new interval."""
        self._before, self._since_s = self._read(), self._clock()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the interval; unknown ones are absent, never zero.

        Returns:
            host.steal_frac, host.load_per_core (1 minute), host.pressure_{cpu,memory,io}_frac, host.throttled_frac.
        """
        now, wall_s = self._read(), max(self._clock() - self._since_s, 1e-9)
        before = self._before
        metrics = {"host.load_per_core": os.getloadavg()[0] / (os.cpu_count() or 1)}
        if now.cpu_s > before.cpu_s:
            metrics["host.steal_frac"] = max(0.0, (now.steal_s - before.steal_s) / (now.cpu_s - before.cpu_s))
        for resource, waited_s in now.pressure_s.items():
            if resource in before.pressure_s:
                metrics[f"host.pressure_{resource}_frac"] = max(0.0, (waited_s - before.pressure_s[resource]) / wall_s)
        if now.throttled_s is not None and before.throttled_s is not None:
            metrics["host.throttled_frac"] = max(0.0, (now.throttled_s - before.throttled_s) / wall_s)
        return metrics


def read_times(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostTimes:
    """Returns the host's counters now."""
    times = psutil.cpu_times()
    pressure = {name: _pressure_s(proc / "pressure" / name) for name in ("cpu", "memory", "io")}
    return HostTimes(
        cpu_s=sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0),  # user and nice include these
        steal_s=getattr(times, "steal", 0.0),
        pressure_s={name: waited_s for name, waited_s in pressure.items() if waited_s is not None},
        throttled_s=_throttled_s(proc, cgroups),
    )


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns how many processes of this process's cgroup the OOM killer has killed so far; None if unknown."""
    counts = [
        _fields(folder / name).get("oom_kill")
        for folder in _cgroup_folders("memory", proc, cgroups)
        for name in ("memory.events", "memory.oom_control")
    ]
    return next((count for count in counts if count is not None), None)


def cgroup_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> Quota | None:
    """Returns the smallest CPU quota of this process's cgroup and its visible ancestors; None without a quota."""
    folders = _cgroup_folders("cpu", proc, cgroups)
    found = [Quota(cores=num, folder=folder) for folder in folders if (num := cores.quota_of(str(folder))) is not None]
    return min(found, key=lambda quota: quota.cores, default=None)


def _cgroup_folders(controller: str, proc: Path, cgroups: Path) -> list[Path]:
    """Returns the folders of this process's cgroup (v2 or v1) and its ancestors, each once, innermost first."""
    found = list(cores.folders(str(cgroups), str(proc / "self" / "cgroup"), controller))
    return [Path(folder) for folder in dict.fromkeys(map(os.path.normpath, reversed(found)))]


def _throttled_s(proc: Path, cgroups: Path) -> float | None:
    quota = cgroup_quota(proc, cgroups)  # each cgroup counts only the throttling by its own quota
    for folder in [quota.folder] if quota else _cgroup_folders("cpu", proc, cgroups):
        counts = _fields(folder / "cpu.stat")
        for name, per_s in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if name in counts:
                return counts[name] / per_s
    return None


def _pressure_s(file: Path) -> float | None:
    for line in cores.read(file).splitlines():
        words = line.split()
        if words[:1] == ["some"]:
            return next((int(word[6:]) / 1e6 for word in words if word.startswith("total=") and word[6:].isdigit()), None)
    return None


def _fields(file: Path) -> dict[str, int]:
    """Returns the whole numbers of a file whose lines each hold a name and a value; {} if it cannot be read."""
    lines = (line.split() for line in cores.read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
