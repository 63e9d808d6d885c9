"""Kills parts of a study on Slurm. Each loss must be reported, no process may be left, and the next trial must run."""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.errors import BadInput
from autotune.failures import classify
from autotune.launchers import slurm_cancel
from autotune.launchers.environment import own_environment
from autotune.records import Outcome
from tests.faults.disks import fill, in_memory
from tests.faults.quick_study import QuickStudy, kill
from tests.launchers.agents import place, ready
from tests.launchers.losses import (
    FAMILY,
    agents,
    began,
    check_resumed,
    check_study_without_its_job,
    listening,
    lost,
    nothing_left,
    resume_after_a_killed_tuner,
    runs_again,
    strangers,
)  # fmt: skip
from tests.launchers.slots_of_a_cluster import GIVEN, check_loss_of_all_slots, wait_for_trial_of
from tests.support.launcher_contract import a_launch, wait_for
from tests.support.stub_programs import program
from tests.support.waiting import wait_until

TUNER = """
import json, sys, time
from pathlib import Path
from autotune.config.schema import SlurmOptions
from autotune.launchers.slurm import SlurmLauncher
from tests.support.launcher_contract import SHORT, a_launch
from tests.launchers.agents import place
folder = Path(sys.argv[1])
launcher = SlurmLauncher(SlurmOptions(**json.loads(sys.argv[2])), place(folder.parent), graces=SHORT)
running = launcher.start(a_launch(folder, sys.argv[3:]))
while True:
    running.poll(); print(launcher.why_waiting(), flush=True); time.sleep(0.1)
"""


@pytest.fixture
def launcher(make):
    return ready(make(cpus=2))


def here():
    """Returns the agents that run in this Slurm's jobs."""
    return agents("SLURM_CONF", os.environ["SLURM_CONF"])


def cancel_all(slurm):
    """Cancels all jobs."""
    slurm.ask("scancel", *(job.split()[0] for job in slurm.jobs()))


def process_of(name, launcher):
    """Returns one of the processes between tuner and trial: "srun", "agent", or Slurm's "slurmstepd" between them."""
    (agent,) = here()
    step = agent.parent()
    assert step.name() == "slurmstepd"
    return {"srun": psutil.Process(launcher._transport._process.pid), "agent": agent, "slurmstepd": step}[name]


@pytest.mark.parametrize("victim", ["srun", "agent", pytest.param("slurmstepd", marks=pytest.mark.thorough)])
def test_killed_process_of_the_job_ends_the_trial_and_leaves_no_process(launcher, slurm, folder, victim):
    launch, running, pids = began(launcher, folder)
    process_of(victim, launcher).kill()
    ended = lost(running, 45 if victim == "slurmstepd" else 15)
    assert ended.evidence["node_lost"]
    assert classify(ended.facts(launch.spec))[0] is Outcome.interrupted
    assert nothing_left(folder.parent.parent, pids, here, 10)
    runs_again(launcher, folder)


@pytest.mark.thorough
def test_terminated_srun_ends_the_trial_and_leaves_no_process(launcher, slurm, folder):
    _, running, pids = began(launcher, folder)
    process_of("srun", launcher).terminate()
    assert lost(running, 15).evidence["node_lost"]
    assert nothing_left(folder.parent.parent, pids, here, 10)
    runs_again(launcher, folder)


@pytest.mark.thorough
def test_foreign_data_on_the_ports_of_srun_does_not_disturb_a_trial(launcher, slurm, folder):
    running = launcher.start(a_launch(folder, program('progress("warmup", 1); time.sleep(3); result()')))
    wait_for(folder / "progress.jsonl")
    assert listening(process_of("agent", launcher)) == []
    assert [each.close() for each in strangers(process_of("srun", launcher), os.urandom(1 << 16))] != []
    assert lost(running, 30).cause == "result"


@pytest.mark.thorough
def test_silent_foreign_connection_to_srun_ends_the_trial_and_leaves_no_process(launcher, slurm, folder):
    _, running, pids = began(launcher, folder)
    connections = strangers(process_of("srun", launcher))
    try:
        assert lost(running, 45).evidence["node_lost"]
        assert nothing_left(folder.parent.parent, pids, here, 10)
        runs_again(launcher, folder)
    finally:
        for each in connections:
            each.close()


