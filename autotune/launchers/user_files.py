"""Protects the user's checkpoints and logs from being overwritten by trials, and reports the files that a trial leaves behind.

A separate process does the guarding (keeper.py). This module is the tuner's side of it. A new file in the working directory, or
in a folder that the command names, counts as the trial's if one of the trial's processes was seen writing it. Any other new
file may come from another program, an editor or a person, and is reported separately.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.harness.checkpoints import CHECKPOINTS, is_saved_by_torch
from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.environment import KEEPER, mark_of, own_environment, study_of
from autotune.launchers.keeper import MAX_LOGS, is_log
from autotune.launchers.process_tree import exit_status
from autotune.run_dir import is_study
from autotune.studies import RESERVED_NAMES, foreign

ANSWER_S = 30.0  # longest wait for the keeper's answer; long, because the machine may be swapping
END_S = 300.0  # longest wait for the keeper's report; it may be copying files that the trial has removed
CLOSE_S = 1.0  # longest wait for the keeper's exit; then it is killed
MAX_ENTRIES = 10_000  # maximum number of names read from a folder; a folder with this many is taken for a data set and ignored
MAX_LEFT = 50  # a report lists at most this many new files that the trial wrote, and at most this many of unknown origin
MAX_NAMED = 500  # maximum number of checkpoints passed to the keeper; it may guard fewer of them, and reports the others
MAX_DEPTH = 3  # deeper folders, like hidden ones, are searched last for checkpoints and logs
# Why a folder is reported as not guarded.
TOO_MANY_FOLDERS = "not all folders in it were searched for checkpoints and logs"
TOO_MANY_ENTRIES = f"taken for a data set, since it has {MAX_ENTRIES:,} entries or more"
MANY_LOGS = 100  # if a folder has more files than this that are named like logs, they are taken for a data set
MANY_UNNAMED = 100  # if a folder has more files than this whose names have no dot, they are taken for a data set
# In each root (the working directory, folders that the command names), at most MAX_FOLDERS folders are searched, and another
# MAX_FOLDERS that are hidden or deep. In the search for new files, subfolders with more than MAX_INSIDE entries are ignored:
# folders in which programs write logs have fewer entries.
MAX_FOLDERS, MAX_INSIDE = 100, 1000
HEAD_BYTES = 8 << 10  # a file whose first HEAD_BYTES contain a NUL is binary
IGNORED = frozenset({"__pycache__"})  # never reported as new
# Folders that are not searched for checkpoints and logs: a trial does not save there, and they have many files.
UNSEARCHED = IGNORED | {
    *(".git", ".hg", ".svn", ".dvc", ".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", ".tox", ".nox"),
    *("node_modules", "site-packages"),
}
STORE_LOCK = ".mlflow.lock"  # lock file next to the embedded tracking store
NOTES = ".autotune-"  # prefix of the names of files that tuners make in the runs folder


@dataclass(kw_only=True)
class Report:
    """What happened to the user's files during a trial. Paths inside the working directory are relative to it.

    Attributes:
        left: new files and folders that the trial made -> their size in bytes.
        new: new files and folders of unknown origin -> their size in bytes.
        kept: user files that the guard kept the trial from changing.
        aside: user files that the trial changed or removed -> path of a copy of the original.
        unguarded: user files that could not be guarded, and folders that were not searched for such files -> reason.
        loaded: checkpoints from which the trial continued a training.
        continued: those checkpoints in `loaded` that earlier trials made.
    """

    left: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    unguarded: dict[str, str] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)


class UserFiles:
    """Guards the user's files during the trials of a study, one trial at a time.

    Args:
        slot: name of the slot whose trials to watch; "" for the whole machine.
        made: files that earlier trials made. All slots share this set.
    """

    def __init__(self, slot: str = "", made: set[Path] | None = None) -> None:
        self._keeper: KeeperProcess | None = None
        self._slot, self.made = slot, set() if made is None else made
        self._folders: Folders | None = None
        self._asked: list[str] = []

    def begin(self, argv: Iterable[str], cwd: str, place: Path) -> None:
        """Starts guarding and watching; returns when the trial may start.

        If the keeper dies or does not answer, a new keeper is started. If that does not answer either, the files are unguarded
        during the trial, and `end` reports each of them as unguarded.

        Raises:
            AutotuneError: the keeper cannot be started.
        """
        place = place.resolve()
        self._folders = folders = Folders(list(argv), Path(cwd), place)
        files = [path for path in [*folders.checkpoints(), *folders.logs()] if path not in self.made]
        self._asked = [str(path) for path in files]
        self._ask(
            place,
            {
                "do": "begin",
                "files": self._asked,
                "folders": [str(path) for path in dict.fromkeys([*folders.watched(), *(path.parent for path in files)])],
                "own": [str(path) for path in self.made],
                "place": str(place),
            },
        )

    def end(self) -> Report:
        """Stops guarding and watching, and returns the report; called once all processes of the trial are gone."""
        folders, self._folders = self._folders, None
        if folders is None:
            return Report()
        said = self._keeper.ask({"do": "end"}, "ended", END_S) if self._keeper else None
        if said is None:  # the keeper was killed or hangs: from then on, the files were unguarded
            self.close()
            self._keeper = None
            said = {"open": dict.fromkeys(self._asked, "the process that guards it has ended")}
        wrote, loaded = ([Path(path) for path in said.get(name, [])] for name in ("wrote", "loaded"))
        continued = [path for path in loaded if any(map(path.is_relative_to, self.made))]
        made, new = folders.new(wrote)
        new = [path for path in new if path not in self.made]  # leaves out files of trials on other slots
        self.made.update(wrote)
        self.made.update(made)
        # From now on, user files that the trial has changed count as made by trials and are no longer guarded, because a trial
        # wrote their contents. If another program has made such a file anew since then, it is the user's and stays guarded.
        aside = set(said.get("aside", {})) - set(said.get("again", []))
        self.made.update(path for path in map(Path, aside) if os.path.lexists(path))
        return Report(
            left=folders.sizes(made),
            new=folders.sizes(new),
            kept=said.get("kept", []),
            aside=said.get("aside", {}),
            unguarded={**folders.missed, **said.get("open", {})},
            loaded=[folders.name(path) for path in loaded],
            continued=[folders.name(path) for path in continued],
        )

    def close(self) -> None:
        """Ends the keeper."""
        if self._keeper is not None:
            self._keeper.close()

    def _ask(self, place: Path, message: dict[str, Any]) -> None:
        for _ in range(2):  # the keeper may have been killed since the last trial
            if self._keeper is None:
                try:
                    self._keeper = KeeperProcess(study_of(place), self._slot)
                except OSError as error:
                    raise AutotuneError(f"the process that guards your files cannot be started ({error})") from error
            if self._keeper.ask(message, "ready") is not None:
                return
            self._keeper.close()
            self._keeper = None


class KeeperProcess:
    """The keeper's process. It ends with this object. If the tuner is killed, it ends after the study's last process.

    Args:
        study: the study's folder. Each process of a study has a mark: an environment variable that names study, slot and trial.
            The keeper watches the processes whose mark names this study and `slot`.
        slot: name of the slot whose processes to watch; "" for all processes of the study.
    """

    def __init__(self, study: Path, slot: str = "") -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.launchers.keeper", mark_of(study, "", slot)],
            cwd="/",
            env={**own_environment(), MARK_VARIABLE: mark_of(study, KEEPER, slot)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.close = weakref.finalize(self, _close, self._process, self._log)

    def ask(self, message: dict[str, Any], expected: str, wait_s: float = ANSWER_S) -> dict[str, Any] | None:
        """Returns the answer to a message; None if the keeper has exited, does not answer, or gives another answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        line, until_s = b"", time.monotonic() + wait_s
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return None
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return None
            line += chunk
        answer: dict[str, Any] = json.loads(line.splitlines()[0])
        return answer if answer["is"] == expected else None


