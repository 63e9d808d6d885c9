"""The agent, which runs a study's trials on another machine: `python -m autotune.launchers.node`.

The engine (Slurm, Ray) starts the agent on a node, and connects the agent's standard input and output to the tuner. This
connection is called the link.
The agent handles deadlines, progress, counters and the monitoring of the machine, because the machine's clocks and /proc can
be read only there. The agent starts and ends processes with a LocalLauncher, like a tuner that runs trials on its own machine.

The agent ends its trial and itself in three cases: the link closes; nothing has come from the tuner for LEASE_S; or nothing has
come for MISSED_S, and a file says that the tuner has given up this node (`Transport.note`). The last two cases matter if the
engine's daemon on the node is gone: then the link stays open.

    tuner  {"do": "open", ...}       what the study needs; answered by the facts of this machine and the GPUs that Ray has given
                                     to the job, or by what is missing here
           {"do": "sweep", "study"}  end what an earlier run of the study left here; answered by a line for each process
           {"do": "before", "max_s"}, {"do": "at_rest"}   call these methods of MachineWatch; answered by what they return
           {"do": "start", "launch", "has_neighbours"}   answered once the first process runs, or by the problems of an invalid
                                     launch; `has_neighbours` says whether the study's other slots may run trials meanwhile
           {"do": "progress"}        the newest progress of the running trial
           {"do": "stop", "reason"}  answered once the trial's processes are gone; "over" in the answer is the "ended" message
    agent  {"is": "hello", ...}      first of all: versions and machine
           {"re": id, ...}           the answer to the message with that id; "problems" if it is bad input
           {"is": "ended", ...}      the running trial is over: how it ended, and what the monitor observed
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autotune
from autotune.clock import Clock
from autotune.errors import AutotuneError, BadInput
from autotune.harness.cores import read
from autotune.harness.protocol import BOOT_ID
from autotune.knobs import malloc
from autotune.launchers.base import Running, Slot
from autotune.launchers.environment import PACKAGE, mark_of, study_of
from autotune.launchers.link import LEASE_S, Link, LinkLost, Message
from autotune.launchers.local import INTERRUPTING, Graces, LocalLauncher
from autotune.launchers.messages import from_watch, to_launch
from autotune.machine import host_facts
from autotune.machine.visible import visible_devices, visible_gpus
from autotune.monitors.cpu import CpuMonitor
from autotune.monitors.watch import MachineWatch, configured_device
from autotune.plain_json import from_json
from autotune.plain_text import shortened

POLL_S = 0.1  # pause between two polls of the running trial
IDLE_S = 1.0  # longest wait for a message while no trial runs
MISSED_S = 5.0  # after this time without a heartbeat, the agent reads the tuner's note every IDLE_S
LEAVE_S = 15.0  # time to clean up once the tuner is gone; after LEAVE_S, the agent exits, and the supervisor ends the trial
# Signals with which an engine ends a job. It signals all of the job's processes, one after another, within FOREIGN_S.
FOREIGN, FOREIGN_S = ("SIGTERM", "SIGKILL"), 0.5
VISIBLE_S = 5.0  # longest wait for a file of the tuner to appear: network file systems cache that a file does not exist
# Variables by which the engine says which devices a job may use. Trials get these variables of the engine. Trials that start
# steps of the job (srun) also get those in ALLOCATION. Trials get no other variables of the engine.
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)  # fmt: skip
SLURM_JOB, RAY_JOB = "SLURM_JOB_ID", "RAY_JOB_ID"
JOB_VARIABLES = (SLURM_JOB, RAY_JOB)  # each holds the engine's id of the job
# Variables by which srun in a trial finds the agent's job, and by which the job's programs find each other. SLURM_NTASKS is not
# one of them, because its value belongs to the agent's own step. Without it, srun starts one task per node, as in a batch job.
ALLOCATION = (
    SLURM_JOB, "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_NNODES",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE",
)  # fmt: skip


class Agent:
    """The agent's state, and its main loop in `run`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._launcher = LocalLauncher()
        self._watch: MachineWatch | None = None
        self._running: Running | None = None
        self._nonce = ""
        self._over: Message | None = None  # the message about the last trial's end
        self._next_look_s = self._next_note_s = 0.0
        self._note = ""
        self._tasks: dict[str, Callable[[Message], dict[str, Any]]] = {
            "open": self._open,
            "sweep": lambda message: {"lines": self._launcher.sweep(Path(message["study"]))},
            "before": lambda message: {"held": self._watched.before(max_s=message["max_s"])},
            "at_rest": lambda _: {"disturbances": [dataclasses.asdict(one) for one in self._watched.at_rest()]},
            "start": self._start,
            "progress": self._progress,
            "stop": self._stop,
        }

    @property
    def _watched(self) -> MachineWatch:
        if self._watch is None:
            raise LookupError("`open` must be the first message")
        return self._watch

    def run(self) -> None:
        """Serves the tuner until the tuner is gone.

        Raises:
            LinkLost: the tuner is gone.
        """
        self._link.send(hello())
        while self._link.silent_s < LEASE_S:
            if self._is_given_up():
                raise LinkLost("the tuner has given up this node")
            pause_s = IDLE_S if self._running is None else max(0.0, self._next_look_s - time.monotonic())
            if message := self._link.receive(pause_s):
                self._link.send({"re": message.get("id"), **self._answer(message)})
            if self._running is not None and time.monotonic() >= self._next_look_s:
                self._look(self._running)
        raise LinkLost(f"nothing was heard from the tuner for {LEASE_S:.0f} s")

    def _is_given_up(self) -> bool:
        """Whether the tuner is silent, and has written in its note that this node is lost."""
        if self._link.silent_s < MISSED_S or time.monotonic() < self._next_note_s:
            return False
        self._next_note_s = time.monotonic() + IDLE_S
        with contextlib.suppress(OSError), open(self._note, "rb") as note:  # NFS checks for new content when a file is opened
            return bool(note.read(1))
        return False

    def close(self) -> None:
        """Ends the running trial, and everything that was started for the study."""
        self._launcher.close()
        if self._watch:
            self._watch.close()

    def _answer(self, message: Message) -> dict[str, Any]:
        try:
            return self._tasks[message["do"]](message)
        except BadInput as error:
            return {"problems": error.problems}
        except AutotuneError as error:
            return {"fault": str(error)}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            asked, why = str(message.get("do"))[:20], f"{type(error).__name__}: {shortened(str(error), 200)}"
            return {"fault": f"node {platform.node()} could not do {asked!r} ({why})"}

    def _open(self, message: Message) -> dict[str, Any]:
        is_of_ray = RAY_JOB in os.environ
        take_over(message["environment"], message["program"])
        if problems := missing(message):
            raise BadInput(problems)
        name, self._note = message["slot"], message["note"]
        slot = Slot(name=name, host=platform.node(), gpus=(), cores=(), facts={}) if name else None
        self._launcher = LocalLauncher(from_json(message["graces"], Graces), slot=slot)
        pid, started_ticks = message["tuner"]
        facts = host_facts()
        kind, index, num = message["device"]
        device = configured_device(kind, index, num, gpus=facts["gpus"])
        self._watch = MachineWatch(device, Clock(), CpuMonitor(tuner=(pid, started_ticks)))
        gpus = visible_gpus(facts["gpus"], os.environ)
        given = (visible_devices(os.environ) or []) if is_of_ray else []
        return {
            # NVML does not list MIG instances. If the trials use a MIG instance, all GPUs of the machine are reported.
            "facts": {**facts, "gpus": gpus if all(gpus) else facts["gpus"], malloc.FACT: malloc.installed_here()},
            "given": [gpu.get("uuid") or f"{name} of node {platform.node()}" for name, gpu in zip(given, gpus, strict=False)],
        }

    def _start(self, message: Message) -> dict[str, Any]:
        launch = to_launch(message["launch"])
        self._watched.beside(mark_of(study_of(launch.folder), "") if message["has_neighbours"] else "")
        self._running, self._nonce, self._over = self._launcher.start(launch), launch.spec.nonce, None
        return {}

    def _progress(self, _: Message) -> dict[str, Any]:
        progress = self._running.progress() if self._running else None
        return {"progress": dataclasses.asdict(progress) if progress else None}

    def _stop(self, message: Message) -> dict[str, Any]:
        if self._running:
            self._running.stop(message["reason"])
            self._look(self._running)
        return {"over": self._over}

    def _look(self, running: Running) -> None:
        """Polls the running trial, and tells the tuner if it is over."""
        self._next_look_s = time.monotonic() + POLL_S
        if (ended := running.poll()) is None:
            self._watched.look(running.progress())
            return
        self._running = None
        self._watched.ended()
        if ended.signal in FOREIGN or ended.cause == "lost":
            time.sleep(FOREIGN_S)  # if the engine ends the whole job, this process dies now, and the tuner reports a lost node
        watched = from_watch(self._watched)
        self._over = {"is": "ended", "nonce": self._nonce, "ended": dataclasses.asdict(ended), "watched": watched}
        self._link.send(self._over)
        self._watched.follow(ended.results)


