"""`autotune run`: composes, checks, starts the study and shows how it goes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autotune
from autotune.cli.began import began_s
from autotune.cli.sync import TrackingProcess
from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput, ClaimBroken, Interrupted, NothingWorked, NotMeasured
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder, call
from autotune.trackers.store import NONE

if TYPE_CHECKING:
    from autotune.cli.plain import View
    from autotune.config.compose import Composed
    from autotune.records import Summary
    from autotune.study import Listener, StudyInputs, Tracking

LIBRARIES = ("optuna", "hydra-core", "mlflow", "numpy", "scipy")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: KEY=VALUE words, the command behind `--`, folders of configuration, the folder of the studies."""

    overrides: tuple[str, ...]
    command: list[str] | None
    config_dirs: tuple[Path, ...]
    runs_dir: str | None = None


def print_config(asked: Asked) -> int:
    """Prints the composed configuration as YAML."""
    print(compose_asked(asked).yaml.rstrip())
    return 0


def print_info(asked: Asked, what: str) -> int:
    """Prints where configuration groups are looked for, nearest first; `searchpath` is all there is to ask."""
    from autotune.config.compose import missing_folders
    from autotune.config.locate import folder

    if what != "searchpath":
        raise BadInput(f"--info: no such information, got {what!r}. Allowed: searchpath.")
    if problems := missing_folders(asked.config_dirs):
        raise BadInput(problems)
    for path in (*asked.config_dirs, folder("conf")):
        print(path.absolute())
    return 0


def run(asked: Asked, *, as_json: bool, is_quiet: bool = False) -> int:
    """Tunes, and prints the verdict.

    Raises:
        BadInput: what was asked for cannot be done.
        NothingWorked: the program does not train as it is, or no other way.
        Interrupted: by the user; what was measured is kept.
        FolderLost: the study's folder cannot be written any more.
    """
    from autotune.machine import host_facts
    from autotune.run_dir import create
    from autotune.study import run_study
    from autotune.study.inheritance import check_named

    facts = host_facts()
    composed = compose_asked(asked, facts)
    inputs = inputs_of(composed, facts)
    check_named(composed.config.search.warm_start, Path(composed.config.runs_dir))
    folder = create(Path(composed.config.runs_dir), composed.name)
    for note in composed.notes:
        print(f"autotune: {note}", file=sys.stderr)
    return carry_out(run_study, inputs, folder, as_json=as_json, is_quiet=is_quiet)


def carry_out(
    study: Callable[[StudyInputs, StudyFolder, Listener], Summary],
    inputs: StudyInputs,
    folder: StudyFolder,
    *,
    as_json: bool,
    is_quiet: bool = False,
) -> int:
    """Runs a study from its beginning or from where it was ended, shows how it goes, and returns the exit code.

    Args:
        study: `run_study` or `resume_study`.
        inputs: what it is given.
        folder: its folder.
        as_json: print its document and nothing else.
        is_quiet: print warnings and the verdict alone.
    """
    view = _view(folder, as_json=as_json, is_quiet=is_quiet)
    try:
        with contextlib.closing(view):
            summary = study(inputs, folder, view)
    except NothingWorked:
        if as_json:
            print_json(folder.read_summary())
        raise
    except KeyboardInterrupt:
        raise _interrupted(folder, "stopped by the user") from None
    if as_json:
        print_json(summary)
    if summary["status"] == "interrupted":
        raise _interrupted(folder, str(summary.get("reason") or "stopped by the user"))
    if verification := summary.get("verification"):
        judge(verification)
    return 0


def judge(verification: dict[str, Any]) -> None:
    """Ends a verification that is complete as its verdict wants it; a warning where the rounds do not tell.

    Raises:
        ClaimBroken: the claim does not hold here and now.
        NotMeasured: no round was completed.
    """
    from autotune.cli import claims

    if verification["verdict"] == "no longer holds":
        raise ClaimBroken(claims.broken(verification))
    if verification["verdict"] == "ambiguous" and not verification.get("now"):
        reason = verification.get("reason") or "no round was completed"
        raise NotMeasured(f"{verification['file']}: not measured: {reason}. Give it more time: --minutes 15.")
    if verification["verdict"] == "ambiguous":
        print(f"autotune: {verification['file']}: {claims.explanation(verification)}", file=sys.stderr)


def _interrupted(folder: StudyFolder, why: str) -> Interrupted:
    go_on = f"To go on: autotune resume {call(folder)}"
    return Interrupted(f"interrupted, {why}: everything measured is kept in {folder.path}. {go_on}")


def compose_asked(asked: Asked, facts: dict[str, object] | None = None) -> Composed:
    """Returns what was asked for, composed and checked.

    Raises:
        BadInput: it cannot be done.
    """
    from autotune.config.compose import compose

    return compose(asked.overrides, command=asked.command, config_dirs=asked.config_dirs, runs_dir=asked.runs_dir, facts=facts)


def inputs_of(composed: Composed, facts: dict[str, object]) -> StudyInputs:
    """Returns what the study is given: the composed configuration, the launcher, the tracker, this machine."""
    from autotune.launchers import make_launcher
    from autotune.study import StudyInputs

    return StudyInputs(
        title=composed.title,
        config=composed.config,
        yaml=composed.yaml,
        space=composed.space,
        command=composed.command,
        launcher=make_launcher(composed.config.launcher),
        machine=facts,
        start_tracking=tracking(composed.config.tracker.uri, composed.secrets),
        versions=versions(),
        hidden=composed.hidden,
        secrets=composed.secrets,
        began_s=began_s(),
    )


def versions() -> dict[str, str]:
    """Returns the versions of autotune and its libraries; the program's torch is added by its baseline."""
    found = {"autotune": autotune.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            continue
    return found


def tracking(uri: str | None, secrets: Secrets) -> Callable[[StudyFolder], Tracking] | None:
    """Returns what starts the process that mirrors the study while it runs; None when nothing is to be tracked.

    Args:
        uri: `tracker.uri`.
        secrets: what must not be uploaded.
    """
    return None if uri == NONE else lambda folder: TrackingProcess(folder, uri, secrets)


def _view(folder: StudyFolder, *, as_json: bool, is_quiet: bool) -> View:
    from autotune.cli.live import LiveView
    from autotune.cli.plain import OnlyVerdict, PlainLines, Quiet

    if as_json:
        return Quiet()
    if is_quiet:
        return OnlyVerdict(folder.path)
    out = console()
    return LiveView(out, folder.path) if out.is_terminal and not out.is_dumb_terminal else PlainLines(folder.path)
