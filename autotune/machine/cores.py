"""Effective CPU cores and memory: what the scheduler and the cgroup leave to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Returns the effective cores, min(affinity, cgroup quota rounded up), at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def cpu_quota(cgroup: Path = CGROUP, own: Path = OWN_CGROUP) -> float | None:
    """Returns the smallest CPU quota, in cores, of this process's cgroup and those above it; None without one."""
    quotas = [quota for folder in _folders(cgroup, own, "cpu") if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes(cgroup: Path = CGROUP, own: Path = OWN_CGROUP) -> int | None:
    """Returns the smallest memory limit of this process's cgroup and those above it; None without one."""
    limits = []
    for folder in _folders(cgroup, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < 2**60:  # v1 writes a huge number for "no limit"
                limits.append(int(text))
    return min(limits, default=None)


def _folders(cgroup: Path, own: Path, controller: str) -> list[Path]:
    """Returns the folders whose limits hold for this process: v2's one tree, and v1's tree of the controller."""
    folders = [cgroup, cgroup / controller]
    for line in _read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        parts = Path(path.lstrip("/")).parts
        if ".." not in parts:
            folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _quota_of(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0 or int(quota) == 0:
        return None  # "max", -1 or no such file
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
