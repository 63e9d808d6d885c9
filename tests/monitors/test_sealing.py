"""Sealing the folder of an ended trial masks secrets in its files, and removes its scratch folder."""

import json
import os
import subprocess
import time
from pathlib import Path

from autotune.cli.sync import TrackingProcess, sync
from autotune.masking import Secrets
from autotune.monitors.sealing import seal, seal_leftovers
from tests.support.studies import make_study

SECRETS = Secrets(["0123456789abc"])


def trial(tmp_path, **files):
    folder = tmp_path / "trials" / "0000"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_sealing_masks_secrets_in_logs_and_keeps_all_other_bytes(tmp_path):
    folder = trial(tmp_path, stdout__log=b"\xff\r\nlogin 0123456789abc\n", stderr__log=b"plain \xe2\x82\xac\n")
    untouched = (folder / "stderr.log").stat().st_ino
    seal(folder, SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"\xff\r\nlogin ***\n"
    assert (folder / "stderr.log").stat().st_ino == untouched, "a log without secrets is not written again"
    seal(folder, SECRETS)
    assert sorted(os.listdir(folder)) == ["stderr.log", "stdout.log"]


def test_sealing_masks_secrets_in_a_result_that_stays_valid_json(tmp_path):
    document = {"error": {"message": "bad 0123456789abc", "api_key": "x"}, "steps": [1.5], "status": "failed", "count": None}
    folder = trial(tmp_path, **{"result.rank0.json": json.dumps(document).encode()})
    seal(folder, SECRETS)
    assert json.loads((folder / "result.rank0.json").read_text()) == {
        **document,
        "error": {"message": "bad ***", "api_key": "***"},
    }


def test_sealing_masks_a_result_that_a_program_has_overwritten(tmp_path):
    folder = trial(tmp_path, **{"result.rank0.json": b"{ token: 0123456789abc"})
    seal(folder, SECRETS)
    assert (folder / "result.rank0.json").read_text() == "{ token: ***"


def test_sealing_removes_half_written_results_and_the_scratch_folder(tmp_path):
    folder = trial(tmp_path, **{"result.rank0.json.77.tmp": b'{"error": "0123456789abc'})
    (folder / "scratch" / "wandb").mkdir(parents=True)
    (folder / "scratch" / "wandb" / "run").write_text("0123456789abc")
    seal(folder, SECRETS)
    assert not list(folder.iterdir())


def test_leftovers_are_sealed_and_finished_trials_are_not_touched_again(tmp_path):
    folder = trial(tmp_path, stdout__log=b"0123456789abc")
    seal_leftovers(tmp_path, SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"***"
    (folder / "trial.json").write_text("{}")
    (folder / "stdout.log").write_bytes(b"0123456789abc")
    seal_leftovers(tmp_path, SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"0123456789abc"


def test_trials_of_a_study_that_runs_are_not_sealed(tmp_path):
    """They may run on another machine, where no process of this one shows it."""
    study = make_study(tmp_path, status="running", num_trials=1)
    folder = study.trial_path(1)
    (folder / "scratch").mkdir(parents=True)
    (folder / "stdout.log").write_text("0123456789abc")
    with study.claimed():
        sync(study, uri="none", follow=False)
        assert (folder / "scratch").exists()
    sync(study, uri="none", follow=False)
    assert not (folder / "scratch").exists()


def test_tracking_process_seals_the_trials_of_the_tuner_that_started_it(tmp_path):
    study = make_study(tmp_path)
    (folder := study.trial_path(99) / "scratch").mkdir(parents=True)
    with study.claimed():
        assert TrackingProcess(study, "none", SECRETS).wait(60) == 0
    assert not folder.exists()


def test_leftovers_of_a_running_trial_are_sealed_only_after_it_ends(tmp_path):
    folder = trial(tmp_path, stdout__log=b"0123456789abc")
    environment = {**os.environ, "AUTOTUNE_MARK": f"{tmp_path.resolve()}:0"}
    running = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        while not Path(f"/proc/{running.pid}/environ").read_bytes():  # it is empty at the beginning of `exec`
            time.sleep(0.01)
        seal_leftovers(tmp_path, SECRETS)
        assert (folder / "stdout.log").read_bytes() == b"0123456789abc"
    finally:
        running.kill()
        running.wait()
    seal_leftovers(tmp_path, SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"***"
