"""Prevents a trial from overwriting, renaming or removing the user's checkpoints.

If the file system supports leases, the tuner's keeper (launchers/keeper.py) guards the files' contents: other processes that
open such a file for writing have to wait. A lease does not protect a name, and the keeper guards only the files that it has
found. So this module replaces `torch.save`, the functions of `os` that change names, and `shutil.copyfile` (the other functions
of `shutil` and `pathlib` call these). The replacements work as before, but they do not change

- the files listed in protocol.KEPT_FILE, and
- other checkpoints that were last changed before the trial began, unless a trial has made them.

To the program, the calls seem to succeed. Data that the program saves to such a file are written to the trial's folder instead,
where `torch.load` and `shutil.copyfile` find them.

The replacement of `torch.load` also records from which checkpoints the program continues its training.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
import sys
from typing import Any, Callable, Dict, List, Optional, Set

from . import adapters, protocol
from .checkpoints import CHECKPOINTS, DATA, is_saved_by_torch
from .patches import patches

Call = Callable[..., None]
MAX_FOLDERS = 1000  # at most this many folders made by one process, and as many files saved by it, are recorded
MAX_LOADED = 16  # at most this many checkpoints loaded by one process are recorded
MAX_VALUES = 100  # of a loaded dictionary or list, at most this many values are examined


def keep(folder: str) -> None:
    """Replaces the functions of `os` and `shutil` in this process, until its end."""
    global kept
    kept = Kept(folder)
    for name in ("rename", "replace"):
        _put(name, kept.renaming)
    for name in ("remove", "unlink"):
        _put(name, kept.removing)
    _put("symlink", kept.linking)
    _put("link", kept.linking_hard)
    for name in ("chmod", "utime"):
        _put(name, kept.touching)
    _put("rmdir", kept.removing_folders)
    _put("mkdir", kept.making_folders)
    patches.on_import("shutil", kept.guard_copies)
    adapters.guard_files(kept.saving, kept.loading)


def torch_is_there() -> None:
    """Replaces `torch.save` and `torch.load` as well; called once torch is imported."""
    if kept is not None:
        torch: Any = sys.modules["torch"]
        patches.install_in((torch, torch.serialization), "save", kept.saving)
        patches.install_in((torch, torch.serialization), "load", kept.loading)


def _put(name: str, around: Callable[[Call], Call]) -> None:
    def function(old: Call) -> Any:
        new = Function(around(old))
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if old in functions:
                functions.add(new)
        functools.update_wrapper(new, old, assigned=("__name__", "__qualname__", "__doc__"))
        return new

    # Before Python 3.11, a class of pathlib has attributes with the functions of `os`. If pathlib was imported before this call
    # (as in a warm start), these attributes are still the original functions, so they are replaced, too.
    accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)
    is_held = accessor is not None and vars(accessor).get(name) is getattr(os, name)
    patches.install(os, name, function)
    if is_held:
        patches.install(accessor, name, lambda _: getattr(os, name))


class Function:
    """A callable that, like a built-in, does not become a method when it is an attribute of a class (pathlib, Python 3.9)."""

    __module__ = "os"  # where pickle looks it up

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function."""
        return self._call(*arguments, **named)

    def __reduce__(self) -> str:
        return str(self.__dict__["__name__"])


