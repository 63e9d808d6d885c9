"""A program whose interpreter lacks autotune is tuned, tracked, reported, exported and run again, end to end."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from autotune.harness.protocol import MARK_VARIABLE

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.thorough,
]  # MLflow uses deprecated parts of SQLAlchemy
PROGRAM = Path(__file__).with_name("loader_bound.py")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    """An interpreter with the torch of the running environment, but without autotune."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, symlinks=True, with_pip=False)
    own = next(place.glob("lib/python*/site-packages"))
    # The .pth files in the added folder have no effect, so autotune is not found through them.
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin" / "python"


def autotune(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH is removed because the program would inherit it, and its interpreter must not find autotune.
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    start = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from autotune.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=cwd,
        env={**environment, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def study(bare_python, tmp_path_factory) -> Path:
    """The folder of a finished study of the program."""
    place = tmp_path_factory.mktemp("user")
    shutil.copy(PROGRAM, place / "train.py")
    options = ["search_space=loader", "loader.num_workers=choice(0,2)", "threads.intra=1", "study.budget.minutes=1"]
    ended = autotune("run", *options, "study.name=first", "--", str(bare_python), "train.py", cwd=place)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return place


@pytest.fixture(scope="module")
def summary(study) -> dict:
    shown = autotune("show", "first", "--json", cwd=study)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def test_interpreter_of_the_program_has_no_autotune(bare_python):
    found = subprocess.run(
        [bare_python, "-c", "import torch, autotune.cli"], cwd="/", capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert "No module named 'autotune" in found.stderr


def test_workers_are_found_for_a_program_that_waits_for_input(summary):
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["speedup"]["ci"][0] > 1.3
    assert summary["best"]["overrides"]["loader.num_workers"] == 2
    assert summary["baseline"]["knobs"]["loader.num_workers"] == 0
    assert summary["best_by_tier"]["exact"]["trial"] == summary["best"]["trial"]


def test_reported_numbers_come_from_the_finals(summary):
    finals = [trial for trial in summary["trials"] if trial["kind"] == "final"]
    assert len(finals) >= 4
    assert summary["best"]["measured_in"] == "finals"
    assert {trial["repeats"] for trial in finals} == {0, summary["best"]["trial"]}


def test_summary_has_the_documented_keys(summary):
    keys = "study status objective unit machine baseline best best_by_tier speedup attribution diagnosis counts seconds trials"
    assert set(keys.split()) <= set(summary)
    of_a_trial = "number outcome reason knobs value ci seconds peak_memory_bytes device_rate loader_rate"
    assert all(set(of_a_trial.split()) <= set(trial) for trial in summary["trials"])
    assert set(summary["seconds"]) == {"total", "measuring", "starting", "compiling", "lost"}


def test_every_trial_is_in_mlflow_with_params_metrics_and_outcome(study, summary):
    from mlflow import MlflowClient  # not at the top: every worker of pytest would import it

    client = MlflowClient(f"sqlite:///{study}/runs/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, filter_string="tags.kind != 'study'", max_results=100)
    by_number = {int(run.data.tags["autotune.trial"].split(":")[0]): run for run in runs}
    assert set(by_number) == {trial["number"] for trial in summary["trials"]}
    for trial in summary["trials"]:
        run = by_number[trial["number"]]
        assert run.data.tags["outcome"] == trial["outcome"]
        assert run.data.params["loader.num_workers"] == str(trial["knobs"]["loader.num_workers"])
        assert run.data.metrics["Samples per second"] == pytest.approx(trial["value"], rel=5e-3)


def test_the_winner_loads_with_plain_hydra_and_with_the_command_line(study):
    exported = autotune("export", "first", "-o", "tuned/best.yaml", cwd=study)
    assert exported.returncode == 0, exported.stderr
    with initialize_config_dir(str(study / "tuned"), version_base="1.3"):
        plain = compose("best")
    assert plain.loader.num_workers == 2
    words = ["--config-dir", ".", "+tuned=best", "--cfg", "--", sys.executable, "train.py"]
    again = autotune("run", *words, cwd=study)
    assert again.returncode == 0, again.stderr
    assert "num_workers: 2" in again.stdout


def verified(study: Path, python: Path, program: str) -> subprocess.CompletedProcess[str]:
    words = ["runs/first/best.yaml", "tracker.uri=none", "--runs-dir", "again", "--rounds", "3"]
    return autotune("verify", *words, "--", str(python), program, cwd=study)


@pytest.mark.thorough
def test_claim_of_the_winner_holds_when_it_is_measured_again(study, bare_python):
    ended = verified(study, bare_python, "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verdict  holds" in ended.stdout


@pytest.mark.thorough
def test_claim_is_refused_after_the_program_has_changed(study, bare_python):
    quick = (study / "train.py").read_text().replace("time.sleep(0.002)", "pass")  # workers gain nothing now
    (study / "outgrown.py").write_text(quick.replace("optimizer.step()", "optimizer.step(); time.sleep(0.005)"))
    ended = verified(study, bare_python, "outgrown.py")
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "the claim does not hold" in ended.stderr


def test_no_process_of_a_trial_is_left_running(study):
    marks = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            marks.append(environ.read_bytes())
        except OSError:
            continue
    assert not [mark for mark in marks if f"{MARK_VARIABLE}={study}".encode() in mark]
