"""Implements `autotune run`: composes and checks the configuration, runs the study and shows its progress."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import autotune
from autotune.cli.process_start import began_s
from autotune.cli.sync import TrackingProcess
from autotune.cli.terminal import Outlasted, can_redraw, console, print_json
from autotune.errors import BadInput, ClaimBroken, Interrupted, NothingWorked, NotMeasured
from autotune.masking import Secrets
from autotune.plain_text import plain
from autotune.run_dir import StudyFolder, is_study
from autotune.studies import call
from autotune.trackers.store import NONE

if TYPE_CHECKING:
    from autotune.cli.plain import View
    from autotune.config.compose import Composed
    from autotune.records import Summary
    from autotune.study import Listener, StudyInputs, Tracking

LIBRARIES = ("optuna", "hydra-core", "mlflow", "numpy", "scipy")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: KEY=VALUE words, the command after `--`, configuration folders, the runs folder."""

    overrides: tuple[str, ...]
    command: list[str] | None
    config_dirs: tuple[Path, ...]
    runs_dir: str | None = None


def print_config(asked: Asked) -> int:
    """Prints the composed configuration as YAML."""
    print(compose_asked(asked).yaml.rstrip())
    return 0


def print_info(asked: Asked, what: str) -> int:
    """Prints the folders searched for configuration groups, highest priority first. `searchpath` is the only valid `what`."""
    from autotune.config.compose import missing_folders
    from autotune.config.locate import folder

    if what != "searchpath":
        raise BadInput(f"--info: no such information, got {what!r:.300}. Allowed: searchpath.")
    if problems := missing_folders(asked.config_dirs):
        raise BadInput(problems)
    for path in (*asked.config_dirs, folder("conf")):
        print(path.absolute())
    return 0


def run(asked: Asked, *, as_json: bool, is_quiet: bool = False) -> int:
    """Runs a study and prints the verdict.

    Raises:
        BadInput: the request is invalid.
        NothingWorked: the unchanged program does not train, or the first settings that were tried all fail in the same way.
        Interrupted: by the user; all measurements are kept.
        FolderLost: the study's folder cannot be written any more.
    """
    from autotune.study import run_study

    inputs, folder = prepare(asked)
    return carry_out(run_study, inputs, folder, as_json=as_json, is_quiet=is_quiet)


def prepare(asked: Asked) -> tuple[StudyInputs, StudyFolder]:
    """Returns a new study's inputs and folder. Prints warnings about the configuration on standard error.

    Raises:
        BadInput: the request is invalid.
    """
    from autotune.machine import host_facts
    from autotune.studies import create
    from autotune.study.earlier_studies import check_named

    facts = host_facts()
    composed = compose_asked(asked, facts)
    check_named(composed.config.search.warm_start, Path(composed.config.runs_dir))
    check_grid(composed)
    inputs = inputs_of(composed, facts)
    folder = create(Path(composed.config.runs_dir), composed.name)
    for note in filter(None, (*composed.notes, _limit_of_job(composed.config.study.budget.minutes))):
        print(f"autotune: {note}", file=sys.stderr)
    return inputs, folder


def check_grid(composed: Composed) -> None:
    """Checks the size of a grid as far as the command line determines it. The baseline determines the other domains.

    Raises:
        BadInput: the domains on the command line alone make the grid too large.
    """
    if composed.config.search.sampler != "grid":
        return
    from autotune.config.command import BATCH_SIZE
    from autotune.knobs.catalogue import knob
    from autotune.knobs.step import ACCUMULATION, tier_of
    from autotune.search.samplers import checked_grid

    space = composed.space
    held = {BATCH_SIZE, ACCUMULATION.key} if space.is_held else set()  # their domains shrink to divisors of train.global_batch
    keys = [key for key in space.typed - held - space.pinned.keys() if key in space.domains]
    searched = [key for key in keys if tier_of(knob(key), is_held=space.is_held).rank <= space.tiers.rank]
    checked_grid({key: domain.distribution() for key in searched if (domain := space.domains[key])})


def _limit_of_job(minutes: float | None) -> str:
    """Returns a warning if the Slurm job that this process runs in ends before the budget is used; otherwise ""."""
    from autotune.config.cluster import JOB

    if minutes is None or JOB not in os.environ:
        return ""
    from autotune.launchers.slurm_cancel import shorter_than

    return shorter_than(60 * minutes, os.environ[JOB])


