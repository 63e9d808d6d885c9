"""Limits of the CUDA device, set and read through the runtime library that torch has loaded. Not measured on a GPU yet."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Optional

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

KEY = "backend.l2_fetch_granularity"
MAX_L2_FETCH_GRANULARITY = 5  # cudaLimitMaxL2FetchGranularity, of enum cudaLimit in driver_types.h
MAPS = "/proc/self/maps"


def runtime() -> Optional[Any]:
    """Returns the CUDA runtime library of this process; None when there is none."""
    try:
        with open(MAPS, encoding="utf-8", errors="replace") as maps:
            paths = [line.split(None, 5)[5].strip() for line in maps if "libcudart" in line]
        return ctypes.CDLL(paths[0]) if paths else None
    except OSError:
        return None


def granularity_bytes() -> Optional[int]:
    """Returns the most that a miss brings into the L2 cache, in bytes; None unknown."""
    library, value = runtime(), ctypes.c_size_t()
    if library is None or library.cudaDeviceGetLimit(ctypes.byref(value), MAX_L2_FETCH_GRANULARITY):
        return None
    return int(value.value)


def apply(knobs: Dict[str, Any], device: str) -> None:
    """Sets the limit in the current device's context, which must be there: creating one here would break a later fork."""
    library = runtime() if KEY in knobs and device == "cuda" else None
    if library is not None:
        library.cudaDeviceSetLimit(MAX_L2_FETCH_GRANULARITY, ctypes.c_size_t(int(knobs[KEY])))


def verify(knobs: Dict[str, Any], device: str) -> Dict[str, KnobReport]:
    """Returns the report of the knob, read back from the device."""
    if KEY not in knobs:
        return {}
    found = granularity_bytes() if device == "cuda" else None
    if found == knobs[KEY]:
        return {KEY: KnobReport(APPLIED, "", found)}
    if found is not None:
        return {KEY: KnobReport(OVERRIDDEN, f"the device has {found}, {knobs[KEY]!r} was asked", found)}
    why = "the CUDA runtime does not tell it" if device == "cuda" else "the program trains on the CPU"
    return {KEY: KnobReport(NOT_APPLICABLE, why)}


def observe(device: str) -> Dict[str, Any]:
    """Returns the limit in force; {} on the CPU."""
    return {KEY: granularity_bytes()} if device == "cuda" else {}


def applicability(device: str) -> Dict[str, str]:
    """Returns why the knob cannot be turned in this process."""
    return {} if device == "cuda" else {KEY: "the program trains on the CPU"}
