"""Checks the options for a cluster's engine (Slurm, Ray). The engine itself rejects what is not checked here."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.config.schema import RAY, SLURM, RayOptions, SlurmOptions, StudyConfig
from autotune.config.wrapped_commands import PYTHON, SCRIPT, SHELLS, STARTERS, WRAPPERS
from autotune.knobs.values import shown

OF_JOB = ("partition", "account", "qos", "nodes", "minutes")  # fixed for a whole job; a step of the job cannot change them
JOB = "SLURM_JOB_ID"  # set inside an allocation (salloc, sbatch), in which srun starts a step instead of a new job
SRUN = "srun"
# Options of srun that take no value, or whose value must follow an equals sign. The next word is never their value.
SRUN_FLAGS = (
    *("-E", "-H", "-I", "-K", "-O", "-Q", "-X", "-Z", "-k", "-l", "-s", "-u", "-v"),
    *("--contiguous", "--disable-status", "--exact", "--exclusive", "--hold", "--immediate", "--kill-on-bad-exit", "--label"),
    *("--multi-prog", "--no-kill", "--overcommit", "--overlap", "--oversubscribe", "--preserve-env", "--pty", "--quiet"),
    *("--spread-job", "--unbuffered", "--verbose", "--whole"),
)
# Names and letters of srun's options that `launch.slurm.args` must not set -> what is wrong with them, what to do instead.
REFUSED = {
    "job-name J": (
        "autotune finds the jobs of a killed autotune by their names, which it chooses itself",
        "Leave it out; to recognise the job, give --comment=TEXT",
    ),
    "nodes N ntasks n ntasks-per-node": (
        "autotune starts one task on each node",
        "Leave it out; for more nodes, give launch.slurm.nodes=N",
    ),
    "input i output o error e label l pty": ("autotune needs srun's input and output itself", "Leave it out"),
    "kill-on-bad-exit K no-kill k wait W": ("autotune decides when the job ends", "Leave it out"),
    "test-only multi-prog bcast usage help h version V": ("with it, srun does not start autotune on the node", "Leave it out"),
    "clusters M": (
        "autotune also calls squeue and scancel, which would ask another cluster",
        "Leave it out, and set SLURM_CLUSTERS in your shell",
    ),
    "parsable wrap array": ("an option of sbatch, not of srun", "Leave it out"),
}
EXPORT, EVERYTHING = "--export", "ALL"  # srun's option for the variables that it passes on to the tasks, and its default
EXPORT_VARIABLE = "SLURM_EXPORT_ENV"  # default of --export for every srun of a job; `sbatch --export` sets it
# Starters of tasks. Each sets two variables for a task: the number of tasks, and the task's own number.
COPIED = (
    (SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
PTY = "SLURM_PTY_PORT"  # set in the shell that `srun --pty` starts
NAMES = {SLURM: "Slurm", RAY: "Ray"}
GPUS = {SLURM: "launch.slurm.gres=gpu:{}", RAY: "launch.ray.gpus={}"}  # the option that requests GPUs
ADDRESS = re.compile(r"auto|(?:[\w.-]+|\[[\da-fA-F:]+\]):\d{1,5}")


def problems_of_cluster(config: StudyConfig, environment: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with `launch.slurm`, `launch.ray` and `device.index`.

    `environment` shows whether autotune runs inside a Slurm job, where some options have no effect.
    """
    launch, launcher = config.launch, config.launcher
    given = {SLURM: _given(launch.slurm), RAY: _given(launch.ray)}
    problems = [
        f"launch.{engine}.{name}: has no effect with launcher={launcher}, got {shown(value)}. Give launcher={engine}, or leave "
        "it out."
        for engine in given
        if engine != launcher
        for name, value in given[engine].items()
    ]
    if launcher not in NAMES:  # trials run here, or there is no such launcher
        return problems
    problems += [
        f"launch.{launcher}.{name}: empty or not printable, got {shown(value)}. Give printable text, or leave it out."
        for name, value in given.get(launcher, {}).items()
        if isinstance(value, str) and not (value.strip() and value.isprintable())
    ]
    if config.device.index:
        problems.append(
            f"device.index: {NAMES[launcher]} chooses the GPUs of a job, got {config.device.index}. Leave it out, and give "
            f"{GPUS[launcher].format('N')}."
        )
    return [*problems, *(_of_slurm(given[SLURM], environment) if launcher == SLURM else _of_ray(launch.ray))]


def resumed_options(slurm: SlurmOptions, environment: Mapping[str, str]) -> SlurmOptions:
    """Returns `launch.slurm` for a resumed study. Inside a job, the options that the job has fixed get their defaults.

    Only the number of nodes stays, because a program for two nodes cannot run in a job of one.
    """
    decided = [name for name in OF_JOB if name != "nodes"] if JOB in environment else []
    usual = SlurmOptions()
    return dataclasses.replace(slurm, **{name: getattr(usual, name) for name in decided})


def problems_of_nodes(config: StudyConfig, command: Sequence[str] | None) -> list[str]:
    """Returns what is wrong with `launch.slurm.nodes` for a command, or for a recipe if `command` is None."""
    num = config.launch.slurm.nodes
    if config.launcher != SLURM or num < 2:
        return []
    if not command:
        return [
            f"launch.slurm.nodes: a recipe trains on one node, got {num}. Leave it out, or give a command of your own: "
            "-- srun python train.py."
        ]
    name = Path(command[0]).name
    if not (PYTHON.fullmatch(name) or name in STARTERS):  # it is unknown what the user's own script starts
        return []
    return [
        f"launch.slurm.nodes: {name} starts processes on one node only, got {num}. Put srun before it: -- srun {name} ... If "
        "the program itself calls srun, start it from a shell script: -- bash train.sh."
    ]


