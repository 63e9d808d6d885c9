"""Reads the user's own configuration files: an exported best.yaml, or files of the model and data groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autotune
from autotune.config import yaml_file
from autotune.config.keys import GROUPS, LEAVES, check_value, unknown_key
from autotune.config.literals import is_reference
from autotune.config.provenance import EXPORTED, PROVENANCE, Provenance
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.values import shown, value_of

PACKAGE = re.compile(r"\A(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")
MAPPINGS = ("env", "provenance")  # keys whose value is a mapping with arbitrary content
PART = "PACKAGE.MODULE:FUNCTION"
# Keys that choose what is run -> form of the value. Only the command line may set them.
COMMAND_LINE_ONLY = {
    "program.python": "PYTHON",
    "model.factory": PART,
    "data.factory": PART,
    "train.step": PART,
    "launch.ray.python": "PYTHON",
    "launch.slurm.args": "--OPTION=VALUE",  # a file must not set it: srun's --prolog and --epilog name programs that srun runs
}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A checked configuration file that an override chose.

    Attributes:
        group: the configuration group of the file.
        document: the file's keys and values.
        package: Hydra's package of the keys, "_global_" for the top level.
        keys: the full keys that the file sets.
    """

    group: str
    document: dict[str, Any]
    package: str
    keys: list[str]


def find(group: str, name: str, folders: list[Path]) -> Path | None:
    """Returns the file GROUP/NAME.yaml from the first of the folders that has it; None if no folder has it."""
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if os.path.lexists(path)), None)


def read(path: Path, group: str, host_context: HostContext) -> Chosen:
    """Reads a file and checks each key, so that Hydra composes only valid content.

    Args:
        path: the file.
        group: the configuration group of the file. The keys belong to it unless the file has a header `# @package`.
        host_context: the machine whose bounds apply.

    Raises:
        BadInput: not YAML, not a mapping, unknown keys or unusable values; lists every problem.
    """
    document = yaml_file.read(path, group, EXPORTED if group == "BEST" else yaml_file.ALLOWED)
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise BadInput(f"{group}: not a mapping of keys to values, got {shown(document)} in {path}. Correct the file.")
    header = PACKAGE.search(path.read_text(encoding="utf-8-sig"))
    package = header[1] if header else group.replace("/", ".")
    problems = []
    cause: BaseException | None = None
    values = dict(flat(document, "" if package == "_global_" else f"{package}."))
    for key, value in values.items():
        try:
            check_key(key, value, host_context)
        except BadInput as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
            cause = cause or error.__cause__
    if problems and not header and package not in GROUPS:
        problems = [
            f"{path}: {package}: not a group of keys, got {shown(document)}. Begin the file with '# @package _global_'."
        ]
    if problems:
        raise BadInput([*problems, *_other_version(document, path)]) from cause
    return Chosen(group=group, document=document, package=package, keys=list(values))


def flat(document: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of a document with their values."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (key in GROUPS or key.partition(".")[0] in MAPPINGS):
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def check_key(key: str, value: Any, host_context: HostContext) -> None:
    """Checks a key and its value in a file.

    Raises:
        BadInput: no such key, a key that files may not set, or a value of the wrong type.
    """
    if key.rpartition(".")[2].startswith("_"):
        raise BadInput(f"{key}: a file must not call or build anything, got {shown(value)}. Remove it: plain values only.")
    if key == "defaults":
        raise BadInput(f"{key}: not supported in a file, got {shown(value)}. Name each file on the command line: +GROUP=NAME.")
    if key in COMMAND_LINE_ONLY:
        give = f"{key}={COMMAND_LINE_ONLY[key]}"
        raise BadInput(f"{key}: not read from a file, got {shown(value)}. Give it on the command line: {give}.")
    if key.startswith("provenance."):  # not checked here: `autotune verify` checks the parts that it reads
        return
    if is_knob(key):
        is_variable = key not in LEAVES  # an environment variable must have a value; for other knobs, null means "not pinned"
        if not is_reference(value) and (value is not None or is_variable):
            value_of(knob(key), value, host_context)
        if is_variable:
            return
    if key not in LEAVES:
        raise BadInput(unknown_key(key, value))
    if key in MAPPINGS and value is None:
        return
    check_value(key, value)


def _other_version(document: dict[Any, Any], path: Path) -> list[str]:
    """Returns a problem if an exported file comes from another version of autotune, else []."""
    version = Provenance.of(document.get(PROVENANCE)).version
    if version in ("", autotune.__version__):
        return []
    return [f"{path}: written by autotune {version}, this is {autotune.__version__}. Export it again from its study."]
