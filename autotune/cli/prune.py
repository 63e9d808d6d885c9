"""Implements `autotune prune`: says what studies no longer need and how many bytes it takes, and removes it with --yes.

Of a study that stays, only what is listed here is removed: `trials/*/kept`, for example, holds the user's own files. Links are
left alone, since what they lead to may be somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, print_json, table_width
from autotune.errors import BadInput
from autotune.explain.tables import FOLDER, INDEX
from autotune.monitors.sealing import SCRATCH
from autotune.owner import OWNER_FILE, describe, held, owner_of
from autotune.quantities import bytes_text
from autotune.run_dir import StudyFolder, find, studies
from autotune.trackers.store import LOCK_FILE

CACHE, TRACES, LOGS, OTHER, WHOLE = "compile cache", "traces", "logs", "other", "whole study"
COLUMNS = (CACHE, TRACES, LOGS, OTHER)
OF_STUDY = {CACHE: ("compile_cache",), LOGS: ("tracking.log",), OTHER: ("*.tmp", ".probe")}
OF_TRIAL = {  # of trials that are over
    TRACES: ("trace.rank*.json.gz",),
    LOGS: ("stdout.log", "stderr.log", "stdout.first.log", "stderr.first.log"),
    OTHER: ("progress.jsonl", "loader*.bin", "peer*.json", "unfinished.trace.*", "*.tmp", SCRATCH),
}
OURS = re.compile(r"autotune-((fault|picture|inspect)-)?[a-z0-9_]{8}(\.log)?")  # names in the folder for temporary files
REMOVED = ".removed"  # end of the name that a study has while it is being removed
STALE_S = 86_400.0
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


@dataclass(kw_only=True)
class Found:
    """What can be removed in one place.

    Attributes:
        name: the study's name, or the folder.
        study: the study's folder, locked while something of it is removed; None for other places.
        paths: what it is -> its files and folders.
        num_files, num_bytes: what it is -> number of files, and bytes on the disk.
    """

    name: str
    study: Path | None = None
    paths: dict[str, list[Path]] = field(default_factory=dict)
    num_files: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, paths: Iterable[Path]) -> None:
        """Adds what was found, with its size."""
        for path in paths:
            files, size = sizes(path)
            self.paths.setdefault(what, []).append(path)
            self.num_files[what] = self.num_files.get(what, 0) + files
            self.num_bytes[what] = self.num_bytes.get(what, 0) + size

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return sum(self.num_bytes.values())

    def as_json(self) -> dict[str, Any]:
        """Returns it for --json."""
        parts = {what: {"files": self.num_files[what], "bytes": self.num_bytes[what]} for what in self.paths}
        return {"name": self.name, "bytes": self.total_bytes, "parts": parts}


def prune(asked: Asked, *, as_json: bool) -> int:
    """Prints what can be removed, and removes it if that is meant.

    Raises:
        BadInput: no such study, a link or a study that is worked on, no such age.
    """
    kept: dict[str, str] = {}
    there = _whole(asked, kept) if asked.is_whole else _parts(asked.runs, kept)
    found = [each for each in there if each.paths]
    found.sort(key=lambda each: -each.total_bytes)
    failed = [failure for each in found for failure in _remove(each, kept)] if asked.is_meant else []
    if as_json:
        entries = [each.as_json() for each in found if each.name not in kept]
        print_json({"is_removed": asked.is_meant, "bytes": sum(each["bytes"] for each in entries), "found": entries,
                    "kept": kept, "failed": failed})  # fmt: skip
    else:
        _print([each for each in found if each.name not in kept], kept, failed, asked)
    return BadInput.exit_code if failed else 0


def sizes(path: Path) -> tuple[int, int]:
    """Returns the number of files at a path and below it, and their bytes on the disk. A link counts as itself."""
    try:
        status = os.lstat(path)
        inside = list(os.scandir(path)) if stat.S_ISDIR(status.st_mode) else []
    except OSError:
        return 0, 0
    below = [sizes(Path(entry.path)) for entry in inside]
    is_file = not stat.S_ISDIR(status.st_mode)
    return is_file + sum(files for files, _ in below), status.st_blocks * 512 + sum(size for _, size in below)


# What can go ----------------------------------------------------------------------------------------------------------------


def _parts(runs: Path, kept: dict[str, str]) -> Iterator[Found]:
    """Yields what the studies of a runs folder can do without, and what killed processes left behind."""
    for folder in studies(runs):
        if why := _why_not(folder):
            kept[folder.name] = why
            continue
        found, path = Found(name=folder.name, study=folder.path), folder.path
        for what, paths in _matching(path, OF_STUDY):
            if what != CACHE or _status(folder) in ("complete", "failed"):  # else `resume` uses it
                found.add(what, paths)
        for trial in _folders(path / "trials"):
            if (trial / "trial.json").is_file():
                for what, paths in _matching(trial, OF_TRIAL):
                    if what != TRACES or (trial / FOLDER / INDEX).is_file():  # the tables made of them are what is read
                        found.add(what, paths)
        yield found
    left = Found(name=str(runs))
    left.add(OTHER, [path for path in _folders(runs) if path.name.startswith(".") and path.name.endswith(REMOVED)])
    yield left
    temporary = Found(name=tempfile.gettempdir())
    temporary.add(OTHER, _temporary(Path(tempfile.gettempdir())))
    yield temporary


def _whole(asked: Asked, kept: dict[str, str]) -> Iterator[Found]:
    """Yields whole studies: those named, or those that nothing was written to for some time."""
    if asked.studies and asked.older_than is not None:
        raise BadInput("--older-than: cannot be combined with STUDY, got both. Give one of them.")
    before_s = time.time() - _age_s(asked.older_than) if asked.older_than is not None else 0.0
    chosen = [_named(asked.runs, word) for word in asked.studies] or list(studies(asked.runs))
    for folder in {folder.path.resolve(): folder for folder in chosen}.values():
        why = _why_not(folder)
        if why and asked.studies:
            raise BadInput(f"STUDY: {why}, got {folder.name!r}. It stays as it is.")
        if not asked.studies and _written_s(folder) >= before_s:
            continue
        if why:
            kept[folder.name] = why
            continue
        found = Found(name=folder.name, study=folder.path)
        found.add(WHOLE, [folder.path])
        yield found


def _named(runs: Path, word: str) -> StudyFolder:
    """Returns the study that is to be removed. A name that stands for two studies, or a file in a study, is refused."""
    folder, exact = find(runs, word), runs / word
    if os.sep not in word and folder.path != exact and (exact / "study.json").is_file():
        raise BadInput(
            f"STUDY: two studies, got {word!r}: the folder {str(exact)!r}, and {str(folder.path)!r}, the latest of that name. "
            "Give the folder."
        )
    if os.path.exists(word) and folder.path != exact and not os.path.samefile(word, folder.path):
        raise BadInput(f"STUDY: inside a study, got {word!r}. To remove the study, give its folder: {folder.path}.")
    return folder


def _why_not(folder: StudyFolder) -> str:
    """Returns why nothing of a study is removed; "" if something can be."""
    if folder.path.is_symlink():
        return "it is a link"
    if (owner := owner_of(folder.path)) is not None:
        return f"{describe(owner)} is working on it"
    try:
        folder.read_study()
    except (OSError, ValueError) as error:
        return f"study.json cannot be read: {error}"
    return ""


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


def _matching(folder: Path, patterns: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, list[Path]]]:
    """Yields what it is and its entries of a folder. Links are left out."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        there = sorted(entry.name for entry in entries if not entry.is_symlink())
        for what, names in patterns.items():
            if paths := [folder / name for name in there if any(fnmatchcase(name, pattern) for pattern in names)]:
                yield what, paths


