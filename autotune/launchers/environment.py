"""Builds a trial's environment: the tuner's, with the harness added and the user's experiment records out of reach."""

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

# A process's mark (value of MARK_VARIABLE) says which study and trial it belongs to. Three kinds of helpers belong to no trial:
# the supervisor, the warm server, and the keeper, which guards the user's files. Their marks have a name instead of a number.
SUPERVISOR, SERVER, KEEPER = "supervisor", "server", "keeper"

# Variables that trials do not inherit. Users set them for real runs, and they name experiment records, to which trials must not
# write.
UNWANTED = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_REGISTRY_URI", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID",
    "WANDB_SERVICE", "COMET_EXPERIMENT_KEY", "CLEARML_TASK_ID", "NEPTUNE_CUSTOM_RUN_ID", "SWANLAB_RUN_ID", "SWANLAB_RESUME",
    "TRACKIO_SPACE_ID",
)  # fmt: skip


def own_environment() -> dict[str, str]:
    """Returns an environment in which `python -m autotune` runs this copy of autotune in any folder, even if not installed."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def mark_of(study: Path, whose: int | str, slot: str = "") -> str:
    """Returns the mark of a trial's or helper's processes, such as "/runs/net:7", or "/runs/net:2/7" on slot 2.

    Args:
        study: the study's folder.
        whose: the trial's number, or SUPERVISOR, SERVER or KEEPER; "" for the beginning that all these marks have in common.
        slot: name of the slot that the process belongs to; "" for the whole machine.
    """
    return f"{study.resolve()}:{slot}{'/' if slot else ''}{whose}"


def is_mark_of(study: Path, mark: str, slot: str | None = None) -> bool:
    """Whether `mark` is the mark of a process of this study: of a trial, a supervisor, a warm server or a keeper.

    Args:
        study: the study's folder.
        mark: the mark.
        slot: name of the slot to which the process must belong ("" for the whole machine); None for any.
    """
    prefix = mark_of(study, "")
    if not mark.startswith(prefix):
        return False
    own, _, whose = mark[len(prefix) :].rpartition("/")
    return slot in (None, own) and (whose.isdigit() or whose in (SUPERVISOR, SERVER, KEEPER))


def study_of(folder: Path) -> Path:
    """Returns the folder of the study that a trial's folder, such as `runs/<study>/trials/0007`, belongs to."""
    return folder.resolve().parent.parent


def trial_environment(launch: Launch) -> dict[str, str]:
    """Returns a trial's environment.

    It combines four groups of variables, each of which overrides those before it: the tuner's environment; variables that keep
    trackers away from the user's records; `launch.env`, with which users can let trials log to W&B; the protocol's variables.
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
    """Returns a warm server's environment: a trial's, without the variables that differ between trials.

    One of the missing variables is SPEC_VARIABLE. Without it, the harness stays inactive.
    """
    environment = trial_environment(launch)
    for name in (*_quiet(launch.folder.resolve()), protocol.RECORDS_VARIABLE, protocol.SPEC_VARIABLE):
        if name not in launch.env:
            environment.pop(name, None)
    if launch.spec.knobs.get("memory.malloc") == GLIBC_KEEP:  # for trials that a server forks, the harness sets this knob
        for name in KEEPING:
            environment.pop(name, None)
            if name in os.environ:
                environment[name] = os.environ[name]
    environment[protocol.MARK_VARIABLE] = mark_of(study_of(launch.folder), SERVER, launch.slot)
    return environment


def _quiet(folder: Path) -> dict[str, str]:
    """Returns the variables that make experiment trackers write to the trial's scratch folder, or write nothing."""
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
        "NEPTUNE_LOG_DIRECTORY": str(scratch / "neptune"),  # read by neptune-scale; the line above is for neptune
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(scratch / "swanlab"),
        "TRACKIO_DIR": str(scratch / "trackio"),
        # Hugging Face's Trainer reads this; a plain SummaryWriter reads no variable.
        "TENSORBOARD_LOGGING_DIR": str(scratch / "tensorboard"),
    }
