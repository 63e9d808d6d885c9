"""Chooses the tracking store: the user's address, or the embedded SQLite store of the runs folder, created once and safely."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import operator
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from autotune.documents import read_text
from autotune.errors import BadInput
from autotune.masking import MASK, Secrets, is_masked
from autotune.run_dir import StudyFolder

URI_VARIABLE, USER_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME"
EXPERIMENT = "autotune"
SQLITE = "sqlite:///"  # beginning of an address; the path after it is relative unless it begins with another slash
NONE = "none"
LOCK_FILE = ".sync.lock"
LOCK_PAUSE_S = 0.2
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)(?:,([^}]*))?\}")
_KEY = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # a reference to another key of the configuration


def store_file(runs: Path) -> Path:
    """Returns the embedded store's database file."""
    return runs.resolve() / "mlflow.db"


def artifacts_path(runs: Path) -> Path:
    """Returns the folder of the embedded store's artifacts."""
    return runs.resolve() / "mlartifacts"


def artifacts_place(uri: str) -> str | None:
    """Returns the address of the artifacts' folder beside a SQLite file; None for servers, which choose the folder."""
    kind, _, file = uri.partition(":///")
    return artifacts_path(Path(file).parent).as_uri() if kind == "sqlite" and file else None


def is_own_place(runs: Path, uri: str) -> bool:
    """Whether an artifact address lies in the embedded store's folder of artifacts."""
    parts = urllib.parse.urlsplit(uri)
    place = Path(urllib.parse.unquote(parts.path)).resolve()
    return parts.scheme == "file" and not parts.netloc and place.is_relative_to(artifacts_path(runs).resolve())


def embedded_uri(runs: Path) -> str:
    """Returns the embedded store's address."""
    return f"sqlite:///{store_file(runs)}"


def chosen_uri(runs: Path, *, asked: str | None = None, folder: StudyFolder | None = None) -> str:
    """Returns the tracking address: `asked`, else the study's own, else MLFLOW_TRACKING_URI, else the embedded store.

    Raises:
        BadInput: the study's own address contains masked credentials, or a reference to a variable, that the environment does
            not provide.
    """
    if asked:
        return asked
    configured, given = (study_uri(folder) if folder else None), os.environ.get(URI_VARIABLE)
    if configured is None:
        return given or embedded_uri(runs)
    return _complete(configured, given)


def study_uri(folder: StudyFolder) -> str | None:
    """Returns the `tracker.uri` from a study's configuration file; None if it has none.

    The relative path of a SQLite file is made absolute: it is relative to the folder in which the study was started.
    """
    uri = _study_option(folder, "uri")
    with contextlib.suppress(OSError, ValueError):  # damaged, or of another version
        if uri is not None and os.path.isdir(cwd := folder.read_study().cwd):
            return _absolute(uri, cwd)
    return uri


def _absolute(uri: str, cwd: str) -> str:
    """Returns an address; the relative path of a SQLite file is made absolute, starting from the folder `cwd`."""
    file = uri.removeprefix(SQLITE)
    return uri if file == uri or file.startswith((":memory:", "${")) else SQLITE + os.path.join(cwd, file)


def may_use(folder: StudyFolder, uri: str) -> bool:
    """Whether a study's configuration has this address or none. Credentials are not compared, because none are stored."""
    configured = study_uri(folder)
    return configured is None or Secrets().text(_resolved(configured)) == Secrets().text(_absolute(uri, os.getcwd()))


def chosen_experiment(uri: str, folder: StudyFolder | None = None) -> str:
    """Returns the name of the experiment: the study's `tracker.experiment`, else "autotune".

    Args:
        uri: address of the store.
        folder: the study; None if there is none yet.

    Raises:
        BadInput: the name refers to a variable that is not set.
    """
    configured = (_study_option(folder, "experiment") if folder else None) or ""
    _check_variables("tracker.experiment", configured, "Set it.")
    default = f"/Shared/{EXPERIMENT}" if uri.partition(":")[0] == "databricks" else EXPERIMENT
    return _resolved(configured) or default


