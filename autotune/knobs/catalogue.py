"""Lists all knobs by key."""

from __future__ import annotations

from collections.abc import Collection

from autotune.errors import BadInput, one_of
from autotune.knobs import execution, loader, memory, nccl, parallel, precision, step, threads
from autotune.knobs.base import Knob
from autotune.knobs.environment import PREFIX, env_knob

FAMILIES = (
    loader.KNOBS, precision.KNOBS, execution.KNOBS, step.KNOBS, threads.KNOBS, memory.KNOBS, parallel.KNOBS, nccl.KNOBS,
)  # fmt: skip
CATALOGUE: dict[str, Knob] = {knob.key: knob for family in FAMILIES for knob in family}
OUTSIDE_GRAPHS = frozenset(key for key, one in CATALOGUE.items() if one.is_outside_graphs)
GROUPS = list(dict.fromkeys(key.partition(".")[0] for key in CATALOGUE))


def knob(key: str) -> Knob:
    """Returns the knob with a key; also accepts env.NAME.

    Raises:
        BadInput: there is no such knob; the message names the nearest.
    """
    if key.startswith(PREFIX):
        return env_knob(key.removeprefix(PREFIX))
    if key not in CATALOGUE:
        allowed = one_of(key, [*CATALOGUE, "env.NAME"])
        raise BadInput(f"knob: there is no such knob, got {key!r}. {allowed} See `autotune knobs`.")
    return CATALOGUE[key]


def clashes(keys: Collection[str]) -> list[tuple[str, str]]:
    """Returns the pairs of `keys` that may set the same variable, env.NAME first: [("env.LD_PRELOAD", "memory.malloc")]."""
    asked = [(f"{PREFIX}{name}", key) for key in keys if key in CATALOGUE for name in CATALOGUE[key].variables]
    return [(variable, key) for variable, key in asked if variable in keys]


def clash_words(variable: str, key: str) -> str:
    """Returns the error message for a pair from `clashes`."""
    return f"{variable}: sets the same variable as {key}, got both. Give one of the two."


def is_knob(key: str) -> bool:
    """Returns whether a key names a knob; any env.NAME does, even one that `env_knob` rejects."""
    return key in CATALOGUE or key.startswith(PREFIX)
