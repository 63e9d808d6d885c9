"""Decides into how many slots a machine is divided, and checks `launch.slots`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.cluster import JOB
from autotune.config.command import CommandTemplate
from autotune.config.program import program_of
from autotune.config.schema import AUTO, LOCAL, SLURM, StudyConfig
from autotune.knobs.values import shown
from autotune.machine.visible import visible_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


def problems_of_slots(config: StudyConfig, facts: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with `launch.slots`."""
    asked = config.launch.slots
    if asked == AUTO or asked == 1:
        return []
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        return [
            f"launch.slots: not a number of slots, got {shown(asked)}. Allowed: auto, or a number from 1. Give one of them."
        ]
    if config.launcher == SLURM and JOB in os.environ and config.launch.slurm.cpus is None:
        return [
            f"launch.slots: got {asked}, but the first slot would take all CPUs of job {os.environ[JOB]}. Give each slot its "
            "share: launch.slurm.cpus=N."
        ]
    if VISIBLE in config.env:
        return [f"launch.slots: got {asked}, but env.{VISIBLE} pins all trials to the same GPUs. Leave one of the two out."]
    if config.launcher == SLURM and config.launch.slurm.nodes > 1:
        return [f"launch.slots: trials over several nodes run one after another, got {asked}. Leave it out."]
    if config.launcher != LOCAL:
        return []
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
    """Returns into how many slots this machine is divided.

    With launch.slots=auto, this is one slot for each GPU if the program is a single process and all GPUs are alike, else one.
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
    """Returns the GPUs that trials may use, as in `facts`; [] if trials run on the CPU, or a GPU has no UUID."""
    if config.device.kind == "cpu":
        return []
    there = visible_gpus(facts.get("gpus") or [], os.environ)
    return [gpu for gpu in there[config.device.index :] if gpu.get("uuid")]