class Folders:
    """The folders in which a trial may leave files: the working directory and the folders that its command names.

    Attributes:
        missed: folders that were not searched, or only in part -> reason.
    """

    def __init__(self, argv: list[str], cwd: Path, place: Path) -> None:
        self._cwd = cwd.resolve()
        self._study = place.parent.parent
        named = dict.fromkeys(path for word in argv for path in _paths(word, self._cwd))
        self._files = [path for path in named if os.path.isfile(path)]
        existing = [self._cwd, *(path for path in named if os.path.isdir(path) and path != self._cwd)]
        self._roots = [path for path in existing if len(_names(path)) < MAX_ENTRIES]
        # Paths that the command names and that do not exist yet, except those in the working directory, which is in `_roots`.
        self._awaited = [path for path in named if not os.path.lexists(path) and not path.is_relative_to(self._cwd)]
        self._before = self._entries()
        self._names, missed = _search(self._roots, self._study.parent)
        missed |= {path: TOO_MANY_ENTRIES for path in existing if path not in self._roots}
        self.missed = {str(path): why for path, why in missed.items()}

    def checkpoints(self) -> list[Path]:
        """Returns the files to guard: binary files that the command names, then checkpoints in the folders, newest first.

        A checkpoint is recognised by its name or, if its name has no dot, by its content. Text files are left out, because
        people edit configuration files while a study runs. For logs, see `logs`.
        """
        # Executables are left out, except those named like checkpoints: some mounted disks show every file as executable.
        named = [path for path in self._files if path.name.endswith(CHECKPOINTS) or not os.access(path, os.X_OK)]
        named = [path for path in named if _is_binary(path)]
        there = [folder / name for folder, names in self._names.items() for name in names if name.endswith(CHECKPOINTS)]
        for folder, names in self._names.items():
            plain = [folder / name for name in names if "." not in name]
            there += [path for path in (plain if len(plain) <= MANY_UNNAMED else ()) if _is_saved_by_torch(path)]
        return _writable([*named, *_newest(there)], MAX_NAMED)

    def logs(self) -> list[Path]:
        """Returns the text files to guard that are named like logs of metrics, newest first."""
        named = [path for path in self._files if is_log(str(path))]
        by_folder = [[folder / name for name in names if is_log(f"{folder}/{name}")] for folder, names in self._names.items()]
        there = [path for paths in by_folder if len(paths) <= MANY_LOGS for path in paths]
        return _writable([*named, *_newest(there)], MAX_LOGS, besides=self._study)  # the study's folder holds the trials' logs

    def watched(self) -> Iterator[Path]:
        """Yields the folders in which new names may appear."""
        for root in self._roots:
            yield root
            yield from _looked_into(root, self._study)
        yield from (path.parent for path in self._awaited if os.path.isdir(path.parent))

    def new(self, wrote: list[Path]) -> tuple[list[Path], list[Path]]:
        """Returns new files and folders, as (made by the trial, of unknown origin).

        Args:
            wrote: files that the trial was seen writing, and folders that it was seen making.
        """
        entries = self._entries() - self._before
        outermost = [path for path in sorted(entries) if path.parent not in entries and path.name not in IGNORED]
        awaited = {path for path in self._awaited if os.path.lexists(path)}
        outermost += sorted(awaited - entries)
        made = [path for path in outermost if any(file.is_relative_to(path) for file in wrote)]
        unknown = [path for path in outermost if path not in made]
        made += self._others(path for path in wrote if not any(path.is_relative_to(known) for known in made))
        return made[:MAX_LEFT], unknown[:MAX_LEFT]

    def sizes(self, paths: list[Path]) -> dict[str, int]:
        """Returns the sizes of files and folders in bytes, by name."""
        return {self.name(path): _size_bytes(path) for path in paths}

    def name(self, path: Path) -> str:
        """Returns a path as reports show it: relative to the working directory if it is inside."""
        return str(path.relative_to(self._cwd) if path.is_relative_to(self._cwd) else path)

    def _others(self, wrote: Iterable[Path]) -> list[Path]:
        """Returns what else a trial made: folders anywhere, new files in searched folders, and files outside of all roots.

        Leaves out autotune's files in the study's folder, files in a temporary folder, and files in a folder that is itself
        returned.
        """
        temporary, found, in_study = list(_temporary_places()), list[Path](), foreign(self._study)
        for path in sorted(wrote):
            is_inside = any(path.is_relative_to(root) for root in self._roots)
            is_new_folder = os.path.isdir(path) and path not in self._before and path.name not in IGNORED
            known = self._names.get(path.parent, {path.name} if is_inside else ())
            is_new_file = os.path.isfile(path) and path.name not in known
            places = [*found, *([] if is_inside else temporary)]
            is_own = path.is_relative_to(self._study) and not any(map(path.is_relative_to, in_study))
            if (is_new_folder or is_new_file) and not is_own and not any(map(path.is_relative_to, places)):
                found.append(path)
        return found

    def _entries(self) -> set[Path]:
        found: set[Path] = set()
        for root in self._roots:
            found |= {root / name for name in _names(root)}
            for folder in _looked_into(root, self._study):
                inside = _names(folder)
                if folder == self._study.parent:  # often `runs`, where TensorBoard's writer makes folders, too
                    ours = {name for name in inside if _is_ours(folder / name, folder)}
                    inside -= ours
                    found.update(path for name in ours - set(RESERVED_NAMES) for path in foreign(folder / name))
                if len(inside) <= MAX_INSIDE:
                    found |= {folder / name for name in inside}
        return {path for path in found if not _is_ours(path, self._study.parent)}


