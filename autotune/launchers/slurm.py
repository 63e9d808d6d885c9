"""Runs trials in a job of Slurm: `srun` starts the agent on a node, and its standard input and output are the link.

The job lives as long as the study. Only `srun` and `squeue` are needed: no accounting (`sacct`), no batch script, no port.
`squeue` is asked for reasons, and for the job's state when the agent is silent; the agent itself says how trials end.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping

from autotune.config.cluster import JOB
from autotune.config.schema import SlurmOptions
from autotune.errors import BadInput
from autotune.launchers.child import EXIT_S, ChildTransport, agent_command, queued_too_long
from autotune.launchers.local import Graces
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.transport import Transport
from autotune.plain_text import shortened

NUMBER = re.compile(r"\bjob (\d+)\b")  # srun: job 12 queued and waiting for resources
ASK_EVERY_S = 10.0  # squeue is answered by the one controller that all users share
SQUEUE_S = 5.0
# Words in a refusal of Slurm -> the option that it is about; the first that fits counts.
OPTIONS = {
    "account": "account", "qos": "qos", "partition": "partition", "generic resource": "gres", "gres": "gres",
    "time limit": "minutes", "memory": "mem", "processors": "cpus", "cpu count": "cpus",
}  # fmt: skip
# Reasons of queued jobs that no waiting ends: limits of the partition, or of one job in it.
NEVER = re.compile(r"^(?:PartitionConfig|PartitionTimeLimit|PartitionNodeLimit|BadConstraints)$|PerJob")
TIME = re.compile(r"TimeLimit|WallDuration")
UNREACHABLE = ("contact slurm controller", "configuration source", "slurm.conf", "Munge", "munge")


class SlurmLauncher(RemoteLauncher):
    """Starts trials in a job of Slurm, or in a step of the job that the tuner runs in.

    Args:
        slurm: `launch.slurm`.
        place: what the node must see.
        graces: the grace periods of the LocalLauncher there.
        patience_s: longest wait in the queue; None for no limit.
    """

    def __init__(
        self, slurm: SlurmOptions, place: Place, *, graces: Graces | None = None, patience_s: float | None = None
    ) -> None:
        super().__init__(place, graces=graces, patience_s=patience_s)
        self._slurm = slurm

    def transport(self) -> Transport:
        """Submits the job and returns at once."""
        if shutil.which("srun") is None:
            raise BadInput("launcher: srun is not installed here, got 'slurm'. Start autotune on a machine that submits jobs.")
        return Srun(self._slurm)

    def too_late(self, waited_s: float, why: str) -> BadInput:
        """See `RemoteLauncher.too_late`."""
        return queued_too_long("Slurm", waited_s, why)


class Srun(ChildTransport):
    """One run of `srun` with the agent at its other end."""

    def __init__(self, slurm: SlurmOptions) -> None:
        super().__init__(command(slurm, os.environ))
        self._slurm = slurm
        self._next_s, self._pause_s, self._state, self._reason = 0.0, 0.5, "", ""

    def why_waiting(self) -> str:
        """Returns Slurm's reason why the job is not running yet: "Resources (job 12)"."""
        job = self._job()
        if not job or JOB in os.environ:
            return self.last_words().removeprefix("srun: ")
        self._ask(job)
        reason = self._reason if self._state == "PENDING" else self._state.lower() or "queued"
        return f"{reason} (job {job})"

    def why_never(self) -> BadInput | None:
        """Returns the error for a job that Slurm has queued although it cannot start; None if it may start."""
        if (job := self._job()) and JOB not in os.environ:
            self._ask(job)
        if self._state != "PENDING" or not NEVER.search(self._reason):
            return None
        name = "minutes" if TIME.search(self._reason) else None
        words = [line.removeprefix("srun: ") for line in self.text().splitlines() if "onfiguration" in line]
        return self._refused(name, ": ".join([self._reason, *words[:1]]))

    def why_lost(self) -> str:
        """See `Transport.why_lost`."""
        status = self.exited(1.0 if self.link.is_lost else 0.0)  # if it is exiting, its last words are worth a moment
        if status is not None:
            return f"srun ended with status {status} ({self._errors()})"
        if job := self._job():
            self._ask(job)
        return f"Slurm says that job {job} is {self._state}" if self._state not in ("", "RUNNING", "PENDING") else ""

    def refusal(self) -> BadInput:
        """Returns Slurm's words on why there is no job, or what keeps the agent from starting on the node."""
        self.exited(EXIT_S)
        text, words = self.text(), self._errors()
        if unseen := self.unseen():
            return unseen
        if any(word in text for word in UNREACHABLE):
            return BadInput(f"launcher: Slurm's controller does not answer, got 'slurm' ({words}). Try `scontrol ping`.")
        return self._refused(next((name for word, name in OPTIONS.items() if word in words.lower()), None), words)

    def _refused(self, name: str | None, words: str) -> BadInput:
        """Returns the error for a job that Slurm does not start, in its words; `name` is the option at fault, if known."""
        value = getattr(self._slurm, name) if name else None
        if value is not None:
            got, there = f"launch.slurm.{name}: Slurm refuses it, got {value!r}", "`sinfo` and `scontrol show partition`"
            return BadInput(f"{got} ({words}). {there} list what there is.")
        got = shortened(shlex.join(command(self._slurm, os.environ)[:-6]), 300)
        return BadInput(f"launch.slurm: Slurm does not start the agent, got `{got}` ({words}). Change launch.slurm.*.")

    def _job(self) -> str:
        """Returns the job's number; "" while it is unknown."""
        found = NUMBER.search(self.text())
        return self.job or (found[1] if found else os.environ.get(JOB, ""))

    def _ask(self, job: str) -> None:
        """Asks Slurm for state and reason of the job, if it was not asked just now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._pause_s = min(2 * self._pause_s, ASK_EVERY_S)
        self._next_s = now_s + self._pause_s
        asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%T|%r"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=SQUEUE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return
        if answer.returncode == 0:
            self._state, _, self._reason = answer.stdout.strip().partition("|")
            self._state = self._state or "no longer in the queue"

    def _errors(self) -> str:
        """Returns srun's error messages on one line, or else the last line of whatever was printed."""
        lines = [line.partition("error: ")[2].strip() for line in self.text().splitlines() if "error: " in line]
        return shortened("; ".join(dict.fromkeys(lines)) or self.last_words() or "it said nothing", 400)


def command(slurm: SlurmOptions, environment: Mapping[str, str]) -> list[str]:
    """Returns the command that starts the agent on a node; inside the tuner's allocation, as a step of that job."""
    given = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "gres": slurm.gres,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.mem,
        "time": None if slurm.minutes is None else math.ceil(slurm.minutes),
    }
    return [
        "srun",
        "--unbuffered",
        "--kill-on-bad-exit=1",
        "--nodes=1",
        "--ntasks=1",
        "--chdir=/",
        "--mpi=none",
        "--job-name=autotune",
        *(["--exact"] if JOB in environment and slurm.cpus is not None else []),
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *shlex.split(slurm.args or ""),
        *agent_command(),
    ]
