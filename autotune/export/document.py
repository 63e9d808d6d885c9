"""Writes configuration files for other libraries, as YAML or JSON, and lists the knobs that a file cannot express."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from autotune.export.in_code import how
from autotune.export.winner import Winner
from autotune.knobs.base import value_text
from autotune.plain_text import one_line
from autotune.records import KnobValue

MAX_LINE = 160
MAX_COPIED = 1 << 16  # limit for text that the reader copies: so high that such text is not cut in practice

# Function that returns a library's keys and values for a knob's value; None if the library cannot express it.
Row = Callable[[Any, Winner], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file with remarks.

    Attributes:
        text: content of the file.
        left_out: one line per knob that the format cannot express; it says how to set the knob instead.
        notes: remarks for the reader; a format with comments includes them in the file too.
        header: headline of the configuration, for formats without comments.
    """

    text: str
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A library's configuration.

    Attributes:
        settings: the library's keys and values.
        usage: lines that explain how to load the file.
        apart: settings of the winner that do not belong in this file, for the user to copy; title line -> keys and values.
        left_out, notes: as in Exported.
    """

    settings: dict[str, Any]
    usage: list[str]
    apart: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expressed(winner: Winner, rows: dict[str, Row], *, skip: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Returns a library's settings for a winner's knobs, and one line per knob that it cannot express.

    Args:
        winner: the configuration to express.
        rows: knob key -> function that returns the library's settings for it.
        skip: knobs that the format covers elsewhere.
    """
    settings: dict[str, Any] = {}
    left_out = []
    for key, value in winner.active.items():
        row = rows.get(key)
        said = row(value, winner) if row else None
        if said is not None:
            settings |= said
        elif key not in skip:
            left_out.append(left_out_line(key, value))
    return settings, left_out


def left_out_line(key: str, value: KnobValue) -> str:
    """Returns a line on how to set a knob that a format cannot express: "threads.intra=2: torch.set_num_threads(2)"."""
    return f"{one_line(f'{key}={value_text(value)}', MAX_LINE)}: {one_line(how(key, value), MAX_COPIED)}"


def as_yaml(winner: Winner, document: Document) -> Exported:
    """Returns a document as YAML, with everything else as comments."""
    lines = [*winner.headline, *document.usage, *document.notes]
    parts = ["".join(f"# {line}\n" for line in lines), f"\n{_dump(document.settings)}"]
    for title, settings in document.apart.items():
        parts.append(f"\n# {title}\n" + "".join(f"# {line}\n" for line in _dump(settings).splitlines()))
    if document.left_out:
        parts.append("\n# Not expressible here; `autotune apply` sets these, too:\n")
        parts += [f"#   {line}\n" for line in document.left_out]
    return Exported(text="".join(parts), left_out=document.left_out, notes=document.notes)


def as_json(winner: Winner, document: Document) -> Exported:
    """Returns a document as JSON. JSON has no comments, so the caller has to print header, notes and omissions."""
    apart = [f"{title} {json.dumps(settings)}" for title, settings in document.apart.items()]
    text = json.dumps(document.settings, indent=2, ensure_ascii=False) + "\n"
    return Exported(text=text, left_out=document.left_out, header=winner.headline, notes=[*document.notes, *apart])


def _dump(settings: dict[str, Any]) -> str:
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
