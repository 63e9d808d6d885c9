"""Builds the environment of a trial: the tuner's own, with the harness added and access to experiment records removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import autotune
from autotune.harness import protocol
from autotune.harness.protocol import KEEPING
from autotune.knobs.malloc import GLIBC_KEEP
from autotune.launchers.base import Launch
from autotune.launchers.injection import first_on

PACKAGE = Path(autotune.__file__).resolve().parent

# A process's mark (value of MARK_VARIABLE) says which study and trial it belongs to. The study's helpers belong to no trial, so
# their marks have one of these names in place of a trial's number. The keeper guards the user's files (keeper.py).
SUPERVISOR, SERVER, KEEPER = "supervisor", "server", "keeper"

# Users set these for real runs. They name experiment records, to which trials must not write.
UNWANTED = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_REGISTRY_URI", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID",
    "WANDB_SERVICE", "COMET_EXPERIMENT_KEY", "CLEARML_TASK_ID", "NEPTUNE_CUSTOM_RUN_ID", "SWANLAB_RUN_ID", "SWANLAB_RESUME",
    "TRACKIO_SPACE_ID",
)  # fmt: skip


def own_environment() -> dict[str, str]:
    """Returns an environment in which `python -m autotune` runs this very package in any folder, even from a checkout."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def mark_of(study: Path, whose: int | str, slot: str = "") -> str:
    """Returns the value of MARK_VARIABLE in the processes of a trial or helper: "/runs/net:7", on slot 2 "/runs/net:2/7".

    Args:
        study: the study's folder.
        whose: the trial's number, or SUPERVISOR, SERVER or KEEPER.
        slot: name of the slot that the process belongs to; "" for the whole machine.
    """
    return f"{study.resolve()}:{slot}{'/' if slot else ''}{whose}"


def is_mark_of(study: Path, mark: str, slot: str | None = None) -> bool:
    """Whether `mark` marks a process of this study: a trial's, or the supervisor, server or keeper.

    Args:
        study: the study's folder.
        mark: the mark.
        slot: accept only marks of this slot ("" is the whole machine); None accepts the marks of all slots.
    """
    prefix = mark_of(study, "")
    if not mark.startswith(prefix):
        return False
    own, _, whose = mark[len(prefix) :].rpartition("/")
    return slot in (None, own) and (whose.isdigit() or whose in (SUPERVISOR, SERVER, KEEPER))


def study_of(folder: Path) -> Path:
    """Returns the study's folder for a trial's folder, `runs/<study>/trials/0007`."""
    return folder.resolve().parent.parent


def trial_environment(launch: Launch) -> dict[str, str]:
    """Returns a trial's environment: the tuner's with trackers redirected, then `launch.env`, then the protocol's variables.

    `launch.env` may override the redirection (W&B may be wanted); nothing overrides the protocol's variables.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    quiet = _quiet(launch.folder.resolve())
    environment = {**inherited, **quiet, **launch.env}
    environment[protocol.RECORDS_VARIABLE] = json.dumps({name: environment[name] for name in quiet})
    environment["PYTHONPATH"] = first_on(environment.get("PYTHONPATH", ""))
    environment[protocol.SPEC_VARIABLE] = str(launch.folder.resolve() / protocol.SPEC_FILE)
    environment[protocol.MARK_VARIABLE] = mark_of(study_of(launch.folder), launch.spec.trial, launch.slot)
    return environment


def server_environment(launch: Launch) -> dict[str, str]:
    """Returns a warm server's environment: a trial's, except for the variables that differ between trials.

    One of these variables names the spec. Without a spec, the harness stays inactive.
    """
    environment = trial_environment(launch)
    for name in (*_quiet(launch.folder.resolve()), protocol.RECORDS_VARIABLE, protocol.SPEC_VARIABLE):
        if name not in launch.env:
            environment.pop(name, None)
    if launch.spec.knobs.get("memory.malloc") == GLIBC_KEEP:  # the harness applies this knob in the forked trial instead
        for name in KEEPING:
            environment.pop(name, None)
            if name in os.environ:
                environment[name] = os.environ[name]
    environment[protocol.MARK_VARIABLE] = mark_of(study_of(launch.folder), SERVER, launch.slot)
    return environment


def _quiet(folder: Path) -> dict[str, str]:
    scratch = folder / protocol.SCRATCH
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(scratch),
        # A file store, not SQLite: creating a SQLite store would cost the trial five seconds.
        "MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "COMET_AUTO_LOG_DISABLE": "true",  # Comet's offline mode is for `comet_ml.start` only, not for `comet_ml.Experiment`
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(scratch / "clearml"),
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_DATA_DIRECTORY": str(scratch / "neptune"),
        "NEPTUNE_LOG_DIRECTORY": str(scratch / "neptune"),  # the same for neptune-scale
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(scratch / "swanlab"),
        "TRACKIO_DIR": str(scratch / "trackio"),
        # Hugging Face's Trainer reads this; a plain SummaryWriter has no such variable.
        "TENSORBOARD_LOGGING_DIR": str(scratch / "tensorboard"),
    }
