"""Says how a training script can set a knob in its own code, for knobs that an export format cannot express."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.knobs.base import DDP_ARGUMENT, LOADER_ARGUMENT, value_text
from autotune.knobs.catalogue import knob
from autotune.knobs.environment import PREFIX
from autotune.records import Knobs, KnobValue


def how(key: str, value: KnobValue) -> str:
    """Returns one line that says how a script sets a knob."""
    if variables := knob(key).environment(value):
        return f"before Python starts: {' '.join(f'{name}={text}' for name, text in variables.items())} (--format env)"
    return knob(key).code_of(value) or f"`autotune knobs {key}`"


def loader_keys(knobs: Iterable[str]) -> list[str]:
    """Returns the knobs that are arguments of the DataLoader."""
    return [key for key in knobs if knob(key).in_code == LOADER_ARGUMENT]


def ddp_keys(knobs: Iterable[str]) -> list[str]:
    """Returns the knobs that are arguments of DistributedDataParallel."""
    return [key for key in knobs if knob(key).in_code == DDP_ARGUMENT]


def loader_arguments(knobs: Knobs) -> Knobs:
    """Returns the DataLoader's arguments by name."""
    return {knob(key).name: knobs[key] for key in loader_keys(knobs)}


def setting(key: str, value: KnobValue) -> str:
    """Returns a knob and its value as the user types them: "threads.intra=2", or NAME=VALUE for `env.NAME`."""
    return f"{key.removeprefix(PREFIX)}={value_text(value)}"
