"""Finds the CPU cores and memory that affinity and cgroups leave to this process."""

from __future__ import annotations

import os

from autotune.harness.cores import CGROUP, OWN_CGROUP, cpu_quota, folders, num_cores, read

__all__ = ["cpu_quota", "memory_limit_bytes", "num_cores"]


def memory_limit_bytes(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> int | None:
    """Returns the smallest memory limit of this process's cgroup and its ancestors; None if there is none."""
    limits = []
    for folder in folders(cgroup, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read(os.path.join(folder, name))
            if text.isdigit() and int(text) < 2**60:  # cgroup v1 writes a huge number for "no limit"
                limits.append(int(text))
    return min(limits, default=None)