def _folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder; none if it is a link, and no links."""
    if folder.name == "trials" and folder.is_symlink():
        return []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _temporary(place: Path) -> Iterator[Path]:
    """Yields what killed processes of this user left among the temporary files: older than a day, and held by no process."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if OURS.fullmatch(entry.name) and not entry.is_symlink():
                status = entry.stat(follow_symlinks=False)
                is_stale = status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_S
                with held(Path(entry.path)) as is_free:
                    if is_stale and is_free:
                        yield Path(entry.path)


# Removing and telling -------------------------------------------------------------------------------------------------------


def _remove(found: Found, kept: dict[str, str]) -> list[str]:
    """Removes what was found, unless a process has begun to work on the study; returns what could not be removed, and why."""
    failed = []
    with contextlib.ExitStack() as locks:
        files = [found.study / name for name in (OWNER_FILE, LOCK_FILE)] if found.study else []
        if not all([locks.enter_context(held(file)) for file in files]):
            kept[found.name] = "another process is working on it"
            return []
        for paths in found.paths.values():
            for path in paths:
                try:
                    _remove_one(path, is_study=path == found.study)
                except OSError as error:
                    failed.append(f"{path}: {error.strerror or error}")
    return failed


def _remove_one(path: Path, *, is_study: bool) -> None:
    """Removes a file or a folder. A study gets another name first, so that half of one never counts as a study."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if is_study:
        path = path.rename(path.with_name(f".{path.name}{REMOVED}"))
    shutil.rmtree(path)  # follows no links


def _print(found: Sequence[Found], kept: dict[str, str], failed: Sequence[str], asked: Asked) -> None:
    out = console()
    columns = [WHOLE] if asked.is_whole else [what for what in COLUMNS if any(what in each.paths for each in found)]
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("where", overflow="fold", no_wrap=not table_width(out))
    for name in ["files", *columns, *(["total"] if len(columns) > 1 else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        cells = [bytes_text(each.num_bytes[what]) if what in each.num_bytes else "" for what in columns]
        total = [bytes_text(each.total_bytes)] if len(columns) > 1 else []
        table.add_row(Text(each.name, style="name"), str(sum(each.num_files.values())), *cells, *total)
    if found:
        out.print(table)
    for name, why in kept.items():
        out.print(Text.assemble((f"left alone  {name}: ", "quiet"), why), overflow="fold")
    for failure in failed:
        out.print(Text(f"not removed  {failure}", style="bad"), overflow="fold")
    size = bytes_text(sum(each.total_bytes for each in found))
    if not found:
        out.print(f"Nothing to remove in {asked.runs}.")
    elif asked.is_meant:
        out.print(f"Removed {size}{', but for what is listed above' if failed else ''}.")
    else:
        out.print(f"{size} can be removed. Nothing was removed yet; [command]--yes[/] removes it.")
