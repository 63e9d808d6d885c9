"""Runs and reads studies from Python: `autotune.run` and `autotune.Study`, for notebooks and pipelines.

It uses the same functions as the command line, so a study started here is the same as one started in a shell.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import show
from autotune.cli import verdict as printed
from autotune.cli.export import tier_named
from autotune.cli.options import runs_folder
from autotune.cli.plain import PlainLines, Quiet, View
from autotune.cli.process_start import begin
from autotune.cli.run import Asked, interrupted, prepare
from autotune.errors import BadInput
from autotune.export.formats import render
from autotune.knobs.values import shown
from autotune.masking import Secrets
from autotune.records import Kind, Knobs, Outcome, Summary, TrialRecord
from autotune.report.writing import write_report
from autotune.run_dir import StudyFolder
from autotune.studies import find
from autotune.study import run_study
from autotune.wording import headline

if TYPE_CHECKING:
    import pandas

GIB = 2**30
# The table of a study without trials has the columns of this record.
NO_TRIAL = TrialRecord(number=0, kind=Kind.baseline, knobs={}, changed={}, outcome=Outcome.ok)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The winner's speed-up over the baseline, as measured by the finals.

    Before the finals are complete, the verdict is "ambiguous". The ratio then comes from the search, which overstates it, or
    from measurements that were not made in pairs. `reason` says which.

    Attributes:
        verdict: "faster", "same" or "ambiguous".
        ratio: how many times as fast the winner is as the baseline; None if the two were not compared.
        low, high: 95 % interval of the ratio; None if there is none.
        reason: why the verdict is not "faster", or a caveat; "" if there is neither.
    """

    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    reason: str


@dataclass(frozen=True)
class Report:
    """A study's report. A notebook displays it as the result of a cell.

    Attributes:
        path: the file. It is self-contained, so it can be sent to others.
    """

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 40em; border: 1px solid #8888"></iframe>'


class Study:
    """A study. Each access to a property reads the study's folder again, so a running study can be read, too.

    Args:
        name: the study's name, as on the command line: "resnet18" is the latest study of that name, "runs/resnet18" a folder.
        runs_dir: folder of the studies; None for "runs".

    Raises:
        autotune.errors.BadInput: there is no such study.
    """

    def __init__(self, name: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] | None = None) -> None:
        self._folder = _fixed(find(runs_folder(None if runs_dir is None else os.fspath(runs_dir)), os.fspath(name)))

    @classmethod
    def _of(cls, folder: StudyFolder) -> Study:
        study = cls.__new__(cls)
        study._folder = _fixed(folder)
        return study

    @property
    def name(self) -> str:
        """Name of the study's folder."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """The study's folder, an absolute path."""
        return self._folder.path

    @property
    def summary(self) -> Summary:
        """The document of `autotune show STUDY --json`.

        Raises:
            autotune.errors.BadInput: the study has no summary yet, or the summary cannot be read.
        """
        return show.read_summary(self._folder)

    @property
    def status(self) -> str:
        """One of "running", "complete", "interrupted" and "failed"."""
        return str(self.summary["status"])

    @property
    def trials(self) -> list[TrialRecord]:
        """Every finished trial, by number; trial 0 is the baseline.

        Raises:
            autotune.errors.BadInput: a trial's record cannot be read.
        """
        try:
            return self._folder.read_trials()
        except (OSError, ValueError) as error:
            raise BadInput(f"STUDY: a trial cannot be read, got {self.name!r} ({error}). Move its folder away.") from error

    @property
    def best(self) -> Knobs | None:
        """Settings of the winner that differ from the baseline; {} if the baseline won, None if nothing was measured yet."""
        best = self.summary["best"]
        return None if best is None else dict(best["overrides"])

    @property
    def speedup(self) -> Speedup | None:
        """The winner against the baseline. Before the finals: the best trial so far, or None if none is better."""
        found = self.summary["speedup"]
        if not found:
            return None
        low, high = found.get("ci") or (None, None)
        reason = str(found.get("reason") or "")
        return Speedup(verdict=found["verdict"], ratio=found.get("ratio"), low=low, high=high, reason=reason)

    @property
    def effects(self) -> list[dict[str, Any]]:
        """The effect of each change of the winner, largest first: {"knob", "from", "to", "ratio", "ci", "verdict", ...}."""
        return list(self.summary["attribution"])

    @property
    def verdict(self) -> str:
        """What `autotune run` prints at the end."""
        return "\n".join(printed.lines(self.summary, self.path))

    def export(self, format: str = "yaml", *, tier: str | None = None) -> str:
        """Returns the winner as `autotune export` writes it.

        Args:
            format: one of `autotune.export.formats.FORMATS`.
            tier: highest tier allowed: "exact", "numerics" or "training"; None for the study's winner, whatever its tier.

        Raises:
            autotune.errors.BadInput: no such format or tier, or the study has no winner yet.
        """
        return render(self.summary, format, tier_named(tier)).text

    def report(self) -> Report:
        """Writes the study's report again, as `autotune report` does, and returns it.

        Raises:
            autotune.errors.BadInput: nothing was measured yet, or the report cannot be written.
        """
        self._folder.mask = Secrets.known().stored
        try:
            return Report(write_report(self._folder, self.summary))
        except OSError as error:
            file = str(self._folder.report_file)
            raise BadInput(f"STUDY: its report cannot be written, got {file!r} ({error.strerror}).") from error

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a table with one row per trial, indexed by its number, and one column per knob.

        Rates are in the unit of column `unit` per second, `peak_memory` is in GiB, `seconds` is the wall time of the trial.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        rows = [_row(trial) for trial in self.trials]
        return pandas.DataFrame(rows, columns=None if rows else list(_row(NO_TRIAL))).set_index("number")

    def __repr__(self) -> str:
        try:
            return f"Study({self.name!r}, {headline(self.summary)!r})"
        except BadInput:  # nothing was measured yet, or the summary cannot be read
            return f"Study({self.name!r})"


