"""Checks what is asked of a cluster's engine. What the engine itself refuses, it says when it is asked."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from autotune.config.schema import LOCAL, StudyConfig
from autotune.knobs.values import shown

OF_JOB = ("partition", "account", "qos", "minutes")  # properties of a whole job, which a step of it cannot change
JOB = "SLURM_JOB_ID"  # set inside an allocation (salloc, sbatch); srun then starts a step of it instead of a job of its own


def problems_of_cluster(config: StudyConfig, environment: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with `launch.slurm` and what goes with it.

    Args:
        config: the configuration.
        environment: the environment of this process, which says whether it runs inside a job of Slurm.
    """
    given = {name: value for name, value in dataclasses.asdict(config.launch.slurm).items() if value is not None}
    if config.launcher == LOCAL:
        return [
            f"launch.slurm.{name}: has no effect with launcher=local, got {shown(value)}. Give launcher=slurm, or leave it out."
            for name, value in given.items()
        ]
    problems = [
        f"launch.slurm.{name}: empty or not printable, got {shown(value)}. Give one, or leave it out."
        for name, value in given.items()
        if isinstance(value, str) and not (value.strip() and value.isprintable())
    ]
    if JOB in environment:
        problems += [
            f"launch.slurm.{name}: has no effect inside job {environment[JOB]}, got {shown(given[name])}. Leave it out, or "
            "start autotune outside of a job."
            for name in OF_JOB
            if name in given
        ]
    if config.device.index:
        problems.append(
            f"device.index: Slurm chooses the GPUs of a job, got {config.device.index}. Leave it out, and give "
            "launch.slurm.gres=gpu:N."
        )
    return [*problems, *_arguments(given.get("args") or "")]


def problems_of_node(config: StudyConfig, num_gpus: int) -> list[str]:
    """Returns what a node does not have that the study needs.

    Args:
        config: the configuration.
        num_gpus: number of GPUs that the job has on the node.
    """
    nproc = config.launch.nproc
    if config.device.kind == "cuda" and not num_gpus:
        return ["device.kind: the job has no GPU on its node, got 'cuda'. Give launch.slurm.gres=gpu:1, or device.kind=cpu."]
    if config.device.kind != "cpu" and 0 < num_gpus < nproc:
        return [
            f"launch.nproc: more processes than the job's GPUs, got {nproc}. Allowed: 1 to {num_gpus}, as each needs its own "
            f"GPU. Give fewer, or launch.slurm.gres=gpu:{nproc}."
        ]
    return []


def _arguments(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        return [f"launch.slurm.args: not the words of a command, got {shown(text)} ({error}). Close the quotation."]
    wrong = [word for word in words if not word.startswith("-")]
    return [
        f"launch.slurm.args: not an option of srun, got {shown(word)}. Write --OPTION=VALUE, with the equals sign."
        for word in wrong
    ]
