"""The user's files beside a trial: what it leaves behind, and checkpoints, which it must not write over.

A trial is the user's own command, so it saves where the real training saves. Which file it will write to is not known before;
copying every model and data set that a command names would cost more than the trial. So the kernel is asked: under a read
lease (fcntl(2), "Leases") whoever opens a file for writing waits until its holder gives way, and only then is a copy made.
Where a file system knows no leases, files that are not too large are copied beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from autotune.run_dir import RESERVED_NAMES

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tar", ".safetensors", ".bin", ".pkl", ".h5", ".npz", ".msgpack")
MAX_KEPT = 64  # files under a lease: each takes a descriptor
MAX_COPIED_BYTES = 1 << 30  # beforehand, where there are no leases
MAX_ENTRIES = 10_000  # of one folder: a data set's is not searched to its end
MAX_LEFT = 50
MAX_FOLDERS, MAX_INSIDE = 100, 1000  # folders of the working directory that are looked into, and entries of one: logs, no data
HEAD_BYTES = 8 << 10
IGNORED = frozenset({"__pycache__"})


class UserFiles:
    """The files beside one trial, from just before it starts until all its processes are gone.

    Args:
        argv: the trial's command.
        cwd: its working directory.
        place: folder for copies, the trial's own, `<study>/trials/0007`.
        ours: names that earlier trials of the study left in `cwd`; those of this one are added at the end.
    """

    def __init__(self, argv: Iterable[str], cwd: str, place: Path, ours: set[str]) -> None:
        self._cwd, self._ours = Path(cwd), ours
        trial = place.resolve()
        self._study = trial.parent.parent
        self._own = (self._study, trial.parent, trial)
        self._before = self._all_names()
        own = {(self._cwd / name).resolve() for name in ours}
        candidates = dict.fromkeys(path for path in _candidates(argv, self._cwd) if path not in own)
        self._kept = [kept for path in list(candidates)[:MAX_KEPT] if (kept := Kept(path, place)).is_open]

    def look(self) -> None:
        """Lets the trial go on that waits to write to a kept file, once there is a copy. Called several times a second."""
        for kept in self._kept:
            kept.look()

    def left(self) -> dict[str, int]:
        """Returns the names that are new in the working directory, with the bytes they hold.

        Also those one folder below it, where programs keep a folder a run: "lightning_logs/version_3".
        """
        new = self._all_names() - self._before
        new = {name for name in new if os.path.dirname(name) not in new and os.path.basename(name) not in IGNORED}
        named = sorted(new)[:MAX_LEFT]
        self._ours.update(named)
        return {name: _size_bytes(self._cwd / name) for name in named}

    def _all_names(self) -> set[str]:
        names = _names(self._cwd)
        folders = [name for name in sorted(names) if not name.startswith(".") and name not in IGNORED][:MAX_FOLDERS]
        for name in folders:
            folder = self._cwd / name
            if folder.is_symlink() or not folder.is_dir() or folder.resolve() in self._own:
                continue
            inside = _names(folder)
            if folder == self._study.parent:  # `runs`, where TensorBoard's writer puts its own folders, too
                ours = {name for name in inside if name.startswith((".", *RESERVED_NAMES)) or _is_study(folder / name)}
                inside -= ours
            if len(inside) <= MAX_INSIDE:
                names |= {f"{name}/{entry}" for entry in inside}
        return names

    def restore(self) -> list[str]:
        """Puts back every kept file that the trial has changed; returns their paths. Called once, at the end."""
        return [str(kept.path) for kept in self._kept if kept.close()]


class Kept:
    """One file that will be as it was.

    Attributes:
        path: the file.
        is_open: whether it is watched.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.is_open = path, False
        self._copy = place / f"kept.{path.name}"
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # unreadable: a trial of the same user cannot read it either
        self._status = os.fstat(self._file)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; SIGIO would end this process
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self.is_open = True
        except OSError as error:
            # EAGAIN: somebody is writing to it right now, so it is not the trial that changes it.
            self.is_open = error.errno != errno.EAGAIN and self._status.st_size <= MAX_COPIED_BYTES and self._keep()
        if not self.is_open:
            os.close(self._file)

    def look(self) -> None:
        """Makes the copy and gives the lease up when somebody waits to write."""
        with contextlib.suppress(OSError):
            if not self._copy.exists() and fcntl.fcntl(self._file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                self._keep()
                fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def close(self) -> bool:
        """Ends the watch; returns whether the file had changed and was put back."""
        try:
            is_changed = self._is_changed()
            if is_changed:
                self._put_back()
            return is_changed
        except OSError:
            return False
        finally:
            os.close(self._file)  # with the lease
            self._copy.unlink(missing_ok=True)

    def _keep(self) -> bool:
        """Copies the file beside the trial; returns whether there was room."""
        try:
            if shutil.disk_usage(self._copy.parent).free < 2 * self._status.st_size:
                return False
            with self._original() as source:
                _write(source, self._copy)
        except OSError:
            self._copy.unlink(missing_ok=True)
            return False
        return True

    def _is_changed(self) -> bool:
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return True
        was = self._status
        return (now.st_ino, now.st_size, now.st_mtime_ns) != (was.st_ino, was.st_size, was.st_mtime_ns)

    def _put_back(self) -> None:
        # Written over in place: the copy has it. Replaced or removed: the open descriptor still holds the old file.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with self._copy.open("rb") if self._copy.exists() else self._original() as source:
                _write(source, temporary)
            os.chmod(temporary, stat.S_IMODE(self._status.st_mode))
            with contextlib.suppress(PermissionError):
                os.chown(temporary, self._status.st_uid, self._status.st_gid)
            os.utime(temporary, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _original(self) -> IO[bytes]:
        file = open(os.dup(self._file), "rb")  # noqa: SIM115 (the caller closes it)
        file.seek(0)
        return file


def _write(source: IO[bytes], path: Path) -> None:
    """Copies to a file that nobody else can read until it has the permissions of the one it stands for."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _candidates(argv: Iterable[str], cwd: Path) -> Iterator[Path]:
    """Yields the files to keep: binary ones that the command names, checkpoints in its folders and in the current one.

    Text is left out: it is configuration, which people change while a study runs.
    """
    folders = [cwd]
    for word in argv:
        path = cwd / word.partition("=")[2] if word.startswith("-") and "=" in word else cwd / word
        with contextlib.suppress(OSError, ValueError):  # a word too long for a path, or with a NUL
            if path.is_dir():
                folders.append(path)
            elif path.is_file() and _is_binary(path):
                yield path.resolve()
    for folder in folders:
        for name in sorted(_names(folder)):
            path = folder / name
            if name.endswith(CHECKPOINTS) and path.is_file():
                yield path.resolve()


def _is_study(path: Path) -> bool:
    return (path / "study.json").exists() or (path / "trials").is_dir()


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(HEAD_BYTES)


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)}
    except OSError:
        return set()


def _size_bytes(path: Path) -> int:
    """Returns the size of a file, or of what lies in a folder."""
    total = 0
    with contextlib.suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        for root, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):
                    total += (Path(root) / name).lstat().st_size
    return total
