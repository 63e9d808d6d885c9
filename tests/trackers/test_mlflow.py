"""A study's copy in a real SQLite store, read with MLflow's own client."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import run_dir
from autotune.errors import BadInput
from autotune.launchers.environment import own_environment
from autotune.records import StudyRecord
from autotune.report.writing import write_report
from autotune.run_dir import StudyFolder
from autotune.trackers import entries, probe, store
from autotune.trackers.contents import Contents
from autotune.trackers.mlflow import MlflowTracker
from autotune.trackers.sync import ParentWatch, follow, incomplete, note, sync
from tests.support.studies import add_trial, make_study, summary_of
from tests.trackers.conftest import quiet_environment, runs_folder
from tests.trackers.servers import Mirror

# MLflow uses deprecated parts of SQLAlchemy and pydantic and does not close its connections.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(runs):
    return make_study(runs, num_trials=2)


@pytest.fixture(scope="module")
def synced(tmp_path_factory, empty_store):
    """A runs folder with a study whose trials and report are in the store. Tests must not change it."""
    runs = runs_folder(tmp_path_factory.mktemp("synced") / "runs", empty_store)
    folder = make_study(runs)
    write_report(folder, folder.read_summary())
    with quiet_environment():
        state = sync(folder)
    assert (state.written, state.pending, state.problem) == (8, [], "")
    return runs


def client_of(runs: Path) -> Any:
    from mlflow import MlflowClient  # not at the top: every worker of pytest would import it

    return MlflowClient(store.embedded_uri(runs))


def read_back(runs: Path) -> dict[str, object]:
    client = client_of(runs)
    experiment = client.get_experiment_by_name("autotune")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def artifacts(runs: Path, run) -> list[str]:
    return [file.path for file in client_of(runs).list_artifacts(run.info.run_id)]


def test_every_trial_is_a_child_run_with_params_metrics_and_outcome(synced):
    found = read_back(synced)
    parent = found.pop("resnet18")
    assert len(found) == 8
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {parent.info.run_id}
    best = found["0005 bf16 channels_last batch 64 workers 2"]
    assert best.data.params["loader.batch_size"] == "64"
    assert best.data.params["layout.channels_last"] == "true"
    assert best.data.params["threads.intra"] == "2"  # the whole configuration, not only the changes
    assert best.data.metrics["Samples per second"] == 40.7
    assert best.data.metrics["ratio measured once"] == 2.42
    assert "ratio to baseline" not in best.data.metrics  # the finals measure this ratio, so only the study has it
    assert best.data.metrics["interval/low per second"] < 40.7 < best.data.metrics["interval/high per second"]
    assert "power W" not in best.data.metrics  # it was not a number
    assert best.data.tags["outcome"] == "ok"
    assert {name for name, run in found.items() if run.data.tags["best"] == "yes"} == {best.info.run_name}
    assert best.info.end_time - best.info.start_time == 21_500


def test_runs_go_to_the_experiment_that_the_study_names(runs):
    folder = make_study(runs, num_trials=1)
    folder.config_file.write_text("tracker:\n  uri: null\n  experiment: the team\n", encoding="utf-8")
    assert sync(folder).problem == ""
    client = client_of(runs)
    experiments = [client.get_experiment_by_name(name).experiment_id for name in ("autotune", "the team")]
    assert [len(client.search_runs([experiment])) for experiment in experiments] == [0, 2]


@pytest.mark.thorough
def test_artifacts_of_another_sqlite_file_are_put_beside_it(runs, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert sync(make_study(runs), f"sqlite:///{tmp_path}/mine.db").problem == ""
    assert list((tmp_path / "mlartifacts").glob("*/artifacts/trial.json"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["it's", 'a "b"', """it's "b\"""", "a b`c"])
