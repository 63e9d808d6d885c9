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


def test_injection_folder_contains_sitecustomize():
    assert (INJECT / "sitecustomize.py").is_file()


def test_unset_python_path_does_not_add_the_current_directory(folder, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert trial_environment(a_launch(folder, []))["PYTHONPATH"] == str(INJECT)


def test_variables_of_the_user_override_ours_except_those_of_the_protocol(folder):
    env = {"WANDB_MODE": "online", "AUTOTUNE_SPEC": "elsewhere", "AUTOTUNE_MARK": "mine"}
    environment = trial_environment(a_launch(folder, [], env=env))
    assert environment["WANDB_MODE"] == json.loads(environment["AUTOTUNE_RECORDS"])["WANDB_MODE"] == "online"
    assert Path(environment["AUTOTUNE_SPEC"]) == folder / "spec.json"
    assert environment["AUTOTUNE_MARK"] == f"{folder.parent.parent}:7"


def test_trial_does_not_inherit_the_run_ids_of_trackers(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "the user's")
    monkeypatch.setenv("WANDB_RUN_ID", "the user's")
    environment = trial_environment(a_launch(folder, []))
    assert "MLFLOW_RUN_ID" not in environment
    assert "WANDB_RUN_ID" not in environment


def test_imports_of_the_tuner_set_no_variable_that_trials_would_inherit():
    """threadpoolctl, for example, sets KMP_DUPLICATE_LIB_OK. With it, a trial would train although the real run fails."""
    code = (
        "import json, os; before = dict(os.environ); import autotune.cli.app, autotune.study.loop as loop; "
        "loop._one_blas_thread(); import optuna, autotune.trackers.mlflow; "
        "print(json.dumps(sorted(name for name in os.environ if os.environ[name] != before.get(name))))"
    )
    given = {name: value for name, value in os.environ.items() if name != "KMP_DUPLICATE_LIB_OK"}
    made = subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True)
    assert json.loads(made.stdout) == []
