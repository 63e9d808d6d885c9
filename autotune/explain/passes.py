"""Finds and reads the files that the passes of `explain` wrote for each rank: three documents and a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autotune.documents import read_bytes
from autotune.errors import Unreadable
from autotune.harness.explain.documents import LINES, MEMORY, PASSES, TRACE, Lines, Memory, Traced, document_file
from autotune.plain_json import MAX_INT, from_json

MAX_DOCUMENT_BYTES = 64 << 20
MAX_RANKS = 1 << 16  # a document that claims more is damaged; without a limit, its missing ranks would be listed one by one
# Keys in a document's rows whose values must be numbers.
NUMBERS = ("line", "count", "seconds", "bytes", "activations", "parameters", "flops")
_NAME = re.compile(rf"explained\.({'|'.join(PASSES)})\.rank(\d+)\.json")
KINDS: dict[str, type[Any]] = {LINES: Lines, TRACE: Traced, MEMORY: Memory}
_Document = TypeVar("_Document", Lines, Traced, Memory)


@dataclass(kw_only=True)
class Passes:
    """The files that the passes wrote, by rank.

    Attributes:
        lines, traced, memory: rank -> document.
        traces: rank -> path of its trace.
        absent: pass -> reasons why files are missing, each for one rank ("rank 1: ...") or for all ranks.
    """

    lines: dict[int, Lines] = field(default_factory=dict)
    traced: dict[int, Traced] = field(default_factory=dict)
    memory: dict[int, Memory] = field(default_factory=dict)
    traces: dict[int, Path] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)

    def miss(self, which: str, reason: str) -> None:
        """Records why a file of a pass is missing."""
        self.absent.setdefault(which, []).append(reason)

    @property
    def world_size(self) -> int:
        """Number of ranks of the program, including ranks that wrote nothing; 0 if no rank wrote anything."""
        return max((each.world_size for found in self.by_pass.values() for each in found.values()), default=0)

    def of(self, which: str) -> list[Any]:
        """Returns the documents of a pass in the order of their ranks."""
        return [document for _, document in sorted(self.by_pass[which].items())]

    def notes(self, ran: Iterable[str]) -> list[str]:
        """Returns sentences on what is missing and why, including what rank 0 could not measure."""
        notes = []
        for which in ran:
            notes += [f"{which}: not known, {reason}" for reason in self.absent.get(which, ())]
            notes += [f"{which}: {note}" for document in self.of(which)[:1] for note in document.notes]
        return notes

    @property
    def by_pass(self) -> dict[str, dict[int, Any]]:
        """Pass -> rank -> document."""
        return {LINES: self.lines, TRACE: self.traced, MEMORY: self.memory}


def read_passes(folders: Sequence[Path], mask: Callable[[str], str] = str) -> Passes:
    """Returns the files of the passes, masked. If several folders hold the same document, the last folder counts."""
    found = Passes()
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if named := _NAME.fullmatch(path.name):
                _read(found, path, named[1], int(named[2]), mask)
    for which, documents in found.by_pass.items():
        if not documents and which not in found.absent:
            found.miss(which, f"the pass {which!r} was not run, or wrote nothing")
        for rank in range(found.world_size) if documents else ():
            # If the rank's file is unreadable, the reason is recorded already.
            is_told = any(reason.startswith(f"rank {rank}: ") for reason in found.absent.get(which, ()))
            if rank not in documents and not is_told:
                found.miss(which, f"rank {rank}: {document_file(which, rank)} is missing")
    return found


def _read(found: Passes, path: Path, which: str, rank: int, mask: Callable[[str], str]) -> None:
    try:
        document = found.by_pass[which][rank] = read_document(path, KINDS[which], mask)
    except Unreadable as error:
        found.miss(which, f"rank {rank}: {error}")
        return
    if isinstance(document, Traced) and Path(document.file).name == document.file != "":
        found.traces[rank] = path.parent / document.file
    elif which == TRACE:
        found.miss(TRACE, f"rank {rank}: {'; '.join(document.notes) or 'no trace was written'}")


def read_document(path: Path, kind: type[_Document], mask: Callable[[str], str] = str) -> _Document:
    """Returns a document.

    Raises:
        Unreadable: the file does not exist, is cut short, is not JSON or holds another kind of document.
    """
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise Unreadable(f"{path.name}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
        raw = json.loads(read_bytes(path).decode("utf-8", "replace"))
    except OSError as error:
        raise Unreadable(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Unreadable(f"{path.name}: not JSON, or cut short") from None
    try:
        _check_numbers(raw)
        document = from_json(_masked(raw, mask), kind)
        if document.world_size > MAX_RANKS:
            raise ValueError(f"world_size: larger than {MAX_RANKS:,}")
        return document
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise Unreadable(f"{path.name}: not a document of this pass: {error}") from None


def _check_numbers(value: Any) -> None:
    """Checks the numbers in a document's rows. Rows are plain dicts, whose values `from_json` does not check.

    Raises:
        TypeError: the value of a name in `NUMBERS` is not a number, or is too large.
    """
    for name, item in value.items() if isinstance(value, dict) else ():
        if name in NUMBERS and not (item is None or (isinstance(item, int | float) and abs(item) < MAX_INT)):
            raise TypeError(f"{name}: not a number, or too large")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(item)


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    """Returns a document without secrets, and without lone surrogates, which a path may contain but UTF-8 text may not."""
    if isinstance(value, dict):
        return {_writable(name): _masked(item, mask) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, mask) for item in value]
    return _writable(mask(value)) if isinstance(value, str) else value


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
