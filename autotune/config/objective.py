"""Checks objectives and constraints before anything runs: their names, and whether this machine can compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.keys import no_such
from autotune.config.schema import StudyConfig
from autotune.knobs.values import shown
from autotune.records import COST, ENERGY, OBJECTIVES, TIME, objective_names

Gpus = Sequence[Mapping[str, Any]]
# Recipe data that never end unless an epoch's length is given.
REPEATING_DATA = ("photos", "fake_cifar", "text", "tabular", "synthetic")


def problems_of_objective(config: StudyConfig, gpus: Gpus | None) -> list[str]:
    """Returns why the objective or a constraint cannot be computed; `gpus` are this host's, None if unknown."""
    if problems := _names(config.objective):
        return problems
    names = objective_names(config.objective)
    problems = []
    if TIME in names and config.study.samples is None:
        problems.append(
            f"study.samples: not set, but objective={TIME} needs the length of the real training. Give study.samples=N."
        )
    if COST in names:
        problems += _cost(config, names)
    if config.study.samples is not None and not {TIME, COST} & set(names):
        problems.append(
            f"study.samples: has no effect with objective={shown_objective(config.objective)}, got {config.study.samples:g}. "
            f"Leave it out, or give objective={TIME}."
        )
    if config.machine.price_per_hour is not None and COST not in names:
        problems.append(
            f"machine.price_per_hour: has no effect with objective={shown_objective(config.objective)}, got "
            f"{config.machine.price_per_hour:g}. Leave it out, or give objective={COST}."
        )
    if ENERGY in names:
        problems += _without_sensor(config, gpus, ("objective", ENERGY, "has_energy_counter", "energy counter"))
    if (limit := config.constraints.max_power_w) is not None:
        asked = ("constraints.max_power_w", f"{limit:g}", "has_power_reading", "power reading")
        problems += _without_sensor(config, gpus, asked)
    return problems


def shown_objective(objective: str | list[str]) -> str:
    """Returns an objective as the user types it."""
    names = objective_names(objective)
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def _names(objective: Any) -> list[str]:
    names = [objective] if isinstance(objective, str) else objective
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        allowed = f"Allowed: {', '.join(OBJECTIVES)}, or a list of them."
        return [f"objective: wrong type, got {shown(objective)}. {allowed} Give one, or [A,B]."]
    if wrong := [name for name in names if name not in OBJECTIVES]:
        return [no_such("objective", name, OBJECTIVES, "objective") for name in dict.fromkeys(wrong)]
    if len(set(names)) < len(names):
        return [f"objective: an objective is named twice, got {shown(objective)}. Name each once."]
    return []


def _cost(config: StudyConfig, names: tuple[str, ...]) -> list[str]:
    problems = []
    if config.machine.price_per_hour is None:
        problems.append(
            f"machine.price_per_hour: not set, but objective={COST} needs the price of an hour on this machine. "
            "Give machine.price_per_hour=PRICE."
        )
    is_ours = (config.model.name is not None or config.model.factory is not None) and config.data.factory is None
    has_length = config.train.samples_per_epoch is not None or (config.study.samples is not None and TIME not in names)
    if is_ours and config.data.name in REPEATING_DATA and not has_length:
        problems.append(
            f"train.samples_per_epoch: not set, but objective={COST} needs the length of an epoch, and data={config.data.name} "
            "never ends. Give train.samples_per_epoch=N."
        )
    return problems


def _without_sensor(config: StudyConfig, gpus: Gpus | None, asked: tuple[str, str, str, str]) -> list[str]:
    """Returns a problem if the study has no GPU with the sensor that a key needs; [] if the GPUs are unknown.

    `asked` is (key, its value, the fact that says whether a GPU has the sensor, the sensor in words).
    """
    key, value, fact, what = asked
    if gpus is None:
        return []
    able = [gpu for gpu in gpus if gpu.get(fact) is not False]
    if able and config.device.kind != "cpu":
        return []
    why = "no GPU of this machine has one" if gpus else "this machine has no GPU"
    why = "device.kind=cpu" if config.device.kind == "cpu" else why
    other = "Leave it out" if key != "objective" else f"Give another objective: {OBJECTIVES[0]}"
    return [f"{key}: needs a GPU's {what} (NVML), got {value} ({why}). {other}, or run the study on a machine that has one."]