def hello() -> Message:
    """Returns the first message of an agent."""
    return {
        "is": "hello",
        "autotune": autotune.__version__,
        "package": str(PACKAGE),
        "host": platform.node(),
        "boot_id": read(BOOT_ID),
        "cores": sorted(os.sched_getaffinity(0)),
        "job": next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), ""),
    }


def take_over(environment: dict[str, str], program: str) -> None:
    """Gives this process, and so its trials, the tuner's environment, but keeps some of the engine's variables.

    Keeps DEVICE_VARIABLES and, if trials start steps in the agent's job, ALLOCATION.

    Args:
        environment: the tuner's environment.
        program: first word of the trials' command.
    """
    is_spread = Path(program).name == "srun" or os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
    has_steps = is_spread and SLURM_JOB in os.environ and SLURM_JOB not in environment
    names = (*DEVICE_VARIABLES, *(ALLOCATION if has_steps else ()))
    kept = {name: os.environ[name] for name in names if name in os.environ}
    if has_steps:  # this is the job's first node, where srun starts rank 0
        environment = {"MASTER_ADDR": platform.node(), **environment}
    os.environ.clear()
    os.environ.update({**environment, **kept})


def missing(message: Message) -> list[str]:
    """Returns a problem for each file or folder that the study needs but this machine does not see or cannot write.

    Args:
        message: "cwd", "program" (the first word of the command), "runs_dir", and "token" (a file in `runs_dir` that the
            tuner has made).
    """
    cwd, program, runs_dir = (os.fspath(message[name]) for name in ("cwd", "program", "runs_dir"))
    host = platform.node()
    shared = "Use a folder on a file system that all nodes share"
    problems = []
    if not os.path.isdir(cwd):
        problems.append(f"cwd: node {host} does not see this folder, got {cwd!r}. {shared}: start autotune from there.")
    elif not shutil.which(os.path.join(cwd, program) if os.sep in program else program):
        problems.append(f"COMMAND: node {host} has no such program, got {program!r}. Give one that all nodes have.")
    give_up_s = time.monotonic() + VISIBLE_S
    while not os.path.exists(os.path.join(runs_dir, message["token"])):
        if time.monotonic() > give_up_s or not os.path.isdir(runs_dir):
            problems.append(f"runs_dir: node {host} does not see this folder, got {runs_dir!r}. {shared}: runs_dir=DIR.")
            break
        time.sleep(0.1)
    else:
        if not os.access(runs_dir, os.W_OK | os.X_OK):
            problems.append(f"runs_dir: node {host} cannot write to this folder, got {runs_dir!r}. {shared}: runs_dir=DIR.")
    return problems


def _exit_without_tuner(link: Link) -> None:
    """Exits if the tuner is gone and the main thread still runs, for example because it waits for a hanging file system."""
    while not link.is_lost and link.silent_s < LEASE_S:
        time.sleep(1.0)
    time.sleep(LEAVE_S)
    os._exit(1)


def _link() -> Link:
    """Returns the link. From now on, other output to standard output goes to standard error."""
    link = Link(os.dup(0), os.dup(1))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return link


def main() -> None:
    """Runs the agent; see the module docstring."""
    link = _link()
    for number in INTERRUPTING:
        signal.signal(number, lambda *_: sys.exit(0))
    threading.Thread(target=_exit_without_tuner, args=(link,), daemon=True).start()
    agent = Agent(link)
    try:
        agent.run()
    except LinkLost as lost:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"autotune: the agent exits: {lost}\n")
    finally:
        for number in INTERRUPTING:
            signal.signal(number, lambda *_: None)
        agent.close()
        link.close()


if __name__ == "__main__":
    main()
