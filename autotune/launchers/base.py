"""Defines the launcher interface. A study reaches the processes of its trials only through this interface.

A launcher knows nothing about knobs, rates or outcomes. It starts a command with an environment, reports how the command ended,
and leaves no process behind. failures.py derives the trial's outcome from the report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.clock import Clock
from autotune.harness import protocol
from autotune.known_messages import Facts

if TYPE_CHECKING:  # needed for annotations only; `watch` imports psutil, which may be missing
    from autotune.monitors.watch import MachineWatch

Cause = Literal["result", "exit", "deadline", "stopped", "lost"]
Start = Literal["fresh", "warm"]
OF_TORCH = ("torch", "torch._dynamo", "torchvision")  # a warm start imports at least those of them that the program imports


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time limits of a trial. A trial that exceeds one of them is ended.

    Attributes:
        start_s: from launch until the first step begins. This covers the phases spawn, import, init and first_batch.
        compile_s: in phase compile. It has its own limit, because compiling takes long even in a trial that does not hang.
        step_s: between two progress lines in the later phases (warmup, steady, exit).
        total_s: from launch to the end of the trial.
    """

    start_s: float = 120.0
    compile_s: float = 300.0
    step_s: float = 60.0
    total_s: float = 900.0


@dataclass(kw_only=True)
class Launch:
    """One trial to start.

    Attributes:
        argv: program and arguments; never a shell string.
        cwd: working directory of the program.
        env: variables that are added to the tuner's environment. They cannot override the protocol's variables (SPEC_VARIABLE,
            MARK_VARIABLE, ...), which the launcher sets.
        folder: the trial's folder, `runs/<study>/trials/0007`; the launcher creates it if missing.
        spec: the request to the harness; the launcher writes it to a file. `spec.folder` is the absolute path of `folder`.
        deadlines: the trial's time limits.
        slot: name of the slot on which the trial runs (see Slot), part of the trial's mark; "" for the whole machine.
        warm: modules that a warm start may import before the program's first line. For a warm start, the launcher forks a
            process that has imported all of them, or only those in OF_TORCH. With (), it starts a fresh interpreter.
        is_warm_whole: whether the forked process must have imported all of `warm`; if False, those in OF_TORCH are enough.
    """

    argv: list[str]
    cwd: str
    folder: Path
    spec: protocol.Spec
    env: dict[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    warm: tuple[str, ...] = ()
    is_warm_whole: bool = False
    slot: str = ""


@dataclass(kw_only=True)
class Ended:
    """How a trial ended. No process of the trial is left, except those that `problems` names.

    Attributes:
        exit_code: exit status of the first process, which runs `Launch.argv`; None if a signal or the launcher ended it.
        signal: name of the signal that ended the first process, such as "SIGSEGV"; None if no signal or the launcher ended it.
        cause: one of
            "result": every rank wrote a result, or some ranks did and the others did not write theirs in time;
            "exit": no rank wrote a result, and the first process exited or srun reported a failed task;
            "deadline": a limit was passed (`evidence["deadline"]`), or the harness was not loaded (`evidence["shut_out"]`);
            "stopped": `Running.stop` was called, for the reason in `evidence["stop_reason"]`;
            "lost": a process that the launcher depends on, such as the supervisor, was killed or exited;
            `evidence["stop_reason"]` says which process.
        phase: last known phase, member of protocol.PHASES.
        results: results of the trial's ranks, in rank order, without results of other trials or earlier attempts.
        problems: result files that could not be read or belong to another trial or attempt, ranks without a result, and
            processes that could not be ended; one sentence each.
        seconds: from launch until the last process has exited.
        start: "fresh", or, if `Launch.warm` allowed it, "warm": a fork of a process that had imported torch.
        spared_s: by how many seconds a warm start reached the program's first line sooner than a fresh start; 0 if fresh.
        evidence: plain JSON values:
            "log_tail", "stdout_tail": last 8 KiB each, secrets masked;
            "oom_kills": number of processes of the tuner's cgroup that the OOM killer killed during the trial; None if unknown;
            "is_harness_seen", "num_steps": whether the harness was loaded, and how many steps it has seen;
            "files_left", "files_new", ...: the attributes of user_files.Report, which says what happened to the user's files;
            "ready_s": seconds from launch until torch was imported; None if it was not;
            "why_fresh": why a requested warm start was not possible;
            "why_less": why a warm start imported only the modules in OF_TORCH;
            "deadline", "hang" (see hangs.Hang.as_json), "shut_out", "stop_reason": depending on the cause;
            "node": {"host", "boot_id", "job"} if the trial ran on another machine; "node_lost": True if that machine was lost.
    """

    exit_code: int | None
    signal: str | None
    cause: Cause
    phase: str
    results: list[protocol.RankResult]
    problems: list[str]
    seconds: float
    evidence: dict[str, Any]
    start: Start = "fresh"
    spared_s: float = 0.0

    @classmethod
    def stopped(cls, reason: str, *, phase: str, seconds: float) -> Ended:
        """Returns the `Ended` of a trial that was stopped for `reason`, without results."""
        return cls(
            exit_code=None, signal=None, cause="stopped", phase=phase, results=[], problems=[], seconds=seconds,
            evidence={"stop_reason": reason},
        )  # fmt: skip

    def facts(self, spec: protocol.Spec, *, device_used_frac: float | None = None) -> Facts:
        """Returns the facts for `failures.classify`.

        Args:
            spec: the trial's spec.
            device_used_frac: largest share of the device's memory seen in use, from 0 to 1; None if unknown.
        """
        return Facts(
            exit_code=self.exit_code,
            signal=self.signal,
            cause=self.cause,
            phase=self.phase,
            results=self.results,
            problems=self.problems,
            log_tail=str(self.evidence.get("log_tail", "")),
            stdout_tail=str(self.evidence.get("stdout_tail", "")),
            stop_reason=str(self.evidence.get("stop_reason", "")),
            deadline=str(self.evidence.get("deadline", "")),
            shut_out=str(self.evidence.get("shut_out", "")),
            hang=str(self.evidence.get("hang", {}).get("summary", "")),
            oom_kills=self.evidence.get("oom_kills") or 0,
            is_harness_seen=bool(self.evidence.get("is_harness_seen")),
            num_steps=int(self.evidence.get("num_steps", 0)),
            loaded=next(iter(self.evidence.get("files_loaded") or []), ""),
            asked={**spec.knobs, **spec.passed},
            mode=spec.mode,
            device_used_frac=device_used_frac,
            memory_limit_bytes=spec.memory_limit_bytes,
        )


class Running(ABC):
    """A running trial. Only the thread that started it may call its methods.

    Call `poll` and `progress` several times a second until `poll` returns Ended. Call `stop` at any time. `poll` and
    `progress` return at once, and are cheap enough not to disturb the measured trial. Only once a trial has passed a deadline
    may `poll` take a few seconds, to find out where the trial hangs.
    """

    @abstractmethod
    def poll(self) -> Ended | None:
        """Returns None until all processes of the trial have exited; then returns how it ended (each time the same object).

        The trial is over when every rank has written its result, the first process has exited, a deadline has passed, or `stop`
        was called. Over the next calls, the processes that are left are ended by SIGTERM and, after a grace period, SIGKILL.
        Nothing that a program does makes this method raise an error: bad results are reported in `Ended.problems`, and logs
        that grow too long are cut.
        """

    @abstractmethod
    def progress(self) -> protocol.Progress | None:
        """Returns the newest progress line of rank 0; None before the harness has written one."""

    def request_stop(self, reason: str) -> None:  # noqa: B027 (may do nothing, because `stop` is always called afterwards)
        """Begins to end the processes and returns without waiting, so that several trials can end at the same time."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the whole process tree and returns when it is gone, within a few seconds; `poll` then returns Ended.

        Ctrl-C, SIGTERM and SIGHUP do not interrupt the call: they are delivered after it.

        Further calls, and calls after the end, do not change the cause. If every rank had already written its result, the
        cause stays "result".

        Args:
            reason: why it is stopped, such as "interrupted by the user"; becomes `evidence["stop_reason"]`.
        """


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Another machine, or a part of this one, on which trials of a study run one at a time.

    Attributes:
        name: its name in messages: "n1, job 12" for another machine, or a number such as "2" for a part of this machine.
        host: name of the machine.
        gpus: UUIDs of the GPUs that its trials may use.
        cores: numbers of the CPUs that its trials may use.
        facts: `machine.host_facts()` of that machine.
    """

    name: str
    host: str
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    facts: dict[str, Any]


class Launcher(ABC):
    """Starts trials. Owned by the tuner's process; one launcher serves one study.

    Attributes:
        clock: clock of the study. It is paused while the launcher waits for a machine.
        slot: the part of the machine reserved for its trials; None for the whole machine.
    """

    clock = Clock()
    slot: Slot | None = None

    @abstractmethod
    def start(self, launch: Launch) -> Running:
        """Starts the trial and returns it; spec.json is written before the first process exists.

        The program's environment has protocol.SPEC_VARIABLE and protocol.MARK_VARIABLE, and its PYTHONPATH begins with the
        harness's injection folder. Standard input is empty. Output goes to protocol.STDOUT_FILE and protocol.STDERR_FILE in the
        trial's folder. Result and progress files of an earlier attempt in that folder are removed. If the command cannot be
        started, no error is raised: the trial ends with exit status 127, and its log says why.

        Raises:
            BadInput: the working directory does not exist, the trial's folder cannot be written, or the system rejects the
                arguments or variables, for example because of a NUL in them.
        """

    def slots(self) -> list[Slot]:
        """Returns, without waiting, the slots on other machines that are ready now. The first call requests the slots.

        A launcher that starts trials on this machine returns []; `beside` returns a launcher for each of its slots.

        Raises:
            BadInput: no such machine is available, or it cannot run the study's trials.
        """
        return []

    def beside(self) -> list[Launcher]:
        """Returns a launcher for each slot, so that trials can run in parallel; [] if there is only one slot.

        `start` of this launcher itself gives a trial the whole machine, so no other trial may run at that time. `close` closes
        all slots.
        """
        return []

    def release(self) -> None:  # noqa: B027 (most launchers have nothing to release)
        """Releases all slots on other machines except the first. Afterwards, trials start only through this launcher."""

    def why_waiting(self) -> str:
        """Returns why trials wait for a machine, such as "Resources (job 12)"; "" if they do not wait or no reason is known."""
        return ""

    def watch(self) -> MachineWatch | None:
        """Returns the monitor of the other machine on which trials run; None if they run on this machine."""
        return None

    def sweep(self, study: Path) -> list[str]:
        """Ends processes that a killed tuner left running for this study. Called before the first trial, never during one.

        When a tuner is killed, its supervisor normally ends them. They are left only if the supervisor was killed, too.

        Returns:
            One line for the user per process ended.
        """
        return []

    def close(self) -> None:  # noqa: B027 (a launcher may have nothing to release)
        """Releases the launcher's resources, and ends processes that still run. Called after the last trial."""

    def unended(self) -> list[str]:
        """Returns, after `close`, a line for the user for each cluster job that may still occupy machines."""
        return []
