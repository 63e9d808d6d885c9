"""Makes, names and finds the studies of a runs folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from autotune.errors import BadInput, one_of
from autotune.plain_text import shell_word
from autotune.records import StudyRecord
from autotune.run_dir import StudyFolder, is_study, path_text, where

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
RECORDS = (  # what a study keeps in its folder, besides its report
    "study.json", "summary.json", "config.yaml", "optuna.journal", "explanation.json", "best.yaml", "owner.json",
    "tracking.json", "trials",
)  # fmt: skip
OWN_FOLDERS = ("trials", "compile_cache", "probes")  # the folders that autotune makes in a study's folder
OWN_SUFFIXES = (".csv", ".env", ".gz", ".html", ".journal", ".json", ".log", ".png", ".py", ".tmp", ".yaml", ".yml")
RESERVED_NAMES = ("mlflow.db", "mlartifacts")  # the embedded tracking store lies next to the studies


def create(runs: Path, name: str) -> StudyFolder:
    """Makes and returns the folder of a new study: `name`, or `name-2`, `name-3` if that is taken.

    Raises:
        BadInput: the name is not a plain name, or the runs folder cannot be written.
    """
    check_name(name)
    try:
        runs.mkdir(mode=0o755, parents=True, exist_ok=True)  # other users must not be able to replace what is in it
        for number in range(1, 100_000):
            path = runs / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            folder = StudyFolder(path, base=name, sequence=next_sequence(runs))
            try:
                (path / "trials").mkdir(mode=0o700)
            except OSError:
                folder.discard()
                raise
            return folder
    except OSError as error:
        problem = f"runs_dir: cannot be written, got {str(runs)!r} ({error.strerror}). Give a folder you own: runs_dir=DIR."
        raise BadInput(problem) from error
    raise BadInput(f"study.name: 99,999 studies of this name exist, got {name!r}. Give another: study.name=NAME.")


def foreign(study: Path) -> list[Path]:
    """Returns the folders and files that a program has put into a study's folder.

    Some programs keep their runs in `runs/train`, which is also the folder of a study of `train.py`. Links are left out, and so
    are files that look like autotune's records, reports and exports.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(study) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            is_own = entry.name in OWN_FOLDERS if is_folder else entry.name.endswith(OWN_SUFFIXES)
            if not (is_own or entry.name.startswith(".") or entry.is_symlink()):
                found.append(study / entry.name)
    return sorted(found)


def check_output(file: Path, option: str) -> None:
    """Checks that a file may be written: its path is valid, and it replaces no record of a study or of the tracking store.

    Raises:
        BadInput: the path is not valid, or the file would replace a record.
    """
    if "\0" in str(file):
        raise BadInput(f"{option}: a path cannot contain a zero byte, got {str(file)!r}. Give another file.")
    file = Path(os.path.realpath(file))  # unlike Path.resolve, it accepts links that lead in a circle
    place = next((folder for folder in file.parents if is_study(folder)), None)
    own = place and file.relative_to(place).parts[0]
    if file.name in RESERVED_NAMES or own in RECORDS:
        whose = f"the study {place.name!r}" if place and own in RECORDS else "MLflow"
        raise BadInput(f"{option}: a record of {whose}, got {str(file)!r}. Give another file.")


