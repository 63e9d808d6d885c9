"""One trial over two nodes of a real Slurm, started by the user's own srun or torchrun.

The second node is this host as well, but has a host name, process ids and a monotonic clock of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.failures import classify
from autotune.harness.protocol import MeasureRules
from autotune.launchers import process_tree
from autotune.launchers.base import Deadlines
from autotune.launchers.environment import mark_of, own_environment
from autotune.launchers.local import LocalLauncher
from autotune.ranks import joined, rate_per_s
from autotune.records import Outcome
from autotune.run_dir import StudyFolder
from tests.apply.conftest import Place, ended
from tests.faults.trial_studies import PROGRAMS as FAULTY
from tests.faults.trial_studies import QUICK
from tests.launchers.losses import nothing_left
from tests.slurm.private import FAR, PrivateSlurm
from tests.support.launcher_contract import a_launch
from tests.support.waiting import wait_until

PROGRAMS = Path(__file__).with_name("programs")
HERE = os.uname().nodename
SRUN = ["srun", "--partition=two", "--nodes=2", "--ntasks=2"]
TASK = [sys.executable, str(PROGRAMS / "task.py")]
RULES = MeasureRules(warmup_min_device_s=0.05, warmup_max_s=2, min_s=0.3, max_s=1)
LIMITS = Deadlines(start_s=90, step_s=6)
KNOBS = {
    "loader": {"batch_size": 8, "num_workers": 1}, "precision": {"amp": "bf16"}, "optimizer": {"implementation": "fused"},
    "threads": {"intra": 1}, "parallel": {"gradient_as_bucket_view": True}, "env": {"SEEN_BY_THE_PROGRAM": "yes"},
}  # fmt: skip


@pytest.fixture
def trial(slurm, folder, meeting):
    """Runs a trial to its end, and fails if it leaves a process on one of the nodes."""
    launcher = LocalLauncher()

    def run(argv, *, limits=LIMITS, rules=RULES, look=lambda running: None, end_after_s=None, **env):
        launch = a_launch(folder, argv, env={**meeting, **env}, deadlines=limits)
        launch.spec.rules, launch.spec.device = rules, "cpu"
        launch.spec.end_s = None if end_after_s is None else time.monotonic() + end_after_s
        running, give_up_s = launcher.start(launch), time.monotonic() + limits.start_s + 60
        while (ended := running.poll()) is None:
            assert time.monotonic() < give_up_s
            look(running)
            time.sleep(0.05)
        assert _no_rank_is_left(mark_of(folder.parent.parent, launch.spec.trial), slurm)
        outcome, reason = classify(ended.facts(launch.spec))
        return SimpleNamespace(outcome=outcome, reason=reason, results=ended.results, evidence=ended.evidence)

    yield run
    launcher.close()


def _no_rank_is_left(mark: str, slurm: PrivateSlurm) -> bool:
    give_up_s = time.monotonic() + 15
    while left := [*process_tree.members(lambda found: found == mark), *slurm.jobs()]:
        if time.monotonic() > give_up_s:
            print(left)
            return False
        time.sleep(0.1)
    return True


def torchrun(port: str, *words: str, train: Path = FAULTY / "ranks.py") -> list[str]:
    """Returns a command that starts torchrun on each node. It gives IP addresses, as the far node's name cannot be resolved."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=7", "--local_addr=127.0.0.1"]
    return [*SRUN, sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *meet, *words, str(train)]


@pytest.mark.thorough
def test_ranks_on_both_nodes_form_one_trial_on_the_clock_of_the_tuner(trial):
    differences_s = []

    def look(running):
        if progress := running.progress():
            differences_s.append(abs(time.monotonic() - progress.time_s))

    far_first = [*SRUN, "--distribution=arbitrary", "--nodelist=n4,n1", *TASK]
    endless = MeasureRules(warmup_min_device_s=0.05, warmup_max_s=2, min_s=600, max_s=600, half_width_frac=0)
    found = trial(far_first, look=look, rules=endless, end_after_s=25)
    assert [(result.rank, result.world_size, result.host) for result in found.results] == [(0, 2, FAR), (1, 2, HERE)]
    assert min(differences_s) < 1
    assert max(differences_s) < 60
    assert all(result.window.seconds > 0.3 for result in found.results)
    ranks = joined(found.results)
    assert [entry["host"] for entry in ranks["by_rank"]] == [FAR, HERE]
    assert all(entry["peak_memory_bytes"] > 2**26 for entry in ranks["by_rank"])
    assert rate_per_s(found.results) == pytest.approx(sum(entry["rate_per_s"] for entry in ranks["by_rank"]), rel=0.1)