def problems_of_export(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns a problem if srun does not pass the environment, and with it the settings, on to the ranks."""
    if Path(command[0]).name != SRUN:
        return []
    options = _options(command[1:])
    given = [value or following for word, following in itertools.pairwise([*options, ""]) for value in _exported(word)]
    exported = given[-1] if given else environment.get(EXPORT_VARIABLE, EVERYTHING)
    if EVERYTHING in exported.upper().split(","):
        return []
    got = f"{EXPORT if given else EXPORT_VARIABLE}={exported}"
    return [
        f"COMMAND: srun does not pass the environment on to the ranks, so no setting can reach them, got {shown(got)}. Write "
        f"srun {EXPORT}={EVERYTHING}, or {EXPORT}={EVERYTHING},NAME=VALUE."
    ]


def problems_of_copies(environment: Mapping[str, str]) -> list[str]:
    """Returns a problem if srun or mpirun has started several autotunes, which would all measure the program at once.

    A shell started by `srun --pty` is allowed: it is task 0, and the other tasks have no terminal in which to start autotune.
    """
    for starter, name, number in COPIED:
        num = environment.get(name, "")
        if not num.isdecimal() or int(num) < 2 or (PTY in environment and environment.get(number) == "0"):
            continue
        return [
            f"launcher: {starter} has started {num} autotunes, got {name}={num}. They would measure the program at the same "
            f"time, and its processes would connect to each other. Start one autotune, which starts {starter}: autotune run "
            f"-- {starter} python train.py."
        ]
    return []


def problems_of_node(config: StudyConfig, num_gpus: int) -> list[str]:
    """Returns a problem if the node has too few GPUs for the study."""
    nproc, more = config.launch.nproc, GPUS[config.launcher]
    if config.device.kind == "cuda" and not num_gpus:
        return [f"device.kind: the job has no GPU on its node, got 'cuda'. Give {more.format(1)}, or device.kind=cpu."]
    if config.device.kind != "cpu" and 0 < num_gpus < nproc:
        return [
            f"launch.nproc: more processes than the job's GPUs, got {nproc}. Allowed: 1 to {num_gpus}, as each needs its own "
            f"GPU. Give fewer, or {more.format(nproc)}."
        ]
    return []


def _given(options: Any) -> dict[str, Any]:
    """Returns the options that differ from their defaults."""
    usual = dataclasses.asdict(type(options)())
    return {name: value for name, value in dataclasses.asdict(options).items() if value != usual[name]}


def _of_slurm(given: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    problems = []
    if JOB in environment:
        problems = [
            f"launch.slurm.{name}: has no effect inside job {environment[JOB]}, got {shown(given[name])}. Leave it out, or "
            "start autotune outside of a job."
            for name in OF_JOB
            if name in given
        ]
    return [*problems, *_arguments(given.get("args") or "")]


def _of_ray(ray: RayOptions) -> list[str]:
    if ADDRESS.fullmatch(ray.address):
        return []
    return [
        f"launch.ray.address: not the address of a cluster, got {shown(ray.address)}. Allowed: auto, HOST:PORT of the "
        "cluster's head. autotune starts no cluster itself: `ray start --head` does."
    ]


def _arguments(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        return [f"launch.slurm.args: not the words of a command, got {shown(text)} ({error}). Close the quotation."]
    refused = [
        f"launch.slurm.args: {why}, got {shown(word)}. {do}."
        for word in words
        for names, (why, do) in REFUSED.items()
        if _is_one_of(names.split(), word)
    ]
    wrong = [word for word in words if not word.startswith("-")]  # such as the value of a refused option
    return refused or [
        f"launch.slurm.args: not an option of srun, got {shown(word)}. Write --OPTION=VALUE, with the equals sign."
        for word in wrong
    ]


def _is_one_of(names: Sequence[str], word: str) -> bool:
    """Whether a word sets one of these options of srun, given by name or letter.

    Srun also accepts the beginning of a name ("--nod" for "--nodes") and joined letters ("-vJname").
    """
    option, given = word.partition("=")[0].removeprefix("--"), word[1:]
    if word.startswith("--"):
        return bool(option) and any(name.startswith(option) for name in names)
    while given and f"-{given[0]}" in SRUN_FLAGS and given[0] not in names:
        given = given[1:]
    return word.startswith("-") and given[:1] in names


def _options(words: Sequence[str]) -> list[str]:
    """Returns srun's own options with their values: the words before the command that srun starts."""
    found: list[str] = []
    for word in words:
        is_option = word.startswith("-") and word != "--"
        is_value = found[-1:] == [EXPORT] or (bool(found) and _may_take_value(found[-1]) and not _is_program(word))
        if not is_option and not is_value:
            break
        found.append(word)
    return found


def _may_take_value(option: str) -> bool:
    """Whether the value of an option of srun may be the next word."""
    is_complete = "=" in option or option in SRUN_FLAGS or (not option.startswith("--") and len(option) > 2)
    return option.startswith("-") and not is_complete


def _is_program(word: str) -> bool:
    """Whether a word after srun looks like the beginning of the command that srun starts, not like an option's value."""
    name = Path(word).name
    is_known = PYTHON.fullmatch(name) or SCRIPT.fullmatch(name) or name in (*SHELLS, *STARTERS, *WRAPPERS)
    return not word.startswith("-") and ("/" in word or bool(is_known))


def _exported(word: str) -> list[str]:
    """Returns [VALUE] for the word --export=VALUE, [""] for --export (the next word is its value), [] for any other word."""
    name, _, value = word.partition("=")
    return [value] if name == EXPORT else []