def check_name(name: str) -> None:
    """Checks a study's name.

    Raises:
        BadInput: the name could lead out of the runs folder, would need quoting in a shell, or is reserved.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise BadInput(
            f"study.name: not a plain name, got {name!r}. Allowed: letters, digits, '.', '_' and '-', starting with a letter "
            "or digit, 80 characters at most. Use runs_dir=DIR to choose the folder."
        )
    if name in RESERVED_NAMES:
        raise BadInput(f"study.name: reserved for the tracking store, got {name!r}. Give another.")


def find(runs: Path, name: str, *, without: Path | None = None) -> StudyFolder:
    """Returns the study that a name or a path refers to.

    A name refers to the latest study that was requested under this name. If there is none, it refers to the study in the folder
    of this name. A path refers to the study whose folder is, or contains, this path, even outside `runs`. So "runs/resnet18" is
    the first study of that name, even if "resnet18" now refers to a later study in "runs/resnet18-2".

    Args:
        runs: the runs folder.
        name: the name or path as typed.
        without: folder of a study that is ignored when a name is looked up.

    Raises:
        BadInput: there is no such study.
    """
    if os.sep in name or name in (os.curdir, os.pardir):
        return _at(name)
    there = [folder for folder in studies(runs) if folder.path != without]
    named = ((record, folder) for folder in there if (record := _record(folder)) and record.base == name)
    # Two studies that start at the same moment may get the same number.
    namesakes = [((record.sequence, record.started_at), folder) for record, folder in named]
    if namesakes:
        return max(namesakes, key=lambda pair: pair[0])[1]
    if exact := next((folder for folder in there if folder.name == name), None):
        return exact
    if os.path.exists(name):
        return _at(name)
    raise BadInput(f"STUDY: no such study in {str(runs)!r}, got {name!r:.300}. {_there_are(name, there)}")


def _at(path: str) -> StudyFolder:
    """Returns the study whose folder is, or contains, a path.

    Raises:
        BadInput: it lies in no study's folder, or it does not exist.
    """
    if not os.path.exists(path):
        raise BadInput(
            f"STUDY: no such study, got {path!r:.300}. {_there_are(os.path.basename(path), studies(Path(path).parent))}"
        )
    if folder := around(Path(path)):
        return folder
    what = "a folder that is not a study" if os.path.isdir(path) else "a file outside any study"
    inside = list(studies(Path(path)))
    has = f"It contains studies, such as {str(inside[0].path)!r}." if inside else "Give a study's name or its folder."
    raise BadInput(f"STUDY: {what}, got {path!r}. {has} See `autotune list`.")


def around(path: Path) -> StudyFolder | None:
    """Returns the study whose folder is, or contains, a path; None if there is none."""
    whole = Path(os.path.abspath(path))
    place = next((each for each in (whole, *whole.parents) if is_study(each)), None)
    if place is None:
        return None
    typed = place if path.is_absolute() else Path(os.path.relpath(place))
    return StudyFolder(typed if typed.name == place.name else place)  # a relative path can end in "..", the name cannot


def _there_are(name: str, there: Iterable[StudyFolder]) -> str:
    known = [folder.name for folder in there]
    have = one_of(name, known, show=8).replace("Allowed:", "There are:") if known else "There is none yet."
    return f"{have} See `autotune list`."


def call(folder: StudyFolder, latest: Mapping[str, str] | None = None) -> str:
    """Returns what to type for this study on a command line: its name, or its path if the name refers to a later study.

    A name that a command would take for an option is replaced by the path, too.

    Args:
        folder: the study.
        latest: requested name -> name of the latest study requested with it; None to find this out by reading all studies.
    """
    try:
        meant = find(folder.path.parent, folder.name).name if latest is None else latest.get(folder.name, folder.name)
        is_meant = meant == folder.name and not meant.startswith("-")
    except BadInput:
        is_meant = False
    return f"{shell_word(folder.name if is_meant else path_text(folder.path))}{where(folder.path.parent)}"


def studies(runs: Path) -> Iterator[StudyFolder]:
    """Yields the studies of a runs folder, by name; none if there is no such folder."""
    if not os.path.isdir(runs):
        return
    yield from map(StudyFolder, sorted(path for path in runs.glob("[!.]*") if is_study(path)))


def next_sequence(runs: Path) -> int:
    """Returns the sequence number of a new study in a runs folder, from 1."""
    return 1 + max((record.sequence for folder in studies(runs) if (record := _record(folder))), default=0)


def _record(folder: StudyFolder) -> StudyRecord | None:
    try:
        return folder.read_study()
    except (OSError, ValueError):  # damaged, or of another version
        return None
