"""Checks a configuration for what its types do not catch: unknown names and numbers out of range."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import operator
import os
import re
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.cluster import problems_of_cluster, problems_of_node
from autotune.config.keys import no_such
from autotune.config.objective import problems_of_objective
from autotune.config.recipe import problems_of_recipe
from autotune.config.schema import (
    DATA,
    DEVICES,
    LAUNCHERS,
    LOCAL,
    OPTIMIZERS,
    SAMPLERS,
    SOURCES,
    WARM,
    MeasureOptions,
    StudyConfig,
    TrackerOptions,
)
from autotune.errors import BadInput
from autotune.knobs.values import shown
from autotune.machine.gpus import has_gpu_driver
from autotune.machine.visible import visible_devices, visible_gpus
from autotune.masking import without_credentials
from autotune.studies import check_name

MINUTES_A_YEAR, SECONDS_A_MONTH, MANY = 525_600, 2_592_000, 10**9
# Key -> smallest and largest value; None as the smallest means anything above 0.
RANGES: dict[str, tuple[float | None, float]] = {
    "study.seed": (0, 2**32 - 1),  # NumPy's limits
    "study.samples": (1, 10**15),
    "constraints.memory_free_frac": (None, 0.99),
    "constraints.max_power_w": (None, 100_000),
    "constraints.max_step_p95_s": (None, SECONDS_A_MONTH),
    "machine.price_per_hour": (None, MANY),
    "study.budget.minutes": (None, MINUTES_A_YEAR),
    "study.budget.trials": (1, MANY),
    "model.num_classes": (1, MANY),
    "model.image_size": (1, 2**16),
    "model.num_layers": (1, 10_000),
    "model.hidden_size": (1, 2**20),
    "model.num_heads": (1, 2**16),
    "model.vocab_size": (16, MANY),
    "data.sequence_length": (1, 2**24),
    "data.num_features": (1, 2**20),
    "train.lr": (None, MANY),
    "train.epochs": (1, MANY),
    "train.samples_per_epoch": (1, MANY),
    "train.global_batch": (1, MANY),
    "launch.nproc": (1, 1024),
    "launch.queue_minutes": (None, MINUTES_A_YEAR),
    "launch.slurm.nodes": (1, 10_000),
    "launch.slurm.cpus": (1, 100_000),
    "launch.slurm.minutes": (None, MINUTES_A_YEAR),
    "launch.ray.gpus": (0, 1024),
    "launch.ray.cpus": (0, 100_000),
    "device.index": (0, 1023),
    "record.configurations": (2, 100_000),
    "record.repeats": (1, 1000),
    "record.repeats_of_best": (0, 1000),
    "record.minutes": (None, MINUTES_A_YEAR),
    "parity.steps": (0, 10_000),
    "parity.tolerance": (0, 10),
    "measure.start_s": (None, SECONDS_A_MONTH),
    "measure.compile_s": (None, SECONDS_A_MONTH),
    "measure.step_s": (None, SECONDS_A_MONTH),
}
# Ranges of the rules in measure.screening and measure.finals whose names end in "_s" or "_frac". All other rules are counts. A
# count must be at least 1 if its name contains "min_".
RULE_RANGES = {"_s": (0, SECONDS_A_MONTH), "_frac": (0, 1)}
COUNT_RANGE, MIN_COUNT_RANGE = (0, 10**6), (1, 10**6)
TRACKING_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "uc", "arn")
TRACKING_FORMS = "Allowed: http://HOST:PORT, sqlite:///FILE, postgresql://..., none."
PLUGINS = "mlflow.tracking_store"  # group of entry points through which plugins add tracking stores to MLflow
PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def problems_of(config: StudyConfig, gpus: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    """Returns every problem of a composed configuration; `gpus` are those of `machine.host_facts()`, None if unknown."""
    problems = [
        *_names(config),
        *_study(config),
        *_warm_start(config.search.warm_start),
        *(found for key, bounds in RANGES.items() for found in _out_of_range(key, operator.attrgetter(key)(config), *bounds)),
        *_recipe(config),
        *_measure(config.measure),
        *problems_of_cluster(config, os.environ),
    ]
    problems += [*problems_of_objective(config, gpus), *_limit(config)]
    if config.launcher == LOCAL:
        problems += _device(config, gpus or ())
    elif gpus is not None:
        problems += problems_of_node(config, len(gpus))
    return [*problems, *tracking_problems(config.tracker.uri), *_experiment(config.tracker)]


def memory_limit_bytes(limit: str | float | int | None, capacity_bytes: int | None) -> int | None:
    """Returns a memory limit in bytes; None if there is none.

    Args:
        limit: `device.memory_limit`: bytes, text such as "8GiB", or a fraction in (0, 1].
        capacity_bytes: the device's memory, to which a fraction refers; None if unknown. A fraction then gives None.

    Raises:
        BadInput: the limit has another form or is out of range.
    """
    if limit is None:
        return None
    found = re.fullmatch(r"\s*(\d*\.?\d+(?:e\+?\d+)?)\s*((?:[kmgt]i?)?)b?\s*", str(limit).lower(), re.ASCII)
    if not found:
        raise _bad_limit(limit)
    amount = float(found[1])
    if not found[2] and 0 < amount <= 1:
        return None if capacity_bytes is None else int(amount * capacity_bytes)
    cap_bytes = amount * PREFIXES[found[2]]
    if not 2**20 <= cap_bytes <= 2**60:
        raise _bad_limit(limit)
    return int(cap_bytes)


def _bad_limit(limit: object) -> BadInput:
    allowed = 'Allowed: bytes, text such as "8GiB", or a fraction between 0 and 1; at least 1 MiB. Give one.'
    return BadInput(f"device.memory_limit: not an amount of memory, got {shown(limit)}. {allowed}")


def _limit(config: StudyConfig) -> list[str]:
    try:
        memory_limit_bytes(config.device.memory_limit, None)
    except BadInput as error:
        return error.problems
    return []


def _device(config: StudyConfig, gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    device, nproc = config.device, config.launch.nproc
    there = len(visible_gpus(gpus, os.environ))
    if device.kind == "cuda" and not gpus and not has_gpu_driver():
        return [
            "device.kind: this machine has neither a GPU nor a GPU driver, got 'cuda'. Give device.kind=cpu, or leave it out."
        ]
    if (gpus or visible_devices(os.environ) == []) and not there and (device.kind == "cuda" or device.index):
        asked = f"device.index={device.index}" if device.index else "'cuda'"
        return [f"device.kind: CUDA_VISIBLE_DEVICES hides every GPU, got {asked}. Unset it, or give device.kind=cpu."]
    if device.kind == "cpu" or not gpus or not there:
        return []
    if device.index >= there:
        return [f"device.index: no such GPU, got {device.index}. Allowed: 0 to {there - 1}. Give one of them."]
    left = there - device.index
    if nproc <= left:
        return []
    from_there = f" from device.index={device.index} on" if device.index else ""
    return [
        f"launch.nproc: more processes than GPUs{from_there}, got {nproc}. Allowed: 1 to {left}, as each needs its own GPU. "
        "Give fewer, or device.kind=cpu."
    ]


def _names(config: StudyConfig) -> list[str]:
    tables = [
        ("search.sampler", config.search.sampler, SAMPLERS, "sampler"),
        ("launcher", config.launcher, LAUNCHERS, "launcher"),
        ("device.kind", config.device.kind, DEVICES, "device"),
        ("launch.warm", config.launch.warm, WARM, "way to start"),
        ("model.source", config.model.source, SOURCES, "source of models"),
        ("data.name", config.data.name, DATA, "data"),
    ]
    if config.train.optimizer is not None:
        tables.append(("train.optimizer", config.train.optimizer, OPTIMIZERS, "optimizer"))
    return [no_such(key, value, allowed, kind) for key, value, allowed, kind in tables if value not in allowed]


def _warm_start(asked: Any) -> list[str]:
    names = asked if isinstance(asked, list) else [asked]
    if asked is False:  # YAML reads `off` as False
        return []
    if names and all(isinstance(name, str) and not _is_unusable(name) for name in names):
        word = next((name for name in names if name in WARM), None)
        if word is None or len(names) == 1:
            return []
        return [f"search.warm_start: {word} must stand alone, got {shown(asked)}. Give {word} alone, or only studies."]
    allowed = "Allowed: auto, off, the name of a study, or several as [A,B]."
    return [f"search.warm_start: not a study, got {shown(asked)}. {allowed} Give one of these."]


def _study(config: StudyConfig) -> list[str]:
    texts = {
        "data.root": config.data.root,
        "runs_dir": config.runs_dir,
        "program.python": config.program.python,
    }
    problems = [
        f"{key}: empty or with a NUL character, got {text!r}. Give a path." for key, text in texts.items() if _is_unusable(text)
    ]
    if config.study.name is not None:
        try:
            check_name(config.study.name)
        except BadInput as error:
            problems += error.problems
    return problems


def _is_unusable(text: str | None) -> bool:
    return text is not None and (not text.strip() or "\0" in text)


def _out_of_range(key: str, value: float | None, least: float | None, most: float) -> list[str]:
    if value is None or (value <= most and (value > 0 if least is None else value >= least)):
        return []
    what = "too large" if value > most else "not a number" if math.isnan(value) else "too small"
    allowed = f"above 0, up to {most:,}" if least is None else f"{least:,} to {most:,}"
    return [f"{key}: {what}, got {shown(value)}. Allowed: {allowed}. Give such a number."]


def tracking_problems(uri: str | None, key: str = "tracker.uri") -> list[str]:
    """Returns what is wrong with the form of a tracking address, without contacting it."""
    if uri is None or uri in ("none", "databricks"):
        return []
    shown_uri, scheme = shown(without_credentials(uri)), uri.partition(":")[0].partition("+")[0].lower()
    if "://" not in uri and scheme not in TRACKING_SCHEMES:
        return [f"{key}: not a tracking address, got {shown_uri}. {TRACKING_FORMS} Write the scheme, too."]
    if scheme in ("http", "https") and not _is_server(uri):
        return [f"{key}: not an address of a server, got {shown_uri}. {TRACKING_FORMS} Give host and port."]
    if scheme in TRACKING_SCHEMES or scheme in {found.name for found in importlib.metadata.entry_points(group=PLUGINS)}:
        return []
    return [f"{key}: no such kind of tracking store, got {shown_uri}. {TRACKING_FORMS} Other kinds need a plugin of MLflow."]


def _experiment(tracker: TrackerOptions) -> list[str]:
    name, is_databricks = tracker.experiment, (tracker.uri or "").partition(":")[0] == "databricks"
    if name is None or (name.strip() and not (is_databricks and not name.startswith("/"))):
        return []
    what = "not an absolute path, which Databricks requires" if name.strip() else "empty"
    return [f"tracker.experiment: {what}, got {shown(name)}. Give a name such as {'/Shared/' * is_databricks}autotune."]


def _is_server(uri: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0 and uri.isprintable() and " " not in uri
    except ValueError:  # a port that is not a number, unclosed brackets
        return False


def _recipe(config: StudyConfig) -> list[str]:
    python = config.program.python
    if python is not None and not _is_unusable(python) and not shutil.which(python):
        return [f"program.python: no such program, got {python!r}. Give the path of a Python interpreter."]
    return problems_of_recipe(config)


def _measure(measure: MeasureOptions) -> list[str]:
    problems = []
    for name, rules in [("screening", measure.screening), ("finals", measure.finals)]:
        values = dataclasses.asdict(rules)
        for key, value in values.items():
            least, most = RULE_RANGES.get(f"_{key.rpartition('_')[2]}", MIN_COUNT_RANGE if "min_" in key else COUNT_RANGE)
            problems += _out_of_range(f"measure.{name}.{key}", value, least, most)
        pairs = [("min_s", "max_s"), ("warmup_min_device_s", "warmup_max_s")]
        problems += [
            f"measure.{name}.{low}: more than {high}, got {values[low]:g} and {values[high]:g}. Swap them."
            for low, high in pairs
            if values[low] > values[high]
        ]
    return problems