# What happens to rank 1, on the far node -> how the trial ends, and what its reason says.
ENDS = {
    "rank is killed": (Outcome.crash, r"^task 1 on node n4 was ended by SIGKILL in phase \w+ \(ended from outside, or"),
    "rank runs out of memory": (Outcome.host_oom, r"DefaultCPUAllocator.* \(rank 1"),
    "waits for a rank": (Outcome.timeout, rf"6 s; rank 0 waits for .* while rank 1 on {FAR} is at ranks\.py:\d+ in think"),
    "rank ends without a word": (Outcome.error, r"^task 1 on node n4 ended with exit status 3"),
    "rank fails early": (Outcome.error, r"^ValueError: no data on this node \(rank 1"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ENDS)
def test_fault_of_a_rank_on_the_second_node_determines_the_outcome(trial, fault):
    outcome, words = ENDS[fault]
    found = trial([*SRUN, *TASK], FAULT=fault)
    assert (found.outcome, bool(re.search(words, found.reason))) == (outcome, True), found.reason


@pytest.mark.thorough
def test_ranks_stop_after_the_same_step_if_a_shared_folder_shows_new_files_late(trial):
    found = trial([*SRUN, *TASK], FAULT="new files are seen late")
    assert found.outcome in (Outcome.ok, Outcome.unsteady), found.reason  # other programs may disturb the test
    assert [result.status for result in found.results] == ["measured", "measured"]
    assert len({len(result.steps["end_s"]) for result in found.results}) == 1


@pytest.mark.thorough
def test_rank_that_torchrun_reports_as_killed_is_named(trial, meeting):
    found = trial(torchrun(meeting["MASTER_PORT"], "--nnodes=2"), limits=Deadlines(start_s=90), FAULT="rank is killed")
    assert found.outcome is Outcome.crash, found.reason
    assert found.reason.startswith("rank 1 was ended by SIGKILL")


@pytest.mark.thorough
def test_rendezvous_that_never_completes_ends_in_time_and_names_the_waiting_nodes(trial, meeting):
    found = trial(torchrun(meeting["MASTER_PORT"], "--nnodes=3"), limits=Deadlines(start_s=25))
    assert found.outcome is Outcome.timeout
    assert f"within 25 s; torchrun on {', '.join(sorted([FAR, HERE]))} waits for the other nodes: fewer than" in found.reason


@pytest.mark.thorough
def test_a_rank_that_is_never_started_is_named(trial):
    found = trial([*SRUN, *TASK], limits=Deadlines(start_s=25), WORLD_SIZE="3")
    assert found.outcome is Outcome.timeout
    assert re.search(r"rank \d(?: on far)? waits for the other ranks at ranks\.py:\d+", found.reason)
    assert "rank 2 of 3 missing (ended, never started, or unable to answer)" in found.reason


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([sys.executable, str(PROGRAMS / "alone.py")], rf"2 processes train at the same time .*\d on {FAR}.*share no model"),
        (
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1", "--nproc_per_node=2",
             str(FAULTY / "ranks.py")],
            r"^the nodes train in groups of their own: there is a rank 0 on \w+ and one on \w+\. Let all nodes meet",
        ),
    ],
)  # fmt: skip
def test_nodes_that_train_separately_are_refused(trial, argv, words):
    slow = MeasureRules(min_s=20, max_s=20)  # the groups begin seconds apart
    found = trial([*SRUN, *argv], rules=slow)
    assert (found.outcome, bool(re.search(words, found.reason))) == (Outcome.error, True), found.reason


