"""Programs that use a tracker: a trial logs to its scratch folder, not to the user's records."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.launchers.environment import trial_environment
from autotune.launchers.user_files import UserFiles
from tests.support.launcher_contract import a_launch

WITH_MLFLOW = """
import mlflow
with mlflow.start_run():
    mlflow.log_metric("loss", 1.0)
"""
WITH_WANDB = """
import wandb
run = wandb.init(project="mine")
run.log({"loss": 1.0})
run.finish()
"""
# Reads the same variables as wandb, for machines without wandb.
LIKE_WANDB = """
import os
assert os.environ["WANDB_MODE"] == "offline" and "WANDB_RUN_ID" not in os.environ
os.makedirs(os.path.join(os.environ.get("WANDB_DIR", "."), "wandb", "offline-run-1"))
"""
WITH_TENSORBOARD = """
import os, pathlib
pathlib.Path("runs/Nov21_host").mkdir(parents=True)  # what SummaryWriter() does
pathlib.Path("runs/Nov21_host/events.out").write_text("123")
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Runs code as a trial's program in `work`; returns the files that it left there and the trial's scratch folder."""
    work, place = tmp_path / "work", tmp_path / "work" / "runs" / "train" / "trials" / "0000"
    (place / "scratch").mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/users.db")
    monkeypatch.setenv("WANDB_RUN_ID", "the user's")
    monkeypatch.setenv("WANDB_MODE", "online")

    def run(code: str) -> tuple[dict[str, int], Path]:
        environment = trial_environment(a_launch(place, []))
        del environment["PYTHONPATH"], environment["AUTOTUNE_SPEC"]  # so that no harness starts
        files = UserFiles()
        files.begin([], str(work), place)
        try:
            subprocess.run(
                [sys.executable, "-c", code], cwd=work, env=environment, check=True, timeout=120, capture_output=True
            )
        finally:
            report = files.end()
            files.close()
        assert not (tmp_path / "users.db").exists()
        return {**report.left, **report.new}, place / "scratch"

    return run


@pytest.mark.thorough
def test_mlflow_writes_to_the_scratch_folder(trial):
    left, scratch = trial(WITH_MLFLOW)
    assert left == {}
    assert list(scratch.glob("mlruns/*/*/metrics/loss"))


def test_weights_and_biases_writes_offline_to_the_scratch_folder(trial):
    try:
        import wandb  # noqa: F401

        code = WITH_WANDB
    except ImportError:
        code = LIKE_WANDB
    left, scratch = trial(code)
    assert left == {}
    assert list(scratch.glob("wandb/offline-run-*"))


def test_tensorboard_folder_in_the_runs_folder_is_distinguished_from_studies(trial):
    left, _ = trial(WITH_TENSORBOARD)
    assert left == {"runs/Nov21_host": 3}


def test_trainer_of_hugging_face_writes_its_events_to_the_scratch_folder(trial):
    code = "import os; os.makedirs(os.environ['TENSORBOARD_LOGGING_DIR'])"
    left, scratch = trial(code)
    assert left == {}
    assert (scratch / "tensorboard").is_dir()