def _study_option(folder: StudyFolder, name: str) -> str | None:
    try:
        document = yaml.safe_load(read_text(folder.config_file))
        value = document["tracker"][name]
        value = _with_keys(value, document) if isinstance(value, str) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError):  # missing or damaged
        return None
    return value if isinstance(value, str) else None


def ensure_store(runs: Path, make: Callable[[str], None]) -> str:
    """Creates the embedded store with `make` if it does not exist, and returns its address.

    Six processes that opened a new MLflow SQLite file at the same time broke it permanently. So one process creates the file,
    under a lock and a temporary name, and renames it when it is complete. The other processes wait.
    """
    file = store_file(runs)
    if not file.exists():
        with _lock(file.with_name(".mlflow.lock")):
            if not file.exists():
                for left in file.parent.glob(".mlflow.db.*"):  # left by a process that was killed while it held the lock
                    left.unlink()
                temporary = file.with_name(f".mlflow.db.{os.getpid()}")
                make(f"sqlite:///{temporary}")
                temporary.chmod(0o600)  # as private as the studies' folders; SQLite's auxiliary files get the same mode
                artifacts_path(runs).mkdir(mode=0o700, exist_ok=True)
                with temporary.open("rb") as made:
                    os.fsync(made.fileno())
                temporary.replace(file)
    return embedded_uri(runs)


@contextlib.contextmanager
def only_writer(folder: StudyFolder, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Tries to obtain the lock for mirroring a study, and yields whether this succeeded: two writers would write trials twice.

    The kernel releases the lock when the process ends, no matter how.
    """
    try:
        file = open(os.open(folder.path / LOCK_FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "w")  # noqa: SIM115 (closed below)
    except OSError:  # a read-only copy of a study, which no process can lock
        yield True
        return
    with file:
        yield _taken(file.fileno(), time.monotonic() + wait_s)


def _taken(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_PAUSE_S)
        except OSError:  # no locks on this file system
            return True
        else:
            return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _complete(configured: str, given: str | None) -> str:
    """Returns a study's address with references resolved and masked credentials filled in."""
    _check_variables("tracker.uri", configured, "Set it, or give --uri URI.")
    uri = _resolved(configured)
    if not is_masked(uri):
        return uri
    if given and Secrets().text(given) == uri:
        return given
    plain = uri.replace(f"{MASK}@", "")
    if os.environ.get(USER_VARIABLE) and not is_masked(plain):
        return plain
    raise BadInput(
        f"tracker.uri: needs credentials, which are not stored with a study, got {uri!r}. Give the whole address in "
        f"{URI_VARIABLE} or with --uri, or the credentials in {USER_VARIABLE} and MLFLOW_TRACKING_PASSWORD."
    )


def _check_variables(key: str, configured: str, do: str) -> None:
    missing = [name for name, default in _REFERENCE.findall(configured) if not default and name not in os.environ]
    if missing:
        raise BadInput(f"{key}: a variable that is not set, got '${{oc.env:{missing[0]}}}'. {do}")


def _with_keys(value: str, document: Any) -> Any:
    """Returns an option in which references to other keys of the configuration are replaced by their values.

    If the option consists of a single reference, the value keeps its type.
    """

    def referred(found: re.Match[str]) -> Any:
        return functools.reduce(operator.getitem, found[1].split("."), document)

    whole = _KEY.fullmatch(value)
    return referred(whole) if whole else _KEY.sub(lambda found: str(referred(found)), value)


def _resolved(configured: str) -> str:
    """Returns a text with the values of the variables to which it refers; for an unset variable, its default or "" is used."""
    return _REFERENCE.sub(lambda found: os.environ.get(found[1], found[2] or ""), configured)
