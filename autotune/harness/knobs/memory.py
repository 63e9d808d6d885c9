"""Handles knobs of memory: the device's allocator (set in the environment), its memory limit, and the host's allocator."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any, Dict, Optional

from ..context import TrialContext
from ..cores import read
from ..protocol import APPLIED, KEEPING, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

ALLOCATOR, FRACTION, MALLOC = "memory.allocator", "memory.fraction", "memory.malloc"
KEEP = "glibc_keep"
COLLECTING = "collect_80"  # torch's allocator frees unused blocks early only if a memory fraction is set
NO_CUDA = "the program does not train on a CUDA device"
REPLACED = "the program has replaced torch's allocator of GPU memory"
# A running process gets the effect of the variables `KEEPING` through mallopt(3), where -1 stands for a threshold that is never
# reached.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
OTHER_MALLOCS = re.compile(r"lib(jemalloc|tcmalloc)[^/]*\.so")
FRACTION_TOLERANCE = 1e-3  # allowed difference between a requested fraction and the one read back: torch stores bytes


class MemoryKnobs(KnobHandler):
    """Limits the device's memory and verifies both allocators."""

    keys = (MALLOC, ALLOCATOR, FRACTION)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._host_allocator = "glibc"

    def on_torch(self) -> None:
        """Makes the C library keep freed memory, if the trial asks for it.

        The environment variables `KEEPING` alone are not enough: the process of a warm trial was started without them, and
        GLIBC_TUNABLES takes precedence over them.
        """
        self._host_allocator = host_allocator()
        if self.asked.get(MALLOC) == KEEP and self._host_allocator in ("glibc", KEEP):
            is_kept = keep_freed_memory()
            self._host_allocator = KEEP if is_kept else "glibc"
            if is_kept:
                os.register_at_fork(before=return_freed_memory)

    def on_activate(self) -> None:
        """Limits the device's memory; if `device.memory_limit` is also set, the lower limit applies."""
        is_asked = FRACTION in self.asked or self.asked.get(ALLOCATOR) == COLLECTING
        if self._context.device != "cuda" or not is_asked:
            return
        limit_bytes = self._context.spec.memory_limit_bytes
        limit_devices(float(self.asked.get(FRACTION, 1.0)), limit_bytes, self._context.device_index)

    def observe(self) -> Dict[str, Any]:
        """Returns the host's allocator; the device's settings can only be compared with a requested value."""
        return {MALLOC: self._host_allocator}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this process."""
        if self._context.device == "cuda" and is_counted(self._context.device_index):
            return {}
        return dict.fromkeys((ALLOCATOR, FRACTION), REPLACED if self._context.device == "cuda" else NO_CUDA)

    def _verify(self, key: str, asked: Any) -> KnobReport:
        if key == MALLOC:
            return _verify_malloc(asked, self._host_allocator)
        if self._context.device != "cuda":
            return KnobReport(NOT_APPLICABLE, NO_CUDA)
        return _verify_allocator(asked) if key == ALLOCATOR else _verify_fraction(asked, self._context.device_index)


def limit_devices(fraction: float, limit_bytes: Optional[int], index: Optional[int]) -> None:
    """Limits this process's memory on the GPU that trains, and on each other GPU where it has already reserved some.

    The allocator checks the limit only when it requests memory from the driver. So the memory cached by the first step is
    released: otherwise later steps could use all of it, even if it exceeds the limit.

    Args:
        fraction: the limit as a share of a GPU's memory.
        limit_bytes: another limit, in bytes; None for no such limit. The lower of the two applies.
        index: see `TrialContext.device_index`.
    """
    from torch import cuda

    own = cuda.current_device() if index is None else index
    for each in range(cuda.device_count()):
        if each == own or reserved_bytes(each):
            share = limit_bytes / cuda.get_device_properties(each).total_memory if limit_bytes else 1.0
            with cuda.device(each):  # older releases of torch would leave this GPU selected
                cuda.set_per_process_memory_fraction(min(fraction, share), each)
    cuda.empty_cache()


def reserved_bytes(index: Optional[int]) -> Optional[int]:
    """Returns the most bytes that this process has reserved on a GPU; None if nothing counts them.

    If the program has replaced torch's allocator (`torch.cuda.memory.change_current_allocator`, for example by RMM's), torch
    has no counts and raises an error.
    """
    from torch import cuda

    try:
        return int(cuda.max_memory_reserved(index))
    except RuntimeError:
        return None


def is_counted(index: Optional[int]) -> bool:
    """Returns whether the memory that this process uses on a GPU is counted, see `reserved_bytes`."""
    return reserved_bytes(index) is not None


def host_allocator() -> str:
    """Returns "glibc", "glibc_keep", "jemalloc" or "tcmalloc", by how this process was started."""
    if found := OTHER_MALLOCS.search(read("/proc/self/maps")):
        return found.group(1)
    at_start = read("/proc/self/environ").split("\0")  # what glibc has read; `os.environ` may have changed since
    return KEEP if all(f"{name}={text}" in at_start for name, text in KEEPING.items()) else "glibc"


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory from now on; returns whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def return_freed_memory() -> None:
    """Returns freed memory to the kernel before this process forks.

    Otherwise a loader's workers would hold old copies of the freed pages, once this process writes to these pages again.
    """
    ctypes.CDLL(None).malloc_trim(0)


def _verify_malloc(asked: str, found: str) -> KnobReport:
    if found == asked:
        return KnobReport(APPLIED, "", found)
    if not asked.startswith("glibc") and asked not in os.environ.get("LD_PRELOAD", ""):
        return KnobReport(NOT_APPLICABLE, f"no lib{asked} was preloaded: it is not installed here", found)
    reason = f"{asked} was requested, but the process allocates with {found}"
    return KnobReport(OVERRIDDEN, reason + (f"; unset {' and '.join(KEEPING)}" if found == KEEP else ""), found)


def _verify_allocator(asked: str) -> KnobReport:
    import torch

    backend = torch.cuda.get_allocator_backend()
    if asked == "cuda_malloc_async" or backend != "native":
        found = "cuda_malloc_async" if backend == "cudaMallocAsync" else "default"
        return _report(found == asked, asked, f"backend {backend}")
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    rounds = settings.get("roundup_power2_divisions") or {}
    in_force = {
        "expandable_segments": bool(settings.get("expandable_segments")),
        "max_split_256": settings.get("max_split_size") == 256 * 2**20,
        "roundup_8": bool(rounds) and all(int(each) == 8 for each in rounds.values()),
        "collect_80": abs(float(settings.get("garbage_collection_threshold") or 0.0) - 0.8) < FRACTION_TOLERANCE,
    }
    is_as_asked = in_force[asked] if asked in in_force else not any(in_force.values())
    return _report(is_as_asked, asked, ", ".join(name for name, is_set in in_force.items() if is_set) or "its defaults")


def _report(is_as_asked: bool, asked: str, found: str) -> KnobReport:
    if is_as_asked:
        return KnobReport(APPLIED, "", asked)
    return KnobReport(OVERRIDDEN, f"{asked} was requested, but the allocator uses {found}", found)


def _verify_fraction(asked: float, index: Optional[int]) -> KnobReport:
    import torch

    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return KnobReport(APPLIED, "", asked)  # before torch 2.8, the fraction can be set but not read back
    if not is_counted(index):
        return KnobReport(NOT_APPLICABLE, REPLACED)
    found = torch.cuda.get_per_process_memory_fraction(index)
    if found < asked + FRACTION_TOLERANCE:
        return KnobReport(APPLIED, "", asked)
    return KnobReport(OVERRIDDEN, f"{asked} was requested, but the process may take {found:.3f} of the device", found)
