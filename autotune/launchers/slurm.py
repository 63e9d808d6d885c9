"""Runs trials in a job of Slurm: `srun` starts the agent on a node, and its standard input and output are the link.

The job lives as long as the study. Only `srun` and `squeue` are needed: no accounting (`sacct`), no batch script, no port.
`squeue` is asked for reasons, and for the job's state when the agent is silent; the agent itself says how trials end.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from typing import IO

from autotune.config.cluster import JOB
from autotune.config.schema import SlurmOptions
from autotune.errors import BadInput
from autotune.launchers.environment import PACKAGE
from autotune.launchers.link import Link
from autotune.launchers.local import Graces
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.supervisor import ENTRY_POINT
from autotune.launchers.transport import Transport, end_process
from autotune.plain_text import plain, shortened

# Run by the node's shell before the agent, so that a missing interpreter is reported with the node's name.
AGENT = (
    'for path in "$1" "$2"; do test -e "$path" || { echo "autotune: $(uname -n) does not see $path" >&2; exit 127; }; done; '
    'PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" exec "$1" -m autotune.launchers.node'
)
UNSEEN = re.compile(r"^autotune: (\S+) does not see (.+)$", re.MULTILINE)
NUMBER = re.compile(r"\bjob (\d+)\b")  # srun: job 12 queued and waiting for resources
ASK_EVERY_S = 10.0  # squeue is answered by the one controller that all users share
SQUEUE_S = 5.0
MAX_WORDS_BYTES = 1 << 16
EXIT_S = 15.0  # longest wait for the exit of an srun whose link has closed
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
        problem = f"Slurm had no node within that time ({why or 'it has not answered'}), got {waited_s / 60:.2g}"
        return BadInput(f"launch.queue_minutes: {problem}. Ask for less, or give more minutes; null waits as long as it takes.")


class Srun(Transport):
    """One run of `srun` with the agent at its other end.

    Args:
        slurm: `launch.slurm`.
    """

    def __init__(self, slurm: SlurmOptions) -> None:
        self._slurm = slurm
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (what srun and the agent print to standard error)
        self._process = subprocess.Popen(
            # The entry point makes srun end with the tuner while it waits in the queue, where it does not look at the link.
            [sys.executable, "-I", "-S", str(ENTRY_POINT), str(os.getpid()), *command(slurm, os.environ)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the tuner's; srun would end the job
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.link = Link(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdout.close()
        self._process.stdin.close()
        self._next_s, self._pause_s, self._state, self._reason = 0.0, 0.5, "", ""
        self._end = weakref.finalize(self, _end, self._process, self.link, self._log)

    def why_waiting(self) -> str:
        """Returns Slurm's reason why the job is not running yet: "Resources (job 12)"."""
        job = self._job()
        if not job or JOB in os.environ:
            return self._last_words()
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
        words = [line.removeprefix("srun: ") for line in self._text().splitlines() if "onfiguration" in line]
        return self._refused(name, ": ".join([self._reason, *words[:1]]))

    def why_lost(self) -> str:
        """See `Transport.why_lost`."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # if it is exiting, its last words are worth a moment
            self._process.wait(1.0 if self.link.is_lost else 0.0)
        if (status := self._process.poll()) is not None:
            return f"srun ended with status {status} ({self._errors()})"
        if job := self._job():
            self._ask(job)
        return f"Slurm says that job {job} is {self._state}" if self._state not in ("", "RUNNING", "PENDING") else ""

    def refusal(self) -> BadInput:
        """Returns Slurm's words on why there is no job, or what keeps the agent from starting on the node."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        text, words = self._text(), self._errors()
        if unseen := UNSEEN.search(text):
            host, path = unseen[1], unseen[2]
            where = "the interpreter that autotune runs in" if path == sys.executable else "autotune itself"
            return BadInput(
                f"launcher: node {host} does not see {where}, got {path!r}. Install autotune on a file system that all nodes "
                "share."
            )
        if any(word in text for word in UNREACHABLE):
            return BadInput(f"launcher: Slurm's controller does not answer, got 'slurm' ({words}). Try `scontrol ping`.")
        return self._refused(next((name for word, name in OPTIONS.items() if word in words.lower()), None), words)

    def close(self) -> None:
        """Closes the link, upon which the agent leaves and the job ends; ends `srun`, and so the job, if that takes long."""
        self._end()

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
        found = NUMBER.search(self._text())
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

    def _text(self) -> str:
        """Returns what srun and the agent have printed to standard error."""
        file = self._log.fileno()  # srun writes at its offset, which pread leaves alone
        return plain(os.pread(file, min(os.fstat(file).st_size, MAX_WORDS_BYTES), 0).decode("utf-8", "replace"))

    def _errors(self) -> str:
        """Returns srun's error messages on one line, or else the last line of whatever was printed."""
        lines = [line.partition("error: ")[2].strip() for line in self._text().splitlines() if "error: " in line]
        return shortened("; ".join(dict.fromkeys(lines)) or self._last_words() or "it said nothing", 400)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._text().splitlines() if line.strip()]
        return shortened(lines[-1].removeprefix("srun: "), 200) if lines else ""


def command(slurm: SlurmOptions, environment: Mapping[str, str]) -> list[str]:
    """Returns the command that starts the agent on a node.

    Args:
        slurm: `launch.slurm`.
        environment: the tuner's; inside an allocation, the agent becomes a step of that job.
    """
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
        *("/bin/sh", "-c", AGENT, "autotune", sys.executable, str(PACKAGE.parent)),
    ]


def _end(process: subprocess.Popen[bytes], link: Link, log: IO[bytes]) -> None:
    """Ends the job with its agent. Also called when the tuner exits."""
    end_process(process, link)
    log.close()