@pytest.mark.thorough
def test_study_applies_knobs_on_both_nodes_and_names_the_node_it_does_not_watch(slurm, tmp_path, meeting):
    (tmp_path / "space.yaml").write_text('{"parallel.gradient_as_bucket_view": [false, true]}')
    words = [*QUICK, "study.budget.trials=1", "study.budget.minutes=4", "explain.auto=false", "search_space=space.yaml"]
    command = [sys.executable, "-m", "autotune", "run", *words, "study.name=s", "--", *SRUN, *TASK]
    environment = {**own_environment(), **meeting}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert "verdict" in done.stdout, done.stdout + done.stderr
    assert f"Ranks run on {FAR}; other programs there are not noticed, only those on {HERE}." in done.stdout + done.stderr
    folder = StudyFolder(tmp_path / "runs" / "s")
    changed = next(one for one in folder.read_trials() if one.changed.get("parallel.gradient_as_bucket_view"))
    files = [folder.trial_path(changed.number) / f"result.rank{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text()) for file in files]
    assert {one["host"] for one in found} == {FAR, HERE}
    assert [one["knobs"]["parallel.gradient_as_bucket_view"]["status"] for one in found] == ["applied", "applied"]
    shown = subprocess.run([*command[:3], "show", "s"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f" on {FAR}" in shown.stdout
    assert slurm.is_idle()


@pytest.mark.thorough
def test_inspect_sees_both_ranks(slurm, tmp_path, meeting):
    command = [sys.executable, "-m", "autotune", "inspect", "--", *SRUN, *TASK]
    done = subprocess.run(
        command, cwd=tmp_path, env={**own_environment(), **meeting}, capture_output=True, text=True, timeout=120
    )
    assert "2 processes that train together" in done.stdout, done.stdout + done.stderr
    assert slurm.is_idle()


@pytest.mark.thorough
def test_apply_reaches_the_ranks_of_both_nodes_and_one_rank_reports_it(slurm, tmp_path):
    place = Place(tmp_path)
    place.best({"loader": {"batch_size": 8}, "threads": {"intra": 1}})
    done = place.apply(*SRUN, sys.executable, "train.py", env={**slurm.environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"batches": [8, 8') == 2
    assert done.stderr.count("autotune: all 2 settings of best.yaml are in effect") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("starter", ["srun", "torchrun", "salloc"])
def test_apply_sets_every_knob_of_ranks_that_train_together_on_two_nodes(slurm, tmp_path, meeting, starter):
    place, train = Place(tmp_path), shutil.copy(PROGRAMS / "ddp.py", tmp_path)
    place.best(KNOBS)
    words = {
        "srun": [*SRUN, sys.executable, train],
        "torchrun": torchrun(meeting["MASTER_PORT"], "--nnodes=2", train=train),
        "salloc": ["srun", sys.executable, train],
    }[starter]
    job = ["salloc", "--quiet", "--partition=two", "--nodes=2", "--ntasks-per-node=1"] if starter == "salloc" else []
    command = [*job, sys.executable, "-m", "autotune", "apply", "best.yaml", "--", *words]
    done = ended(place.popen(command, env={**slurm.environment, **meeting}))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(rank.pop("host") for rank in found) == sorted([HERE, FAR])
    assert found[0] == found[1]  # the weights are equal, too: the ranks have trained together
    assert found[0].pop("weights")
    assert found[0] == {
        "ranks": 2, "batches": [8], "dtypes": ["torch.bfloat16"], "workers": 1, "threads": 1, "is_view": True, "is_fused": True,
        "variable": "yes",
    }  # fmt: skip
    assert done.stderr.count("autotune: all 7 settings of best.yaml are in effect") == 1
    assert slurm.is_idle()


@pytest.mark.thorough
def test_srun_that_does_not_pass_the_environment_to_the_ranks_is_refused(slurm, tmp_path):
    place = Place(tmp_path)
    place.best({"loader": {"batch_size": 8}})
    done = place.apply("srun", "--export=PATH", sys.executable, "train.py", env=slurm.environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "COMMAND: srun does not pass the environment on to the ranks" in done.stderr


@pytest.mark.thorough
def test_several_tuners_started_by_srun_are_refused_before_a_study_is_made(slurm, tmp_path):
    tuner = [sys.executable, "-m", "autotune", "run", *QUICK, "--", *TASK]
    done = subprocess.run(
        ["srun", "--ntasks=2", *tuner],
        cwd=tmp_path,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("launcher: srun has started 2 autotunes, got SLURM_STEP_NUM_TASKS=2") == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_killed_tuner_leaves_no_rank_on_either_node(slurm, tmp_path, meeting):
    command = [sys.executable, "-m", "autotune", "run", *QUICK, "study.name=s", "study.budget.minutes=5", "--", *SRUN, *TASK]
    tuner = subprocess.Popen(
        command, cwd=tmp_path, env={**own_environment(), **meeting, "FAULT": "waits for a rank"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    study = tmp_path / "runs" / "s"
    progress = study / "trials" / "0000" / "progress.jsonl"
    wait_until(lambda: progress.exists() and '"warmup"' in progress.read_text(), "the warm-up")
    tuner.kill()
    tuner.wait()
    assert nothing_left(study, [], slurm.jobs, 20)