@pytest.mark.thorough
@pytest.mark.parametrize("is_number_known", [True, False], ids=["number known", "number unknown"])
def test_job_that_ends_while_the_controller_is_down_does_not_stay_allocated(make, slurm, folder, is_number_known):
    launcher = make(cpus=2)
    if is_number_known:
        _, running, _ = began(ready(launcher), folder)
    else:
        launcher.slots()
        newest_agent()
    slurm.save()
    slurm.kill("slurmctld")
    try:
        if is_number_known:
            process_of("agent", launcher).kill()
            assert lost(running, 45).evidence["node_lost"]
        launcher.close()  # the controller cannot be reached
        (line,) = launcher.unended()
    finally:
        slurm.start("slurmctld")
    assert re.match(r"Job \d+ may still" if is_number_known else r"A job named autotune-\w+ may still", line)
    wait_until(slurm.answers)
    assert slurm.jobs()  # the controller does not know that the job is over
    launcher.close()
    assert launcher.unended() == []
    assert nothing_left(folder.parent.parent, [], slurm.jobs, 90)  # the job is COMPLETING until its node answers


@pytest.mark.thorough
def test_a_lost_job_whose_end_the_controller_forgets_is_cancelled_again(make, slurm, folder):
    launcher = ready(make(cpus=4))  # the whole node
    _, running, _ = began(launcher, folder)
    slurm.save()
    process_of("agent", launcher).kill()
    assert lost(running, 15).evidence["node_lost"]
    slurm.kill("slurmctld", for_s=0.2)  # before it has saved that the job is over
    assert slurm.jobs(), "the controller has saved the end of the job"
    runs_again(launcher, folder, 60)


def newest_agent(*, after=None):
    """Waits for an agent other than `after`, and returns it."""
    return wait_until(lambda: [one for one in here() if one != after], "an agent")[0]


@pytest.mark.thorough
def test_job_whose_agent_is_killed_before_its_first_message_is_reported(make, slurm, monkeypatch):
    monkeypatch.setattr("autotune.launchers.slurm.BEGIN_S", 2.0)
    launcher = make(cpus=2)
    launcher.slots()
    newest_agent().parent().kill()  # slurmstepd; srun does not notice
    with pytest.raises(BadInput, match="the agent has said nothing for 2 s although its job runs"):
        ready(launcher)


@pytest.mark.thorough
def test_study_that_ended_because_of_a_silent_agent_can_be_resumed(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0, module="tests.slurm.impatient")
    process = study.start("launcher=slurm", "launch.slurm.cpus=2", "explain.auto=false")
    study.wait_for_trial(1, process)
    (job,), (first,) = slurm.jobs(), here()
    slurm.ask("scancel", job.split()[0])
    newest_agent(after=first).parent().kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert "the agent has said nothing for 4 s although its job runs" in err
    assert study.none_is_left()
    assert slurm.is_idle()
    check_resumed(study, 2)


def test_killed_tuner_leaves_no_process_on_the_node(slurm, folder):
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(folder), '{"cpus": 2}', *program(FAMILY)], env=own_environment())
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    tuner.kill()
    tuner.wait()
    assert nothing_left(folder.parent.parent, pids, here, 10)
    assert slurm.is_idle()


@pytest.mark.parametrize(
    "defaults",
    [{"SCANCEL_INTERACTIVE": "true"}, {"SCANCEL_STATE": "PENDING", "SQUEUE_STATES": "PENDING"}],
    ids=["asks", "states"],
)
def test_leftover_jobs_are_found_and_cancelled_despite_the_defaults_of_the_user(slurm, monkeypatch, defaults):
    name = "autotune-1a2b3c4d"
    slurm.ask("salloc", "--ntasks=1", f"--job-name={name}", "--no-shell")
    for variable, value in defaults.items():
        monkeypatch.setenv(variable, value)
    assert list(slurm_cancel._held([name])) == [name]
    slurm_cancel.cancel(jobs := {f"{slurm_cancel.NAME}{name}"})
    assert jobs == set()
    for variable in defaults:
        monkeypatch.delenv(variable)
    assert slurm.is_idle()


@pytest.mark.parametrize("variable", ["SLURM_LABELIO", "SLURM_STDOUTMODE", "SLURM_STDINMODE"])
def test_srun_defaults_of_the_user_do_not_break_the_link(make, monkeypatch, variable):
    monkeypatch.setenv(variable, "1" if variable == "SLURM_LABELIO" else "none")
    ready(make(), 20)


