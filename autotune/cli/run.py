"""`autotune run`: composes, checks, starts the study and shows how it goes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import autotune
from autotune.cli import verdict
from autotune.cli.sync import TrackingProcess
from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput, Interrupted, NothingWorked
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder
from autotune.trackers.store import NONE

if TYPE_CHECKING:
    from autotune.cli.plain import View
    from autotune.config.compose import Composed
    from autotune.study import Plan, Tracking

LIBRARIES = ("optuna", "hydra-core", "mlflow", "numpy", "scipy")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: KEY=VALUE words, the command behind `--`, folders of configuration."""

    overrides: tuple[str, ...]
    command: list[str] | None
    config_dirs: tuple[Path, ...]


def print_config(asked: Asked) -> int:
    """Prints the composed configuration as YAML."""
    print(_compose(asked).yaml.rstrip())
    return 0


def print_info(asked: Asked, what: str) -> int:
    """Prints where configuration groups are looked for, nearest first; `searchpath` is all there is to ask."""
    from autotune.config.locate import folder

    if what != "searchpath":
        raise BadInput(f"--info: no such information, got {what!r}. Allowed: searchpath.")
    for path in (*asked.config_dirs, folder("conf")):
        print(path.resolve())
    return 0


def run(asked: Asked, *, as_json: bool) -> int:
    """Tunes, and prints the verdict.

    Raises:
        BadInput: what was asked for cannot be done.
        NothingWorked: the program does not train as it is.
        Interrupted: by the user; what was measured is kept.
    """
    from autotune.machine import host_facts
    from autotune.run_dir import create
    from autotune.study import run_study

    facts = host_facts()
    composed = _compose(asked, facts)
    runs = Path(composed.config.runs_dir)
    plan = _plan(composed, facts)
    folder = create(runs, composed.name)
    view = _view(folder, as_json=as_json)
    with contextlib.closing(view):
        summary = run_study(plan, folder, view)
    if as_json:
        print_json(summary)
    if summary["status"] == "failed":
        raise NothingWorked(str(summary.get("reason") or "no configuration worked"))
    if summary["status"] == "interrupted":
        commands = verdict.next_commands(folder.name, runs, has_best=verdict.has_winner(summary))
        raise Interrupted(f"interrupted: everything measured is kept in {folder.path}. Next: {commands[0]}")
    return 0


def _compose(asked: Asked, facts: dict[str, object] | None = None) -> Composed:
    from autotune.config.compose import compose

    return compose(asked.overrides, command=asked.command, config_dirs=asked.config_dirs, facts=facts)


def _plan(composed: Composed, facts: dict[str, object]) -> Plan:
    from autotune.launchers.local import LocalLauncher
    from autotune.study import Plan

    return Plan(
        title=composed.title,
        config=composed.config,
        yaml=composed.yaml,
        space=composed.space,
        command=composed.command,
        launcher=LocalLauncher(),
        machine=facts,
        start_tracking=tracking(composed.config.tracker.uri, composed.secrets),
        versions=versions(),
        hidden=composed.hidden,
        secrets=composed.secrets,
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


def _view(folder: StudyFolder, *, as_json: bool) -> View:
    from autotune.cli.live import LiveView
    from autotune.cli.plain import PlainLines, Quiet

    if as_json:
        return Quiet()
    out = console()
    return LiveView(out, folder.path) if out.is_terminal and not out.is_dumb_terminal else PlainLines(folder.path)
