"""Which answers of scancel leave no doubt that a job is over. The others keep it, to be cancelled again or told."""

import os
import platform
import subprocess
import time

import pytest

from autotune.config.schema import SlurmOptions
from autotune.launchers import remote, slurm
from autotune.launchers.remote import Place

KILL = "scancel: error: Kill job error on job id 12"


@pytest.fixture
def scancel(tmp_path, monkeypatch):
    """Returns a function that puts an scancel on PATH: lines of shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(text):
        (tmp_path / "scancel").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "scancel").chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("words", "status", "is_over"),
    [
        ("", 0, True),  # cancelled now; and in Slurm 22.05 also a job that is over, or that Slurm has forgotten
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
def test_a_job_is_dropped_only_if_scancel_leaves_no_doubt(scancel, words, status, is_over):
    scancel(f'echo "{words}" >&2; exit {status}')
    jobs = {"12"}
    slurm.cancel(jobs)
    assert jobs == (set() if is_over else {"12"})


@pytest.mark.parametrize(("args", "is_ours"), [(None, True), ("--jobid=12", False)])
def test_a_job_that_the_user_has_started_is_never_cancelled(scancel, tmp_path, monkeypatch, args, is_ours):
    """With --jobid, srun starts a step in a job of the user's."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    scancel("")
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'srun: job 12 queued' >&2\nexec cat >/dev/null\n")
    (tmp_path / "srun").chmod(0o755)
    jobs = set()
    transport = slurm.Srun(SlurmOptions(args=args), unended=jobs)
    give_up_s = time.monotonic() + 10
    while "job 12" not in transport.text():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    transport.close()
    assert jobs == ({"12"} if is_ours else set())
    transport.close()  # as after an interrupt in the first call


def test_a_job_is_kept_while_scancel_hangs(scancel, monkeypatch):
    monkeypatch.setattr(slurm, "SCANCEL_S", 0.2)
    scancel("exec sleep 60")
    jobs = {"12", "--name=autotune-1a2b3c4d"}
    slurm.cancel(jobs)
    assert jobs == {"12", "--name=autotune-1a2b3c4d"}


def test_one_job_of_several_is_dropped(scancel):
    scancel('test "$2" = 12 || { echo "slurm_load_jobs error: Zero Bytes were transmitted" >&2; exit 1; }')
    jobs = {"12", "13"}
    slurm.cancel(jobs)
    assert jobs == {"13"}


@pytest.mark.parametrize(("status", "is_over"), [(0, True), (1, False)])
def test_a_job_whose_tuner_was_killed_is_cancelled_by_the_next_one(scancel, tmp_path, status, is_over):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    scancel(f'echo "$@" >>{tmp_path}/asked; exit {status}')
    left = tmp_path / f".autotune-{platform.node()}-{dead.pid}-autotune-1a2b3c4d.job"
    alive = tmp_path / f".autotune-{platform.node()}-{os.getpid()}-autotune-5e6f7a8b.job"
    for note in (left, alive):
        note.touch()
    slurm.cancel_left(tmp_path)
    assert (tmp_path / "asked").read_text() == "--quiet --name=autotune-1a2b3c4d\n"
    assert left.exists() is not is_over
    assert alive.exists()


def test_a_job_is_noted_until_it_has_been_cancelled(scancel, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "srun").write_text("#!/bin/sh\ncat >/dev/null\n")  # no `exec`: standard output stays open, as that of srun
    (tmp_path / "srun").chmod(0o755)
    launcher = slurm.SlurmLauncher(SlurmOptions(), Place(cwd="/", program="true", runs_dir=str(tmp_path / "runs")))
    scancel("exit 1")
    assert launcher.slots() == []
    launcher.close()
    (note,) = (tmp_path / "runs").iterdir()
    scancel("")
    launcher.close()
    assert not note.exists()


def test_the_job_of_a_tuner_that_lives_in_another_container_is_not_cancelled(scancel, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "srun").write_text("#!/bin/sh\ncat >/dev/null\n")
    (tmp_path / "srun").chmod(0o755)
    scancel(f"touch {tmp_path}/asked")
    srun = slurm.Srun(SlurmOptions(), runs_dir=tmp_path / "runs")
    monkeypatch.setattr(remote, "is_taken", lambda _: False)  # its id is free here
    try:
        slurm.cancel_left(tmp_path / "runs")
        assert srun.note.exists()
        assert not (tmp_path / "asked").exists()
    finally:
        srun.close()
