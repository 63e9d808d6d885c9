"""What a well-typed configuration can still get wrong: names that are in no table, numbers that make no sense."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil

from autotune.config.keys import no_such
from autotune.config.schema import (
    DATA,
    DEVICES,
    LAUNCHERS,
    OBJECTIVES,
    OPTIMIZERS,
    SAMPLERS,
    SOURCES,
    MeasureOptions,
    StudyConfig,
)
from autotune.errors import BadInput
from autotune.run_dir import check_name

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def problems_of(config: StudyConfig) -> list[str]:
    """Returns every problem of a composed configuration."""
    return [*_names(config), *_study(config), *_numbers(config), *_recipe(config), *_measure(config.measure), *_limit(config)]


def memory_limit_bytes(limit: str | float | int | None, capacity_bytes: int | None) -> int | None:
    """Returns the cap in bytes; None for none.

    Args:
        limit: `device.memory_limit`: bytes, text such as "8GiB", or a fraction in (0, 1].
        capacity_bytes: memory of the device that a fraction refers to; None when it is not known, then a fraction gives None.

    Raises:
        BadInput: it is none of these.
    """
    if limit is None:
        return None
    found = re.fullmatch(r"\s*(\d*\.?\d+(?:e\+?\d+)?)\s*((?:[kmgt]i?)?)b?\s*", str(limit).lower())
    if not found:
        raise _bad_limit(limit)
    amount = float(found[1])
    if not found[2] and 0 < amount <= 1:
        return None if capacity_bytes is None else int(amount * capacity_bytes)
    cap_bytes = amount * PREFIXES[found[2]]
    if not math.isfinite(cap_bytes) or cap_bytes < 2**20:
        raise _bad_limit(limit)
    return int(cap_bytes)


def _bad_limit(limit: object) -> BadInput:
    allowed = 'Allowed: bytes, text such as "8GiB", or a fraction between 0 and 1; at least 1 MiB.'
    return BadInput(f"device.memory_limit: not an amount of memory, got {limit!r}. {allowed}")


def _limit(config: StudyConfig) -> list[str]:
    try:
        memory_limit_bytes(config.device.memory_limit, None)
    except BadInput as error:
        return error.problems
    return []


def _names(config: StudyConfig) -> list[str]:
    tables = [
        ("search.sampler", config.search.sampler, SAMPLERS, "sampler"),
        ("objective", config.objective, OBJECTIVES, "objective"),
        ("launcher", config.launcher, LAUNCHERS, "launcher"),
        ("device.kind", config.device.kind, DEVICES, "device"),
        ("model.source", config.model.source, SOURCES, "source of models"),
        ("data.name", config.data.name, DATA, "data"),
    ]
    if config.train.optimizer is not None:
        tables.append(("train.optimizer", config.train.optimizer, OPTIMIZERS, "optimizer"))
    return [no_such(key, value, allowed, kind) for key, value, allowed, kind in tables if value not in allowed]


def _study(config: StudyConfig) -> list[str]:
    texts = {
        "data.root": config.data.root,
        "runs_dir": config.runs_dir,
        "tracker.uri": config.tracker.uri,
        "program.python": config.program.python,
    }
    problems = [
        f"{key}: empty or with a NUL character, got {text!r}. Give a path." for key, text in texts.items() if _hostile(text)
    ]
    if config.study.name is not None:
        try:
            check_name(config.study.name)
        except BadInput as error:
            problems += error.problems
    return problems


def _hostile(text: str | None) -> bool:
    return text is not None and (not text.strip() or "\0" in text)


def _numbers(config: StudyConfig) -> list[str]:
    at_least: list[tuple[str, float | int | None, float]] = [
        ("study.seed", config.study.seed, 0),
        ("study.budget.trials", config.study.budget.trials, 1),
        ("model.num_classes", config.model.num_classes, 1),
        ("model.image_size", config.model.image_size, 1),
        ("train.epochs", config.train.epochs, 1),
        ("train.samples_per_epoch", config.train.samples_per_epoch, 1),
        ("device.index", config.device.index, 0),
        ("launch.nproc", config.launch.nproc, 1),
    ]
    above_zero = [("study.budget.minutes", config.study.budget.minutes), ("train.lr", config.train.lr)]
    problems = [
        f"{key}: too small, got {value}. Allowed: {least:g} and more."
        for key, value, least in at_least
        if value is not None and not value >= least
    ]
    return problems + [
        f"{key}: not a number above 0, got {value}. Give one."
        for key, value in above_zero
        if value is not None and not (value > 0 and math.isfinite(value))
    ]


def _recipe(config: StudyConfig) -> list[str]:
    problems = []
    if config.train.global_batch is not None:
        problems.append(
            f"train.global_batch: not built yet, got {config.train.global_batch}. Pin the batch instead: "
            "loader.batch_size=N, or bound the search: tiers=numerics."
        )
    if config.data.name == "folder" and config.data.root is None:
        problems.append("data.root: data=folder needs a folder, got nothing. Give data.root=DIR, one subfolder per class.")
    if config.launch.nproc > 1:
        problems.append(
            f"launch.nproc: recipes run in one process so far, got {config.launch.nproc}. "
            "Tune a command instead: autotune run -- torchrun --nproc_per_node=N train.py."
        )
    if config.program.python is not None and not _hostile(config.program.python) and not shutil.which(config.program.python):
        problems.append(
            f"program.python: no such program, got {config.program.python!r}. Give the path of a Python interpreter."
        )
    return problems


def _measure(measure: MeasureOptions) -> list[str]:
    problems = []
    for name, rules in [("screening", measure.screening), ("finals", measure.finals)]:
        values = dataclasses.asdict(rules)
        problems += [
            f"measure.{name}.{key}: not a finite number of 0 or more, got {value}. Give one."
            for key, value in values.items()
            if not (value >= 0 and math.isfinite(value))
        ]
        pairs = [("min_s", "max_s"), ("warmup_min_device_s", "warmup_max_s")]
        problems += [
            f"measure.{name}.{low}: more than {high}, got {values[low]:g} and {values[high]:g}. Swap them."
            for low, high in pairs
            if values[low] > values[high]
        ]
    limits = {"start_s": measure.start_s, "compile_s": measure.compile_s, "step_s": measure.step_s}
    return problems + [
        f"measure.{key}: not a number of seconds above 0, got {value}. Give one."
        for key, value in limits.items()
        if not (value > 0 and math.isfinite(value))
    ]