def _paths(word: str, cwd: Path) -> Iterator[Path]:
    """Yields the paths that one word of a command may name: `out`, `--output=out`, `project=out`."""
    for part in filter(None, {word, word.partition("=")[2]}):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long for a path, contains a NUL, or a symlink loop
            path = (cwd / part).resolve()
            if not part.startswith("-") and (os.path.exists(path) if os.sep not in part else part.isprintable()):
                yield path


def _looked_into(root: Path, study: Path) -> list[Path]:
    """Returns the subfolders in which a program may make a folder per run, such as "lightning_logs" (with "version_3").

    Symbolic links to folders are resolved.
    """
    folders = [root / name for name in sorted(_names(root)) if _is_searched(name)]
    found = dict.fromkeys(path.resolve() if os.path.islink(path) else path for path in folders if os.path.isdir(path))
    return [path for path in found if path != root and not path.is_relative_to(study)][:MAX_FOLDERS]


def _search(roots: list[Path], runs: Path) -> tuple[dict[Path, frozenset[str]], dict[Path, str]]:
    """Searches each root and the folders below it, at most MAX_FOLDERS per root. Links to folders are resolved.

    The folders in a root come first. Below them, the first subfolder of every folder is searched, then the second subfolder of
    every folder, and so on. So a data set with a folder per class does not use up MAX_FOLDERS. Hidden folders, and folders
    deeper than MAX_DEPTH, come last; of these, another MAX_FOLDERS are searched. The studies in the folder `runs` and virtual
    environments are left out.

    Returns:
        the names of the files in each folder, and the folders that were searched only in part -> reason
    """
    found: dict[Path, frozenset[str]] = {}
    missed: dict[Path, str] = {}
    for root in sorted(roots, key=lambda path: len(path.parts), reverse=True):  # roots inside other roots first
        waiting = [(False, 0, 0, root)]  # (whether hidden or deep, place in the order, depth, folder)
        num_left, used_up = [MAX_FOLDERS, MAX_FOLDERS], set[tuple[bool, Path]]()
        while waiting:
            is_late, place, depth, path = heapq.heappop(waiting)
            folder = path.resolve() if os.path.islink(path) else path
            is_skipped = any((is_late, parent) in used_up for parent in path.parents)
            if depth and (folder in found or is_skipped or _is_ours(folder, runs)):
                continue
            if not num_left[is_late]:
                used_up.add((is_late, path.parent))
                missed[path.parent] = TOO_MANY_FOLDERS
                continue
            num_left[is_late] -= 1
            folders, files = _listed(folder)
            if depth and "pyvenv.cfg" in files:
                continue
            found[folder] = frozenset(files)
            if len(folders) + len(files) == MAX_ENTRIES:
                missed[folder] = TOO_MANY_ENTRIES
                continue
            for number, name in enumerate(sorted(set(folders) - UNSEARCHED)):
                late = is_late or depth == MAX_DEPTH or name.startswith(".")
                heapq.heappush(waiting, (late, place + number if depth else 0, depth + 1, folder / name))
    return found, missed


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of the subfolders and of the files in a folder, MAX_ENTRIES at most."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_ENTRIES):
            is_folder = os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()
            (folders if is_folder else files).append(entry.name)
    return folders, files