def test_runs_of_a_study_are_found_under_any_folder_name(name):
    from mlflow.utils.search_utils import SearchUtils

    study = StudyRecord(name=name, title="t", command=[], cwd="/", started_at=1.5)
    words = f"{entries.search(study)} AND attributes.start_time >= 1000"
    found, _ = SearchUtils.parse_search_filter(words)
    assert found == {"type": "tag", "key": entries.STUDY_TAG, "comparator": "=", "value": entries.study_id(study)}


@pytest.mark.parametrize(
    ("name", "status"),
    [("0000 baseline", "FINISHED"), ("0002 batch 128 workers 2", "KILLED"), ("0003 batch 4096", "FAILED")],
)
def test_run_status_says_whether_the_rate_counts(synced, name, status):
    assert read_back(synced)[name].info.status == status


def test_interrupted_trials_have_the_run_status_killed(runs):
    folder = make_study(runs, num_trials=2)
    file = folder.trial_path(1) / "trial.json"
    file.write_text(file.read_text().replace('"outcome": "ok"', '"outcome": "interrupted"'), encoding="utf-8")
    sync(folder)
    assert read_back(runs)["0001 bf16 channels_last"].info.status == "KILLED"


def test_parent_run_contains_verdict_metrics_and_files(synced):
    parent = read_back(synced)["resnet18"]
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["ratio to baseline"] == 2.41
    assert "faster: 2.41x" in parent.data.tags["mlflow.note.content"]
    assert {"best.yaml", "summary.json", "study.json", "report.html"} <= set(artifacts(synced, parent))


def test_parent_run_contains_the_report_and_the_tables_of_the_passes(folder, runs):
    (folder.path / "report.html").write_text("<p>faster</p>")
    (folder.trial_path(1) / "explain").mkdir()
    (folder.trial_path(1) / "explain" / "operators.csv").write_text("name,device_s\nmm,1.5\n")
    sync(folder)
    parent, client = read_back(runs)["resnet18"], client_of(runs)
    assert {"report.html", "explain"} <= set(artifacts(runs, parent))
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "explain/0001")] == ["explain/0001/operators.csv"]


def test_report_written_after_a_sync_is_added_by_the_next_sync(folder, runs):
    sync(folder)
    (folder.path / "report.html").write_text("<p>faster</p>")
    sync(folder)
    assert "report.html" in artifacts(runs, read_back(runs)["resnet18"])


def test_no_metric_is_a_curve_of_one_point(synced):
    client = client_of(synced)
    for run in read_back(synced).values():
        for name in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, name)
            assert len(points) > 1 or points[0].step == 0, name


def test_runs_of_an_earlier_layout_are_written_again(runs):
    folder = make_study(runs, num_trials=2)
    sync(folder)
    client = client_of(runs)
    before = {run.info.run_id for run in read_back(runs).values()}
    for run_id in before:
        client.delete_tag(run_id, "autotune.layout")
    assert sync(folder).written == 2
    assert not before & {run.info.run_id for run in read_back(runs).values()}
    assert Mirror(store.embedded_uri(runs), folder.name).problems(folder) == []


def test_failures_carry_reason_and_log_tail(synced):
    failed = read_back(synced)["0003 batch 4096"]
    assert "can't allocate memory" in failed.data.tags["reason"]
    assert "stderr.tail.txt" in artifacts(synced, failed)


def test_second_sync_writes_nothing(folder, runs):
    sync(folder)
    before = {name: run.info.run_id for name, run in read_back(runs).items()}
    state = sync(folder)
    assert (state.written, state.present) == (0, 2)
    assert {name: run.info.run_id for name, run in read_back(runs).items()} == before


def test_changed_param_creates_a_new_run_because_mlflow_params_are_fixed(runs):
    folder = make_study(runs, num_trials=2)
    sync(folder)
    before = {name: run.info.run_id for name, run in read_back(runs).items()}
    trial = folder.read_trials()[1]
    trial.knobs["loader.batch_size"] = 33
    folder.write_trial(trial)
    state = sync(folder)
    assert (state.written, state.is_complete) == (1, True)
    after = {name: run.info.run_id for name, run in read_back(runs).items()}
    assert len(after) == 3
    assert {name for name in after if after[name] != before[name]} == {"0001 bf16 channels_last"}
    assert read_back(runs)["0001 bf16 channels_last"].data.params["loader.batch_size"] == "33"


