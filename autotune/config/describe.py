"""Lists the configuration's keys for `autotune run --help`, from the schema and its docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

from autotune.config.locate import folder, options
from autotune.config.schema import StudyConfig
from autotune.knobs.catalogue import GROUPS as KNOB_GROUPS


@dataclass(frozen=True)
class Row:
    """One line of the list: a key, or a whole group, and its meaning."""

    key: str
    meaning: str


def overview(schema: type[Any] = StudyConfig, prefix: str = "") -> list[Row]:
    """Returns the rows in the order of the schema.

    There is a row for each key with its default (such as "launch.nproc=1"), except keys of groups that are listed as a whole:
    such a group has one row (such as "loader.*").
    """
    hints, meanings, rows = typing.get_type_hints(schema), documented(schema), []
    for field in dataclasses.fields(schema):
        key, hint, meaning = f"{prefix}{field.name}", hints[field.name], meanings[field.name]
        if key in ("model", "data"):
            files = ", ".join(options(key, [folder("conf")]))
            rows.append(Row(f"{key}=NAME", f"{meaning.rstrip('.')}: {files}, or a file of --config-dir"))
        if key == "search_space":
            names = ", ".join(options("search_spaces", [folder("search_spaces").parent]))
            meaning = meaning.replace("search_spaces/", f"search_spaces/ ({names})")
        if key == "provenance":  # only exported files contain it
            continue
        if not dataclasses.is_dataclass(hint):
            default = field.default if field.default_factory is dataclasses.MISSING else None
            rows.append(Row(_name(key, default), meaning))
        elif key in KNOB_GROUPS or not documented(typing.cast(type[Any], hint)):
            names = ", ".join(inner.name for inner in dataclasses.fields(hint))
            is_listed = bool(rows) and rows[-1].meaning.endswith(names)
            rows.append(Row(f"{key}.*", meaning if is_listed else f"{meaning.rstrip('.')}: {names}"))
        else:
            rows += overview(typing.cast(type[Any], hint), f"{key}.")
    return rows


def documented(schema: type[Any]) -> dict[str, str]:
    """Returns field -> meaning from the docstring's "Attributes:"; {} without such a section."""
    part = (inspect.getdoc(schema) or "").partition("Attributes:\n")[2]
    joined = re.sub(r"\n {5,}", " ", part)
    return dict(re.findall(r"^ {4}(\w+): (.+)$", joined, re.MULTILINE))


def _name(key: str, default: Any) -> str:
    if key == "env":
        return "env.NAME=VALUE"
    words = {None: "null", True: "true", False: "false"}
    value = default.name if isinstance(default, enum.Enum) else default
    return f"{key}={words[value] if value is None or isinstance(value, bool) else value}"
