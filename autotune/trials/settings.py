"""Derives what the configuration sets for every trial: limits, device, memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.config.checks import memory_limit_bytes
from autotune.config.schema import DeviceOptions, MeasureOptions, StudyConfig
from autotune.harness.protocol import RankResult
from autotune.knobs.memory import FRACTION
from autotune.launchers.base import Deadlines
from autotune.machine.gpus import slice_memory_bytes
from autotune.machine.visible import BUS, ORDER, VISIBLE, are_unlike, entries_from, visible_gpus
from autotune.trials.inputs import StudyInputs

UNBOUNDED_S = 86_400.0  # the limits of the phases end a hanging trial long before this


def deadlines(measure: MeasureOptions, *, max_s: float | None) -> Deadlines:
    """Returns the deadlines of a trial, which may take `max_s` seconds in all; None for no overall limit."""
    total_s = UNBOUNDED_S if max_s is None else max_s
    return Deadlines(start_s=measure.start_s, compile_s=measure.compile_s, step_s=measure.step_s, total_s=total_s)


def device_environment(device: DeviceOptions, *, nproc: int = 1, gpus: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Returns the variables that select the program's devices; `device.index` counts only devices that autotune sees.

    If a machine's GPUs differ, CUDA numbers them by speed, but nvidia-smi numbers them by bus. If the user has not chosen GPUs
    or their order, an index above 0 is nvidia-smi's number: the variables make CUDA number by bus, too. Without an index, the
    program runs as it does without autotune, so the variables leave CUDA's order as it is.

    Args:
        device: the configured index and kind.
        nproc: number of processes of a recipe. Each has its own device, from `device.index` on.
        gpus: all GPUs of the machine, as `machine.gpus.gpus` returns them.
    """
    if device.kind == "cpu":
        return {VISIBLE: ""}
    if not device.index:
        return {}
    found = {VISIBLE: ",".join(entries_from(device.index, nproc, os.environ))}
    if VISIBLE not in os.environ and are_unlike(gpus) and ORDER not in os.environ:
        found[ORDER] = BUS
    return found


def process_environment(config: StudyConfig, machine: dict[str, Any]) -> dict[str, str]:
    """Returns the variables that every process of a trial starts with, besides the variables of knobs and of the user.

    A recipe's ranks share the cores equally. torchrun would give each rank a single thread regardless of the cores. That would
    not be a fair baseline for a recipe on a CPU. For the user's own command, the launcher's setting is kept.
    """
    nproc = config.launch.nproc
    found = device_environment(config.device, nproc=nproc, gpus=machine.get("gpus") or ())
    if nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, int(machine["num_cores"]) // nproc))
    return found


def compile_cache(study: Path) -> dict[str, str]:
    """Returns the variables that give torch.compile a cache for this study only.

    Such a cache is never stale, and never comes from another machine. The study's trials share it, so that the finals need not
    recompile what the search compiled.
    """
    folder = os.path.abspath(study / "compile_cache")
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}


def memory_cap_bytes(device: DeviceOptions, machine: dict[str, Any]) -> int | None:
    """Returns the memory cap of one process in bytes; None without a limit. The limit may be a fraction of all memory."""
    return memory_limit_bytes(device.memory_limit, capacity_bytes(machine, device))


def memory_seen_bytes(inputs: StudyInputs, first: RankResult) -> int:
    """Returns the bytes that a trial may fill: the configured cap, or else what the baseline saw or the machine reports."""
    known = first.memory.get("capacity_bytes") or first.facts.get("device_memory_bytes")
    return memory_cap_bytes(inputs.config.device, inputs.machine) or (int(known) if known else capacity_bytes(inputs.machine))


def memory_of_process_bytes(inputs: StudyInputs, first: RankResult) -> int:
    """Returns the memory that each process of a trial may fill; `first` is rank 0's result of the baseline.

    On a CPU, the processes on a machine share its memory, even if each of them has a limit.
    """
    seen = memory_seen_bytes(inputs, first)
    if first.memory.get("kind") == "cpu":
        num_ranks = math.ceil(first.world_size / (first.facts.get("num_nodes") or 1))
        return min(seen, capacity_bytes(inputs.machine, DeviceOptions(kind="cpu")) // num_ranks)
    total = first.memory.get("capacity_bytes") or first.facts.get("device_memory_bytes") or seen
    return min(seen, int(float(inputs.space.pinned.get(FRACTION.key, 1.0)) * total))


def capacity_bytes(machine: dict[str, Any], device: DeviceOptions | None = None) -> int:
    """Returns the device's memory, or the host's if there is no GPU or the GPU shares the host's memory (GB10, Jetson).

    Args:
        machine: `machine.host_facts()`.
        device: the configured device; None for the first GPU, if there is one.
    """
    device = device or DeviceOptions()
    gpus = (machine.get("gpus") or []) if device.kind != "cpu" else []
    entry = next(iter(entries_from(device.index, 1, os.environ)), "")
    if gpus and entry.startswith("MIG-") and (found := slice_memory_bytes(entry)):
        return found
    chosen = [gpu for gpu in visible_gpus(gpus, os.environ, device.index)[:1] if gpu] or gpus[:1]
    return int((chosen[0].get("memory_bytes") if chosen else None) or machine["memory_bytes"])