def test_changed_metric_creates_a_new_run_because_mlflow_keeps_the_larger_value(runs):
    folder = make_study(runs, num_trials=2)
    sync(folder)
    baseline = folder.read_trials()[0]  # measured again when the study was resumed
    baseline.value = 33.6
    folder.write_trial(baseline)
    assert sync(folder).is_complete
    found = read_back(runs)["0001 bf16 channels_last"]
    assert found.data.metrics["ratio measured once"] == 1.14


def test_experiment_is_not_named_after_a_secret(runs, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2pass")
    folder = make_study(runs, num_trials=1)
    folder.config_file.write_text("tracker:\n  experiment: team-${oc.env:API_TOKEN}\n", encoding="utf-8")
    assert sync(folder).is_complete
    names = [experiment.name for experiment in client_of(runs).search_experiments()]
    assert [name for name in names if name.startswith("team-")] == ["team-***"]


def test_repeated_attempt_of_a_trial_replaces_the_first(runs):
    folder = make_study(runs, num_trials=2)
    sync(folder)
    spec = folder.trial_path(1) / "spec.json"
    spec.write_text(spec.read_text().replace("nonce1", "another"))
    assert sync(folder).is_complete
    assert Mirror(store.embedded_uri(runs), folder.name).problems(folder) == []


def test_a_trial_whose_folder_was_deleted_stays_in_mlflow(runs):
    folder = make_study(runs, num_trials=3)
    sync(folder)
    shutil.rmtree(folder.trial_path(1))
    sync(folder)
    assert Mirror(store.embedded_uri(runs), folder.name).numbers == [0, 1, 2]


def test_two_parents_become_one_with_every_trial_below_it(runs):
    folder = make_study(runs, num_trials=3)
    sync(folder)
    client = client_of(runs)
    parent = read_back(runs)["resnet18"]
    tags = {key: value for key, value in parent.data.tags.items() if key.startswith(("autotune.", "study", "kind"))}
    again = client.create_run(parent.info.experiment_id, tags=tags, run_name="resnet18")
    client.set_tag(read_back(runs)["0001 bf16 channels_last"].info.run_id, "mlflow.parentRunId", again.info.run_id)
    assert sync(folder).is_complete
    assert Mirror(store.embedded_uri(runs), folder.name).problems(folder) == []


def test_deleted_experiment_is_reported_with_the_command_that_restores_it(runs):
    folder = make_study(runs, num_trials=1)
    sync(folder)
    client = client_of(runs)
    experiment = client.get_experiment_by_name("autotune").experiment_id
    client.delete_experiment(experiment)
    restore = f"MLFLOW_TRACKING_URI={store.embedded_uri(runs)} mlflow experiments restore --experiment-id {experiment}"
    assert restore in sync(folder).problem
    client.restore_experiment(experiment)
    assert sync(folder).is_complete


def test_best_of_a_resumed_study_is_no_longer_called_the_best(runs):
    folder = make_study(runs)
    sync(folder)
    folder.write_summary(folder.read_summary() | {"status": "running"})
    with folder.claimed():
        assert sync(folder).written == 1
    assert {run.data.tags["best"] for run in read_back(runs).values()} == {"-"}


def test_tags_that_a_resumed_study_has_lost_are_no_longer_shown(runs):
    folder = make_study(runs)
    sync(folder)
    parent = read_back(runs)["resnet18"]
    assert parent.data.tags["verdict"] == "faster"
    for name in ("finding.2", "mine"):
        client_of(runs).set_tag(parent.info.run_id, name, "kept")
    folder.write_summary(folder.read_summary() | {"status": "running", "speedup": None})
    with folder.claimed():
        sync(folder)
    tags = read_back(runs)["resnet18"].data.tags
    assert [tags[name] for name in ("verdict", "finding.2", "mine")] == ["-", "-", "kept"]


def test_sync_of_a_growing_study_writes_only_new_trials(runs):
    folder = make_study(runs, status="running", num_trials=3)
    with folder.claimed():
        assert sync(folder).written == 3
    assert read_back(runs)["resnet18"].info.status == "RUNNING"
    trials = [*folder.read_trials(), add_trial(folder, 3)]
    folder.write_summary(summary_of(folder.name, trials, status="complete"))
    assert sync(folder).written == 1
    assert read_back(runs)["resnet18"].info.status == "FINISHED"


def test_study_that_was_killed_is_interrupted_in_mlflow_until_it_is_resumed(runs):
    folder = make_study(runs, status="running", num_trials=2)
    sync(folder)
    parent = read_back(runs)["resnet18"]
    assert (parent.info.status, parent.data.tags["status"]) == ("KILLED", "interrupted")
    with folder.claimed():
        sync(folder)
    parent = read_back(runs)["resnet18"]
    assert (parent.info.status, parent.data.tags["status"]) == ("RUNNING", "running")


def test_follow_copies_a_study_once_more_when_its_tuner_is_killed(runs):
    folder = make_study(runs, status="running", num_trials=1)
    copied = []

    class Tuner(ParentWatch):
        is_gone = False

        def limit(self, _):
            pass

        def wait(self, _):
            claim.close()
            self.is_gone = True

    with contextlib.ExitStack() as claim:
        claim.enter_context(folder.claimed())
        follow(folder, "none", parent=Tuner(), report=lambda _: copied.append(Contents.read(folder).status))
    assert copied == ["RUNNING", "KILLED"]


def test_trials_that_mlflow_got_before_the_server_went_down_are_not_missing(runs, monkeypatch):
    folder = make_study(runs, num_trials=2)
    tracker = MlflowTracker(store.embedded_uri(runs), runs)
    assert tracker.push(folder).is_complete
    add_trial(folder, 2)
    monkeypatch.setattr(probe, "problem_of", lambda *_: "no answer")
    for is_last in (False, True):
        state = tracker.push(folder, is_last=is_last)
        assert (state.pending, state.written, state.present) == ([2], 0, 2)
    note(folder, state)
    assert "MLflow lacks 1 of 3 trials (no answer from" in incomplete(folder, "")


def test_successive_studies_of_the_same_name_have_separate_runs(folder, runs):
    sync(folder)
    shutil.rmtree(folder.path)
    again = make_study(runs, num_trials=2)
    study = json.loads(again.study_file.read_text())
    again.study_file.write_text(json.dumps(study | {"started_at": study["started_at"] + 60}), encoding="utf-8")
    assert sync(again).written == 2


def test_invalid_tracking_address_is_refused(runs):
    with pytest.raises(BadInput, match=r"tracker\.uri: not a tracking address"):
        sync(make_study(runs), "carrier-pigeon://home")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [("mlruns", "MLFLOW_ALLOW_FILE_STORE=true"), ("databricks", "credential"), ("mssql+pymssql://h/d", "pymssql")],
)
def test_store_that_mlflow_refuses_is_reported_with_the_cause(runs, monkeypatch, tmp_path, uri, problem):
    monkeypatch.chdir(tmp_path)
    state = sync(make_study(runs), uri)
    assert problem in state.problem
    assert len(state.pending) == 8


