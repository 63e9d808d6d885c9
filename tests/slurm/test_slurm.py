"""Studies on a real Slurm, the environment of their trials, and what Slurm refuses."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.config.schema import SlurmOptions
from autotune.errors import BadInput
from autotune.launchers.node import DEVICE_VARIABLES
from autotune.launchers.slurm import SlurmLauncher
from autotune.run_dir import StudyFolder
from tests.faults.quick_study import QuickStudy
from tests.launchers.agents import environments, place, ready
from tests.launchers.losses import check_one_job, check_refused_study
from tests.launchers.slots_of_a_cluster import check_four_slots, check_slots
from tests.slurm.private import FAR, PrivateSlurm, why_not
from tests.support.launcher_contract import a_launch, wait
from tests.support.stub_programs import program
from tests.support.waiting import wait_until

SLURM = ("launcher=slurm", "launch.slurm.cpus=2", "study.budget.minutes=0.35", "study.budget.trials=1", "explain.auto=false")


def test_study_in_a_job_completes_and_leaves_no_process(slurm, tmp_path):
    err, job = check_one_job(QuickStudy(tmp_path, trial_s=0.05), slurm.is_idle, *SLURM)
    assert re.search(rf"trials run on node .*\bjob {job}\b", err)  # the study has waited for this job


def test_environment_of_a_trial_is_that_of_a_local_trial_plus_the_gpu_of_the_job(make, folder, tmp_path, monkeypatch):
    here, there = environments(make(gres="gpu:1", cpus=1), folder, tmp_path / "runs", monkeypatch)
    devices = {name: there.pop(name) for name in DEVICE_VARIABLES if name in there}
    assert there == here
    assert devices["CUDA_VISIBLE_DEVICES"] == "0"


def test_reason_why_a_job_waits_is_reported_and_the_clock_is_paused(make, folder, slurm):
    first, second = ready(make(cpus=4)), make(cpus=4)
    running = second.start(a_launch(folder, program("result()")))
    stood_s, give_up_s = second.clock.monotonic(), time.monotonic() + 30
    while "Resources" not in second.why_waiting():
        assert time.monotonic() < give_up_s, second.why_waiting()
        assert running.poll() is None
        time.sleep(0.1)
    assert second.clock.monotonic() == stood_s
    first.close()
    assert wait(running).cause == "result"
    assert second.why_waiting() == ""


@pytest.mark.thorough
def test_tuner_inside_an_allocation_runs_its_trials_as_a_step_of_it(slurm, tmp_path):
    study = QuickStudy(tmp_path)
    command = ["salloc", "--quiet", "--partition=other", "--cpus-per-task=2", sys.executable, "-m", "autotune", "run"]
    command += [*SLURM, "tracker.uri=none", "device.kind=cpu", "study.name=s", "--", sys.executable, "-S", "train.py", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, env=study._environment, capture_output=True, text=True, timeout=100)
    assert "verdict" in done.stdout, done.stderr
    assert slurm.is_idle()


@pytest.mark.thorough
def test_launcher_within_a_step_is_told_that_the_step_has_all_cpus(slurm, tmp_path):
    study = QuickStudy(tmp_path)
    command = ["srun", "--partition=other", "--cpus-per-task=2", sys.executable, "-m", "autotune", "run"]
    command += [*SLURM, "launch.queue_minutes=0.3", "--", sys.executable, "-S", "train.py", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, env=study._environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.search(r"launch\.queue_minutes: .*autotune runs in step \d+\.0, .* leave out launcher=slurm\)", done.stderr)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (
            "--cons=nosuch*2&odd",
            r"launch\.slurm\.args: no node of job \d+ has this feature, got .*\*2&odd \(n2: .* plain\)",
        ),
        ("-Cplain&nosuch", r"no free place for a step in job \d+ on a node with --constraint=plain&nosuch\)"),
    ],
)
def test_feature_that_the_nodes_of_the_allocation_lack_is_named(slurm, tmp_path, constraint, told):
    study = QuickStudy(tmp_path)
    command = ["salloc", "--quiet", "--partition=other", "--cpus-per-task=2", sys.executable, "-m", "autotune", "run"]
    command += [*SLURM, f"launch.slurm.args='{constraint}'", "launch.queue_minutes=0.2", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=study._environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.search(told, done.stderr), done.stderr
    assert slurm.is_idle()


@pytest.mark.thorough
def test_slot_without_room_in_the_allocation_is_refused(slurm, tmp_path):
    study = QuickStudy(tmp_path)
    command = ["salloc", "--quiet", "--partition=other", "--cpus-per-task=2", sys.executable, "-m", "autotune", "run"]
    command += [*SLURM, "launch.slots=2", "launch.queue_minutes=0.3", "--", sys.executable, "-S", "train.py", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, env=study._environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.search(r"autotune: waiting: slot 2: no free place for a step in job \d+\n", done.stderr)
    assert re.search(r"launch\.queue_minutes: .*\(slot 2: no free place for a step in job \d+\)", done.stderr)
    assert slurm.is_idle()


@pytest.mark.thorough
def test_a_second_tuner_of_a_study_is_refused_before_it_asks_for_a_node(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0)
    first = study.start("launcher=slurm", "launch.slurm.cpus=4", "explain.auto=false")
    study.wait_for_trial(1, first)
    out, err = study.resume().communicate(timeout=30)  # the first has all CPUs of the node
    assert out == ""
    assert f"another autotune is working on it, got 's' (process {first.pid} on host" in err
    assert "waiting" not in err
    first.terminate()
    first.communicate(timeout=60)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nodes": 9}, ["launch.slurm", "9"]),
        ({"partition": "nosuch"}, ["launch.slurm.partition: ", "'nosuch'", "nvalid partition"]),
        ({"gres": "gpu:tpu:1"}, ["launch.slurm: ", "--gres=gpu:tpu:1", "node configuration is not available"]),
        ({"gres": "gpu:0.5"}, ["launch.slurm.gres: ", "'gpu:0.5'", "TRES"]),
        ({"gres": "fpga:1"}, ["launch.slurm.gres: ", "'fpga:1'", "generic resource"]),
        ({"cpus": 64}, ["launch.slurm: ", "--cpus-per-task=64", "PartitionConfig"]),
        ({"minutes": 6000.0}, ["launch.slurm", "6000", "Partition"]),
        ({"mem": "900G"}, ["launch.slurm.mem: ", "'900G'", "Memory specification"]),
        ({"args": "--no-such-option"}, ["launch.slurm", "no-such-option"]),
        ({"args": "--constraint=nosuch"}, ["launch.slurm", "--constraint=nosuch", "nvalid feature"]),
    ],
)
def test_options_that_slurm_refuses_are_reported_in_the_words_of_slurm(make, options, told):
    with pytest.raises(BadInput) as caught:
        ready(make(**options))
    assert all(words in str(caught.value) for words in told), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["cwd", "runs_dir"])
def test_a_folder_that_the_node_does_not_see_is_named(slurm, make, tmp_path, what):
    hidden = slurm.apart / what
    hidden.mkdir()
    launcher = make(dataclasses.replace(place(tmp_path), **{what: str(hidden)}), partition="apart")
    with pytest.raises(BadInput, match=rf"{what}: node {os.uname().nodename} does not see .*{hidden}"):
        ready(launcher)


def test_an_interpreter_that_the_node_does_not_see_is_named(slurm, make, monkeypatch):
    hidden = slurm.apart / "python"
    hidden.symlink_to(sys.executable)
    launcher = make(partition="apart")
    monkeypatch.setattr(sys, "executable", str(hidden))
    with pytest.raises(BadInput, match=rf"node {os.uname().nodename} does not see the interpreter.*{hidden}"):
        ready(launcher)


def test_refused_option_ends_the_command_with_status_2_and_no_traceback(slurm, tmp_path):
    study = QuickStudy(tmp_path)
    refuses_it = r"launch\.slurm\.partition: Slurm refuses it"
    check_refused_study(study, slurm.is_idle, refuses_it, *SLURM, "launch.slurm.partition=nosuch")
    assert not study.folder.path.exists()


@pytest.mark.thorough
def test_unreachable_controller_is_reported(slurm, make, tmp_path, monkeypatch):
    text = (slurm.apart.parent / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", text))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(BadInput, match=r"^launcher: Slurm's controller does not answer.*Unable to contact"):
        ready(make(), within_s=60)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])


@pytest.mark.thorough
def test_without_the_key_of_the_cluster_no_job_starts(slurm, make, tmp_path, monkeypatch):
    conf = slurm.other_key(tmp_path)
    try:
        monkeypatch.setenv("SLURM_CONF", conf)
        with pytest.raises(BadInput, match=r"^launcher: Slurm's controller does not answer.*Zero Bytes"):
            ready(make(), within_s=60)
    finally:
        monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        slurm.kill("other munged")
    assert slurm.jobs() == []


def test_missing_srun_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"^launcher: srun is not installed here"):
        SlurmLauncher(SlurmOptions(), place(tmp_path)).slots()


@pytest.mark.thorough
def test_a_study_on_two_slots_runs_its_search_in_two_jobs(slurm, tmp_path):
    study = QuickStudy(tmp_path)
    check_slots(study, "launcher=slurm", "launch.slurm.cpus=2")
    assert slurm.is_idle()


@pytest.mark.thorough
def test_study_on_four_slots_of_two_nodes_finds_the_same_speedup_as_on_one_slot(slurm, tmp_path):
    engine = ("launcher=slurm", "launch.slurm.partition=two", "launch.slurm.cpus=2")
    found = check_four_slots(tmp_path, *engine, where=lambda: slurm.ask("squeue", "--noheader", "--format=%N").split())
    assert {trial.evidence["node"]["host"] for trial in found.read_trials()} == {os.uname().nodename, FAR}
    assert slurm.is_idle()


@pytest.mark.thorough
def test_more_slots_than_slurm_gives_in_time_are_refused(slurm, tmp_path):
    no_node = r"launch\.queue_minutes: Slurm provided no node within [\d.]+ s \(slot 2: Resources \(job "
    overrides = ("launcher=slurm", "launch.slots=2", "launch.slurm.cpus=4", "launch.queue_minutes=0.1")
    check_refused_study(QuickStudy(tmp_path), slurm.is_idle, no_node, *overrides)


@pytest.mark.thorough
def test_private_slurm_leaves_no_daemon_if_a_job_ends_while_it_stops(tmp_path, monkeypatch):
    if why := why_not():
        pytest.skip(why)
    made = PrivateSlurm(tmp_path)
    monkeypatch.setattr(made, "jobs", lambda: ["999999 gone"])
    made.stop()
    words = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in words if str(tmp_path) in line] == []


@pytest.mark.thorough
def test_batch_script_of_the_docs_continues_its_study_after_a_requeue(slurm, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "on-a-cluster.md").read_text(encoding="utf-8")
    script = page[page.index("#!/bin/bash\n#SBATCH --gres") :].partition("```")[0]
    usual, study = "study.budget.minutes=50 -- python train.py", QuickStudy(tmp_path, trial_s=1.0)
    assert usual in script
    quick = f"{' '.join(SLURM[2:])} tracker.uri=none device.kind=cpu -- {sys.executable} -S train.py 1.0"
    (tmp_path / "tune.sh").write_text(script.replace(usual, quick).replace("autotune ", f"{sys.executable} -m autotune "))
    submit = ["sbatch", "--parsable", "--partition=other", "--cpus-per-task=2", "--output=out", "tune.sh"]
    submitted = subprocess.run(submit, cwd=tmp_path, env=study._environment, capture_output=True, text=True, check=True)
    job = submitted.stdout.strip()
    folder = StudyFolder(tmp_path / "runs" / f"tune-{job}")
    wait_until(lambda: len([*folder.path.glob("trials/*/trial.json")]) > 1, "two trials")
    slurm.ask("scontrol", "requeue", job)
    wait_until(lambda: f"{job} PENDING" in slurm.jobs(), "the job in the queue")
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
    wait_until(lambda: f"{job} RUNNING" in slurm.jobs(), "the job's second start")
    assert slurm.is_idle(within_s=100)
    out = (tmp_path / "out").read_text()
    assert out.count("resumed  ") == 1, out
    assert folder.read_summary()["status"] == "complete", out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