@pytest.mark.thorough
@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_job_of_a_tuner_killed_with_its_srun_is_cancelled_by_the_next_tuner(make, slurm, folder, monkeypatch, is_elsewhere):
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(folder), '{"cpus": 4}', *program(FAMILY)], env=own_environment())
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    everything = [psutil.Process(tuner.pid), *psutil.Process(tuner.pid).children(recursive=True)]
    for send in (psutil.Process.suspend, psutil.Process.kill):  # no process notices the death of another
        for process in everything:
            send(process)
    tuner.wait()
    assert nothing_left(folder.parent.parent, pids, here, 40)
    assert slurm.jobs(), "Slurm does not know that the agent has ended"
    if is_elsewhere:  # the next tuner runs on another login node
        monkeypatch.setattr("autotune.launchers.slurm_cancel.BEGIN_S", 1.0)
        (note,) = Path(place(folder.parent).runs_dir).glob(".autotune-*.job")
        note.rename(note.with_name(note.name.replace(platform.node(), "login2")))
        assert nothing_left(folder.parent.parent, [], lambda: slurm.ask("squeue", "--noheader", "--steps").split(), 60)
    ready(make(place(folder.parent), cpus=4), 60)  # the new job needs the CPUs of the old one


def test_tuner_killed_while_its_job_is_queued_leaves_no_job(make, slurm, folder):
    ready(make(cpus=4))
    argv = [sys.executable, "-c", TUNER, str(folder), '{"cpus": 4}', *program(FAMILY)]
    with subprocess.Popen(argv, env=own_environment(), stdout=subprocess.PIPE, text=True) as tuner:
        for line in tuner.stdout:
            if "job" in line:
                break
        tuner.kill()
    wait_until(lambda: not any("PENDING" in job for job in slurm.jobs()), "the end of the job", within_s=10, every_s=0.1)


@pytest.mark.thorough
def test_study_continues_after_its_job_was_cancelled(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0)
    check_study_without_its_job(study, lambda: cancel_all(slurm), "launcher=slurm", "launch.slurm.cpus=2")


@pytest.mark.thorough
def test_a_study_whose_tuner_was_killed_is_resumed_in_a_new_job(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=0.5)
    resume_after_a_killed_tuner(study, slurm.is_idle, "launcher=slurm", "launch.slurm.cpus=2")


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["srun", "agent", "slurmstepd"])
def test_stopped_process_of_the_job_is_reported_in_time_and_leaves_no_process(launcher, slurm, folder, victim):
    _, running, pids = began(launcher, folder)
    stopped = process_of(victim, launcher)
    stopped.suspend()
    try:
        assert lost(running, 45).evidence["node_lost"]
        if victim == "slurmstepd":  # the node cannot end the job, so the agent must, at the latest when its lease ends
            assert nothing_left(folder.parent.parent, pids, list, 40)
        else:
            assert nothing_left(folder.parent.parent, pids, here, 40)
    finally:
        if stopped.is_running():
            stopped.resume()


@pytest.mark.thorough
def test_stopped_tuner_has_no_trial_running_after_the_lease(slurm, folder):
    argv = [sys.executable, "-c", TUNER, str(folder), '{"cpus": 2}', *program(FAMILY)]
    tuner = subprocess.Popen(argv, env=own_environment(), stdout=subprocess.DEVNULL)
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    tuner.send_signal(signal.SIGSTOP)
    try:
        assert nothing_left(folder.parent.parent, pids, here, 50)
    finally:
        tuner.kill()
        tuner.wait()
    assert slurm.is_idle()


@pytest.mark.thorough
def test_trials_continue_in_the_same_job_while_the_controller_is_down(launcher, slurm, folder):
    slurm.save()
    steady = program('progress("warmup", 1); time.sleep(14); result()')  # so long that Slurm is asked about the agent
    running = launcher.start(a_launch(folder, steady))
    slurm.kill("slurmctld")
    try:
        ended = lost(running, 40)
        assert ended.cause == "result", ended
        again = launcher.start(a_launch(folder, steady))
    finally:
        slurm.start("slurmctld")
    assert lost(again, 40).cause == "result"
    assert slurm.answers()
    assert len(slurm.jobs()) == 1  # it was the same job


@pytest.mark.thorough
def test_a_lost_job_is_replaced_once_the_controller_answers_again(launcher, slurm, folder, monkeypatch):
    monkeypatch.setattr("autotune.launchers.remote.AGAIN_S", 1.0)
    _, running, _ = began(launcher, folder)
    slurm.save()
    slurm.kill("slurmctld")
    try:
        process_of("agent", launcher).kill()
        assert lost(running, 45).evidence["node_lost"]
        again = launcher.start(a_launch(folder, program("result()")))
        wait_until(lambda: again.poll() or launcher._unanswered, "srun's refusal", within_s=120)
        assert again.poll() is None
        assert "Slurm's controller does not answer (" in launcher.why_waiting()
    finally:
        slurm.start("slurmctld")
    assert lost(again, 120).cause == "result"


