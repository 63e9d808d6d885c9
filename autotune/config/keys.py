"""Lists the configuration's keys and their types, from the schema."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
import typing
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.schema import StudyConfig
from autotune.errors import BadInput, nearest, one_of
from autotune.knobs.catalogue import is_knob
from autotune.knobs.values import shown

# Hints for settings that users may look for under another name.
KNOWN_AS = {"parallel.fsdp": "Sharding is parallel.strategy=fsdp.", "parallel.sharding": "Sharding is parallel.strategy=fsdp."}
ALLOWED = {"launch.slots": "auto, or a whole number from 1"}  # keys whose type does not show what is allowed
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
ALSO_CALLED = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}  # word that a user may give -> the value that is meant


def leaves(schema: type[Any] = StudyConfig, prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> type hint for every key that has a value."""
    hints = typing.get_type_hints(schema)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= leaves(typing.cast(type[Any], hint), f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = hint
    return found


LEAVES = leaves()
CONFIG_GROUPS = ("model", "data")  # keys whose value is the name of a file in conf/
GROUPS = {key.rpartition(".")[0] for key in LEAVES} - {""}
# Keys that say where, how long and over which knobs to search. Studies that differ only in these keys measure the same thing.
_SURROUNDINGS = (
    "env", "provenance", "runs_dir", "launcher", "launch.warm", "launch.slots", "launch.queue_minutes", "search_space", "tiers",
    "program.python", "study.name",
)  # fmt: skip
_SURROUNDING_GROUPS = ("study.budget.", "launch.slurm.", "launch.ray.", "search.", "tracker.", "record.", "explain.")


def is_setting(key: str) -> bool:
    """Returns whether a key decides what is measured (recipe, device, windows, objective); False for knobs."""
    return key in LEAVES and not (key in _SURROUNDINGS or key.startswith(_SURROUNDING_GROUPS) or is_knob(key))


def is_text(key: str) -> bool:
    """Returns whether the value of an existing key can only be text (or null)."""
    return LEAVES[key] in (str, str | None)


def settings(config: StudyConfig) -> dict[str, Any]:
    """Returns key -> value for the settings that differ from their defaults."""
    default = StudyConfig()
    pairs = {key: (operator.attrgetter(key)(config), operator.attrgetter(key)(default)) for key in LEAVES if is_setting(key)}
    return {key: value for key, (value, usual) in pairs.items() if value != usual}


def check_value(key: str, value: Any) -> None:
    """Checks a value against the type of an existing key.

    Raises:
        BadInput: the value does not have that type.
    """
    try:
        OmegaConf.update(_scratch(), key, value, merge=False)
    except OverflowError as error:  # for example, a whole number of 400 digits
        raise BadInput(f"{key}: too large, got {shown(value)}. Give a smaller number.") from error
    except OmegaConfBaseException as error:
        raise BadInput(refusal(key, value, error)) from error


@functools.cache
def _scratch() -> DictConfig:
    """Returns an object to try values on. It is shared: creating one takes 20 ms, and values set earlier do not matter."""
    return typing.cast(DictConfig, OmegaConf.structured(StudyConfig))


def unknown_key(key: str, value: Any) -> str:
    """Returns the message for a key that does not exist. It suggests the same name in another group, or else similar keys."""
    wrong = f"{key}: there is no such key, got {shown(value)}."
    if key in KNOWN_AS:
        return f"{wrong} {KNOWN_AS[key]}"
    if key in GROUPS:
        inside = [name for name in LEAVES if name.startswith(f"{key}.")]
        return f"{key}: a group of keys, not a key, got {shown(value)}. Allowed: {', '.join(inside[:12])}. Set one of them."
    last = key.rpartition(".")[2]
    twins = [name for name in LEAVES if name.rpartition(".")[2] == last]
    if twins:
        return f"{wrong} Did you mean {(nearest(key, twins) if '.' in key else twins)[0]!r}? See `autotune run --help`."
    return f"{wrong} {one_of(key, [*CONFIG_GROUPS, *LEAVES, 'env.NAME'], show=6)} See `autotune run --help`."


def refusal(key: str, value: Any, error: OmegaConfBaseException) -> str:
    """Returns the message for a value that OmegaConf rejected for `key`."""
    hint = LEAVES[key]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"{key}: no such value, got {shown(value)}. {one_of(str(value), hint.__members__)}"
    return f"{key}: wrong type, got {shown(value)}. Allowed: {ALLOWED.get(key) or type_words(hint)}."


def type_words(hint: Any) -> str:
    """Returns a type hint in words."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        null = " or null" if len(members) < len(typing.get_args(hint)) else ""
        return " or ".join(WORDS[member] for member in members) + null
    return WORDS.get(typing.get_origin(hint) or hint, str(hint))


def no_such(key: str, value: Any, allowed: typing.Iterable[str], kind: str) -> str:
    """Returns the message for an unknown name, with the nearest allowed names."""
    names = nearest(str(value), allowed)
    if (meant := ALSO_CALLED.get(str(value).lower())) in names:
        return f"{key}: no such {kind}, got {shown(value)}. Did you mean {meant!r}? Allowed: {', '.join(names)}."
    return f"{key}: no such {kind}, got {shown(value)}. {one_of(str(value), names)}"
