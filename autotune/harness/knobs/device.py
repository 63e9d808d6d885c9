"""Sets and reads limits of the CUDA device through the runtime library that torch has loaded. Not measured on a GPU yet."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Dict, Optional

import torch

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import ON_THE_CPU, KnobHandler

KEY = "backend.l2_fetch_granularity"
MAX_L2_FETCH_GRANULARITY = 5  # cudaLimitMaxL2FetchGranularity, of enum cudaLimit in driver_types.h
MAPS = "/proc/self/maps"


def runtime() -> Optional[Any]:
    """Returns the CUDA runtime library of this process; None if it has none."""
    try:
        with open(MAPS, encoding="utf-8", errors="replace") as maps:
            paths = [line.split(None, 5)[5].strip() for line in maps if "libcudart" in line]
        return ctypes.CDLL(paths[0]) if paths else None
    except OSError:
        return None


def granularity_bytes() -> Optional[int]:
    """Returns the maximum number of bytes that a miss fetches into the L2 cache; None if unknown."""
    library, value = runtime(), ctypes.c_size_t()
    if library is None or not _works(library, library.cudaDeviceGetLimit(ctypes.byref(value), MAX_L2_FETCH_GRANULARITY)):
        return None
    return int(value.value)


def _works(library: Any, error: int) -> bool:
    """Returns whether a call of the library succeeded. If not, clears the error: torch would raise it after the next kernel."""
    if error:
        library.cudaGetLastError()
    return not error


class DeviceKnobs(KnobHandler):
    """Sets limits of the device's context, which must already exist: creating a context here would break a later fork."""

    keys = (KEY,)

    def on_activate(self) -> None:
        """Sets the limit in the context of the device that trains."""
        library = runtime() if self.asked and self._context.device == "cuda" else None
        if library is not None:
            with self._on_its_device():
                _works(library, library.cudaDeviceSetLimit(MAX_L2_FETCH_GRANULARITY, ctypes.c_size_t(int(self.asked[KEY]))))

    def observe(self) -> Dict[str, Any]:
        """Returns the limit in force, in bytes; {} on the CPU."""
        if self._context.device != "cuda":
            return {}
        with self._on_its_device():
            return {KEY: granularity_bytes()}

    def _on_its_device(self) -> Any:
        """Returns a context manager that selects the GPU that trains, so that no other GPU gets a CUDA context."""
        index = self._context.device_index
        return contextlib.nullcontext() if index is None else torch.cuda.device(index)

    def applicability(self) -> Dict[str, str]:
        """Returns why the knob cannot be changed in this process."""
        return {} if self._context.device == "cuda" else {KEY: ON_THE_CPU}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        found = self.observe().get(key)
        if found == asked:
            return KnobReport(APPLIED, "", found)
        if found is not None:
            return KnobReport(OVERRIDDEN, f"{asked!r} was requested, but the device has {found}", found)
        is_on_gpu = self._context.device == "cuda"
        return KnobReport(NOT_APPLICABLE, "the CUDA runtime does not report this limit" if is_on_gpu else ON_THE_CPU)