@pytest.mark.thorough
def test_trial_on_a_node_set_down_ends_and_the_next_runs_once_the_node_is_back(make, slurm, folder):
    launcher = ready(make(cpus=2, partition="other"))
    _, running, pids = began(launcher, folder)
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    assert lost(running, 20).evidence["node_lost"]
    assert nothing_left(folder.parent.parent, pids, here, 10)
    runs_again(launcher, folder, 60)  # ReturnToService=2: the node comes back by itself


@pytest.mark.thorough
def test_node_whose_daemon_was_killed_is_reported_in_time_and_left_empty(make, slurm, folder):
    launcher = ready(make(cpus=2, partition="other"))
    _, running, pids = began(launcher, folder)
    slurm.kill("n2")
    try:
        ended = lost(running, 45)
        assert ended.evidence.get("node_lost"), ended
        assert nothing_left(folder.parent.parent, pids, here, 20)  # the tuner's note ends the agent before its lease
    finally:
        slurm.start("n2")


@pytest.mark.thorough
def test_job_on_a_lost_node_is_cancelled_again_after_the_controller_restarted(make, slurm, folder):
    launcher = ready(make(cpus=4, partition="other"))
    _, running, pids = began(launcher, folder)
    (job,) = slurm.jobs()
    slurm.save()
    slurm.kill("n2")
    try:
        assert lost(running, 45).evidence["node_lost"]
        assert nothing_left(folder.parent.parent, pids, here, 40)
        slurm.kill("slurmctld", for_s=0.0)  # the controller has not saved that the node and its job are lost
    finally:
        slurm.start("n2")
    assert slurm.jobs() == [job]
    runs_again(launcher, folder, 90)  # it needs all CPUs of the node


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_study_and_job_end_if_the_shared_folder_becomes_unwritable(slurm, tmp_path, fault):
    with in_memory(tmp_path / "runs", "size=4m") as runs, contextlib.ExitStack() as stack:
        study = QuickStudy(tmp_path, trial_s=1.0)
        tuner = study.start("launcher=slurm", "launch.slurm.cpus=2", "compile.mode=off", "explain.auto=false")
        study.wait_for_trial(1, tuner)
        before, began_s = study.folder.read_trials(), time.monotonic()
        if fault == "full":
            fill(runs)
        else:
            subprocess.run(["mount", "--bind", runs, runs], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", runs], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)
        _, err = tuner.communicate(timeout=90)
        print(f"ended after {time.monotonic() - began_s:.1f} s")
        said = "the disk is full" if fault == "full" else "cannot be written any more (Read-only file system)"
        assert (tuner.returncode, "Traceback" in err) == (2, False), err
        assert f"autotune: runs/s: {said}" in err
        assert study.none_is_left()
        assert slurm.is_idle()
        assert study.folder.read_trials()[: len(before)] == before


@pytest.mark.thorough
def test_job_at_its_time_limit_is_reported_and_the_next_trial_gets_a_new_job(make, slurm, folder):
    launcher = ready(make(cpus=2, minutes=1.0))
    _, running, pids = began(launcher, folder)
    ended = lost(running, 180)  # Slurm looks at time limits twice a minute
    assert ended.evidence["node_lost"]
    assert "DUE TO TIME LIMIT" in ended.evidence["stop_reason"]
    assert nothing_left(folder.parent.parent, pids, here, 10)
    assert runs_again(launcher, folder).evidence["node"]["job"] != ended.evidence["node"]["job"]


@contextlib.contextmanager
def urgent_job(seconds):
    """Runs a job that needs the whole node, so that it preempts those of the partitions `other` and `spare`."""
    argv = ["srun", "--partition=urgent", "--nodes=1", "--ntasks=1", "--cpus-per-task=4", "sleep", str(seconds)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        yield
        assert process.wait(60) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("partition", ["other", "spare"], ids=["requeue", "cancel"])
def test_preempted_job_is_reported_and_the_next_trial_waits_for_the_node(make, slurm, folder, partition):
    launcher = ready(make(cpus=2, partition=partition))
    _, running, pids = began(launcher, folder)
    with urgent_job(8):
        ended = lost(running, 30)
        assert ended.evidence["node_lost"]
        assert "PREEMPTION" in ended.evidence["stop_reason"]
        assert nothing_left(folder.parent.parent, pids, here, 10)
        again = launcher.start(a_launch(folder, program("result()")))
        assert again.poll() is None
    assert lost(again, 30).cause == "result"


@pytest.mark.thorough
def test_study_whose_job_is_preempted_in_the_finals_still_reaches_a_verdict(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0)
    options = ("launch.slurm.cpus=2", "launch.slurm.partition=other", "study.budget.minutes=2", "study.budget.trials=1")
    process = study.start("launcher=slurm", *options, "measure.quiet=false", "explain.auto=false")
    wait_for_trial_of(study, "final", process)
    with urgent_job(4):
        out, err = process.communicate(timeout=200)
    assert "verdict  faster" in out, out + err
    trials = study.folder.read_trials()
    outcomes = [{trial.outcome, trial.evidence.get("earlier_attempt", {}).get("outcome")} for trial in trials]
    cut_off = [trial.kind.value for trial, found in zip(trials, outcomes, strict=True) if "interrupted" in found]
    assert cut_off == ["final"]  # it is repeated if the time of the finals allows
    assert study.none_is_left()
    assert slurm.is_idle()


@pytest.mark.thorough
def test_study_killed_in_its_finals_is_resumed_with_a_single_slot(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0)
    process = study.start("launcher=slurm", "launch.slurm.cpus=2", "launch.slots=2", *GIVEN, "study.budget.trials=2")
    wait_for_trial_of(study, "final", process)
    kill(process)
    assert slurm.is_idle()
    out, err = study.resume().communicate(timeout=400)
    assert "verdict" in out, out + err
    assert len(re.search(r"trials run on node (.*)", err)[1].split("; ")) == 1
    assert re.search(r"launch:\n(  .*\n)*  slots: 2\n", study.folder.config_file.read_text())


@pytest.mark.thorough
def test_suspended_job_ends_the_trial_and_leaves_no_process(launcher, slurm, folder):
    _, running, pids = began(launcher, folder)
    (job,) = slurm.jobs()
    slurm.ask("scontrol", "suspend", job.split()[0])
    ended = lost(running, 45)
    assert "SUSPENDED" in ended.evidence["stop_reason"]
    assert nothing_left(folder.parent.parent, pids, lambda: [*here(), *slurm.jobs()], 40)
    runs_again(launcher, folder)


@pytest.mark.thorough
def test_node_that_returns_with_another_boot_id_is_used_again(make, slurm, folder):
    launcher = ready(make(cpus=2, partition="other"))
    _, running, _ = began(launcher, folder)
    before = dict(launcher.node.about)
    slurm.reboot("n2", "11111111-2222-3333-4444-555555555555")
    try:
        ended = lost(running, 60)
        assert (ended.evidence["node_lost"], ended.evidence["node"]) == (True, before)
        again = runs_again(launcher, folder, 90)
        assert again.evidence["node"]["host"] == before["host"]
        assert again.evidence["node"]["boot_id"] == "11111111-2222-3333-4444-555555555555"
        launcher.close()
    finally:
        slurm.kill("n2")
        slurm.start("n2")


@pytest.mark.thorough
def test_study_continues_after_losing_all_its_slots_at_once(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.5)
    process = study.start("launcher=slurm", "launch.slurm.cpus=2", *GIVEN, "launch.slots=2")
    check_loss_of_all_slots(study, process, lambda: cancel_all(slurm))
    assert slurm.is_idle()


@pytest.mark.thorough
def test_study_goes_on_without_a_slot_whose_job_gets_no_node_again(slurm, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.5)
    options = (*GIVEN, "launch.slots=2", "launch.queue_minutes=0.2")
    process = study.start("launcher=slurm", "launch.slurm.cpus=2", *options)
    wait_for_trial_of(study, "search", process, beside=1)
    (job,) = {name.rpartition(" ")[2] for trial in study.folder.read_trials() if (name := trial.slot).startswith("2: ")}
    with subprocess.Popen(["srun", "--ntasks=1", "--cpus-per-task=2", "sleep", "600"], stderr=subprocess.DEVNULL) as other:
        wait_until(lambda: any("PENDING" in line for line in slurm.jobs()), "the other job in the queue")
        slurm.ask("scancel", job)
        out, err = process.communicate(timeout=400)
        other.terminate()
    assert "The study goes on without slot 2: launch.queue_minutes: Slurm provided no node" in out, out + err
    assert "One trial at a time: no other slot is left." in out
    assert "verdict" in out
    assert study.none_is_left()
    assert slurm.is_idle()
