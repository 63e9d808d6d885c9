"""Cancels Slurm jobs that hold nodes although their srun is gone.

The jobs of killed tuners are found by notes in the runs folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from autotune.launchers.tuner_files import is_free, left_by_killed
from autotune.launchers.user_files import NOTES
from autotune.quantities import seconds_text

SQUEUE_S = SCANCEL_S = 5.0  # longest run of squeue (or sinfo) and of scancel
BEGIN_S = 300.0  # longest time from the job's start to the agent's first message; a site's prolog may take minutes
SAVED_S = 10.0  # Slurm saves its jobs every 5 s. A controller that is killed in between forgets that a job has ended.
# What Slurm's commands print if they cannot reach the controller; "Zero Bytes": munge's key differs from the cluster's.
UNREACHABLE = (
    "contact slurm controller", "Socket timed out", "configuration source", "slurm.conf", "Munge", "munge", "Zero Bytes",
)  # fmt: skip
# What scancel prints about a job that is over. Once MinJobAge has passed, newer versions of Slurm call the job's id invalid.
OVER = re.compile(r"^scancel: error: Kill job error on job id (\d+): (?:Invalid job id|Job/step already complet)", re.MULTILINE)
DEFAULTS = ("SQUEUE_", "SCANCEL_", "SINFO_")  # prefixes of the variables that set a user's defaults for these commands
NAME = "--name="  # scancel's option for a job whose number is unknown
NOTE = ".job"  # suffix of a note: a file in the runs folder, named after a job and made before the job is submitted
NOTED = re.compile(rf"{re.escape(NOTES)}(.+)-(\d+)-autotune-[0-9a-f]+{re.escape(NOTE)}")  # host and process id of the tuner
OLD_S = 30 * 86400.0  # notes of other hosts are kept this long if Slurm does not know the job: another cluster may know it
EXTERN = re.compile(r"extern", re.IGNORECASE)  # name of a step that Slurm itself adds to each job at some sites


def cancel(jobs: set[str]) -> bool:
    """Cancels `jobs` (arguments of scancel), and removes from the set those that are over. Returns whether Slurm answers.

    srun tells the controller that its job is over. If the controller does not answer at that moment, it keeps the job's nodes
    allocated until the job's time limit, although nothing runs there. So a job stays in the set until the controller has
    accepted its end. An error of scancel that does not say that the job is over (OVER), such as "Protocol authentication
    error", leaves the job in the set. If the controller does not answer for one job, the remaining jobs are not tried and stay
    in the set.
    """
    for job in sorted(jobs):
        try:
            answer = ask("scancel", "--quiet", job, timeout_s=SCANCEL_S)
        except (OSError, subprocess.TimeoutExpired):
            return False
        if answer.returncode == 0 or job in OVER.findall(answer.stderr):
            jobs.discard(job)
        elif any(words in answer.stderr for words in (*UNREACHABLE, "timed out")):
            return False
    return True


def ask(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs squeue, scancel or sinfo without the user's defaults for them.

    With SQUEUE_STATES=PENDING, a running job would look as if it were over. With SCANCEL_STATE=PENDING, scancel would not
    cancel it and yet exit with status 0. With SCANCEL_INTERACTIVE, scancel would wait for an answer.

    Raises:
        OSError: the command cannot be started.
        TimeoutExpired: the command did not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(DEFAULTS)}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


class LeftJobs:
    """Jobs left behind by killed tuners, found by the notes in a runs folder. The slots of a study share one object.

    Attributes:
        notes: notes of killed tuners on this host.
    """

    def __init__(self, runs_dir: Path) -> None:
        self.notes: list[Path] = []
        self._runs_dir, self._is_asked = runs_dir, False
        self._lines: list[str] = []

    def cancel(self) -> None:
        """Cancels these jobs. Only the first call has an effect."""
        if not self._is_asked:
            self._is_asked, self.notes = True, left_by_killed(self._runs_dir, NOTE)
            self._lines = cancel_left(self._runs_dir)

    def unchecked(self) -> list[str]:
        """Returns a line for the user about each job that may be left; each line is returned only once."""
        lines, self._lines = self._lines, []
        return lines


def mark(note: Path) -> None:
    """Marks the note of a lost job, so that `settle` keeps the note for SAVED_S.

    A job is lost if the tuner was killed, srun ended or the connection to the node broke before the tuner ended the job.
    """
    with contextlib.suppress(OSError):
        if not is_marked(note):
            note.write_bytes(b"lost\n")


def is_marked(note: Path) -> bool:
    """Whether `mark` has marked the note: its job is lost."""
    return note.stat().st_size > 0


def settle(note: Path) -> None:
    """Removes the note of a job whose end Slurm has accepted. Keeps it while Slurm may still forget that end (SAVED_S)."""
    with contextlib.suppress(OSError):
        if not is_marked(note) or time.time() - note.stat().st_mtime > SAVED_S:
            note.unlink()


def cancel_left(runs_dir: Path) -> list[str]:
    """Cancels the jobs of tuners that were killed together with their srun: Slurm does not know yet that these jobs are over.

    Whether a tuner on another host still runs is not visible here. Its job is cancelled only if it has run for more than
    BEGIN_S and has no step. While a tuner runs, its agent (autotune's process on the node) is a step of the job.

    Returns:
        A line for the user about each job that may be left and was not cancelled.
    """
    own, others = left_by_killed(runs_dir, NOTE), _of_other_hosts(runs_dir)
    for note in own:
        mark(note)
    does_answer = cancel(left := {f"{NAME}{job_of(note)}" for note in own})
    for note in own:
        if f"{NAME}{job_of(note)}" not in left:
            settle(note)
    unchecked = sorted(job.removeprefix(NAME) for job in left)
    held = _held(others) if others and does_answer else None
    if others and held is None:
        unchecked += sorted(others)
    lines = [line for name, note in others.items() if held is not None and (line := _settle(name, note, held))]
    if unchecked:
        names = ",".join(unchecked)
        lines.append(
            f"Slurm has not said whether jobs of earlier autotunes are over: {names}. They may hold nodes. When Slurm answers, "
            f"`squeue --name={names}` lists the jobs that are not over: end them with scancel."
        )
    return lines


def not_over(notes: Sequence[Path]) -> set[str] | None:
    """Returns the numbers of the jobs in `notes` that hold nodes or wait for them; None if Slurm does not answer."""
    names = ",".join(job_of(note) for note in notes)
    jobs = _squeue(f"{NAME}{names}", "--states=PENDING,RUNNING,SUSPENDED", "--format=%i") if names else []
    return None if jobs is None else {job.strip() for job in jobs}


def shorter_than(budget_s: float, job: str) -> str:
    """Returns a warning if the user's own job ends before a study's budget is used; "" if not, or if its end is unknown."""
    rows = [line.split("|") for line in _squeue(f"--jobs={job}", "--format=%A|%L") or ()]  # an array's id lists all its tasks
    left_s = next((_seconds(row[-1]) for row in rows if row[0].strip() == job), 0.0)  # 0: no time limit
    if not 0 < left_s < budget_s:
        return ""
    fitting = max(0.1, math.floor(left_s / 6 - 5) / 10)  # half a minute less than `left_s`
    left, budget = seconds_text(left_s), seconds_text(budget_s)
    return (
        f"study.budget.minutes: job {job} ends in {left}, before the budget of {budget} is used, "
        f"so the finals may not run. Give study.budget.minutes={fitting:g}, or finish with `autotune resume` in another job."
    )


def named(job: str) -> str:
    """Returns the subject of a message about `job`, an argument of scancel: "Job 12"."""
    return f"A job named {job.removeprefix(NAME)}" if job.startswith(NAME) else f"Job {job}"


def job_of(note: Path) -> str:
    """Returns the name of the job that a note is about."""
    return "-".join(note.name.removesuffix(NOTE).rsplit("-", 2)[1:])  # .autotune-HOST-PID-autotune-1a2b3c4d.job


def _of_other_hosts(runs_dir: Path) -> dict[str, Path]:
    """Returns this user's notes of tuners on other hosts: job name -> note. Leaves out locked notes: their tuners still run."""
    told = {note: NOTED.fullmatch(note.name) for note in runs_dir.glob(f"{NOTES}*{NOTE}")}
    return {job_of(note): note for note, name in told.items() if name and name[1] != platform.node() and is_free(note)}


def _held(names: Collection[str]) -> dict[str, tuple[str, bool]] | None:
    """Returns the jobs with these names that hold nodes or wait for them; None if Slurm does not answer.

    Leaves out jobs with a step. The step is an agent, and an agent runs only as long as its tuner.

    Returns:
        Name -> (number, whether the tuner is certainly gone).
    """
    jobs = _squeue(f"{NAME}{','.join(names)}", "--format=%j|%i|%T|%M")
    words = [line.split("|") for line in jobs or () if line.count("|") == 3]
    found = {name: (number, state == "RUNNING" and _seconds(passed) > BEGIN_S) for name, number, state, passed in words}
    steps = _squeue("--steps", f"--jobs={','.join(number for number, _ in found.values())}", "--format=%i") if found else []
    if jobs is None or steps is None:
        return None
    busy = {step.strip().partition(".")[0] for step in steps if not EXTERN.search(step)}
    return {name: job for name, job in found.items() if job[0] not in busy}


def _settle(name: str, note: Path, held: Mapping[str, tuple[str, bool]]) -> str:
    """Cancels another host's job if its tuner is certainly gone. Returns a line for the user if it may be left, else ""."""
    number, is_gone = held.get(name, ("", True))
    if number and is_gone:
        is_gone = cancel(left := {number}) and not left
    if is_gone:
        with contextlib.suppress(OSError):
            if number or time.time() - note.stat().st_mtime > OLD_S:
                note.unlink(missing_ok=True)
        return ""
    host, process = NOTED.sub(r"\1 \2", note.name).split()
    return (
        f"Job {number} may be left by process {process} on {host}, an earlier autotune; from here it is not known whether that "
        f"process still runs. If not, end the job: scancel {number}"
    )


def _squeue(*options: str) -> list[str] | None:
    """Returns the lines that squeue prints; None if Slurm does not answer."""
    try:
        answer = ask("squeue", "--noheader", *options, timeout_s=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.splitlines() if answer.returncode == 0 else None


def _seconds(passed: str) -> float:
    """Returns the seconds in a duration as squeue prints it: "1-02:03:04", "3:04"; 0 for any other text."""
    days, _, clock = passed.strip().rpartition("-")
    seconds = 0.0
    try:
        for part in clock.split(":"):
            seconds = 60 * seconds + int(part)
        return seconds + 86400 * int(days or 0)
    except ValueError:
        return 0.0