def run(
    *overrides: str,
    command: Sequence[str | os.PathLike[str]] | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    config_dirs: Sequence[str | os.PathLike[str]] = (),
    on_trial: Callable[[Study, TrialRecord], object] | None = None,
    is_quiet: bool = False,
) -> Study:
    """Runs a study to its end, as `autotune run` does, and returns it.

        study = autotune.run("study.budget.minutes=15", command=["python", "train.py"])

    Args:
        overrides: the arguments before `--` on the command line: "model=resnet18", "study.budget.minutes=15".
        command: the program to tune, as a list of arguments; None if a recipe is tuned (model=...).
        runs_dir: folder of the studies; None for "runs".
        config_dirs: folders with your own configuration, searched first.
        on_trial: called with the study and the trial's record after every trial. If it raises, the study ends as failed;
            `autotune resume` continues it.
        is_quiet: print only warnings, on standard error; otherwise a line is printed for every event.

    Raises:
        autotune.errors.BadInput: the request is invalid; the message says why.
        autotune.errors.NothingWorked: the unchanged program does not train, or the first settings that were tried all fail in
            the same way.
        autotune.errors.Interrupted: the study ended early, by Ctrl-C, by the notebook's stop button, or because it could not go
            on, for example with a faulty GPU. All measurements are on disk: `Study(name)` reads them.
        autotune.errors.FolderLost: the study's folder cannot be written any more.
    """
    if isinstance(command, str):
        raise BadInput(f"COMMAND: not a list of arguments, got {shown(command)}. Give command={command.split()!r}.")
    begin(is_process=False)
    runs = None if runs_dir is None else os.fspath(runs_dir)
    asked = Asked(
        overrides=overrides,
        command=None if command is None else [os.fspath(word) for word in command],
        config_dirs=tuple(Path(folder) for folder in config_dirs),
        runs_dir=runs,
    )
    inputs, folder = prepare(asked)
    study = Study._of(folder)
    view = (_Warnings if is_quiet else _Lines)(study, on_trial)
    try:
        summary = run_study(inputs, folder, view)
    except KeyboardInterrupt:
        raise interrupted(folder, "stopped by the user") from None
    if summary["status"] == "interrupted":
        raise interrupted(folder, str(summary.get("reason") or "stopped by the user"))
    return study


def _fixed(folder: StudyFolder) -> StudyFolder:
    """Returns a study's folder with an absolute path. A relative one fails once the program changes its working directory."""
    return StudyFolder(folder.path.absolute(), base=folder.base, sequence=folder.sequence)


class _Calling(View):
    """A view that calls the user's function after every trial."""

    def __init__(self, study: Study, on_trial: Callable[[Study, TrialRecord], object] | None) -> None:
        self._study, self._on_trial = study, on_trial

    def trial_ended(self, trial: TrialRecord) -> None:
        super().trial_ended(trial)
        if self._on_trial is not None:
            self._on_trial(self._study, trial)


class _Warnings(_Calling, Quiet):
    pass


class _Lines(_Calling, PlainLines):
    def __init__(self, study: Study, on_trial: Callable[[Study, TrialRecord], object] | None) -> None:
        _Calling.__init__(self, study, on_trial)
        PlainLines.__init__(self, study.path)


def _row(trial: TrialRecord) -> dict[str, Any]:
    low, high = trial.ci or (None, None)
    memory = trial.peak_memory_bytes
    return {
        "number": trial.number,
        "kind": trial.kind.value,
        "outcome": trial.outcome.value,
        "rate": trial.value,
        "rate_low": low,
        "rate_high": high,
        "unit": trial.unit,
        "device_rate": trial.device_rate,
        "loader_rate": trial.loader_rate,
        "peak_memory": None if memory is None else memory / GIB,
        "seconds": trial.seconds,
        "reason": trial.reason,
        **trial.knobs,
    }
