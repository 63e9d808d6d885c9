"""Effective CPU cores as the program's process sees them: affinity and cgroup quota.

The tuner counts them as well, in its own process and before it; the program may have bound itself to fewer.
"""

from __future__ import annotations

import math
import os
from typing import Iterator, Optional

CGROUP = "/sys/fs/cgroup"
OWN_CGROUP = "/proc/self/cgroup"


def num_cores(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> int:
    """Returns min(affinity, smallest cgroup quota rounded up), at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroup, own) if (quota := _quota_of(folder)) is not None]
    return max(1, min([affinity, *(math.ceil(quota) for quota in quotas)]))


def _folders(cgroup: str, own: str) -> Iterator[str]:
    """Yields the folders whose quota holds for this process: v2's one tree and v1's of the controller "cpu"."""
    yield cgroup
    yield os.path.join(cgroup, "cpu")
    for line in _read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = os.path.join(cgroup, "cpu") if controllers else cgroup
        for part in () if ".." in path else path.strip("/").split("/"):
            folder = os.path.join(folder, part)
            yield folder


def _quota_of(folder: str) -> Optional[float]:
    quota, _, period = _read(os.path.join(folder, "cpu.max")).partition(" ")
    if not period:
        quota, period = (_read(os.path.join(folder, f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None  # "max", -1 or no such file
    return int(quota) / int(period)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
