"""Runs trials in a Slurm job: `srun` starts the agent (node.py) on a node. The link to it is srun's standard input and output.

The job lasts as long as the study. Only `srun`, `squeue` and `scancel` are needed: no accounting (`sacct`), no batch
script, no port. `squeue` says why a job waits, and whether it still runs if the agent is silent. The agent reports how trials
end.

If a trial has several nodes, the agent runs on the job's first node. On each other node, a task only waits for the link to
close: srun passes the link to every task as its standard input. The trial's command contains the user's own `srun`, as in
the real run. This `srun` starts the trial's ranks as a new step of the same job. The agent's step shares its CPUs and GPUs with
the new step (`--overlap`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.config.cluster import JOB, SRUN
from autotune.config.schema import SlurmOptions
from autotune.errors import BadInput
from autotune.launchers.base import Slot
from autotune.launchers.child import EXIT_S, ChildTransport, agent_command
from autotune.launchers.local import Graces
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.slurm_cancel import (
    BEGIN_S,
    NAME,
    NOTE,
    SQUEUE_S,
    UNREACHABLE,
    LeftJobs,
    ask,
    cancel,
    mark,
    named,
    not_over,
    settle,
)
from autotune.launchers.transport import Transport
from autotune.launchers.tuner_files import lock, own_prefix
from autotune.plain_text import shortened

NUMBER = re.compile(r"\bjob (\d+)\b")  # srun: job 12 queued and waiting for resources
ASK_EVERY_S = 10.0  # pauses between calls of squeue grow to this, because all users share the controller that answers
STEP_S = 5.0  # a step of the user's own job that has not started by then counts as waiting for other steps to end
MAX_EARLIER = 20  # Slurm is asked about at most this many of a slot's earlier jobs
WAIT_S = 2  # the tasks on other nodes are ended this long after the agent has exited
# Starts srun without the user's variables that would break the link; srun has no options that override them.
LINKED = ("env", *(f"--unset=SLURM_{name}" for name in ("LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE")))
# Words in an error message of Slurm -> the option that caused it; the first match counts.
OPTIONS = {
    "account": "account", "qos": "qos", "partition": "partition", "generic resource": "gres", "gres": "gres",
    "time limit": "minutes", "memory": "mem", "(tres)": "gres", "processors": "cpus", "cpu count": "cpus",
}  # fmt: skip
# Slurm's reasons for which a queued job waits in vain: limits of the partition, or of one job in it. TIME: limits of its time.
NEVER = re.compile(r"^(?:PartitionConfig|PartitionTimeLimit|PartitionNodeLimit|BadConstraints)$|PerJob")
TIME = re.compile(r"TimeLimit|WallDuration")
NODES = "SLURM_JOB_NODELIST"
# salloc --mem and sbatch --mem set this variable, and srun reads it. Then a step takes all memory of the job, so the steps of
# further slots never start. With --mem=0, steps share the job's memory.
MEMORY = "SLURM_MEM_PER_NODE"
STEP, MAX_STEP = "SLURM_STEP_ID", 2**31  # steps with larger numbers are Slurm's own, such as salloc's; they hold no CPUs
# Features that a node must have: srun's option for them, the variable with the same effect, and a feature's name in a value.
CONSTRAINT, CONSTRAINT_VARIABLE = re.compile(r"(?:--cons\w*=|-C)(.+)"), "SLURM_CONSTRAINT"
FEATURE = re.compile(r"(?<![\w.*-])[\w.-]+")
JOIN = ("--jobid", "--jobi")  # option of srun that starts a step in an existing job, and its only abbreviation


class SlurmLauncher(RemoteLauncher):
    """Starts trials in a Slurm job, or in a step of the job that the tuner runs in.

    Args:
        slurm: `launch.slurm`.
        place: what the node must see.
        graces: the grace periods of the LocalLauncher on the node.
        patience_s: longest wait in the queue; None for no limit.
        left: jobs left behind by killed tuners, shared with the other slots; None to look for them in the runs folder.
    """

    engine = "Slurm"

    def __init__(
        self,
        slurm: SlurmOptions,
        place: Place,
        *,
        graces: Graces | None = None,
        patience_s: float | None = None,
        left: LeftJobs | None = None,
    ) -> None:
        super().__init__(place, graces=graces, patience_s=patience_s)
        self._slurm, self._left = slurm, left or LeftJobs(Path(place.runs_dir))
        self._unended: set[str] = set()  # jobs, as arguments of scancel, that may hold nodes although srun is gone
        self._notes: list[Path] = []  # `Srun.note` of each earlier job
        self._next_s = 0.0  # when to look for earlier jobs again while waiting for a node

    def slots(self) -> list[Slot]:
        """See `RemoteLauncher.slots`."""
        if self._slot is None and time.monotonic() >= self._next_s:
            self._cancel_earlier()  # an earlier job may hold the nodes that the new job waits for
        return super().slots()

    def transport(self) -> Transport:
        """Submits the job and returns at once."""
        if shutil.which("srun") is None:
            raise BadInput("launcher: srun is not installed here, got 'slurm'. Start autotune on a machine that submits jobs.")
        slurm, place = self._slurm, self._place
        seen = [place.cwd, _existing(place.runs_dir)] if slurm.nodes > 1 else []  # the agent itself checks only its own node
        return Srun(
            slurm,
            is_shared=has_steps(slurm, place.program),
            seen=seen,
            unended=self._unended,
            runs_dir=Path(place.runs_dir),
        )

    def sweep(self, study: Path) -> list[str]:
        """Also lists jobs that were left behind by killed tuners and may still hold nodes. See `RemoteLauncher.sweep`."""
        return [*super().sweep(study), *self._left.unchecked()]

    def close(self) -> None:
        """See `Launcher.close`."""
        note = self._transport.note if self._transport else None
        super().close()
        are_over = self._cancel_earlier()
        self._notes = [*self._notes, *([note] if note else [])][-MAX_EARLIER:]
        if are_over:
            for each in (*self._notes, *self._left.notes):
                settle(each)

    def _cancel_earlier(self) -> bool:
        """Cancels earlier jobs that still hold nodes. Returns whether all of them are over.

        An earlier job may hold nodes for two reasons. Slurm may not have answered when the job was cancelled. Or slurmctld was
        killed before it had saved that the job was over, and gave the job its nodes again when it restarted.
        """
        self._left.cancel()
        self._next_s = time.monotonic() + ASK_EVERY_S
        again = not_over([*self._notes, *self._left.notes]) if cancel(self._unended) else None
        if again:
            self._unended |= again
            cancel(self._unended)
        return again is not None and not self._unended

    def unended(self) -> list[str]:
        """Returns a line for each job that may still hold its nodes. See `Launcher.unended`."""
        return [
            f"{named(job)} may still hold nodes: Slurm did not answer when asked to end the job. When Slurm answers again, "
            f"end it: scancel {job}"
            for job in sorted(self._unended)
        ]


class Srun(ChildTransport):
    """One run of `srun`, connected to an agent.

    Attributes:
        note: see `Transport`; the file's name contains the job's name. None without `runs_dir` or in the user's own job.

    Args:
        slurm: `launch.slurm`.
        is_shared: whether trials start steps in the agent's job that share its CPUs and GPUs.
        seen: paths that every node of the job must see.
        unended: jobs that may not be over, as arguments of scancel; `close` adds this job.
        runs_dir: folder of `note`.
    """

    def __init__(
        self,
        slurm: SlurmOptions,
        *,
        is_shared: bool = False,
        seen: Sequence[str] = (),
        unended: set[str] | None = None,
        runs_dir: Path | None = None,
    ) -> None:
        self._name = f"autotune-{secrets.token_hex(4)}"
        self._words = command(slurm, os.environ, is_shared=is_shared, name=self._name)
        has_joined = any(word.partition("=")[0] in JOIN for word in self._words)
        self._is_of_user = JOB in os.environ or has_joined  # if so, srun only starts a step in the user's job
        if runs_dir and not self._is_of_user:
            with contextlib.suppress(OSError):  # `RemoteLauncher` reports a folder that cannot be written
                runs_dir.mkdir(parents=True, exist_ok=True)
                note = runs_dir / f"{own_prefix()}{self._name}{NOTE}"
                descriptor = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                weakref.finalize(self, os.close, descriptor)  # the note is locked while this object is in use
                lock(descriptor)
                self.note = note
        super().__init__([*LINKED, *self._words, *agent_command(*seen)])
        self._slurm, self._unended = slurm, unended if unended is not None else set()
        self._is_feature_known = False
        given = [found[1] for word in self._words if (found := CONSTRAINT.fullmatch(word))]
        self._constraint = given[-1] if given else os.environ.get(CONSTRAINT_VARIABLE, "")
        self._next_s, self._pause_s, self._state, self._reason = 0.0, 0.5, "", ""
        self._began_s = self._queued_s = time.monotonic()  # `_queued_s`: when the job was last seen in the queue

    def close(self) -> None:
        """See `Transport.close`."""
        if self._end.alive and not self._is_of_user:
            is_alive = self._process.poll() is None
            if job := self._job() or (f"{NAME}{self._name}" if is_alive else ""):  # by name until srun prints the number
                self._unended.add(job)  # even if srun exits with 0, Slurm may not know yet that the job has ended
            if self.note and (self.link.is_lost or not is_alive):
                mark(self.note)
        super().close()

    def why_waiting(self) -> str:
        """Returns Slurm's reason why the job is not running yet, such as "Resources (job 12)"."""
        job = self._job()
        if not job or JOB in os.environ:
            # srun may say nothing while it waits for CPUs or GPUs of the user's own job.
            why = ""
            if time.monotonic() - self._began_s > STEP_S:
                of_job = "a step waits for CPUs or GPUs of the job given by --jobid" if self._is_of_user else ""
                why = _no_place(job, os.environ.get(STEP, ""), self._constraint) if job else of_job
            return self.last_words().removeprefix("srun: ") or why
        self._ask(job)
        reason = self._reason if self._state == "PENDING" else self._state.lower() or "queued"
        return f"{reason} (job {job})"

    def why_never(self) -> BadInput | None:
        """Returns the error if Slurm has queued a job that can never start, or if the job's agent is silent; else None."""
        if JOB in os.environ:
            return self._lacks_feature()
        # With --quiet, srun does not print the number of a queued job. With --jobid, it may wait for CPUs of the user's job.
        if {"--quiet", "-Q"} & {*self._words} or self._is_of_user:
            return None
        if job := self._job():
            self._ask(job)
        if job and self._state != "RUNNING":
            self._queued_s = time.monotonic()
        elif time.monotonic() - self._queued_s > BEGIN_S:
            # `job` may be unknown: srun prints no number for a job that does not have to wait.
            silent = f"the agent has said nothing for {BEGIN_S:.0f} s although its job runs"
            return BadInput(
                f"launcher: {silent}, got 'slurm' (job {job or 'unknown'}). See slurmd's log on its node; start again."
            )
        if self._state != "PENDING" or not NEVER.search(self._reason):
            return None
        name = "minutes" if TIME.search(self._reason) else None
        words = [line.removeprefix("srun: ") for line in self.text().splitlines() if "onfiguration" in line]
        return self._refused(name, ": ".join([self._reason, *words[:1]]))

    def _lacks_feature(self) -> BadInput | None:
        """Returns the error if no node of the user's job has a required feature: srun would wait for ever, without a word."""
        nodes, is_long = os.environ.get(NODES, ""), time.monotonic() - self._began_s > STEP_S
        if not (self._constraint and nodes and is_long) or self._is_feature_known:
            return None
        self._is_feature_known = True  # a job keeps its nodes, so the answer does not change
        try:
            answer = ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%b", timeout_s=SQUEUE_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        rows = answer.stdout.split()
        there = {name for row in rows for name in row.split(",")} - {"(null)"}
        if not rows or there & {*FEATURE.findall(self._constraint)}:
            return None
        have = f"they have {', '.join(sorted(there))}" if there else "they have none"
        return BadInput(
            f"launch.slurm.args: no node of job {os.environ[JOB]} has this feature, got --constraint={self._constraint} "
            f"({nodes}: {have}). Leave it out, or start autotune in a job on nodes with this feature."
        )

    def why_lost(self) -> str:
        """See `Transport.why_lost`."""
        status = self.exited(1.0 if self.link.is_lost else 0.0)  # srun may still be printing its last message
        if status is not None:
            unseen = self.unseen()
            return str(unseen) if unseen else f"srun ended with status {status} ({self._errors()})"
        if job := self._job():
            self._ask(job)
        return f"Slurm says that job {job} is {self._state}" if self._state not in ("", "RUNNING", "PENDING") else ""

    def refusal(self) -> BadInput:
        """Returns Slurm's message on why there is no job, or why the agent does not start on the node."""
        self.exited(EXIT_S)
        words = self._errors()
        if unseen := self.unseen():
            return unseen
        if self.unanswered():
            return BadInput(f"launcher: Slurm's controller does not answer, got 'slurm' ({words}). Try `scontrol ping`.")
        return self._refused(next((name for word, name in OPTIONS.items() if word in words.lower()), None), words)

    def unanswered(self) -> str:
        """See `Transport.unanswered`."""
        text = self.text()
        return f"Slurm's controller does not answer ({self._errors()})" if any(word in text for word in UNREACHABLE) else ""

    def _refused(self, name: str | None, words: str) -> BadInput:
        """Returns the error for a job that Slurm does not start, with Slurm's message; `name` is the wrong option, if known."""
        value = getattr(self._slurm, name) if name else None
        if value is not None:
            got, there = f"launch.slurm.{name}: Slurm refuses it, got {value!r}", "`sinfo` and `scontrol show partition`"
            return BadInput(f"{got} ({words}). {there} list what there is.")
        got = shortened(shlex.join(self._words), 300)
        return BadInput(f"launch.slurm: Slurm does not start the agent, got `{got}` ({words}). Change launch.slurm.*.")

    def _job(self) -> str:
        """Returns the job's number; "" while it is unknown."""
        found = NUMBER.findall(self.text())  # the last counts: an srun stopped in the queue submits a second job
        return self.job or (found[-1] if found else os.environ.get(JOB, ""))

    def _ask(self, job: str) -> None:
        """Asks Slurm for the job's state and reason, unless the pause after the last call is not over."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._pause_s = min(2 * self._pause_s, ASK_EVERY_S)
        self._next_s = now_s + self._pause_s
        try:
            answer = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r", timeout_s=SQUEUE_S)
        except (OSError, subprocess.TimeoutExpired):
            return
        if answer.returncode == 0:
            self._state, _, self._reason = answer.stdout.strip().partition("|")
            self._state = self._state or "no longer in the queue"

    def _errors(self) -> str:
        """Returns srun's error messages on one line; if there are none, the last line of its output."""
        lines = [line.partition("error: ")[2].strip() for line in self.text().splitlines() if "error: " in line]
        return shortened("; ".join(dict.fromkeys(lines)) or self.last_words() or "it printed nothing", 400)


