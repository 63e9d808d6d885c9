"""Implements `autotune prune`: lists files that no command needs any more, with their sizes, and removes them with --yes.

In a study that stays, only files that match OF_STUDY or OF_TRIAL are removed. Other files, such as files in `trials/*/kept`,
may be the user's own. Links are neither followed nor removed, because their targets may belong to someone else.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, print_json, table_width
from autotune.errors import BadInput
from autotune.explain.tables import FOLDER, INDEX
from autotune.harness.protocol import SCRATCH
from autotune.owner import OWNER_FILE, describe, held, owner_of
from autotune.plain_text import escaped
from autotune.quantities import bytes_text
from autotune.run_dir import StudyFolder
from autotune.studies import find, foreign, studies
from autotune.trackers.store import LOCK_FILE

CACHE, TRACES, LOGS, OTHER, WHOLE = KINDS = ("compile cache", "traces", "logs", "other", "whole study")
OF_STUDY = {CACHE: ("compile_cache",), LOGS: ("tracking.log",), OTHER: ("*.tmp", ".probe")}
OF_TRIAL = {  # files of trials that are over
    TRACES: ("trace.rank*.json.gz",),
    LOGS: ("stdout.log", "stderr.log", "stdout.first.log", "stderr.first.log"),
    OTHER: ("progress.jsonl", "loader*.bin", "peer*.json", "unfinished.trace.*", "*.tmp", SCRATCH),
}
TEMPORARY = {OTHER: ("autotune-fault-????????.log", *(f"autotune-{name}-????????" for name in ("picture", "inspect", "slots")))}
LEAST_NAME = 16  # characters for a study's name; if fewer would be left, the table omits the columns per kind
MAX_FOREIGN = 5  # at most so many files and folders that autotune did not make are named for each study
REMOVED = ".removed"  # suffix of a study's name while it is being removed
STALE_S = 86_400.0  # a temporary file that has not been changed for this long is no longer in use
UNITS_S = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed."""

    runs: Path
    studies: Sequence[str] = ()
    older_than: str | None = None
    is_meant: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether whole studies are to be removed."""
        return bool(self.studies) or self.older_than is not None


class Item(NamedTuple):
    """A file or folder to remove. `kind` is one of KINDS; `num_files` and `num_bytes` are from `sizes`."""

    kind: str
    path: Path
    num_files: int
    num_bytes: int


@dataclass(kw_only=True)
class Place:
    """What can be removed in a study, or in another folder.

    Attributes:
        name: the study's name, or the folder.
        study: the study's folder, which is locked while something is removed; None for another folder.
        items: what can be removed.
    """

    name: str
    study: Path | None = None
    items: list[Item] = field(default_factory=list)

    def add(self, kind: str, paths: Iterable[Path]) -> None:
        """Adds files and folders, with their sizes."""
        self.items += [Item(kind, path, *sizes(path)) for path in paths]

    def bytes_of(self, *kinds: str) -> int:
        """Returns the bytes of the items of these kinds, or of all items if no kind is given."""
        return sum(item.num_bytes for item in self.items if not kinds or item.kind in kinds)

    def as_json(self) -> dict[str, Any]:
        """Returns what --json prints about this place."""
        files, parts = sum(item.num_files for item in self.items), {item.kind for item in self.items}
        by_kind = {kind: self.bytes_of(kind) for kind in KINDS if kind in parts}
        return {"name": self.name, "files": files, "bytes": self.bytes_of(), "bytes_by_kind": by_kind}


def prune(asked: Asked, *, as_json: bool) -> int:
    """Prints what can be removed, and removes it with --yes. Returns 2 if something that was asked for could not be removed.

    Raises:
        BadInput: there is no such study, it is a link or in use, or the age is malformed.
    """
    kept: dict[str, str] = {}  # name of a study that is left alone -> why
    places = [place for place in (_whole(asked, kept) if asked.is_whole else _parts(asked.runs, kept)) if place.items]
    failed: dict[Path, str] = {}
    for place in places if asked.is_meant else ():
        failed |= _remove(place, kept)
    places = sorted((place for place in places if place.name not in kept), key=Place.bytes_of, reverse=True)
    if as_json:
        found, said = [place.as_json() for place in places], [f"{path}: {reason}" for path, reason in failed.items()]
        total = _num_bytes(places, failed)
        print_json({"is_removed": asked.is_meant, "bytes": total, "found": found, "kept": kept, "failed": said})
    else:
        _print(places, kept, failed, asked)
    return BadInput.exit_code if failed or (asked.studies and kept) else 0


def sizes(path: Path) -> tuple[int, int]:
    """Returns (number of files, bytes on the disk) of a file or a whole folder. Links count, but not their targets."""
    num_files = num_bytes = 0
    left = [os.fspath(path)]
    while left:  # a loop, because a stranger's folder may be nested deeper than Python can recurse
        at = left.pop()
        try:
            status = os.lstat(at)
            is_folder = stat.S_ISDIR(status.st_mode)
            left += [os.path.join(at, name) for name in (os.listdir(at) if is_folder else ())]
        except OSError:
            continue
        num_files, num_bytes = num_files + (not is_folder), num_bytes + status.st_blocks * 512
    return num_files, num_bytes


def _parts(runs: Path, kept: dict[str, str]) -> Iterator[Place]:
    """Yields what is no longer needed in the studies of a runs folder, and files that killed processes left behind."""
    for folder in studies(runs):
        if why := _why_not(folder):
            kept[folder.name] = why
            continue
        place, path = Place(name=folder.name, study=folder.path), folder.path
        for kind, found in _matching(path, OF_STUDY):
            if kind != CACHE or _status(folder) in ("complete", "failed"):  # `resume` needs an unfinished study's cache
                place.add(kind, [found])
        for trial in _folders(path / "trials"):
            is_over = trial.name.isdecimal() and (trial / "trial.json").is_file()  # "0007.bak" is a copy that the user made
            for kind, found in _matching(trial, OF_TRIAL) if is_over else ():
                if kind != TRACES or (trial / FOLDER / INDEX).is_file():  # a trace is kept until the tables are made from it
                    place.add(kind, [found])
        yield place
    left = [path for path in _folders(runs) if path.name.startswith(".") and path.name.endswith(REMOVED)]
    temporary = [path for _, path in _matching(Path(tempfile.gettempdir()), TEMPORARY) if _is_stale(path)]
    for where, paths in ((str(runs), left), (tempfile.gettempdir(), temporary)):
        place = Place(name=where)
        place.add(OTHER, paths)
        yield place


def _whole(asked: Asked, kept: dict[str, str]) -> Iterator[Place]:
    """Yields the studies to remove as a whole: those that were named, or those not written to for `asked.older_than`."""
    if asked.studies and asked.older_than is not None:
        raise BadInput("--older-than: cannot be combined with STUDY, got both. Give one of them.")
    before_s = time.time() - _age_s(asked.older_than) if asked.older_than is not None else float("inf")
    chosen = [_named(asked.runs, word) for word in asked.studies] or studies(asked.runs)
    for folder in {folder.path.absolute(): folder for folder in chosen if _written_s(folder) < before_s}.values():
        why = _why_not(folder) or _what_else(folder)
        if why and asked.studies:
            raise BadInput(f"STUDY: {why}, got {folder.name!r}. It stays as it is.")
        if why:
            kept[folder.name] = why
            continue
        place = Place(name=folder.name, study=folder.path)
        place.add(WHOLE, [folder.path])
        yield place


def _named(runs: Path, word: str) -> StudyFolder:
    """Returns the study to remove. Refuses an ambiguous name and a file inside a study."""
    folder, exact = find(runs, word), runs / word
    if os.sep not in word and folder.path != exact and (exact / "study.json").is_file():
        raise BadInput(
            f"STUDY: ambiguous, got {word!r}: the folder {str(exact)!r}, or {str(folder.path)!r}, the latest of that name. "
            "Give the folder."
        )
    if os.path.exists(word) and folder.path != exact and not os.path.samefile(word, folder.path):
        raise BadInput(f"STUDY: inside a study, got {word!r}. To remove the study, give its folder: {folder.path}.")
    return folder


def _why_not(folder: StudyFolder) -> str:
    """Returns why a study must not be changed; "" if it may be."""
    if folder.path.is_symlink():
        return "it is a link"
    if (owner := owner_of(folder.path)) is not None:
        return f"{describe(owner)} is working on it"
    try:
        folder.read_study()
    except (OSError, ValueError) as error:
        return f"study.json cannot be read: {error}"
    return ""


def _what_else(folder: StudyFolder) -> str:
    """Returns what a program has put into a study's folder, as a reason not to remove the folder; "" for nothing."""
    names = [escaped(path.name) for path in foreign(folder.path)]
    if not names:
        return ""
    shown = ", ".join([*names[:MAX_FOREIGN], *([f"{len(names) - MAX_FOREIGN} more"] if len(names) > MAX_FOREIGN else [])])
    return f"it holds what autotune did not make, so move this first: {shown}"


