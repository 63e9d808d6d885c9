"""The folder of a study: where each file lies, and how documents are written and read. Nothing else knows the paths."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.errors import BadInput, nearest
from autotune.records import StudyRecord, Summary, TrialRecord

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
RESERVED_NAMES = ("mlflow.db", "mlartifacts")  # the embedded tracking store lies beside the studies


class StudyFolder:
    """Paths and documents of one study: `runs/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def study_file(self) -> Path:
        """StudyRecord: what the study is about."""
        return self.path / "study.json"

    @property
    def config_file(self) -> Path:
        """The composed configuration, interpolations unresolved."""
        return self.path / "config.yaml"

    @property
    def journal_file(self) -> Path:
        """Optuna's journal storage."""
        return self.path / "optuna.journal"

    @property
    def summary_file(self) -> Path:
        """Summary, rewritten after every trial."""
        return self.path / "summary.json"

    @property
    def best_file(self) -> Path:
        """The winner as YAML."""
        return self.path / "best.yaml"

    def trial_path(self, number: int) -> Path:
        """Returns the folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def write_study(self, record: StudyRecord) -> None:
        """Writes the study's record."""
        write_json(self.study_file, record.as_json())

    def read_study(self) -> StudyRecord:
        """Returns the study's record."""
        return StudyRecord.from_json(read_json(self.study_file))

    def write_trial(self, record: TrialRecord) -> None:
        """Writes a finished trial's record; from then on the trial counts."""
        write_json(self.trial_path(record.number) / "trial.json", record.as_json())

    def read_trials(self) -> list[TrialRecord]:
        """Returns every finished trial, by number. Folders without a record (cut off) are left out."""
        files = sorted(self.path.glob("trials/[0-9]*/trial.json"))
        return [TrialRecord.from_json(read_json(file)) for file in files]

    def next_number(self) -> int:
        """Returns the first trial number that has no folder yet."""
        taken = [int(folder.name) for folder in self.path.glob("trials/[0-9]*") if folder.name.isdigit()]
        return max(taken, default=-1) + 1

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json."""
        write_json(self.summary_file, summary)

    def read_summary(self) -> Summary:
        """Returns summary.json."""
        return dict(read_json(self.summary_file))


def create(runs: Path, name: str) -> StudyFolder:
    """Makes and returns the folder of a new study: `name`, or `name-2`, `name-3` when that is taken.

    Raises:
        BadInput: the name is not a plain name, or the runs folder cannot be written.
    """
    check_name(name)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{n}" for n in range(2, 100_000))):
            path = runs / f"{name}{suffix}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            (path / "trials").mkdir(mode=0o700)
            return StudyFolder(path)
    except OSError as error:
        problem = f"runs_dir: cannot be written, got {str(runs)!r} ({error.strerror}). Give a folder you own: runs_dir=DIR."
        raise BadInput(problem) from error
    raise BadInput(f"study.name: 99,999 studies of this name exist, got {name!r}. Give another: study.name=NAME.")


def check_name(name: str) -> None:
    """Checks a study's name.

    Raises:
        BadInput: it could leave the runs folder or upset a shell.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise BadInput(
            f"study.name: not a plain name, got {name!r}. Allowed: letters, digits, '.', '_' and '-', starting with a letter "
            "or digit, 80 characters at most. Use runs_dir=DIR to choose the folder."
        )
    if name in RESERVED_NAMES:
        raise BadInput(f"study.name: a name the tracking store has, got {name!r}. Give another.")


def find(runs: Path, name: str) -> StudyFolder:
    """Returns the study that `name` means: that very name, or for a default name the latest of `name`, `name-2`, ...

    Raises:
        BadInput: there is none.
    """
    check_name(name)
    numbered = re.compile(re.escape(name) + r"-(\d+)")
    matches = [(0, folder) for folder in studies(runs) if folder.name == name]
    matches += [(int(m[1]), folder) for folder in studies(runs) if (m := numbered.fullmatch(folder.name))]
    if matches:
        return max(matches, key=lambda pair: pair[0])[1]
    known = [folder.name for folder in studies(runs)]
    there = f"There {'are' if known else 'is none yet'}{': ' if known else ''}{', '.join(nearest(name, known)[:8])}."
    raise BadInput(f"STUDY: no such study in {str(runs)!r}, got {name!r}. {there} See `autotune list`.")


def studies(runs: Path) -> Iterator[StudyFolder]:
    """Yields the studies of a runs folder, by name; none where there is no such folder."""
    if not os.path.isdir(runs):
        return
    for file in sorted(runs.glob("*/study.json")):
        yield StudyFolder(file.parent)


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document: whole under a temporary name, then renamed, so that a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Returns a JSON document.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8"))
