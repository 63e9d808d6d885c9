"""Checks of configuration files that the user brings: an exported best.yaml, a model or data group of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.keys import GROUPS, LEAVES, refusal, structured, unknown_key
from autotune.errors import BadInput
from autotune.knobs.base import Circumstances
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.values import shown, value_of

PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
MAPPINGS = ("env", "provenance")  # keys whose value is a mapping of anything


def find(group: str, name: str, folders: list[Path]) -> Path | None:
    """Returns the file of a configuration group's option, in the first folder that has it."""
    return next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)


def check(path: Path, group: str, circumstances: Circumstances) -> None:
    """Checks a file before Hydra composes it, since Hydra stops at the first problem.

    Args:
        path: the file.
        group: the group it is chosen from, which is where its keys go unless it says `# @package`.
        circumstances: the machine whose bounds hold.

    Raises:
        BadInput: not YAML, not a mapping, unknown keys or unusable values; names them all.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: not readable as YAML ({' '.join(str(error).split())}). Correct the file.") from error
    if not isinstance(document, dict | None):
        raise BadInput(f"{path}: not a mapping of keys to values, got {shown(document)}. Correct the file.")
    header = PACKAGE.search(text)
    package = header[1] if header else group.replace("/", ".")
    prefix = "" if package == "_global_" else f"{package}."
    problems = []
    cause: BaseException | None = None
    for key, value in _flat(document or {}, prefix):
        try:
            _check_key(key, value, circumstances)
        except BadInput as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
            cause = cause or error.__cause__
    if problems:
        raise BadInput(problems) from cause


def _flat(document: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        key = f"{prefix}{name}"
        if key in ("defaults", f"{prefix}defaults"):
            continue
        if isinstance(value, dict) and (key in GROUPS or key == "env"):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _check_key(key: str, value: Any, circumstances: Circumstances) -> None:
    if is_knob(key):
        if isinstance(value, str) and "${" in value:
            return
        if value is not None:
            value_of(knob(key), value, circumstances)
        return
    if key not in LEAVES:
        raise BadInput(unknown_key(key))
    if key in MAPPINGS and value is None:
        return
    try:
        OmegaConf.update(structured(), key, value, merge=True)
    except OmegaConfBaseException as error:
        raise BadInput(refusal(key, value, error)) from error