def _status(folder: StudyFolder) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(folder.read_outline()["status"])
    return ""


def _written_s(folder: StudyFolder) -> float:
    """Returns when a study was last written to, seconds since the epoch."""
    times = [0.0]
    for file in (folder.study_file, folder.summary_file, folder.path / OWNER_FILE):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _age_s(typed: str) -> float:
    number, unit = typed[:-1], typed[-1:]
    if not re.fullmatch(r"[0-9]{1,6}", number) or unit not in UNITS_S:
        raise BadInput(f"--older-than: not an age, got {typed!r}. Allowed: a whole number and h, d or w: 30d.")
    return int(number) * UNITS_S[unit]


def _matching(folder: Path, patterns: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Path]]:
    """Yields (kind, path) for the entries of a folder that match a pattern. Links are left out."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries if not entry.is_symlink()):
            for kind, several in patterns.items():
                if any(fnmatchcase(name, pattern) for pattern in several):
                    yield kind, folder / name


def _folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder, without links; [] for a study's "trials" that is itself a link."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        there = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        return there if folder.name != "trials" or not folder.is_symlink() else []
    return []


def _is_stale(path: Path) -> bool:
    """Whether a temporary file or folder is this user's, has not been changed for a day, and is not locked by a process."""
    with contextlib.suppress(OSError), held(path) as is_free:
        status = os.lstat(path)
        return is_free and status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_S
    return False


