"""Command-line overrides split by what they mean: a pin or plain key for Hydra, or a domain to search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config import files
from autotune.config.domains import domain_of, parse
from autotune.config.keys import GROUPS, LEAVES, no_such, refusal, structured, unknown_key
from autotune.config.locate import options
from autotune.errors import BadInput
from autotune.knobs.base import Circumstances
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.environment import PREFIX
from autotune.knobs.values import shown, value_of
from autotune.space import Domain

CONFIG_GROUPS = ("model", "data")
RECIPE_KEYS = ("model", "data", "train")


@dataclass
class Split:
    """The overrides of one command line, sorted.

    Attributes:
        hydra: those that Hydra composes, each known to be good.
        domains: knob key -> domain of those that ask for a search.
        pinned: knob keys given one value.
        problems: what is wrong with the rest.
        cause: the first foreign error behind a problem.
    """

    hydra: list[str] = field(default_factory=list)
    domains: dict[str, Domain] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    cause: BaseException | None = None


def split(overrides: Sequence[str], folders: list[Path], circumstances: Circumstances, *, has_command: bool) -> Split:
    """Returns the overrides sorted by meaning; every problem is collected, none is raised.

    Args:
        overrides: KEY=VALUE as typed.
        folders: where configuration groups are looked up, conf/ first.
        circumstances: the machine whose bounds hold.
        has_command: whether a command is tuned, which has no use for a recipe's keys.
    """
    result = Split()
    for text in overrides:
        try:
            _place(text, result, folders, circumstances, has_command)
        except BadInput as error:
            result.problems += error.problems
            result.cause = result.cause or error.__cause__
    result.problems += [
        f"{key}: pinned to one value and tuned over a domain at once. Give one of the two."
        for key in sorted(result.pinned & result.domains.keys())
    ]
    return result


def _place(text: str, result: Split, folders: list[Path], circumstances: Circumstances, has_command: bool) -> None:
    override = parse(text)
    key = override.key_or_group
    _refuse_by_key(text, override, has_command)
    if override.is_sweep_override():
        if key in result.domains:
            raise BadInput(f"{key}: two domains. Give one.")
        result.domains[key] = _domain(override, circumstances)
    elif key.startswith(PREFIX):
        result.hydra.append(_environment(text, override, circumstances))
        result.pinned.add(key)
    elif _is_group(override, folders):
        _check_group(override, folders, circumstances)
        result.hydra.append(text)
    else:
        _check_value(override, circumstances)
        result.hydra.append(f"{key}={text.partition('=')[2]}")  # `+` and `++` on a key that exists mean the same as none
        if is_knob(key):
            result.pinned.add(key)


def _refuse_by_key(text: str, override: Override, has_command: bool) -> None:
    key = override.key_or_group
    if override.type is OverrideType.DEL:
        raise BadInput(f"{key}: nothing can be deleted, got {shown(text)}. Set a key to null to take back its value.")
    if override.is_hydra_override() or key == "hydra" or override.package is not None:
        raise BadInput(f"{key}: not a key of autotune, got {shown(text)}. Hydra's own settings cannot be changed here.")
    if has_command and key.split(".")[0] in RECIPE_KEYS:
        raise BadInput(f"{key}: belongs to a built-in recipe, got {shown(text)}. Leave it out, or leave out '-- COMMAND'.")


def _domain(override: Override, circumstances: Circumstances) -> Domain:
    key = override.key_or_group
    if is_knob(key):
        return domain_of(knob(key), override, circumstances)
    if key in CONFIG_GROUPS or key in LEAVES:
        raise BadInput(
            f"{key}: only knobs can be tuned, got {shown(override.input_line)}. Give one value. See `autotune knobs`."
        )
    raise BadInput(unknown_key(key))


def _environment(text: str, override: Override, circumstances: Circumstances) -> str:
    """Returns the override of an environment variable that keeps its value's letters: 0.10 is not 0.1, true is not True."""
    key, written = override.key_or_group, override.value()
    plain = written if isinstance(override._value, QuotedString) else text.partition("=")[2]
    value = str(value_of(knob(key), plain, circumstances))
    return f"++{key}={QuotedString(text=value, quote=Quote.double).with_quotes()}"


def _is_group(override: Override, folders: list[Path]) -> bool:
    """Returns whether an override chooses a configuration file: `model=resnet18`, or `+resnet18=best` out of a --config-dir."""
    key = override.key_or_group
    if key in CONFIG_GROUPS or "/" in key:
        return True
    may_be = override.is_add() and "." not in key and key not in LEAVES
    return may_be and (key not in GROUPS or bool(options(key, folders)))


def _check_group(override: Override, folders: list[Path], circumstances: Circumstances) -> None:
    key, value = override.key_or_group, override.value()
    names = options(key, folders)
    if not names:
        raise BadInput(
            f"{key}: no such group of configuration files, got {shown(override.input_line)}. "
            "Give the folder that holds it: --config-dir DIR."
        )
    if key == "model" and value is None:
        return
    if value not in names:
        others = " Other torchvision classifiers: model.name=NAME." if key == "model" else ""
        raise BadInput(no_such(key, value, names, key if key in CONFIG_GROUPS else "configuration file") + others)
    if path := files.find(key, str(value), folders):
        files.check(path, key, circumstances)


def _check_value(override: Override, circumstances: Circumstances) -> None:
    key, value = override.key_or_group, override.value()
    if key in GROUPS:
        raise BadInput(unknown_key(key))
    if key in files.MAPPINGS:
        raise BadInput(
            f"{key}: cannot be set as a whole, got {shown(value)}. Set environment variables one by one: env.NAME=VALUE."
        )
    if is_knob(key) and value is not None and not _is_reference(value):
        value_of(knob(key), value, circumstances)
    try:
        OmegaConf.update(structured(), key, value, merge=True)
    except OmegaConfBaseException as error:
        raise BadInput(refusal(key, value, error)) from error


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
