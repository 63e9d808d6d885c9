"""What the configuration asks of every trial: limits, device, memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autotune.config.checks import memory_limit_bytes
from autotune.config.schema import DeviceOptions, MeasureOptions
from autotune.harness.protocol import RankResult
from autotune.launchers.base import Deadlines
from autotune.study.plan import Plan

UNBOUNDED_S = 86_400.0  # the phases' own limits end a trial that is stuck long before


def deadlines(measure: MeasureOptions, *, max_s: float | None) -> Deadlines:
    """Returns when to give up on a trial.

    Args:
        measure: limits of the phases.
        max_s: wall time the whole trial may take; None for no bound of its own.
    """
    total_s = UNBOUNDED_S if max_s is None else max_s
    return Deadlines(start_s=measure.start_s, compile_s=measure.compile_s, step_s=measure.step_s, total_s=total_s)


def device_environment(device: DeviceOptions) -> dict[str, str]:
    """Returns the variables that show the program its device: `device.index` counts among those visible to autotune."""
    if device.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not device.index:
        return {}
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    return {"CUDA_VISIBLE_DEVICES": visible[device.index] if device.index < len(visible) else str(device.index)}


def compile_cache(study: Path) -> dict[str, str]:
    """Returns the variables that give torch.compile a cache of the study's own: never another machine's, never stale.

    Its trials share it, so that the finals do not compile anew what the search compiled.
    """
    folder = os.path.abspath(study / "compile_cache")
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}


def memory_cap_bytes(device: DeviceOptions, machine: dict[str, Any]) -> int | None:
    """Returns the cap of one process in bytes, a fraction being one of the memory there is; None for none."""
    return memory_limit_bytes(device.memory_limit, capacity_bytes(machine))


def memory_seen_bytes(plan: Plan, first: RankResult) -> int | None:
    """Returns the memory that a trial may fill: the limit, else what the baseline saw of its device, else the host's facts."""
    known = first.memory.get("capacity_bytes") or first.facts.get("device_memory_bytes")
    return memory_cap_bytes(plan.config.device, plan.machine) or (int(known) if known else capacity_bytes(plan.machine))


def capacity_bytes(machine: dict[str, Any]) -> int:
    """Returns the memory of the first GPU, or of the host where there is none."""
    gpus = machine.get("gpus") or []
    return int(gpus[0]["memory_bytes"] if gpus else machine["memory_bytes"])