def _remove(place: Place, kept: dict[str, str]) -> dict[Path, str]:
    """Removes a place's items; if its study is now in use, only adds it to `kept`. Returns the failures, path -> reason."""
    failed = {}
    with contextlib.ExitStack() as locks:
        files = [place.study / name for name in (OWNER_FILE, LOCK_FILE)] if place.study else []
        if not all([locks.enter_context(held(file)) for file in files]):
            kept[place.name] = "another process is working on it"
            return {}
        for item in place.items:
            try:
                _remove_one(item.path, is_study=item.kind == WHOLE)
            except OSError as error:
                failed[item.path] = str(error.strerror or error)
            except RecursionError:  # of shutil.rmtree, before Python 3.13
                failed[item.path] = "nested too deeply for Python, but not for rm -r"
    return failed


def _remove_one(path: Path, *, is_study: bool) -> None:
    """Removes a file or a folder. Renames a study first, so that a half-removed folder does not count as a study."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if is_study:  # a random name, because an interrupted removal may have left a folder
        path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}{REMOVED}"))
    shutil.rmtree(path)  # follows no links


def _table(places: Sequence[Place], width: int | None) -> Table:
    """Returns a row per place. If the columns for the kinds would leave no room for names, these columns are left out."""
    kinds = [kind for kind in KINDS if any(place.bytes_of(kind) for place in places)]
    columns = {"files": [str(sum(item.num_files for item in place.items)) for place in places]}
    columns |= {kind: [bytes_text(size) if (size := place.bytes_of(kind)) else "" for place in places] for kind in kinds}
    columns |= {"total": [bytes_text(place.bytes_of()) for place in places]}
    needed = sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items())
    if width is not None and width - needed < LEAST_NAME:
        columns = {name: cells for name, cells in columns.items() if name not in kinds}
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("where", overflow="fold", no_wrap=width is None)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for place, *cells in zip(places, *columns.values(), strict=True):
        table.add_row(Text(escaped(place.name), style="name"), *cells)
    return table


def _num_bytes(places: Sequence[Place], failed: Container[Path]) -> int:
    """Returns the bytes of all items except those that could not be removed."""
    return sum(item.num_bytes for place in places for item in place.items if item.path not in failed)


def _print(places: Sequence[Place], kept: dict[str, str], failed: dict[Path, str], asked: Asked) -> None:
    out = console()
    if places:
        out.print(_table(places, table_width(out)))
    for name, why in kept.items():
        out.print(Text.assemble((f"left alone  {escaped(name)}: ", "quiet"), why), overflow="fold")
    for path, reason in failed.items():
        out.print(Text(f"not removed  {path}: {reason}", style="bad"), overflow="fold")
    size = bytes_text(_num_bytes(places, failed))
    if not places:
        out.print(Text(f"Nothing to remove in {asked.runs}."))
    elif asked.is_meant:
        out.print(f"Removed {size}{'; the rest is listed above' if failed else ''}.")
    else:
        out.print(f"{size} can be removed. Nothing was removed yet; [command]--yes[/] removes it.")