def _no_place(job: str, step: str, constraint: str) -> str:
    """Returns why no step of the user's own job starts.

    Args:
        job: the job.
        step: the number of the step that the tuner runs in; "" if it runs in none.
        constraint: the features that the step requires; "" if it requires none.
    """
    if not step.isdecimal() or int(step) > MAX_STEP:
        return f"no free place for a step in job {job}{f' on a node with --constraint={constraint}' if constraint else ''}"
    return f"autotune runs in step {job}.{step}, which has the job's CPUs, as after `srun --pty`: leave out launcher=slurm"


def has_steps(slurm: SlurmOptions, program: str) -> bool:
    """Whether trials start steps in the agent's job; `program` is the first word of their command."""
    return slurm.nodes > 1 or Path(program).name == SRUN


def command(
    slurm: SlurmOptions, environment: Mapping[str, str], *, is_shared: bool = False, name: str = "autotune"
) -> list[str]:
    """Returns the srun command that starts the agent on a node. If the tuner runs in a job, the agent is a step of that job.

    Args:
        slurm: `launch.slurm`.
        environment: the tuner's environment, which shows whether the tuner runs in a job.
        is_shared: whether trials start steps in the job that share the CPUs and GPUs of the agent's step.
        name: name of the job.
    """
    shares_memory = {JOB, MEMORY} <= environment.keys() and "--mem" not in (slurm.args or "")
    given = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "gres": slurm.gres,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.mem or ("0" if shares_memory else None),
        "time": None if slurm.minutes is None else math.ceil(slurm.minutes),
    }
    return [
        "srun",
        "--unbuffered",
        "--kill-on-bad-exit=1",
        f"--nodes={slurm.nodes}",
        f"--ntasks={slurm.nodes}",
        "--chdir=/",
        "--mpi=none",
        f"--job-name={name}",
        *(["--ntasks-per-node=1", f"--wait={WAIT_S}"] if slurm.nodes > 1 else []),
        *(["--overlap"] if is_shared else []),
        *(["--exact"] if JOB in environment and slurm.cpus is not None else []),
        *(f"--{option}={value}" for option, value in given.items() if value is not None),
        *shlex.split(slurm.args or ""),
    ]


def _existing(path: str) -> str:
    """Returns the absolute path if it exists, else the nearest existing folder above it."""
    found = Path(path).absolute()
    return str(next(each for each in (found, *found.parents) if os.path.exists(each)))
