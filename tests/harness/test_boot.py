"""How the harness gets into a process: its import hook survives early look-ups, is removed, and harms no other process."""

import ast
import json
import sys
from pathlib import Path

import pytest

from autotune.harness.protocol import RECORDS_VARIABLE
from tests.harness.conftest import INJECT, Run, Trial


@pytest.mark.thorough
def test_import_hook_survives_a_check_whether_torch_is_installed(trial: Trial, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN_SITE'] = 'ran'\n")
    # A study also sets the folder of compiled code. Otherwise, torch sets this variable itself.
    variables = {"PYTHONPATH": f"{INJECT}:{own}", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    found = trial("entry.py", mode="inspect", env=variables, is_fresh=True)
    assert found.result().status == "measured"
    assert "own site: ran" in found.stdout
    assert "plain loader: True" in found.stdout
    assert "finders left: 0" in found.stdout
    # The optimizer imports the compiler. Before that, no setting of the compiler had changed, so a warm server may import it.
    assert found.result().facts["startup"]["changed_before_compiler"] == []


def test_isolated_interpreter_does_not_load_the_harness(trial: Trial) -> None:
    run = trial("no_torch.py", argv=[sys.executable, "-I"])
    assert (run.returncode, run.stdout) == (0, "fine\n")
    assert [path.name for path in run.folder.iterdir()] == ["spec.json"]


def test_a_program_without_torch_is_left_alone(trial: Trial) -> None:
    run = trial("no_torch.py", is_fresh=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "fine\n", "")
    assert sorted(path.name for path in run.folder.iterdir()) == ["progress.jsonl", "spec.json"]
    assert json.loads((run.folder / "progress.jsonl").read_text())["phase"] == "spawn"


IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
WANDB = """
import os, types
def init(project=None, mode=None):
    return types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode or os.environ["WANDB_MODE"]))
"""

MLFLOW = """
import os
def _resolve_tracking_uri(tracking_uri=None):
    return tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
"""


def recorded(trial: Trial, place: Path, **environment: str) -> tuple[Run, Path]:
    """Runs a program that names its own account and server; returns the run and the store that its environment names."""
    (place / "wandb.py").write_text(WANDB)
    store = place / "mlruns"
    quiet = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    named = {**quiet, **environment}
    added = {"PYTHONPATH": f"{INJECT}:{place}", RECORDS_VARIABLE: json.dumps(named)}
    return trial("records.py", mode="inspect", env={**named, **added}, is_fresh=True), store


@pytest.mark.thorough
def test_trial_records_do_not_reach_the_account_or_server_that_the_program_names(trial: Trial, tmp_path: Path) -> None:
    found, store = recorded(trial, tmp_path)
    assert found.result().status == "measured", found.stderr
    assert "client: ['mine', 'Default']" in found.stdout
    assert "modes: ['offline', 'offline', 'disabled']" in found.stdout
    assert "finders left: 2" in found.stdout  # those for torch and for the Hub, which the program has not imported
    assert len(list(store.glob("*/*/metrics/loss"))) == 1


@pytest.mark.parametrize("is_asked", [False, True])
def test_records_stay_away_from_a_server_that_the_program_names_in_its_environment(
    trial: Trial, tmp_path: Path, is_asked: bool
) -> None:
    package = tmp_path / "mlflow" / "tracking" / "_tracking_service"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "utils.py").write_text(MLFLOW)
    (tmp_path / "wandb.py").write_text(WANDB)
    server, store = "http://127.0.0.1:9", "file:///store"
    mode, uri = ("online", server) if is_asked else ("offline", store)
    named = {"WANDB_MODE": mode, "MLFLOW_TRACKING_URI": uri}
    added = {"PYTHONPATH": f"{INJECT}:{tmp_path}", RECORDS_VARIABLE: json.dumps(named)}
    run = trial("renamed.py", env={**named, **added}, is_fresh=True)
    assert run.stdout == f"{mode} disabled {uri}\n" * 2, run.stderr


@pytest.mark.thorough
def test_program_logs_to_its_own_server_if_trials_are_to_be_recorded(trial: Trial, tmp_path: Path) -> None:
    found, store = recorded(trial, tmp_path, WANDB_MODE="online", MLFLOW_TRACKING_URI="http://127.0.0.1:9", **IMPATIENT)
    assert not found.has_result
    assert "127.0.0.1" in found.stderr
    assert "port=9" in found.stderr
    assert not store.exists()


def test_a_trial_uploads_nothing_to_the_hub(trial: Trial) -> None:
    server = "http://127.0.0.1:9"  # nothing listens there
    found = trial("uploads.py", mode="inspect", env={"HF_ENDPOINT": server, "HF_TOKEN": "hf_none"})
    assert found.result().status == "measured", found.stderr
    first, second, third, fourth = ast.literal_eval(found.stdout.partition("uploads: ")[2].splitlines()[0])
    assert first == ("me/net", server, "Upload")
    assert second == ("me/net", "http://127.0.0.1:8", "Upload")
    assert (third, fourth) == (("me/net", server, "step 1"), ("me/net", server, "step 2"))
    assert f"made: {server}/me/net me/set" in found.stdout
    assert "bucket: me/logs" in found.stdout or "bucket" not in found.stdout  # older versions have none