class Kept:
    """The guarded paths in this process, and the replacements of functions that change files.

    The list of paths is read again when the keeper has changed it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        names = (protocol.KEPT_FILE, protocol.OWN_FILE, protocol.SPARED_FILE, protocol.MADE_FILE, protocol.LOADED_FILE)
        self._file, self._own, self._spared, self._made, self._loaded = (os.path.join(folder, name) for name in names)
        self._version: Any = None
        self._paths: Dict[str, str] = {}  # path -> the file's name
        self._removed: Set[str] = set()  # folders that the program believes it has removed or renamed
        self._left: Set[str] = set()  # files not in `_paths` that the program believes it has removed
        self._with_checkpoints: Dict[str, bool] = {}  # folder -> whether it held a user's checkpoint before its removal
        self._unlinked: Set[str] = set()  # names of kept files, and links to them, that the program believes it has removed
        self._touched: Set[str] = set()  # files older than the trial whose mode or times this process has changed
        self._folders: Set[str] = set()  # folders that this process has made
        self._known: Set[str] = set()  # files that this process has saved or renamed, or that are recorded as loaded
        self._num_loaded = 0
        self._caches = _caches()
        self._began_ns: Optional[int] = None  # when the trial began, by the clock of its folder's file system
        with contextlib.suppress(OSError):
            self._began_ns = os.stat(os.path.join(folder, protocol.SPEC_FILE)).st_mtime_ns

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a `torch.save` that does not change the user's files, and records new files that it is about to make."""

        def saved(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(f, (str, os.PathLike)):
                self._know(f)
                kept = self._kept(f, None) or self._older(f, is_followed=True, is_any=True)
                if kept is not None:
                    _append(self._spared, kept)
                    f = self._place_for(kept)
                elif not os.path.lexists(f):
                    _append(self._made, os.path.realpath(f))
            return save(obj, f, *arguments, **named)

        return saved

    def loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a `torch.load` that redirects reads as `saving` redirects writes.

        If the trial has tried to overwrite a user's file, the function loads the trial's version from the trial's folder. It
        also records which other files contain the state of an optimizer: the program continues a training from these.
        """

        def loaded(f: Any, *arguments: Any, **named: Any) -> Any:
            saved = self._instead_of(f)
            found = load(saved, *arguments, **named)
            if saved is f and self._num_loaded < MAX_LOADED and _is_of_training(found):
                with contextlib.suppress(Exception):  # it was loaded from memory, for example
                    path = os.path.realpath(f if isinstance(f, (str, os.PathLike)) else f.name)
                    if path not in self._known:
                        self._num_loaded += 1
                        self._known.add(path)
                        _append(self._loaded, path)
            return found

        return loaded

    def _know(self, path: Any) -> None:
        if len(self._known) < MAX_FOLDERS:
            self._known.add(os.path.realpath(path))

    def guard_copies(self, shutil: Any) -> None:
        """Replaces the functions of the module `shutil` that write to another file; `copy`, `copy2` and `move` call these."""
        patches.install(shutil, "copyfile", self._copying)
        for name in ("copymode", "copystat"):
            patches.install(shutil, name, self._copying_status)

    def _copying(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def copied(src: Any, dst: Any, **named: Any) -> Any:
            kept = self._copied_over(dst)
            if kept is None:
                return copy(self._instead_of(src), dst, **named)
            _append(self._spared, kept)
            copy(self._instead_of(src), self._place_for(kept), **named)
            return dst

        return copied

    def _copying_status(self, copy: Call) -> Call:
        def copied(src: Any, dst: Any, **named: Any) -> None:
            if self._copied_over(dst) is None:
                copy(src, dst, **named)

        return copied

    def _copied_over(self, dst: Any) -> Optional[str]:
        if not isinstance(dst, (str, bytes, os.PathLike)):  # a descriptor
            return None
        older = self._older(dst, is_followed=True)
        if older is not None and older.endswith(DATA) and not is_saved_by_torch(older):
            older = None  # perhaps the program copies its data to a faster disk
        return self._kept(dst, None) or older

    def renaming(self, rename: Call) -> Call:
        """Returns an `os.rename` or `os.replace` that does not change guarded names."""

        def renamed(src: Any, dst: Any, *, src_dir_fd: Optional[int] = None, dst_dir_fd: Optional[int] = None) -> None:
            origin, target = _at(src, src_dir_fd), _at(dst, dst_dir_fd)
            taken = self._kept(dst, dst_dir_fd) or self._older(target)
            source = self._kept(src, src_dir_fd) or self._older(origin)
            inside = self._kept_inside(origin)
            if taken is None and source is None and not inside:
                is_new = not os.path.lexists(target)
                rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                self._know(target)
                if is_new and (os.path.isfile(target) or os.path.realpath(origin) in self._folders):
                    _append(self._made, os.path.realpath(target))
                return
            import shutil  # importing it costs milliseconds, and few programs get here

            for path in (*filter(None, (taken, source)), *inside):
                _append(self._spared, path)
            if inside:
                is_empty = os.path.isdir(target) and not os.listdir(target)  # an empty folder may be replaced
                shutil.copytree(origin, target, symlinks=True, copy_function=self._clone, dirs_exist_ok=is_empty)
                self._removed.update(folder for folder, _, _ in os.walk(os.path.realpath(origin)))
                return
            move = shutil.move if source is None else shutil.copy2
            move(origin, target if taken is None else self._place_for(taken))

        return renamed

    def _clone(self, src: str, dst: str) -> None:
        """As `shutil.copy2`. On btrfs and XFS, the copy shares the blocks of `src`: no gigabytes are read and written."""
        import fcntl
        import shutil

        try:
            if not os.path.isfile(src):  # to open a pipe would wait for another program
                raise FileNotFoundError
            with open(self._instead_of(src), "rb") as source, open(dst, "wb") as target:
                fcntl.ioctl(target.fileno(), protocol.FICLONE, source.fileno())
            shutil.copystat(src, dst)
        except OSError:
            shutil.copy2(src, dst)

    def removing(self, remove: Call) -> Call:
        """Returns an `os.remove` or `os.unlink` that does not remove guarded names."""

        def removed(path: Any, *, dir_fd: Optional[int] = None) -> None:
            kept = self._kept(path, dir_fd)
            older = None if kept else self._older(_at(path, dir_fd))
            beside = None if kept or older or dir_fd is None else self._beside(_at(path, dir_fd))
            if not (kept or older or beside):
                remove(path, dir_fd=dir_fd)
                return
            self._left.update(filter(None, (older, beside)))
            self._unlinked.add(_named(path, dir_fd))
            if kept or older:
                _append(self._spared, kept or older or "")

        return removed

    def linking(self, link: Call) -> Call:
        """Returns an `os.symlink` that makes no link at a guarded name that the program believes it has removed."""

        def linked(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: Optional[int] = None) -> None:
            name = _named(dst, dir_fd) if self._unlinked else ""
            if name in self._unlinked:
                self._unlinked.discard(name)
            else:
                link(src, dst, target_is_directory, dir_fd=dir_fd)

        return linked

    def linking_hard(self, link: Call) -> Call:
        """Returns an `os.link` that makes no link at a guarded name that the program believes it has removed."""

        def linked(src: Any, dst: Any, *, dst_dir_fd: Optional[int] = None, **named: Any) -> None:
            name = _named(dst, dst_dir_fd) if self._unlinked else ""
            if name in self._unlinked:
                self._unlinked.discard(name)
            else:
                link(src, dst, dst_dir_fd=dst_dir_fd, **named)

        return linked

    def touching(self, change: Call) -> Call:
        """Returns an `os.chmod` or `os.utime` that notes a file older than the trial before it changes the file.

        The call sets the file's time of change, so the file would no longer look older than the trial.
        """

        def touched(path: Any, *arguments: Any, **named: Any) -> None:
            is_path = isinstance(path, (str, bytes, os.PathLike)) and named.get("dir_fd") is None
            older = self._older(path, is_followed=True, is_any=True) if is_path else None
            if older is not None and len(self._touched) < MAX_FOLDERS:
                self._touched.add(older)
            change(path, *arguments, **named)

        return touched

    def removing_folders(self, remove: Call) -> Call:
        """Returns an `os.rmdir` that only pretends to remove a folder if everything in it is guarded."""

        def removed(path: Any, *, dir_fd: Optional[int] = None) -> None:
            try:
                remove(path, dir_fd=dir_fd)
            except OSError as error:
                folder = os.path.realpath(_at(path, dir_fd))
                if error.errno != errno.ENOTEMPTY or not self._holds_only_kept(folder):
                    raise
                self._removed.add(folder)

        return removed

    def making_folders(self, make: Call) -> Call:
        """Returns an `os.mkdir` that records new folders, and accepts a folder that only seems to be removed or renamed."""

        def made(path: Any, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> None:
            folder = os.path.realpath(_at(path, dir_fd)) if self._removed else ""
            is_there = folder in self._removed and os.path.isdir(folder)
            self._removed.discard(folder)
            if not is_there:
                make(path, mode, dir_fd=dir_fd)
                self._note_folder(os.path.realpath(_at(path, dir_fd)))

        return made

    def _note_folder(self, folder: str) -> None:
        if len(self._folders) < MAX_FOLDERS:
            if os.path.dirname(folder) not in self._folders:
                _append(self._made, folder)
            self._folders.add(folder)

    def _kept(self, path: Any, dir_fd: Optional[int]) -> Optional[str]:
        """Returns the guarded path that `path` refers to; None if it refers to no guarded path."""
        self._read()
        if not self._paths:
            return None
        text = _at(path, dir_fd)
        is_link = os.path.islink(text)
        if not is_link and os.path.basename(text) not in self._paths.values():
            return None
        full = os.path.realpath(text) if is_link else _named(path, dir_fd)
        return full if full in self._paths else None

    def _older(self, path: Any, *, is_followed: bool = False, is_any: bool = False) -> Optional[str]:
        """Returns the resolved path of a checkpoint that is older than the trial and that no trial has made; None otherwise.

        The keeper may have missed the file, for example if only a configuration file of the program names the file's folder.

        Args:
            path: what a call is about to change.
            is_followed: whether the call follows a symbolic link. If not, it changes only the link, which is not guarded.
            is_any: whether any file counts as a checkpoint.
        """
        if self._began_ns is None:
            return None
        try:
            status = os.stat(path, follow_symlinks=is_followed)
        except (OSError, ValueError):  # no such file, or no path
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        full = os.path.realpath(os.fsdecode(path))
        # The time of the inode's last change (ctime) decides, because no call can set it back. The time of modification (mtime)
        # does not: if the trial copies an old file, the copy is new but may keep the old mtime.
        if status.st_ctime_ns >= self._began_ns and full not in self._touched:
            return None
        return full if (is_any or self._is_checkpoint(full)) and not self._is_of_trials(full) else None

    def _is_checkpoint(self, path: str) -> bool:
        """Whether a file is a checkpoint by its name or content. In caches, other files have such names: content decides."""
        is_named = path.endswith(CHECKPOINTS) and not any(_is_within(path, folder) for folder in self._caches)
        return is_named or is_saved_by_torch(path)

    def _beside(self, path: str) -> Optional[str]:
        """Returns the resolved path of a file of the user that is in a folder with a checkpoint; None for other files.

        Without such a file, the checkpoint is often useless. Used only if a call that removes the file names it relative to a
        folder's descriptor (`dir_fd`), as `shutil.rmtree` does.
        """
        is_beside = self._began_ns is not None and self._is_with_checkpoint(os.path.realpath(os.path.dirname(path)))
        return self._older(path, is_any=True) if is_beside else None

    def _is_with_checkpoint(self, folder: str) -> bool:
        """Whether a folder held a checkpoint of the user at the first call for this folder."""
        if folder not in self._with_checkpoints:
            paths: List[str] = []
            with contextlib.suppress(OSError):  # it cannot be read
                paths = [entry.path for entry in os.scandir(folder)]
            named = {path for path in self._paths if path.endswith(CHECKPOINTS)}  # without guarded logs
            self._with_checkpoints[folder] = any(path in named or self._older(path) for path in paths)
        return self._with_checkpoints[folder]

    def _is_of_trials(self, path: str) -> bool:
        """Whether this or an earlier trial has made a file, or a folder that contains the file."""
        made: List[str] = []
        for file in (self._made, self._own):
            with contextlib.suppress(OSError):  # the file does not exist
                made += _listed(file)
        return any(_is_within(path, each) for each in made)

    def _kept_inside(self, path: str) -> List[str]:
        """Returns the guarded paths inside a folder; none for other paths and for links to folders."""
        self._read()
        if not self._paths or os.path.islink(path) or not os.path.isdir(path):
            return []
        folder = os.path.realpath(path)
        return [kept for kept in self._paths if _is_within(kept, folder)]

    def _holds_only_kept(self, folder: str) -> bool:
        self._read()
        kept = [*self._paths, *self._left]
        return all(
            self._kept(entry.path, None) is not None or any(_is_within(path, entry.path) for path in kept)
            for entry in os.scandir(folder)  # names and links that are kept, and folders that hold such names
        )

    def _read(self) -> None:
        try:
            status = os.stat(self._file)
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._version:
                self._paths = {path: os.path.basename(path) for path in _listed(self._file)}
                self._version = version
        except FileNotFoundError:  # nothing is guarded
            self._paths, self._version = {}, None
        except OSError:  # a file server that fails once: what was guarded stays guarded
            pass

    def _place(self, path: str) -> str:
        """Returns where in the trial's folder to save what would overwrite the user's file `path`; equal in all processes."""
        return os.path.join(self._folder, protocol.SCRATCH, "instead", path.lstrip(os.sep))

    def _place_for(self, path: str) -> str:
        place = self._place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def _instead_of(self, path: Any) -> Any:
        """Returns the file in the trial's folder that replaces the user's file `path`; `path` itself without such a file."""
        if isinstance(path, (str, bytes, os.PathLike)):
            with contextlib.suppress(OSError, ValueError):
                place = self._place(os.path.realpath(os.fsdecode(path)))
                if os.path.isfile(place):
                    return place
        return path


def _caches() -> List[str]:
    """Returns the folders for caches and temporary files, without those that contain the working directory."""
    home = os.path.expanduser("~")
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME")
    named = [*map(os.environ.get, names), "/tmp", os.path.join(home, ".cache"), os.path.join(home, ".triton")]
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the folder is gone
        here = ""
    folders = [os.path.realpath(name) for name in named if name]
    return [folder for folder in folders if not _is_within(here, folder)]


def _listed(file: str) -> List[str]:
    with open(file, encoding="utf-8", errors="surrogateescape") as opened:
        return [path for path in opened.read().split("\0") if path]


def _is_of_training(loaded: Any) -> bool:
    """Whether an object is the state of an optimizer, or a dictionary that holds one, perhaps in a list."""
    if not isinstance(loaded, dict):
        return False
    values = list(itertools.islice(dict.values(loaded), MAX_VALUES))
    inner = [each for value in values if type(value) in (list, tuple) for each in value[:MAX_VALUES]]
    return any(isinstance(each, dict) and "param_groups" in each and "state" in each for each in (loaded, *values, *inner))


def _append(file: str, line: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="surrogateescape") as opened:
            opened.write(line + "\0")
    except OSError:  # the disk is full: the path is not recorded
        pass


kept: Optional[Kept] = None  # the guarded paths of this process


def _at(path: Any, dir_fd: Optional[int]) -> str:
    text = os.fsdecode(path)
    return text if dir_fd is None else os.path.join("/proc/self/fd/%d" % dir_fd, text)


def _named(path: Any, dir_fd: Optional[int]) -> str:
    """Returns the full name of a path, without following it if it is a link itself."""
    folder, name = os.path.split(_at(path, dir_fd))
    return os.path.join(os.path.realpath(folder), name)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)
