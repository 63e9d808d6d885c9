"""Lays out a study's folder and reads and writes its documents. No other module knows the paths."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune.documents import as_json, make_folder, parsed, read_json, read_text, write_text
from autotune.errors import BadInput, FolderLost
from autotune.harness.protocol import PROGRESS_FILE
from autotune.owner import MAX_HOST, OWNER_FILE, Claim, Owned, owner_of
from autotune.plain_text import escaped, shell_word
from autotune.records import StudyRecord, Summary, TrialRecord, TrialRequest
from autotune.shapes import check
from autotune.summaries import EXPLANATION, checked_summary

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # pauses between retries on a full disk, during which another program may free space
PROBE_BYTES = 1 << 20  # about as much as a trial writes
LONG = ('"trials": ', '"explanation": ')  # entries of summary.json that may become large; each is on a line of its own
CUT_OFF = "autotune was ended before the study was over"

Known = dict[Path, tuple[tuple[int, int, int], TrialRecord]]  # file -> (its time, size and inode when it was read), its record


class StudyFolder:
    """Paths and documents of one study: `runs/<name>/`.

    Attributes:
        path: the folder.
        name: its name.
        base, sequence: as in StudyRecord, if this process made the folder.
        study_file: StudyRecord: what the study is about.
        config_file: the composed configuration, with interpolations unresolved.
        journal_file: Optuna's journal storage; None for a study that is kept in memory.
        summary_file: Summary, rewritten while the study runs.
        best_file: the winner as YAML.
        report_file: what the study found, as one HTML file.
        is_kept: whether the folder outlives the study. False in a replay, which need not write after every trial.
        mask: function that masks the study's secrets in every document that is written.
    """

    is_kept = True

    def __init__(self, path: Path, *, base: str = "", sequence: int = 0) -> None:
        self.path = path
        self.name = path.name
        self.base, self.sequence = base or path.name, sequence
        self.study_file, self.config_file = path / "study.json", path / "config.yaml"
        self.journal_file: Path | None = path / "optuna.journal"
        self.summary_file, self.best_file, self.report_file = path / "summary.json", path / "best.yaml", path / "report.html"
        self.mask: Callable[[str], str] = str
        self._claim: Claim | None = None
        self._next: int | None = None  # number of the next trial, once it is known
        self._is_begun = False  # whether there is a study to resume

    def trial_path(self, number: int) -> Path:
        """Returns the folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def trial_files(self, name: str) -> list[Path]:
        """Returns the file `name` of every trial that has one. Other folders, such as a copy "0007.bak", are not trials."""
        return [file for file in sorted(self.path.glob(f"trials/[0-9]*/{name}")) if file.parent.name.isdecimal()]

    # Ownership -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claimed(self) -> Iterator[str]:
        """Locks the study against other tuners; yields why it could not be locked, "" if it was locked.

        Raises:
            BadInput: another tuner is working on it.
            FolderLost: the folder cannot be written.
        """
        self._is_begun = is_study(self.path)
        with contextlib.ExitStack() as held:
            try:
                self._claim = held.enter_context(Claim(self.path))
            except Owned as owned:
                raise self._taken(owned) from None
            except OSError as error:
                raise self.lost(error) from error
            try:
                yield self._claim.problem
            finally:
                self._claim = None

    @property
    def is_owned(self) -> bool:
        """Whether a process is working on the study now."""
        return owner_of(self.path) is not None

    def check_free(self) -> None:
        """Checks that no other tuner is working on the study, before a long wait for a node. `claimed` checks again later.

        Raises:
            BadInput: another tuner is working on it.
        """
        if (owner := owner_of(self.path)) is not None:
            raise self._taken(Owned(owner))

    def _taken(self, owned: Owned) -> BadInput:
        host, gone = owned.owner.get("host"), ""
        # A lock may outlive a host that crashed. Without locks, this file alone says that the study is taken.
        if host and host != platform.node():
            gone = f" If {escaped(host[:MAX_HOST])} does not run it any more, remove {self.path / OWNER_FILE}."
        return BadInput(
            f"STUDY: another autotune is working on it, got {self.name!r} ({owned}). Wait until it has ended, or end it with "
            f"Ctrl-C.{gone}"
        )

    # Documents -------------------------------------------------------------------------------------------------------------

    def write_study(self, record: StudyRecord) -> None:
        """Writes the study's record."""
        self._write(self.study_file, record.as_json())
        self._is_begun = True

    def read_study(self) -> StudyRecord:
        """Returns the study's record. If the folder was copied or renamed, the record has the folder's present name.

        Raises:
            OSError: it cannot be read.
            ValueError: study.json does not hold a study's record.
        """
        record = StudyRecord.from_json(read_json(self.study_file))
        return record if record.name == self.name else replace(record, name=self.name, base=self.name)

    def write_config(self, yaml: str) -> None:
        """Writes the composed configuration."""
        self._write(self.config_file, yaml)

    def write_request(self, request: TrialRequest) -> None:
        """Makes a trial's folder and writes what the trial is to measure. Removes the record of an earlier measurement."""
        place = self.trial_path(request.number)
        self._put(lambda: make_folder(place))
        self._put(lambda: (place / "trial.json").unlink(missing_ok=True))  # else a trial that is cut off would seem finished
        self._write(place / "asked.json", asdict(request))
        self._next = max(self.next_number(), request.number + 1)

    def write_trial(self, record: TrialRecord) -> None:
        """Writes a finished trial's record. A trial without a record does not count."""
        self._write(self.trial_path(record.number) / "trial.json", record.as_json())

    def read_trials(self, known: Known | None = None) -> list[TrialRecord]:
        """Returns every finished trial, ordered by number. Folders without a record (of killed trials) are left out.

        Args:
            known: what earlier calls have read, which this call updates. Only files that have changed since are read again.

        Raises:
            OSError: a record cannot be read.
            ValueError: a record is invalid; the message names its file.
        """
        known = {} if known is None else known
        return sorted((_read_once(file, known) for file in self.trial_files("trial.json")), key=lambda record: record.number)

    def read_trial(self, number: int) -> TrialRecord:
        """Returns a finished trial.

        Raises:
            OSError, ValueError: as `read_trials`, or there is no such trial.
        """
        return TrialRecord.from_json(read_json(self.trial_path(number) / "trial.json"))

    def read_cut_off(self) -> list[TrialRequest]:
        """Returns the requests of trials without a record, ordered by number: autotune was killed while they ran."""
        found = []
        for file in self.trial_files("asked.json"):
            if not file.with_name("trial.json").exists():
                with contextlib.suppress(OSError, ValueError):  # killed before the request was written
                    found.append(TrialRequest.from_json(read_json(file)))
        return sorted(found, key=lambda request: request.number)

    def forget_progress(self, number: int) -> None:
        """Removes the progress file of a trial that will be measured again. Call it once the trial's time has been counted."""
        self._put(lambda: (self.trial_path(number) / PROGRESS_FILE).unlink(missing_ok=True))

    def tidy(self) -> None:
        """Removes temporary files that killed processes left behind. Only the study's owner may call it."""
        for pattern in ("*.tmp", "trials/*/*.tmp", ".probe"):
            with contextlib.suppress(OSError):  # the folder cannot be read
                for file in self.path.glob(pattern):
                    with contextlib.suppress(OSError):
                        file.unlink()

    def next_number(self) -> int:
        """Returns the number of the next trial: one more than the highest that has a folder."""
        if self._next is None:
            taken = [int(folder.name) for folder in self.path.glob("trials/[0-9]*") if folder.name.isdecimal()]
            self._next = max(taken, default=-1) + 1
        return self._next

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json."""
        self._write(self.summary_file, summary)

    def read_summary(self) -> Summary:
        """Returns summary.json as it is stored, but with the folder's present name as "study".

        Raises:
            OSError: it cannot be read.
            ValueError: it does not hold a summary.
        """
        return {**checked_summary(read_json(self.summary_file)), "study": self.name}

    def read_outline(self) -> Summary:
        """Returns summary.json with "num_trials", and without its long entries ("trials" is []), so that reading is fast.

        The long entries are included if the file does not have the form in which `write_summary` writes it.

        Raises:
            OSError, ValueError: as `read_summary`.
        """
        text = read_text(self.summary_file)
        summary = checked_summary(_outline(text) or parsed(text))
        return {**summary, "study": self.name, "num_trials": summary.get("num_trials", len(summary["trials"]))}

    def current_summary(self, *, is_outline: bool = False) -> Summary:
        """Returns summary.json. A "running" study that no process is working on was killed: its status becomes "interrupted".

        Args:
            is_outline: return only the entries that `read_outline` returns.

        Raises:
            OSError, ValueError: as `read_summary`.
        """
        is_owned = self.is_owned  # checked first: an owner that ends before the summary is read has written its final status
        summary = self.read_outline() if is_outline else self.read_summary()
        if summary["status"] == "running" and not is_owned:
            return {**summary, "status": "interrupted", "reason": CUT_OFF}
        return summary

    @property
    def explanation_file(self) -> Path:
        """Explanation of the study, see explain/explanation.py."""
        return self.path / "explanation.json"

    def write_explanation(self, document: dict[str, Any]) -> None:
        """Writes explanation.json."""
        self._write(self.explanation_file, document)

    def read_explanation(self) -> dict[str, Any] | None:
        """Returns explanation.json; None if it is missing, unreadable or damaged: `explain` can make it again."""
        with contextlib.suppress(OSError, ValueError):
            document: dict[str, Any] = read_json(self.explanation_file)
            check(document, EXPLANATION)
            return document
        return None

    def write_best(self, text: str) -> None:
        """Writes the winner."""
        self._write(self.best_file, text)

    # When it cannot be written ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that the folder still exists and that a trial's files can be written there.

        Raises:
            FolderLost: it cannot be written; the message says why and what to do.
        """
        self._put(lambda: write_text(self.path / ".probe", "." * PROBE_BYTES))
        with contextlib.suppress(OSError):
            (self.path / ".probe").unlink()

    def lost(self, error: OSError) -> FolderLost:
        """Returns the exception that explains a failed write to the user."""
        why, again = error.strerror or str(error), f"autotune resume {self._typed()}{where(self.path.parent)}"
        kept = "What was measured before is kept"
        if error.errno in GONE and error.filename and self._claim is not None and not self._claim.is_lost:
            place = Path(os.fsdecode(error.filename)).parent  # folder of the file being written
            return FolderLost(f"{place}: gone ({why}), deleted or moved while the study ran. {kept}. To continue: {again}")
        if error.errno in GONE:
            return FolderLost(
                f"{self.path}: the study's folder is gone ({why}), deleted, moved or unmounted while the study ran. Nothing is "
                "written there again. Start a new study, or continue it in its new place: autotune resume STUDY --runs-dir DIR"
            )
        if not self._is_begun:
            kept, again = "Nothing was measured yet", "start the study again"
        if error.errno in FULL:
            place = self._place_of(error)
            what, todo = _full(place, error.errno)
            return FolderLost(f"{place}: {what} ({why}). {kept}. {todo}, then: {again}")
        return FolderLost(f"{self.path}: cannot be written any more ({why}). {kept}. Make it writable, then: {again}")

    def _typed(self) -> str:
        """Returns what a user types for this study: its name, or its path if there is a later study of this name."""
        later: list[Path] = []
        with contextlib.suppress(OSError):  # the runs folder is lost, too
            later = [path for path in self.path.parent.glob(f"{glob.escape(self.name)}-[1-9]*") if is_study(path)]
        return shell_word(path_text(self.path) if later else self.name)

    def discard(self) -> None:
        """Removes the folder if no study has begun in it, so that its name is free again."""
        if self._is_begun or is_study(self.path):
            return
        self.tidy()
        for file in (self.path / OWNER_FILE, self.config_file):
            with contextlib.suppress(OSError):
                file.unlink()
        for place in (self.path / "trials", self.path):
            with contextlib.suppress(OSError):  # something else is in it
                place.rmdir()

    def _place_of(self, error: OSError) -> Path:
        """Returns the folder of the file that could not be written: the study's, unless the file lies elsewhere."""
        is_named = isinstance(error.filename, str | bytes | os.PathLike)
        file = Path(os.path.abspath(os.fsdecode(error.filename if is_named else self.path)))
        return self.path if file.is_relative_to(os.path.abspath(self.path)) else file.parent

    def _check_place(self) -> None:
        if self._claim is not None and self._claim.is_lost:
            raise self.lost(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))

    def _write(self, file: Path, document: Any) -> None:
        self._put(lambda: write_text(file, self.mask(document if isinstance(document, str) else as_json(document))))

    def _put(self, write: Callable[[], None]) -> None:
        """Calls a function that writes.

        Raises:
            FolderLost: nothing can be written.
        """
        self._check_place()
        try:
            when_there_is_room(write)
        except OSError as error:
            raise self.lost(error) from error