def carry_out(
    study: Callable[[StudyInputs, StudyFolder, Listener], Summary],
    inputs: StudyInputs,
    folder: StudyFolder,
    *,
    as_json: bool,
    is_quiet: bool = False,
) -> int:
    """Starts or resumes a study, shows its progress, and returns the exit status.

    Args:
        study: `run_study` or `resume_study`.
        inputs: the study's inputs.
        folder: the study's folder.
        as_json: print the summary as JSON and nothing else.
        is_quiet: print only warnings and the verdict.
    """
    try:
        with contextlib.closing(_view(inputs, folder, as_json=as_json, is_quiet=is_quiet)) as view:
            summary = study(inputs, folder, view)
    except NothingWorked:
        if as_json:
            print_json(folder.read_summary())
        raise
    except KeyboardInterrupt:
        raise interrupted(folder, "stopped by the user") from None
    if as_json:
        print_json(summary)
    if summary["status"] == "interrupted":
        raise interrupted(folder, str(summary.get("reason") or "stopped by the user"))
    if verification := summary.get("verification"):
        judge(verification)
    return 0


def judge(verification: dict[str, Any]) -> None:
    """Raises the error that a finished verification's verdict calls for, or prints a warning if the rounds are inconclusive.

    Raises:
        ClaimBroken: the claim does not hold on this machine now.
        NotMeasured: no round was completed.
    """
    from autotune.compare.verify import NOTHING
    from autotune.report import verification_rows

    if verification["verdict"] == "no longer holds":
        raise ClaimBroken(verification_rows.broken(verification))
    if verification["verdict"] == "ambiguous" and not verification.get("now"):
        reason = verification.get("reason") or "no round was completed"
        more = "" if NOTHING in reason else " Give it more time: --minutes 15."
        raise NotMeasured(f"{verification['file']}: not measured: {reason}.{more}")
    if verification["verdict"] == "ambiguous":
        print(plain(f"autotune: {verification['file']}: {verification_rows.explanation(verification)}"), file=sys.stderr)


def interrupted(folder: StudyFolder, why: str) -> Interrupted:
    """Returns the exception for an interrupted study; its message says how to continue.

    If the study had not begun yet, its folder is removed, so that its name is free again.
    """
    folder.discard()
    if not is_study(folder.path):
        return Interrupted("interrupted before the study began: nothing was measured, and nothing is left")
    go_on = f"To continue: autotune resume {call(folder)}"
    return Interrupted(f"interrupted, {why}: everything measured is kept in {folder.path}. {go_on}")


def compose_asked(asked: Asked, facts: dict[str, object] | None = None) -> Composed:
    """Returns the composed and checked configuration.

    Raises:
        BadInput: it is invalid.
    """
    from autotune.config.compose import compose

    return compose(asked.overrides, command=asked.command, config_dirs=asked.config_dirs, runs_dir=asked.runs_dir, facts=facts)


def inputs_of(composed: Composed, facts: dict[str, object], *, is_alone: bool = False) -> StudyInputs:
    """Returns the study's inputs: the composed configuration, the launcher, the tracker, the machine that trials run on.

    If trials run on another machine than this one, waits until that machine is available; see `launcher_of` for `is_alone`.
    """
    from autotune.cli.nodes import launcher_of
    from autotune.study import StudyInputs

    launcher, machine = launcher_of(composed, facts, is_alone=is_alone)
    return StudyInputs(
        title=composed.title,
        config=composed.config,
        yaml=composed.yaml,
        space=composed.space,
        command=composed.command,
        launcher=launcher,
        machine=machine,
        clock=launcher.clock,
        start_tracking=tracking(composed.config.tracker.uri, composed.secrets),
        versions=versions(),
        secrets=composed.secrets,
        began_s=began_s(),
    )


def versions() -> dict[str, str]:
    """Returns the versions of autotune and its libraries. The baseline adds the version of the program's torch."""
    found = {"autotune": autotune.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # running from a checkout without installed dependencies
            continue
    return found


def tracking(uri: str | None, secrets: Secrets) -> Callable[[StudyFolder], Tracking] | None:
    """Returns a function that starts a process to mirror the running study into MLflow; None if tracking is off.

    Args:
        uri: `tracker.uri`.
        secrets: values that must not be uploaded.
    """
    return None if uri == NONE else lambda folder: TrackingProcess(folder, uri, secrets)


def _view(inputs: StudyInputs, folder: StudyFolder, *, as_json: bool, is_quiet: bool) -> View:
    from autotune.cli.live import LiveView
    from autotune.cli.plain import OnlyVerdict, PlainLines, Quiet

    if as_json:
        return Quiet()
    if is_quiet:
        return OnlyVerdict(folder.path)
    out = console()
    if not can_redraw(out):
        return PlainLines(folder.path)
    out.file = cast(IO[str], Outlasted(out.file))
    return LiveView(out, folder.path, budget_clock=inputs.clock.monotonic, begun_s=inputs.began_s)
