"""Decides into how many slots a machine is divided, and checks `launch.slots`. A slot runs one trial at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.cluster import JOB
from autotune.config.command import CommandTemplate
from autotune.config.schema import AUTO, LOCAL, SLURM, SlurmOptions, StudyConfig
from autotune.config.wrapped_commands import program_of
from autotune.knobs.values import shown
from autotune.machine.visible import VISIBLE, visible_devices, visible_gpus

# Variables that Slurm sets in a job with GPUs. Each contains the indices of the GPUs, or their number.
GPUS_OF_JOB = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE")
GPUS_OF_STEP = "SLURM_GPUS_PER_TASK"  # number of GPUs that srun requests for each task; a slot is a step with one task


def problems_of_slots(config: StudyConfig, facts: Mapping[str, Any], *, is_recorded: bool = False) -> list[str]:
    """Returns what is wrong with `launch.slots`.

    Args:
        config: the configuration.
        facts: result of `machine.host_facts()`; {} if trials run on a cluster.
        is_recorded: whether the study already exists. Its options of the launcher can then not be changed.
    """
    asked = config.launch.slots
    if asked == AUTO or asked == 1:
        return []
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        return [
            f"launch.slots: not a number of slots, got {shown(asked)}. Allowed: auto, or a whole number from 1. Give one of "
            "them."
        ]
    outside = "Resume the study outside of a job" if is_recorded else ""
    if config.launcher == SLURM and JOB in os.environ and config.launch.slurm.cpus is None:
        return [
            f"launch.slots: got {asked}, but the first slot would take all CPUs of job {os.environ[JOB]}. "
            f"{outside or 'Give each slot its share: launch.slurm.cpus=N'}."
        ]
    if config.launcher == SLURM and JOB in os.environ and _takes_all_gpus(config.launch.slurm):
        return [
            f"launch.slots: got {asked}, but the first slot would take all GPUs of job {os.environ[JOB]}. "
            f"{outside or 'Give each slot its share: launch.slurm.gres=gpu:N, or launch.slurm.gres=none'}."
        ]
    if VISIBLE in config.env:
        return [f"launch.slots: got {asked}, but env.{VISIBLE} pins all trials to the same GPUs. Leave one of the two out."]
    if config.launcher == SLURM and config.launch.slurm.nodes > 1:
        return [f"launch.slots: trials over several nodes run one after another, got {asked}. Leave it out."]
    if config.launcher != LOCAL:
        return []
    if has_unknown(config, facts):
        return [
            f"launch.slots: got {asked}, but NVML does not tell apart the GPUs that trials may use (as with slices of a GPU, "
            "MIG), so trials would share one. Leave it out, or give device.kind=cpu."
        ]
    nproc, num_cores, gpus = config.launch.nproc, int(facts["num_cores"]), gpus_of(config, facts)
    most = len(gpus) // nproc if gpus else num_cores
    if gpus and asked > most:
        each = "one GPU" if nproc == 1 else f"{nproc} GPUs"
        return [
            f"launch.slots: more slots than GPUs, got {asked}. Allowed: auto, or 1 to {max(1, most)}, with {each} each. Give "
            "fewer."
        ]
    if asked > num_cores:
        return [f"launch.slots: more slots than CPU cores, got {asked}. Allowed: auto, or 1 to {num_cores}. Give fewer."]
    if len(kinds := sorted({str(gpu["name"]) for gpu in gpus})) > 1:
        return [
            f"launch.slots: got {asked} on {' and '.join(kinds)}, but rates of unlike GPUs cannot be compared. Choose GPUs of "
            f"one kind with {VISIBLE}, or give launch.slots=1."
        ]
    return []


def num_slots(config: StudyConfig, command: CommandTemplate, facts: Mapping[str, Any]) -> int:
    """Returns the number of slots into which this machine is divided.

    With launch.slots=auto, it is the number of GPUs if the program is a single process and all GPUs are alike, else 1.
    """
    asked = config.launch.slots
    if isinstance(asked, int):
        return asked
    gpus = gpus_of(config, facts)
    has_one_process = config.launch.nproc == 1 and not program_of(command.parts).starter
    is_alike = len({(gpu.get("name"), gpu.get("memory_bytes")) for gpu in gpus}) == 1
    if not has_one_process or not is_alike or VISIBLE in config.env:
        return 1
    return max(1, min(len(gpus), int(facts["num_cores"])))


def gpus_of(config: StudyConfig, facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the GPUs that trials may use, as in `facts`; [] if trials run on the CPU, or no GPU has a UUID."""
    return [gpu for gpu in _seen(config, facts) if gpu.get("uuid")]


def has_unknown(config: StudyConfig, facts: Mapping[str, Any]) -> bool:
    """Whether trials may use a slice of a GPU (MIG), which NVML does not list, or a GPU without a UUID."""
    seen, entries = _seen(config, facts), visible_devices(os.environ) or []
    is_sliced = any(entry.startswith("MIG-") for entry in entries[config.device.index :])
    return bool(seen) and (is_sliced or any(gpu and not gpu.get("uuid") for gpu in seen))


def _takes_all_gpus(slurm: SlurmOptions) -> bool:
    """Whether a step of this job gets all of the job's GPUs because it requests none. Further steps then wait until it ends."""
    has_gpus = any(os.environ.get(name, "0") not in ("", "0") for name in GPUS_OF_JOB)
    words = (slurm.args or "").split()
    is_asked = any(word.startswith(("--gres", "--gpus", "-G")) or ("--tres" in word and "gpu" in word) for word in words)
    return has_gpus and slurm.gres is None and not is_asked and not os.environ.get(GPUS_OF_STEP)


def _seen(config: StudyConfig, facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    gpus = facts.get("gpus") or []
    if config.device.kind == "cpu" or not gpus:
        return []
    return visible_gpus(gpus, os.environ, config.device.index)
