"""A job is forgotten only if the answer of scancel proves that it is over. Other jobs are cancelled again, or reported."""

import os
import platform
import subprocess
import time

import pytest

from autotune.config.schema import SlurmOptions
from autotune.errors import BadInput
from autotune.launchers import slurm, slurm_cancel, tuner_files
from autotune.launchers.remote import Place
from autotune.launchers.remote_slots import RemoteSlots
from tests.support.waiting import wait_until

KILL = "scancel: error: Kill job error on job id 12"


@pytest.fixture
def scancel(tmp_path, monkeypatch):
    """Returns a function that puts a shell script on PATH, as scancel or another command."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(text, name="scancel"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("words", "status", "is_over"),
    [
        ("", 0, True),  # cancelled; in Slurm 22.05 also for a job that is over, or that Slurm has forgotten
        (f"{KILL}: Invalid job id specified", 1, True),
        (f"{KILL}: Job/step already completing or completed", 1, True),
        (f"{KILL}: Socket timed out on send/recv operation", 140, False),
        (f"{KILL}: Unable to contact slurm controller (connect failure)", 8, False),
        (f"{KILL}: Protocol authentication error", 239, False),
        (f"{KILL}: Access/permission denied", 210, False),
        (f"{KILL}: Slurm backup controller in standby mode", 1, False),
        ("scancel: error: Kill job error on job id 123: Invalid job id specified", 1, False),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", 1, False),
        ("scancel: fatal: Could not establish a configuration source", 1, False),
        ("", 1, False),
    ],
)
def test_job_is_forgotten_only_if_scancel_proves_that_it_is_over(scancel, words, status, is_over):
    scancel(f'echo "{words}" >&2; exit {status}')
    jobs = {"12"}
    slurm_cancel.cancel(jobs)
    assert jobs == (set() if is_over else {"12"})


def test_second_job_is_cancelled_if_srun_submits_its_job_again(scancel, monkeypatch):
    """An srun that was stopped in the queue cancels its job when it continues, and submits another."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    scancel('for job in 12 13; do echo "srun: job $job queued and waiting for resources" >&2; done; cat >/dev/null', "srun")
    jobs = set()
    transport = slurm.Srun(SlurmOptions(), unended=jobs)
    wait_until(lambda: "job 13" in transport.text())
    transport.close()
    assert jobs == {"13"}


