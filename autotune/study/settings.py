"""What the configuration asks of every trial: limits, device, memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from autotune.config.schema import DeviceOptions, MeasureOptions
from autotune.errors import BadInput
from autotune.launchers.base import Deadlines

UNBOUNDED_S = 86_400.0  # the phases' own limits end a trial that is stuck long before
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def deadlines(measure: MeasureOptions, *, max_s: float | None) -> Deadlines:
    """Returns when to give up on a trial.

    Args:
        measure: limits of the phases.
        max_s: wall time the whole trial may take; None for no bound of its own.
    """
    total_s = UNBOUNDED_S if max_s is None else max_s
    return Deadlines(start_s=measure.start_s, compile_s=measure.compile_s, step_s=measure.step_s, total_s=total_s)


def device_environment(device: DeviceOptions) -> dict[str, str]:
    """Returns the variables that show the program the device it is to use, and no other."""
    if device.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": str(device.index)} if device.index else {}


def compile_cache(study: Path) -> dict[str, str]:
    """Returns the variables that give torch.compile a cache of the study's own: never another machine's, never stale.

    Its trials share it, so that the finals do not compile anew what the search compiled.
    """
    folder = os.path.abspath(study / "compile_cache")
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}


def memory_limit_bytes(limit: str | float | int | None, machine: dict[str, Any]) -> int | None:
    """Returns the cap of one process in bytes; None for none.

    Args:
        limit: bytes, text with a unit, or a fraction of the memory there is (1.0 and below).
        machine: host facts; the memory of the first GPU counts where there is one.

    Raises:
        BadInput: no amount of memory.
    """
    if limit is None:
        return None
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(limit).lower())
    amount = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if amount <= 0:
        raise BadInput(
            f"device.memory_limit: not an amount of memory, got {limit!r}. Give bytes, '8GiB', or a fraction like 0.9."
        )
    return int(amount * capacity_bytes(machine)) if amount <= 1 else int(amount)


def capacity_bytes(machine: dict[str, Any]) -> int:
    """Returns the memory of the first GPU, or of the host where there is none."""
    gpus = machine.get("gpus") or []
    return int(gpus[0]["memory_bytes"] if gpus else machine["memory_bytes"])
