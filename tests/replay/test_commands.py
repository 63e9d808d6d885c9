"""`autotune record` and `autotune replay` on the command line, with real files and real processes that are killed."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from autotune.cli.main import main
from autotune.launchers.environment import own_environment
from autotune.replay import bench
from autotune.replay.table import read, write
from autotune.run_dir import StudyFolder
from tests.faults.quick_study import PROGRAM
from tests.replay.tables import make_table
from tests.replay.test_recording import places
from tests.support.stub_programs import PRELUDE
from tests.support.waiting import wait_until

SPACE = ["search_space=none", "loader.num_workers=choice(0,1)", "precision.amp=choice(off,bf16)", "record.repeats=2"]


@pytest.fixture
def record(tmp_path):
    (tmp_path / "train.py").write_text(f"{PRELUDE}\n{PROGRAM}", encoding="utf-8")
    environment = {**own_environment(), "COLUMNS": "120", "NO_COLOR": "1"}

    def start(*words):
        program = ["--", sys.executable, "-S", "train.py", "0.05"]
        argv = [sys.executable, "-m", "autotune", "record", "tracker.uri=none", "device.kind=cpu", "study.name=s", *SPACE]
        return subprocess.Popen(
            [*argv, *words, *program], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


@pytest.mark.thorough
def test_same_command_continues_a_killed_recording_and_repeats_no_measurement(record, tmp_path):
    folder = StudyFolder(tmp_path / "runs" / "record-s")
    process = record()
    wait_until((folder.trial_path(3) / "trial.json").exists, every_s=0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = places(folder.read_trials())
    process = record("-o", "t.jsonl.gz")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "recorded: 4 configurations, 8 measurements" in out
    found = places(folder.read_trials())
    assert found[: len(before)] == before
    assert len(set(found)) == len(found) == 8
    assert not (tmp_path / "runs" / "record-s-2").exists()
    table = read(tmp_path / "t.jsonl.gz")
    assert len(table.measurements) == 8
    text = gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).decode()
    for private in (socket.gethostname(), str(tmp_path), os.path.expanduser("~")):
        assert len(private) < 4 or private not in text


@pytest.mark.parametrize(
    ("blocked", "said"),
    [
        ("t.jsonl.gz", "table: not written: --output: cannot be written, got 't.jsonl.gz'"),
        pytest.param("runs/record-s/table.jsonl.gz", "runs/record-s: cannot be written any more", marks=pytest.mark.thorough),
    ],
)
def test_interrupted_recording_says_so_even_if_its_table_cannot_be_written(record, tmp_path, blocked, said):
    process = record("-o", "t.jsonl.gz")
    wait_until((tmp_path / "runs" / "record-s" / "trials" / "0001" / "trial.json").exists, every_s=0.01)
    (tmp_path / blocked).mkdir()
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130, err
    assert said in err
    assert "stopped by the user" in err


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    for name, seed in (("one", 0), ("two", 1)):
        write(make_table(noise_frac=0.02, seed=seed), folder / f"{name}.jsonl.gz")
    return folder


def test_replay_prints_every_table_and_strategy(tables, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    files = [str(tables / "one.jsonl.gz"), str(tables / "two.jsonl.gz")]
    assert main(["replay", *files, "--sampler", "random,grid", "--seeds", "2", "--trials", "4", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("ten random trials reach") == 2
    assert "all 2 tables together" in said
    assert said.count("random ") >= 3


def test_replay_json_is_one_document_and_raw_adds_every_study(tables, capsys):
    command = ["replay", str(tables / "one.jsonl.gz"), "--sampler", "random", "--seeds", "2", "--trials", "3", "--jobs", "1"]
    assert main([*command, "--json", "--raw"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tables"][0]["table"] == "formula"
    assert document["strategies"]["random"]["studies"] == 2
    assert [len(study["steps"]) for study in document["studies"]] == [4, 4]


def test_duplicate_table_is_replayed_once_and_single_measurements_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = str(tmp_path / "once.jsonl.gz")
    write(make_table(repeats=1), tmp_path / "once.jsonl.gz")
    assert main(["replay", path, path, "--sampler", "random", "--seeds", "1", "--trials", "2", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("ten random trials reach") == 1
    assert "30 configurations were measured only once" in said


def test_an_empty_strategy_is_refused(tables, capsys):
    assert main(["replay", str(tables / "one.jsonl.gz"), "--sampler", ""]) == 2
    assert "no such strategy, got ''" in capsys.readouterr().err


def test_name_of_a_strategy_with_keys_wraps_between_words(tables, capsys):
    command = ["replay", str(tables / "one.jsonl.gz"), "--sampler", "default:search.memory_model=false:measure.racing=false"]
    assert main([*command, "--seeds", "1", "--trials", "2", "--jobs", "1"]) == 0
    words = capsys.readouterr().out.split()
    assert {"default:", "memory_model", "off:", "measure.racing", "off"} <= set(words)


@pytest.mark.thorough
def test_ablations_are_printed_as_one_markdown_table(tables, capsys):
    command = ["replay", str(tables / "one.jsonl.gz"), "--sampler", "ablations", "--markdown"]
    assert main([*command, "--seeds", "1", "--trials", "2", "--jobs", "1"]) == 0
    head, rule, first, *parts = capsys.readouterr().out.splitlines()
    assert head.startswith("| strategy | 10 trials |")
    assert len({line.count("|") for line in (head, rule, first, *parts)}) == 1
    assert first.startswith("| `default` |")
    assert [line.split("`")[1].removeprefix("default:") for line in parts] == [
        "search.seeds=false", "search.decomposition=false", "search.memory_model=false", "search.cost_aware=false",
        "search.stop=false", "measure.racing=false",
    ]  # fmt: skip


@pytest.mark.thorough
def test_results_do_not_depend_on_the_number_of_processes(tables, capsys):
    command = [
        "replay",
        str(tables / "one.jsonl.gz"),
        "--sampler",
        "random,study-tpe",
        "--seeds",
        "3",
        "--trials",
        "5",
        "--json",
        "--raw",
    ]
    found = []
    for jobs in ("1", "2"):
        assert main([*command, "--jobs", jobs]) == 0
        found.append([{**study, "own_s": 0} for study in json.loads(capsys.readouterr().out)["studies"]])
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_killed_or_terminated_replay_leaves_no_process_behind(tables, end):
    words = ["replay", str(tables / "one.jsonl.gz"), "--sampler", "default", "--seeds", "5000", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own_environment()
    )
    itself = psutil.Process(process.pid)
    wait_until(lambda: sum(map(_is_worker, itself.children(recursive=True))) >= 2, "two workers", every_s=0.05)
    started = itself.children(recursive=True)
    time.sleep(1.0)  # let the workers begin
    process.send_signal(end)
    process.communicate(timeout=30)
    assert process.returncode != 0
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []


@pytest.mark.thorough
def test_ctrl_c_does_not_wait_for_submitted_studies(monkeypatch):
    def interrupted(pool, *_, **__):
        for _ in range(4):
            pool.submit(time.sleep, 3600)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.ProcessPoolExecutor, "map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench._studies([], bench.Asked(tables=[], num_jobs=2), lambda: None)
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    assert [process for process in left if _is_worker(process)] == []


def _is_worker(process):
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_wrong_strategy_and_wrong_table_are_reported_together(tables, capsys):
    assert main(["replay", str(tables / "one.jsonl.gz"), "nosuch.gz", "--sampler", "nosuch,random"]) == 2
    said = capsys.readouterr().err
    assert "no such strategy, got 'nosuch'" in said
    assert "'nosuch.gz'" in said


def test_recording_that_gets_no_node_leaves_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without srun
    assert main(["record", "launcher=slurm", *SPACE, "--", sys.executable, "train.py"]) == 2
    assert "srun is not installed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
