"""Sorts command-line overrides by meaning: keys with one value for Hydra, files to read, or domains to search."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString

from autotune.config import files
from autotune.config.domains import domain_of, parse
from autotune.config.keys import CONFIG_GROUPS, GROUPS, LEAVES, check_value, is_text, no_such, unknown_key
from autotune.config.literals import is_reference
from autotune.config.locate import folder, options
from autotune.errors import BadInput, nearest
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.environment import KNOBS, PREFIX
from autotune.knobs.values import shown, value_of
from autotune.space import Domain

TOP_LEVEL = {key.split(".")[0] for key in LEAVES}
RECIPE_KEYS = ("model", "data", "train", "launch")
GLOBAL_BATCH = "train.global_batch"
# Keys that also apply to commands, although their groups are in RECIPE_KEYS.
COMMAND_KEYS = (
    *(GLOBAL_BATCH, "launch.warm", "launch.slots", "launch.queue_minutes"),
    *(key for key in LEAVES if key.startswith(("launch.slurm.", "launch.ray."))),
)
LISTS = ("objective", "search.warm_start")  # keys that accept several values
# Library -> override. model=LIBRARY/NAME is short for this override and model.name=NAME.
LIBRARIES = {"timm": "model=timm", "torchvision": "model=resnet18"}
# GROUP=NAME, +GROUP=NAME or ++GROUP=NAME, which chooses a file. Unlike Hydra's grammar, it also matches groups with dots or
# leading digits.
FILE_CHOICE = re.compile(r"(\+{0,2})(\w[\w.-]*(?:/\w[\w.-]*)*)=(\w[\w.-]*)")


@dataclass
class Split:
    """The overrides of one command line, sorted.

    Attributes:
        hydra: checked overrides that Hydra composes.
        files: chosen configuration files of the user, in order.
        domains: knob key -> domain to search.
        pinned: keys of knobs with a single value.
        problems: what is wrong with the remaining overrides.
        cause: the first underlying exception of a problem.
    """

    hydra: list[str] = field(default_factory=list)
    files: list[files.Chosen] = field(default_factory=list)
    domains: dict[str, Domain] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    cause: BaseException | None = None


def split(overrides: Sequence[str], folders: list[Path], host_context: HostContext, *, has_command: bool) -> Split:
    """Returns the overrides sorted by meaning. Problems are collected, not raised.

    Args:
        overrides: KEY=VALUE as typed.
        folders: the user's own configuration folders, which take precedence over conf/.
        host_context: the machine whose bounds apply.
        has_command: whether a command is tuned; a recipe's keys are then rejected.
    """
    result = Split()
    if problem := _command_before_dashes(overrides):
        result.problems.append(problem)
        overrides = [typed for typed in overrides if "=" in typed]
    choices = [at for at, typed in enumerate(overrides) if typed.lstrip("+").startswith("model=")]
    for at, typed in enumerate(overrides):
        if at in choices[:-1] and _library_of(typed):  # model=LIBRARY/NAME sets two keys; a later model= replaces both
            continue
        try:
            for text in _of_library(typed):
                _place(text, result, folders, host_context, has_command)
        except BadInput as error:
            result.problems += error.problems
            result.cause = result.cause or error.__cause__
    result.problems += [
        f"{key}: pinned to one value and tuned over a domain at once, got both. Give one of the two."
        for key in sorted(result.pinned & result.domains.keys())
    ]
    return result


def _command_before_dashes(overrides: Sequence[str]) -> str:
    """Returns the error message for a command that is given without `--` before it; "" if the words are not a command."""
    words = [typed for typed in overrides if "=" not in typed]
    if not words or not (os.path.isfile(words[0]) or shutil.which(words[0])):
        return ""
    command = shlex.join(words)
    return f"{shown(command)}: not KEY=VALUE, but a command. A command goes after --: `-- {command}`."


def names_a_recipe(text: str) -> bool:
    """Whether an override names a model, or was probably meant to: `model=resnet18`, `modle=resnet18`, `resnet18`."""
    key, equals, _ = text.partition("=")
    key = key.lstrip("+")
    return not equals or key == "model" or (key not in LEAVES and nearest(key, [*CONFIG_GROUPS, *LEAVES])[0] == "model")


def _library_of(text: str) -> tuple[str, str] | None:
    """Returns (LIBRARY, NAME) of an override model=LIBRARY/NAME; None for any other word."""
    key, _, value = text.lstrip("+").partition("=")
    source, slash, name = value.partition("/")
    return (source, name) if key == "model" and slash and source in LIBRARIES else None


def _of_library(text: str) -> list[str]:
    """Returns the overrides that model=timm/NAME and model=torchvision/NAME expand to; any other word unchanged."""
    found = _library_of(text)
    if found is None:
        return [text]
    source, name = found
    if not name:
        raise BadInput(f"model: the name of the {source} model is missing, got {shown(text)}. Give model={source}/NAME.")
    return [LIBRARIES[source], f"model.name={name}"]


def _place(text: str, result: Split, folders: list[Path], host_context: HostContext, has_command: bool) -> None:
    if _place_file(text, result, folders, host_context, has_command):
        return
    override = parse(text)
    key = override.key_or_group
    _refuse_by_key(text, override)
    if has_command:
        _refuse_recipe_key(key, text)
    if override.is_sweep_override():
        if key in result.domains:
            raise BadInput(f"{key}: two domains, got {shown(text)} and another. Give one.")
        result.domains[key] = _domain(override, host_context)
    elif key.startswith(PREFIX):
        result.hydra.append(_environment(text, override, host_context))
        result.pinned.add(key)
    elif key in CONFIG_GROUPS or "/" in key:
        _check_group(key, override.value(), text, folders)
        _drop_earlier_choices(key, result)
        result.hydra.append(text.lstrip("+"))  # Hydra takes no `+` before a group that has a default
    else:
        _check_value(override, host_context)
        result.hydra.append(f"{key}={_as_typed(key, override.value(), text.partition('=')[2])}")  # `+` and `++` change nothing
        if is_knob(key):
            result.pinned.add(key)


def _place_file(text: str, result: Split, folders: list[Path], host_context: HostContext, has_command: bool) -> bool:
    """Handles an override if it chooses a file from the user's folders; returns whether it does.

    Raises:
        BadInput: the override can only mean a file and there is none, or the file cannot be used.
    """
    found = FILE_CHOICE.fullmatch(text)
    if not found or found[2].startswith("hydra/"):
        return False
    plus, group, name = found.groups()
    if not plus and group not in CONFIG_GROUPS and "/" not in group:
        return False
    path = files.find(group, name, folders)
    if path is None:
        if plus and group.split(".")[0] not in TOP_LEVEL:
            _check_group(group, name, text, folders)
        return False
    chosen = files.read(path, group, host_context)
    if has_command:
        for key in chosen.keys:
            _refuse_recipe_key(key, text)
    if not plus:
        _drop_earlier_choices(group, result)
    result.files.append(chosen)
    return True


def _drop_earlier_choices(group: str, result: Split) -> None:
    """Drops earlier choices for a group: the last override wins, as with every key."""
    result.hydra = [text for text in result.hydra if not text.startswith(f"{group}=")]
    result.files = [chosen for chosen in result.files if chosen.group != group]


def _refuse_by_key(text: str, override: Override) -> None:
    key = override.key_or_group
    if override.type is OverrideType.DEL:
        raise BadInput(f"{key}: keys cannot be deleted, got {shown(text)}. To unset a key, give KEY=null.")
    if override.is_hydra_override() or key == "hydra" or override.package is not None:
        raise BadInput(f"{key}: not a key of autotune, got {shown(text)}. Hydra's own settings cannot be changed here.")


def _refuse_recipe_key(key: str, text: str) -> None:
    if key.split(".")[0] in RECIPE_KEYS and key not in COMMAND_KEYS:
        own = " A command starts its processes itself: -- torchrun --nproc_per_node=N SCRIPT." if key == "launch.nproc" else ""
        what = f"{key}: belongs to a built-in recipe, got {shown(text)}."
        raise BadInput(f"{what} Leave it out, or leave out '-- COMMAND'.{own}")


def _domain(override: Override, host_context: HostContext) -> Domain:
    key = override.key_or_group
    if is_knob(key):
        return domain_of(knob(key), override, host_context)
    if key in CONFIG_GROUPS or key in LEAVES:
        give = f"Write several values as a list: {key}=[A,B]." if key in LISTS else "Give one value."
        raise BadInput(f"{key}: only knobs can be tuned, got {shown(override.input_line)}. {give} See `autotune knobs`.")
    raise BadInput(unknown_key(key, (override.input_line or "").partition("=")[2]))


def _environment(text: str, override: Override, host_context: HostContext) -> str:
    """Returns the override of an environment variable with its value exactly as typed: 0.10 and true stay "0.10" and "true"."""
    key, written = override.key_or_group, override.value()
    plain = written if isinstance(override._value, QuotedString) else text.partition("=")[2]
    if owner := KNOBS.get(key.removeprefix(PREFIX)):
        words = {"1": "true", "0": "false"} if knob(owner).type is bool else {}
        raise BadInput(f"{key}: belongs to a knob, got {shown(text)}. Set the knob: {owner}={words.get(str(plain), plain)}.")
    value = str(value_of(knob(key), plain, host_context))
    return f"++{key}={QuotedString(text=value, quote=Quote.double).with_quotes()}"


def _as_typed(key: str, value: Any, typed: str) -> str:
    """Returns a value for Hydra. Hydra reads the name 2026_12_01 as 20261201, and 1.10 as 1.1, so such texts are quoted."""
    is_misread = type(value) in ((int, float) if key in LISTS else (bool, int, float))  # warm_start=false stays a truth value
    if not is_misread or is_knob(key) or "(" in typed or not (is_text(key) or key in LISTS):
        return typed
    return QuotedString(text=typed.strip(), quote=Quote.double).with_quotes()


def _check_group(group: str, value: Any, text: str, folders: list[Path]) -> None:
    names = options(group, [*folders, folder("conf")])
    if not names:
        problem = f"{group}: no such group of configuration files, got {shown(text)}."
        raise BadInput(f"{problem} Give the folder that contains it: --config-dir DIR.")
    if value not in names:
        others = " Other torchvision classifiers: model.name=NAME." if group == "model" else ""
        raise BadInput(no_such(group, value, names, group if group in CONFIG_GROUPS else "configuration file") + others)


def _check_value(override: Override, host_context: HostContext) -> None:
    key, value = override.key_or_group, override.value()
    if key in GROUPS or key not in LEAVES:
        raise BadInput(unknown_key(key, value))
    if key in files.MAPPINGS:
        one_by_one = (
            "Set environment variables one by one: env.NAME=VALUE." if key == "env" else "Only exported files contain it."
        )
        raise BadInput(f"{key}: cannot be set like this, got {shown(value)}. {one_by_one}")
    if is_knob(key) and value is not None and not is_reference(value):
        value_of(knob(key), value, host_context)
    check_value(key, value)