def _is_searched(name: str) -> bool:
    return not name.startswith(".") and name not in IGNORED


def _newest(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=_modified_s, reverse=True)


def _writable(paths: list[Path], most: int, *, besides: Path | None = None) -> list[Path]:
    """Returns the first `most` files among the paths that a trial can write or replace, with links resolved, each only once.

    Leaves out files below the folder `besides`.
    """
    found: dict[Path, None] = {}
    # Resolves one path at a time and stops after `most` files: there may be thousands of paths on a slow file system.
    # Path.resolve would raise an error for a link that leads to itself.
    for path in (Path(os.path.realpath(path)) for path in paths):
        if len(found) == most:
            break
        if path in found or (besides and path.is_relative_to(besides)):
            continue
        # A read-only file can be replaced or removed if its folder is writable.
        if os.path.isfile(path) and (os.access(path, os.W_OK) or os.access(path.parent, os.W_OK)):
            found[path] = None
    return list(found)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_ours(path: Path, runs: Path) -> bool:
    """Whether an entry is a study's folder, or is made by autotune next to the studies: its notes, the tracking store.

    In the folder `runs`, each folder that has a folder "trials" counts as a study, because the study may have just begun.
    Elsewhere, a folder "trials" may contain a program's own files.
    """
    is_store = path.name.removeprefix(".").startswith(RESERVED_NAMES) or path.name == STORE_LOCK
    # Path.is_dir would raise an error for the study of another user, whose folder is private.
    is_new = path.parent == runs and os.path.isdir(path / "trials")
    return is_store or path.name.startswith(NOTES) or is_new or is_study(path)


def _temporary_places() -> Iterator[Path]:
    yield Path(tempfile.gettempdir()).resolve()
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).resolve()  # works without a home, too


def _is_binary(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b"\0" in file.read(HEAD_BYTES)
    return False


def _is_saved_by_torch(path: Path) -> bool:
    return os.path.isfile(path) and is_saved_by_torch(path)  # opening a named pipe would wait for another program


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)}
    except OSError:
        return set()


def _size_bytes(path: Path) -> int:
    """Returns the size of a file, or of all files in a folder, in bytes."""
    total = 0
    with contextlib.suppress(OSError):
        if not os.path.isdir(path) or os.path.islink(path):
            return path.lstat().st_size
        for root, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):
                    total += (Path(root) / name).lstat().st_size
    return total


def _close(process: subprocess.Popen[bytes], log: Any) -> None:
    """Closes a keeper's pipes, so that it exits, and kills it after CLOSE_S. Also called when the tuner exits."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    exit_status(process, CLOSE_S)
    log.close()
