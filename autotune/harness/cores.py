"""Counts the CPU cores that a process may use, by affinity and cgroup quota, and reads the kernel's files about them.

Tuner and harness each count for their own process, because the program may have bound itself to fewer cores than the tuner has.
"""

from __future__ import annotations

import math
import os
import re
from typing import Iterator, List, Optional, Union

CGROUP = "/sys/fs/cgroup"
OWN_CGROUP = "/proc/self/cgroup"
CPUINFO = "/proc/cpuinfo"
# Instruction sets that decide which kernels torch and oneDNN pick; x86 names, then Arm's.
ISA = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10_2", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16",
    "asimd", "sve", "sve2", "bf16", "sve_bf16",
)  # fmt: skip


def num_cores(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> int:
    """Returns the number of cores that this process may use: min(affinity, smallest cgroup quota rounded up), at least 1."""
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup, own)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def cpu_quota(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> Optional[float]:
    """Returns the smallest CPU quota, in cores, of this process's cgroup and the cgroups above it; None without a quota."""
    quotas = [quota for folder in folders(cgroup, own, "cpu") if (quota := quota_of(folder)) is not None]
    return min(quotas, default=None)


def folders(cgroup: str, own: str, controller: str) -> Iterator[str]:
    """Yields the folders whose limits apply to this process, from the root down. cgroup v2 has one tree, v1 several.

    Args:
        cgroup: where cgroups are mounted.
        own: file with this process's cgroups.
        controller: "cpu" or "memory". In v1, one tree may serve several controllers; its name lists them: "cpu,cpuacct".
    """
    yield from (cgroup, os.path.join(cgroup, controller))
    for line in read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        for tree in (controllers, controller) if controllers else ("unified", ""):
            folder = os.path.join(cgroup, tree)
            for part in ("", *(() if ".." in path else path.strip("/").split("/"))):
                folder = os.path.join(folder, part)
                yield folder


def quota_of(folder: str) -> Optional[float]:
    """Returns the CPU quota, in cores, that a cgroup's folder sets; None if it sets none."""
    quota, _, period = read(os.path.join(folder, "cpu.max")).partition(" ")
    if not period:
        quota, period = (read(os.path.join(folder, f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None  # no quota ("max" or -1), or no such file
    return int(quota) / int(period)


def read(path: Union[str, "os.PathLike[str]"]) -> str:
    """Returns the stripped text of one of the kernel's small files; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def numbers_of(text: str) -> List[int]:
    """Returns the numbers in one of the kernel's lists: [0, 1, 2, 3, 8] for "0-3,8"."""
    found: List[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def instruction_sets(cpuinfo: str) -> List[str]:
    """Returns the members of ISA among the flags in the text of /proc/cpuinfo."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set((found[1] if found else "").replace("svebf16", "sve_bf16").split())
    return [name for name in ISA if name in flags]