@pytest.mark.parametrize(
    "words", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"]
)
def test_srun_that_the_controller_does_not_answer_is_told_from_one_that_it_refuses(scancel, monkeypatch, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    scancel(f'echo "srun: error: Unable to allocate resources: {words}" >&2; exit 1', "srun")
    transport = slurm.Srun(SlurmOptions())
    told = str(transport.refusal())
    assert told.startswith("launcher: Slurm's controller does not answer, got 'slurm' (Unable to allocate resources: ")
    assert transport.unanswered() == f"Slurm's controller does not answer (Unable to allocate resources: {words})"
    transport.close()
    scancel('echo "srun: error: Unable to allocate resources: Invalid partition name" >&2; exit 1', "srun")
    transport = slurm.Srun(SlurmOptions())
    assert "Invalid partition name" in str(transport.refusal())
    assert transport.unanswered() == ""
    transport.close()


@pytest.mark.parametrize(("args", "is_ours"), [(None, True), ("--jobid=12", False), ("--jobi=12", False)])
def test_job_started_by_the_user_is_never_cancelled(scancel, tmp_path, monkeypatch, args, is_ours):
    """With --jobid, srun starts a step in a job of the user."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    scancel("")
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'srun: job 12 queued' >&2\nexec cat >/dev/null\n")
    (tmp_path / "srun").chmod(0o755)
    jobs = set()
    transport = slurm.Srun(SlurmOptions(args=args), unended=jobs)
    wait_until(lambda: "job 12" in transport.text())
    transport.close()
    assert jobs == ({"12"} if is_ours else set())
    transport.close()  # as after an interrupt in the first call


@pytest.mark.parametrize(("args", "is_silent"), [(None, True), ("--jobid=12", False)])
def test_a_step_that_waits_in_a_job_of_the_user_is_not_called_silent(scancel, monkeypatch, args, is_silent):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(slurm, "BEGIN_S", 0.0)
    scancel("exec cat >/dev/null", "srun")
    transport = slurm.Srun(SlurmOptions(args=args))
    assert (transport.why_never() is not None) is is_silent
    monkeypatch.setattr(slurm, "STEP_S", 0.0)
    assert ("of the job given by --jobid" in transport.why_waiting()) is not is_silent
    transport.close()


def test_job_is_remembered_if_scancel_hangs(scancel, monkeypatch):
    monkeypatch.setattr(slurm_cancel, "SCANCEL_S", 0.2)
    scancel("exec sleep 60")
    jobs = {"12", "--name=autotune-1a2b3c4d"}
    slurm_cancel.cancel(jobs)
    assert jobs == {"12", "--name=autotune-1a2b3c4d"}


def test_only_the_job_that_scancel_ended_is_forgotten(scancel):
    scancel('test "$2" = 12 || { echo "slurm_load_jobs error: Zero Bytes were transmitted" >&2; exit 1; }')
    jobs = {"12", "13"}
    slurm_cancel.cancel(jobs)
    assert jobs == {"13"}


@pytest.mark.parametrize(("status", "is_over"), [(0, True), (1, False)])
def test_job_whose_tuner_was_killed_is_cancelled_by_the_next_tuner(scancel, tmp_path, status, is_over):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    scancel(f'echo "$@" >>{tmp_path}/asked; exit {status}')
    left = tmp_path / f".autotune-{platform.node()}-{dead.pid}-autotune-1a2b3c4d.job"
    alive = tmp_path / f".autotune-{platform.node()}-{os.getpid()}-autotune-5e6f7a8b.job"
    for note in (left, alive):
        note.touch()
    slurm_cancel.cancel_left(tmp_path)
    assert (tmp_path / "asked").read_text() == "--quiet --name=autotune-1a2b3c4d\n"
    assert left.exists(), "a controller that is killed now has not saved that the job has ended"
    os.utime(left, (0, time.time() - slurm_cancel.SAVED_S - 1))
    slurm_cancel.cancel_left(tmp_path)
    assert (tmp_path / "asked").read_text() == 2 * "--quiet --name=autotune-1a2b3c4d\n"
    assert left.exists() is not is_over
    assert alive.exists()


def test_note_about_a_job_is_kept_until_the_job_was_cancelled(scancel, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "srun").write_text("#!/bin/sh\ncat >/dev/null\n")  # no `exec`: standard output stays open, as that of srun
    (tmp_path / "srun").chmod(0o755)
    launcher = slurm.SlurmLauncher(SlurmOptions(), Place(cwd="/", program="true", runs_dir=str(tmp_path / "runs")))
    scancel("exit 1")
    assert launcher.slots() == []
    launcher.close()
    (note,) = (tmp_path / "runs").iterdir()
    for command in ("scancel", "squeue"):
        scancel("", command)
    launcher.close()
    assert not note.exists()


@pytest.mark.parametrize("is_own", [True, False])
def test_lost_job_is_cancelled_again_while_the_next_job_waits(scancel, tmp_path, monkeypatch, dead, is_own):
    """A controller that is killed before it has saved a job's end assigns the nodes to that job again, permanently."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(slurm_cancel, "SAVED_S", 0.1)
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.1)
    scancel(f'echo "$@" >>{tmp_path}/asked; rm -f {tmp_path}/again')
    scancel(f'for word; do test "$word" != "--name=$(cat {tmp_path}/again)" || echo 12; done', "squeue")
    (runs := tmp_path / "runs").mkdir()
    launcher = slurm.SlurmLauncher(SlurmOptions(), Place(cwd="/", program="true", runs_dir=str(runs)))
    if is_own:
        scancel("echo 'srun: job 12 queued and waiting' >&2; exit 1", "srun")
        with pytest.raises(BadInput, match="Slurm does not start the agent"):
            wait_until(launcher.slots)
    else:
        noted(runs, platform.node(), dead, "1a2b3c4d")
    (note,) = runs.iterdir()
    scancel("cat >/dev/null", "srun")
    assert launcher.slots() == []
    name = slurm_cancel.job_of(note)
    assert (tmp_path / "asked").read_text().splitlines() == ["--quiet 12" if is_own else f"--quiet --name={name}"]
    (tmp_path / "again").write_text(name)  # the controller has been started again
    assert wait_until(lambda: launcher.slots() or not (tmp_path / "again").exists()) is True  # and no slot meanwhile
    assert (tmp_path / "asked").read_text().splitlines()[1:] == ["--quiet 12"]
    launcher.close()
    assert list(runs.iterdir()) == []


def test_job_of_a_tuner_running_in_another_container_is_not_cancelled(scancel, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "srun").write_text("#!/bin/sh\ncat >/dev/null\n")
    (tmp_path / "srun").chmod(0o755)
    scancel(f"touch {tmp_path}/asked")
    srun = slurm.Srun(SlurmOptions(), runs_dir=tmp_path / "runs")
    monkeypatch.setattr(tuner_files, "is_taken", lambda _: False)  # its id is free here
    try:
        slurm_cancel.cancel_left(tmp_path / "runs")
        assert srun.note.exists()
        assert not (tmp_path / "asked").exists()
    finally:
        srun.close()