def test_tracker_uri_none_tracks_nothing(folder, runs):
    folder.config_file.write_text("tracker:\n  uri: none\n", encoding="utf-8")
    assert sync(folder).is_complete
    assert not (runs / "mlartifacts").exists()


def test_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(BadInput, match="not a study"):
        sync(StudyFolder(tmp_path), store.embedded_uri(tmp_path))


def test_more_params_than_fit_into_a_batch_are_all_written(runs):
    folder = make_study(runs, num_trials=1)
    trial = folder.read_trials()[0]
    trial.knobs |= {f"env.NAME_{n}": n for n in range(150)}
    folder.write_trial(trial)
    sync(folder)
    assert len(read_back(runs)["0000 baseline"].data.params) == 156


@pytest.mark.thorough
def test_sync_with_follow_ends_when_the_study_ends(runs):
    folder = make_study(runs, status="running", num_trials=2)
    argv = [sys.executable, "-m", "autotune", "sync", "resnet18", "--follow", "--runs-dir", str(runs)]
    environment = {k: v for k, v in own_environment().items() if k != "MLFLOW_TRACKING_URI"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    trials = [*folder.read_trials(), add_trial(folder, 2)]
    folder.write_summary(summary_of(folder.name, trials, status="complete"))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert {"resnet18", "0002 batch 128 workers 2"} <= set(read_back(runs))


def test_second_push_reads_only_changed_trials_and_asks_only_for_recent_runs(runs, monkeypatch):
    folder = make_study(runs, num_trials=4, status="running")
    tracker = MlflowTracker(store.embedded_uri(runs), runs)
    assert tracker.push(folder).written == 4
    asked, read, search = [], [], tracker._client.search_runs
    monkeypatch.setattr(tracker._client, "search_runs", lambda *words, **how: asked.append(search(*words, **how)) or asked[-1])
    add_trial(folder, 4)
    changed = folder.read_trial(2)
    changed.reason = "ruled out later"
    folder.write_trial(changed)
    read_json = run_dir.read_json
    monkeypatch.setattr(run_dir, "read_json", lambda file: read.append(file) or read_json(file))
    state = tracker.push(folder)
    assert (state.written, state.present, state.pending, state.problem) == (2, 3, [], "")
    assert [file.parent.name for file in read if file.name == "trial.json"] == ["0002", "0004"]
    assert sorted(run.data.tags["trial"] for page in asked for run in page) == ["2", "3", "4"]  # began no earlier than trial 2
    assert read_back(runs)["0002 batch 128 workers 2"].data.tags["reason"] == "ruled out later"
    assert len(read_back(runs)) == 6
    assert sync(folder).written == 0


@pytest.mark.thorough
def test_a_run_that_was_deleted_while_a_trial_was_written_counts_as_missing(runs, monkeypatch):
    folder = make_study(runs, num_trials=2, status="running")
    tracker = MlflowTracker(store.embedded_uri(runs), runs)
    tracker.push(folder)
    add_trial(folder, 2)
    ended = tracker._client.set_terminated
    monkeypatch.setattr(
        tracker._client, "set_terminated", lambda run_id, *words: (ended(run_id, *words), tracker._client.delete_run(run_id))
    )
    state = tracker.push(folder)
    assert state.pending == [2]
    assert "MLflow lacks some of what was written" in state.problem
    monkeypatch.undo()
    assert tracker.push(folder).is_complete
    assert "0002 batch 128 workers 2" in read_back(runs)


def test_sync_writes_nothing_while_another_process_writes(folder):
    with store.only_writer(folder):
        state = sync(folder, wait_s=0.0)
    assert state.written == 0
    assert "another" in state.problem


@pytest.mark.thorough
def test_simultaneous_first_syncs_make_one_complete_store(tmp_path):
    for name in ("one", "two"):
        make_study(tmp_path, name, num_trials=1)
    environment = {k: v for k, v in own_environment().items() if k != "MLFLOW_TRACKING_URI"}
    argv = [sys.executable, "-m", "autotune", "sync", "--runs-dir", str(tmp_path)]
    processes = [
        subprocess.Popen([*argv, name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in ("one", "two")
    ]
    said = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert {"one", "two"} <= set(read_back(tmp_path))
