"""Probes the host: cores, memory, limits, kernel settings, and environment variables that may change a program's speed."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil

from autotune.harness.cores import cpu_quota, num_cores, read
from autotune.machine.facts import CXX, memory_left_bytes, memory_limit_bytes, recorded
from autotune.machine.probes.engines import ray, slurm
from autotune.machine.topology import adapters, numa_nodes

SHARED_MEMORY = Path("/dev/shm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
CC = ("gcc", "clang", "cc")


def look() -> dict[str, Any]:
    """Returns what is known about this host. Affinity, cgroup and limits are those of this process; its children inherit them.

    Returns:
        "num_cpus": CPUs of the host; "num_affine", "cpus": how many CPUs this process may run on, and their numbers;
        "quota_cores": cores that the cgroup's quota allows (None without a quota); "num_cores": the lower limit, rounded up;
        "memory_bytes" (at most the cgroup's limit), "available_bytes", "swap_bytes", "swap_used_bytes";
        "shared_memory": {"bytes", "free_bytes", "is_writable"}, or None;
        "memlock_bytes", "open_files", "max_open_files": limits; None if unlimited;
        "huge_pages": "always", "madvise", "never", or "" if unknown;
        "cxx", "cc": path of a C++ and of a C compiler, or None; "variables": see `recorded`;
        "adapters", "numa_nodes": as in `topology()`; "slurm", "ray": as in `slurm()` and `ray()`.
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, left = memory_limit_bytes(), memory_left_bytes()
    cpus = sorted(os.sched_getaffinity(0))
    open_files, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "num_cpus": os.cpu_count() or len(cpus),
        "num_affine": len(cpus),
        "cpus": cpus,
        "quota_cores": cpu_quota(),
        "num_cores": num_cores(),
        "memory_bytes": min(memory.total, limit or memory.total),
        "available_bytes": memory.available if left is None else min(memory.available, left),
        "swap_bytes": swap.total,
        "swap_used_bytes": swap.used,
        "shared_memory": shared_memory(SHARED_MEMORY),
        "memlock_bytes": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "open_files": _limit(open_files),
        "max_open_files": _limit(max_open_files),
        "huge_pages": chosen(HUGE_PAGES / "enabled"),
        "cxx": _which(os.environ.get("CXX", ""), *CXX),
        "cc": _which(os.environ.get("CC", ""), *CC),
        "variables": recorded(os.environ),
        "adapters": adapters(),
        "numa_nodes": numa_nodes(),
        "slurm": slurm(),
        "ray": ray(),
    }


def shared_memory(folder: Path) -> dict[str, Any] | None:
    """Returns {"bytes" (its size), "free_bytes", "is_writable"} of the shared memory; None if there is none."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"bytes": usage.total, "free_bytes": usage.free, "is_writable": os.access(folder, os.W_OK | os.X_OK)}


def chosen(file: Path) -> str:
    """Returns the word in brackets in a kernel setting such as "always [madvise] never"; "" if unknown."""
    found = re.search(r"\[(\w+)\]", read(file))
    return found[1] if found else ""


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _which(*names: str) -> str | None:
    return next((path for name in names if name and (path := shutil.which(name))), None)