@pytest.fixture
def dead():
    """The id of a process that has exited."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def noted(folder, host, pid, job):
    note = folder / f".autotune-{host}-{pid}-autotune-{job}.job"
    note.touch()
    return note


@pytest.mark.parametrize("silence", ["exec sleep 60", 'echo "scancel: error: Unable to contact slurm controller" >&2; exit 1'])
def test_slurm_is_not_asked_about_more_jobs_after_it_did_not_answer(scancel, tmp_path, monkeypatch, dead, silence):
    monkeypatch.setattr(slurm_cancel, "SCANCEL_S", 2.0)
    scancel(f'echo "$@" >>{tmp_path}/asked; {silence}')
    scancel(f"touch {tmp_path}/squeued", "squeue")
    notes = [noted(tmp_path, platform.node(), dead, job) for job in ("1a", "2b", "3c")] + [noted(tmp_path, "far", 7, "4d")]
    (line,) = slurm_cancel.cancel_left(tmp_path)
    assert (tmp_path / "asked").read_text().splitlines() == ["--quiet --name=autotune-1a"]
    assert not (tmp_path / "squeued").exists()
    assert "over: autotune-1a,autotune-2b,autotune-3c,autotune-4d. They may hold nodes" in line
    assert all(note.exists() for note in notes)


@pytest.mark.parametrize(
    ("state", "steps", "becomes"),
    [
        ("RUNNING|6:00", "", "cancelled"),
        ("RUNNING|1-00:00:00", "12.extern", "cancelled"),
        ("RUNNING|6:00", "12.0", "left alone"),  # its agent runs
        ("RUNNING|4:00", "", "reported"),  # its agent may not have started yet
        ("PENDING|0:00", "", "reported"),
        ("COMPLETING|9:00", "", "reported"),
        ("", "", "left alone"),  # over, or of another cluster
    ],
)
def test_job_of_a_tuner_on_another_host_is_cancelled_only_if_its_agent_is_gone(scancel, tmp_path, state, steps, becomes):
    state, _, passed = state.partition("|")
    job = f"autotune-1a2b|12|{state}|{passed}" if state else ""
    scancel(f'case "$*" in *--steps*) echo "{steps}";; *) echo "{job}";; esac', "squeue")
    scancel(f'echo "$@" >>{tmp_path}/asked')
    note = noted(tmp_path, "far-2", 7, "1a2b")
    lines = slurm_cancel.cancel_left(tmp_path)
    assert note.exists() is (becomes != "cancelled")
    assert (tmp_path / "asked").exists() is (becomes == "cancelled")
    assert len(lines) == (becomes == "reported")
    if lines:
        assert lines[0].startswith("Job 12 may be left by process 7 on far-2, an earlier autotune;")
        assert lines[0].endswith("If not, end the job: scancel 12")
    if becomes == "cancelled":
        assert (tmp_path / "asked").read_text() == "--quiet 12\n"


def test_job_of_a_tuner_on_another_host_is_not_queried_while_its_note_is_locked(scancel, tmp_path):
    scancel(f"touch {tmp_path}/asked", "squeue")
    with noted(tmp_path, "far", 7, "1a2b").open("w") as note:
        tuner_files.lock(note.fileno())
        assert slurm_cancel.cancel_left(tmp_path) == []
    assert not (tmp_path / "asked").exists()
    slurm_cancel.cancel_left(tmp_path)
    assert (tmp_path / "asked").exists()


def test_slots_ask_slurm_once_and_report_unchecked_jobs_once(scancel, tmp_path, monkeypatch, dead):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    scancel("cat >/dev/null", "srun")
    scancel(f'echo "$@" >>{tmp_path}/asked; exit 1')
    runs = tmp_path / "runs"
    runs.mkdir()
    noted(runs, platform.node(), dead, "1a2b")
    place, left = Place(cwd="/", program="true", runs_dir=str(runs)), slurm_cancel.LeftJobs(runs)
    slots = RemoteSlots([slurm.SlurmLauncher(SlurmOptions(), place, left=left) for _ in range(3)])
    try:
        (line,) = slots.sweep(tmp_path)
        assert "autotune-1a2b" in line
        assert (tmp_path / "asked").read_text().splitlines() == ["--quiet --name=autotune-1a2b"]
        assert slots.sweep(tmp_path) == []
    finally:
        slots.close()


def test_user_defaults_for_squeue_and_scancel_do_not_apply(scancel, tmp_path, monkeypatch):
    for name in ("SCANCEL_STATE", "SQUEUE_STATES"):
        monkeypatch.setenv(name, "PENDING")
    for command in ("scancel", "squeue"):
        scancel(f'cat >>{tmp_path}/given; test -z "$SCANCEL_STATE$SQUEUE_STATES"', command)
        assert slurm_cancel.ask(command, timeout_s=5.0).returncode == 0
    assert (tmp_path / "given").read_text() == "", "standard input is empty, so no question of scancel is answered"


@pytest.mark.parametrize(
    ("left", "ends", "fitting"),
    [("28:30", "28 min 30 s", "28"), ("0:20", "20 s", "0.1"), ("1:05:00", "", ""), ("UNLIMITED", "", ""), ("", "", "")],
)
def test_budget_that_is_longer_than_the_own_job_is_noted(scancel, left, ends, fitting):
    scancel(f"echo '11|0:05'; echo '12|{left}'", "squeue")  # as for the first task of an array
    said = slurm_cancel.shorter_than(1800.0, "12")
    assert bool(said) == bool(ends)
    assert not ends or f"job 12 ends in {ends}, before the budget of 30 min is used" in said
    assert not ends or f"Give study.budget.minutes={fitting}, or" in said
