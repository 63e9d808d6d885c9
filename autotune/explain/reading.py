"""Reads the documents that the passes of a trial wrote. What cannot be read is a sentence, never a zero."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autotune.explain.evidence import Operations
from autotune.harness.explain.documents import LINES, MEMORY, TRACE, Compiled, Line, Lines, Memory, Site, Stage, Traced

MAX_DOCUMENT_BYTES = 64 << 20
Document = TypeVar("Document", Lines, Traced, Memory)
Part = TypeVar("Part")


@dataclasses.dataclass
class Documents:
    """What the passes of one configuration found, by rank.

    Attributes:
        lines, traced, memory: documents of a pass; [] if it did not run or nothing of it can be read.
        operations: what the traces say of operators; [] without a trace.
        notes: what is missing, and why; what the passes could not find out.
    """

    lines: list[Lines] = dataclasses.field(default_factory=list)
    traced: list[Traced] = dataclasses.field(default_factory=list)
    memory: list[Memory] = dataclasses.field(default_factory=list)
    operations: list[Operations] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def read(folders: dict[str, Path]) -> Documents:
    """Returns the documents of some passes.

    Args:
        folders: pass -> folder of the trial that ran it.
    """
    made = Documents()
    if LINES in folders:
        made.lines = _by_rank(folders[LINES], LINES, _lines, made.notes)
    if TRACE in folders:
        made.traced = _by_rank(folders[TRACE], TRACE, lambda raw: _made(Traced, raw), made.notes)
    if MEMORY in folders:
        made.memory = _by_rank(folders[MEMORY], MEMORY, lambda raw: _made(Memory, raw), made.notes)
    return made


def _by_rank(folder: Path, which: str, convert: Callable[[Any], Document], notes: list[str]) -> list[Document]:
    found: list[Document] = []
    for file in sorted(folder.glob(f"explained.{which}.rank*.json"), key=_rank):
        try:
            found.append(convert(_read(file)))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            notes.append(f"{which}: rank {_rank(file)} is not known: {file.name} cannot be read ({str(error)[:120]})")
    for note in found[0].notes if found else ():
        notes.append(f"{which}: {note}")
    there = {document.rank for document in found}
    wanted = max((document.world_size for document in found), default=0)
    missing = [str(rank) for rank in range(wanted) if rank not in there]
    if missing and not any("cannot be read" in note and note.startswith(which) for note in notes):
        notes.append(f"{which}: not known of rank {', '.join(missing)}, which wrote nothing")
    if not found and not notes:
        notes.append(f"{which}: not known, no document was written")
    return sorted(found, key=lambda document: document.rank)


def _rank(file: Path) -> int:
    found = re.search(r"rank(\d+)", file.name)
    return int(found[1]) if found else 0


def _read(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_DOCUMENT_BYTES:
        raise ValueError(f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("not a document")
    return raw


def _made(cls: Callable[..., Part], raw: dict[str, Any]) -> Part:
    """Returns a dataclass with the fields that this version knows; later versions may write more."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in raw.items() if name in names})


def _lines(raw: dict[str, Any]) -> Lines:
    parts: dict[str, Any] = {
        "lines": [_made(Line, line) for line in raw["lines"]],
        "stages": [_made(Stage, stage) for stage in raw["stages"]],
        "syncs": [_made(Site, site) for site in raw["syncs"]],
        "compiled": _made(Compiled, raw["compiled"]) if raw.get("compiled") else None,
    }
    return _made(Lines, {**raw, **parts})