def when_there_is_room(write: Callable[[], None]) -> None:
    """Calls a function that writes. Waits a little and calls it again if the disk is full.

    Raises:
        OSError: nothing can be written.
    """
    pauses_s = list(PAUSES_S)
    while True:
        try:
            write()
        except OSError as error:
            if error.errno not in FULL or not pauses_s:
                raise
            time.sleep(pauses_s.pop(0))
        else:
            return


def is_study(path: Path) -> bool:
    """Whether a folder is a study's. A folder that has lost its study.json counts, too, so that the loss can be reported."""
    return os.path.isfile(path / "study.json") or (os.path.isfile(path / "summary.json") and os.path.isdir(path / "trials"))


def _outline(text: str) -> dict[str, Any] | None:
    """Returns a summary's entries except LONG ones; None if "num_trials" is missing or `as_json` did not write the text."""
    lines = text.split("\n")
    if (lines[0], lines[-1]) != ("{", "}") or not any(line.startswith('"num_trials": ') for line in lines):
        return None
    short = [line.removesuffix(",") for line in lines[1:-1] if not line.startswith(LONG)]
    return {"trials": [], **parsed(f"{{{','.join(short)}}}")}


def _full(place: Path, number: int | None) -> tuple[str, str]:
    """Returns what is used up where a file cannot be written, and what to do about it."""
    if number == errno.EDQUOT:
        return "your quota is used up", "Remove some files"
    with contextlib.suppress(OSError):
        found = os.statvfs(place)
        if found.f_files and not found.f_favail and found.f_bavail:
            return "the disk has room, but no inodes for more files", "Remove some files"
    return "the disk is full", "Free some space"


def _read_once(file: Path, known: Known) -> TrialRecord:
    found = file.stat()
    stamp, (known_stamp, record) = (found.st_mtime_ns, found.st_size, found.st_ino), known.get(file, (None, None))
    if record is None or stamp != known_stamp:
        try:
            record = TrialRecord.from_json(read_json(file))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        known[file] = stamp, record
    return record


def path_text(path: Path) -> str:
    """Returns a path as a user types it for a study: with a slash, since text without a slash is read as a name."""
    return str(path) if os.sep in str(path) else os.path.join(os.curdir, path)


def where(runs: Path) -> str:
    """Returns " --runs-dir FOLDER", which makes a command use a runs folder; "" for the usual folder."""
    folder = path_text(runs) if str(runs).startswith("-") else str(runs)
    return "" if runs == Path("runs") else f" --runs-dir {shell_word(folder)}"
