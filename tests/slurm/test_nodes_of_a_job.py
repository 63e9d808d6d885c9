"""Trials over two nodes with launcher=slurm. One job of two nodes serves the whole study, and srun starts the ranks in it.

The second node is this host as well, but has a host name, process ids and a monotonic clock of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.errors import BadInput
from autotune.failures import classify
from autotune.launchers.environment import own_environment
from autotune.records import Outcome
from autotune.run_dir import StudyFolder
from tests.faults.trial_studies import QUICK
from tests.launchers.agents import place, ready
from tests.launchers.losses import lost, nothing_left
from tests.slurm.private import FAR
from tests.slurm.test_faults import TUNER, here
from tests.support.launcher_contract import a_launch, wait_for
from tests.support.stub_programs import program

HERE = os.uname().nodename
OPTIONS = {"nodes": 2, "cpus": 2, "partition": "two"}
WORDS = ["launcher=slurm", *(f"launch.slurm.{name}={value}" for name, value in OPTIONS.items())]
TASK = ["srun", sys.executable, str(Path(__file__).with_name("programs") / "task.py")]
# A rank on each node, with a child process that does not ignore SIGTERM. Slurm would lose one that does, because it tracks
# processes by parents here (proctrack/linuxproc). With proctrack/cgroup, it loses none.
RANKS = [
    "srun",
    *program("""
spawn("import time; time.sleep(600)", start_new_session=True)
open(folder + "/rank" + os.environ["SLURM_PROCID"], "w").write(os.uname().nodename)
if os.environ["SLURM_PROCID"] == "0": progress("warmup", 1)
time.sleep(600)
"""),
]
FIRST = ["srun", *program('if os.environ["SLURM_PROCID"] == "0": result()')]


@pytest.fixture
def shell(meeting):
    """The environment of a shell that does not know which nodes a job will have."""
    return {**own_environment(), **{name: value for name, value in meeting.items() if name != "MASTER_ADDR"}}


@pytest.fixture
def launcher(make, tmp_path):
    return ready(make(**OPTIONS))


def autotune(*words, cwd, env, timeout_s):
    command = [sys.executable, "-m", "autotune", *words, "--", *TASK]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)


def ranks_of(folder):
    """Waits for both ranks; returns where they run."""
    return [wait_for(folder / f"rank{rank}") for rank in range(2)]


@pytest.mark.thorough
def test_a_study_measures_the_ranks_of_both_nodes_in_one_job(slurm, tmp_path, shell):
    (tmp_path / "space.yaml").write_text('{"parallel.gradient_as_bucket_view": [false, true]}')
    words = [*WORDS, *QUICK, "study.budget.trials=1", "study.budget.minutes=4", "explain.auto=false", "search_space=space.yaml"]
    done = autotune("run", *words, "study.name=s", cwd=tmp_path, env=shell, timeout_s=280)
    assert "verdict" in done.stdout, done.stdout + done.stderr
    assert f"Ranks run on {FAR}; other programs there are not noticed, only those on {HERE}." in done.stdout + done.stderr
    folder = StudyFolder(tmp_path / "runs" / "s")
    trials = folder.read_trials()
    assert len({trial.evidence["node"]["job"] for trial in trials}) == 1
    measured = [trial for trial in trials if trial.outcome.has_value]
    assert [[entry["host"] for entry in trial.ranks["by_rank"]] for trial in measured] == [[HERE, FAR]] * len(measured)
    changed = next(trial for trial in measured if trial.changed.get("parallel.gradient_as_bucket_view"))
    files = [folder.trial_path(changed.number) / f"result.rank{rank}.json" for rank in range(2)]
    states = [json.loads(file.read_text())["knobs"]["parallel.gradient_as_bucket_view"]["status"] for file in files]
    assert states == ["applied", "applied"]
    assert slurm.is_idle()


@pytest.mark.thorough
def test_inspect_sees_the_ranks_of_both_nodes(slurm, tmp_path, shell):
    done = autotune("inspect", *WORDS, cwd=tmp_path, env=shell, timeout_s=120)
    assert "2 processes that train together" in done.stdout, done.stdout + done.stderr
    assert slurm.is_idle()


def ended(victim, launcher, slurm):
    """Ends a part of the job, or the whole of it."""
    if victim == "job":
        (job,) = slurm.jobs()
        slurm.ask("scancel", job.split()[0])
    elif victim == "srun":
        psutil.Process(launcher._transport._process.pid).kill()
    elif victim == "agent":
        (agent,) = here()
        agent.kill()
    else:
        (task,) = [one for one in slurm.processes_on("n4") if one.name() == "cat"]
        task.kill()


@pytest.mark.parametrize(
    "victim", ["agent", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("srun", "task of the far node", "job"))]
)
def test_loss_of_a_part_of_the_job_ends_the_trial_and_leaves_no_rank_on_any_node(launcher, slurm, folder, victim):
    launch = a_launch(folder, RANKS)
    running = launcher.start(launch)
    assert ranks_of(folder) == [HERE, FAR]
    ended(victim, launcher, slurm)
    found = lost(running, 20)
    assert found.evidence["node_lost"], found
    assert classify(found.facts(launch.spec))[0] is Outcome.interrupted
    assert nothing_left(folder.parent.parent, [], lambda: [*here(), *slurm.jobs()], 15)
    assert lost(launcher.start(a_launch(folder, FIRST)), 60).cause == "result"


@pytest.mark.thorough
@pytest.mark.parametrize(("sent", "within_s"), [(signal.SIGKILL, 15), (signal.SIGSTOP, 60)], ids=["killed", "stopped"])
def test_killed_or_stopped_tuner_leaves_no_rank_on_either_node(slurm, folder, sent, within_s):
    argv = [sys.executable, "-c", TUNER, str(folder), json.dumps(OPTIONS), *RANKS]
    with subprocess.Popen(argv, env=own_environment(), stdout=subprocess.DEVNULL) as tuner:
        try:
            assert ranks_of(folder) == [HERE, FAR]
            tuner.send_signal(sent)
            assert nothing_left(folder.parent.parent, [], lambda: [*here(), *slurm.jobs()], within_s)
        finally:
            tuner.kill()


@pytest.mark.thorough
def test_loss_of_the_second_node_is_reported_and_leaves_no_rank_on_either_node(launcher, slurm, folder):
    running = launcher.start(a_launch(folder, RANKS))
    assert ranks_of(folder) == [HERE, FAR]
    slurm.kill("n4")  # with all processes on it
    try:
        found = lost(running, 60)
        assert found.evidence.get("node_lost"), found
        assert nothing_left(folder.parent.parent, [], lambda: [*here(), *slurm.jobs()], 40)
    finally:
        slurm.start("n4")
    assert lost(launcher.start(a_launch(folder, FIRST)), 90).cause == "result"


def test_folder_that_only_the_second_node_does_not_see_is_named(slurm, make, tmp_path):
    hidden = slurm.apart / "of-two"
    hidden.mkdir()
    launcher = make(dataclasses.replace(place(tmp_path), cwd=str(hidden)), nodes=2, partition="half")
    with pytest.raises(BadInput, match=rf"node {HERE} does not see this folder, got '{hidden}'"):
        ready(launcher)


def test_trial_on_one_node_also_starts_its_ranks_with_srun(slurm, make, tmp_path, folder):
    launcher = ready(make(dataclasses.replace(place(tmp_path), program="srun"), cpus=2))
    running = launcher.start(a_launch(folder, [*FIRST[:1], "--ntasks=2", *FIRST[1:]]))
    assert lost(running, 30).cause == "result"
    assert len(slurm.jobs()) == 1  # its step is part of the agent's job
