import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.launchers.environment import trial_environment
from autotune.launchers.injection import INJECT
from tests.support.launcher_contract import a_launch


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "study" / "trials" / "0007"


def test_injection_folder_holds_what_python_looks_for():
    assert (INJECT / "sitecustomize.py").is_file()


def test_an_empty_python_path_adds_no_current_directory(folder, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert trial_environment(a_launch(folder, []))["PYTHONPATH"] == str(INJECT)


def test_the_user_s_own_variables_beat_ours_but_not_the_protocol_s(folder):
    env = {"WANDB_MODE": "online", "AUTOTUNE_SPEC": "elsewhere", "AUTOTUNE_MARK": "mine"}
    environment = trial_environment(a_launch(folder, [], env=env))
    assert environment["WANDB_MODE"] == "online"
    assert Path(environment["AUTOTUNE_SPEC"]) == folder / "spec.json"
    assert environment["AUTOTUNE_MARK"] == f"{folder.parent.parent}:7"


def test_a_real_run_s_identity_is_not_inherited(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "the user's")
    monkeypatch.setenv("WANDB_RUN_ID", "the user's")
    environment = trial_environment(a_launch(folder, []))
    assert "MLFLOW_RUN_ID" not in environment
    assert "WANDB_RUN_ID" not in environment


def test_what_the_tuner_imports_sets_no_variable_that_trials_would_inherit():
    """With KMP_DUPLICATE_LIB_OK, which threadpoolctl sets, a trial would train where the real run ends with an error."""
    code = (
        "import json, os; before = dict(os.environ); import autotune.cli.app, autotune.study.loop as loop; "
        "loop._one_blas_thread(); import optuna, autotune.trackers.mlflow; "
        "print(json.dumps(sorted(name for name in os.environ if os.environ[name] != before.get(name))))"
    )
    given = {name: value for name, value in os.environ.items() if name != "KMP_DUPLICATE_LIB_OK"}
    made = subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True)
    assert json.loads(made.stdout) == []
