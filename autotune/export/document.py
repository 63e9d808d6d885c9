"""Files of other libraries: their own keys and values, as YAML with comments or as JSON, and what they cannot express."""

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

# What a library's file says of a knob's value; None for what it cannot express.
Row = Callable[[Any, Winner], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is handed over.

    Attributes:
        text: the file.
        left_out: a line for each knob that the format cannot express, with how to set it otherwise.
        notes: what the reader should know and the file cannot say; a file that has comments says it, too.
        header: what this is and what it is worth, where the file has no comments to say it.
    """

    text: str
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A library's configuration.

    Attributes:
        settings: its keys and values.
        usage: how it is loaded; a line each.
        apart: what belongs to the winner and not into this file, ready to be copied: title line -> keys and values.
        left_out, notes: as in Exported.
    """

    settings: dict[str, Any]
    usage: list[str]
    apart: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expressed(winner: Winner, rows: dict[str, Row], *, skip: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Returns a library's keys for the knobs of a winner, and a line for each knob that it cannot express.

    Args:
        winner: what to write down.
        rows: knob key -> what the library's file says of it.
        skip: knobs that the format hands over in another place.
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
    """Returns a knob that a format cannot express, and how it is set in code: "threads.intra=2: torch.set_num_threads(2)"."""
    return f"{one_line(f'{key}={value_text(value)}', MAX_LINE)}: {one_line(how(key, value), 1 << 16)}"  # what to do is not cut


def as_yaml(winner: Winner, document: Document) -> Exported:
    """Returns a document as YAML, everything else as comments."""
    lines = [*winner.headline, *document.usage, *document.notes]
    parts = ["".join(f"# {line}\n" for line in lines), f"\n{_dump(document.settings)}"]
    for title, settings in document.apart.items():
        parts.append(f"\n# {title}\n" + "".join(f"# {line}\n" for line in _dump(settings).splitlines()))
    if document.left_out:
        parts.append("\n# Not expressible here; `autotune apply` sets these, too:\n")
        parts += [f"#   {line}\n" for line in document.left_out]
    return Exported(text="".join(parts), left_out=document.left_out, notes=document.notes)


def as_json(winner: Winner, document: Document) -> Exported:
    """Returns a document as JSON, which has no comments: what cannot be said in it is left to the caller."""
    apart = [f"{title} {json.dumps(settings)}" for title, settings in document.apart.items()]
    text = json.dumps(document.settings, indent=2, ensure_ascii=False) + "\n"
    return Exported(text=text, left_out=document.left_out, header=winner.headline, notes=[*document.notes, *apart])


def _dump(settings: dict[str, Any]) -> str:
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
