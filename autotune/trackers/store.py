"""Where tracking goes: the address a user named, or the embedded SQLite store of the runs folder, made once and safely."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from autotune.run_dir import StudyFolder

URI_VARIABLE = "MLFLOW_TRACKING_URI"
NONE = "none"


def store_file(runs: Path) -> Path:
    """Returns the embedded store's database file."""
    return runs.resolve() / "mlflow.db"


def artifacts_path(runs: Path) -> Path:
    """Returns the folder of the embedded store's artifacts."""
    return runs.resolve() / "mlartifacts"


def embedded_uri(runs: Path) -> str:
    """Returns the embedded store's address."""
    return f"sqlite:///{store_file(runs)}"


def chosen_uri(runs: Path, *, asked: str | None = None, folder: StudyFolder | None = None) -> str:
    """Returns where tracking goes: as asked, as the study says, as MLFLOW_TRACKING_URI says, or into the embedded store."""
    configured = study_uri(folder) if folder else None
    return asked or configured or os.environ.get(URI_VARIABLE) or embedded_uri(runs)


def study_uri(folder: StudyFolder) -> str | None:
    """Returns the `tracker.uri` a study was configured with; None when it has none or an environment reference."""
    try:
        config = yaml.safe_load(folder.config_file.read_text(encoding="utf-8"))
        uri = config["tracker"]["uri"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return os.path.expandvars(_environment_references(uri)) if isinstance(uri, str) else None


def ensure_store(runs: Path, make: Callable[[str], None]) -> str:
    """Makes the embedded store if it is not there, and returns its address.

    Six processes opening a fresh MLflow SQLite file at once left it broken for good. So one makes it, under a lock and a
    temporary name, and renames it when it is whole; the others wait.

    Args:
        runs: the runs folder.
        make: creates a whole, empty store at the address it is given.
    """
    file = store_file(runs)
    if not file.exists():
        with _lock(file.with_name(".mlflow.lock")):
            if not file.exists():
                temporary = file.with_name(f".mlflow.{os.getpid()}.db")
                temporary.unlink(missing_ok=True)
                make(f"sqlite:///{temporary}")
                temporary.replace(file)
    return embedded_uri(runs)


@contextmanager
def only_writer(folder: StudyFolder) -> Iterator[bool]:
    """Holds the right to mirror a study, and says whether it was free: two at once would write every trial twice."""
    try:
        file = (folder.path / ".sync.lock").open("w")
    except OSError:  # a read-only copy of somebody's study: nobody else writes there either
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _environment_references(uri: str) -> str:
    # config.yaml is kept unresolved so that secrets stay out of it; `${oc.env:NAME}` is the one form that makes sense here
    return uri.replace("${oc.env:", "${")
