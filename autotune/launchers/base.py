"""Defines the launcher interface. A study reaches the processes of its trials only through it.

A launcher knows nothing about knobs, rates or outcomes: it starts a command with an environment, reports how it ended and
leaves no process behind. failures.py interprets the report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.clock import Clock
from autotune.harness import protocol
from autotune.known_messages import Facts

if TYPE_CHECKING:  # psutil, which `watch` imports, may be missing where `autotune.apply` runs
    from autotune.monitors.watch import MachineWatch

Cause = Literal["result", "exit", "deadline", "stopped", "lost"]
Start = Literal["fresh", "warm"]
OF_TORCH = ("torch", "torch._dynamo", "torchvision")  # a warm start imports these if the program has them


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long a trial may take before it is ended as hanging.

    Attributes:
        start_s: from launch until the first step begins, through phases spawn, import, init and first_batch.
        compile_s: in phase compile. A compiling trial is slow, but does not hang, so this phase has its own limit.
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
        env: variables added to the tuner's own environment; the launcher sets the protocol's variables, which override them.
        folder: the trial's folder, `runs/<study>/trials/0007`; the launcher creates it if missing.
        spec: the request to the harness; the launcher writes it to a file. `spec.folder` is the absolute path of `folder`.
        deadlines: when to give up.
        slot: name of the trial's slot, which is part of the value of protocol.MARK_VARIABLE; "" for the whole machine.
        warm: modules that may be imported before the program's first line. Instead of starting a fresh interpreter, the
            launcher may then fork a process that has imported all of them, or only those in OF_TORCH. () needs a fresh start.
        is_warm_whole: whether a warm start requires a process that has imported all of `warm`, not only those in OF_TORCH.
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
        exit_code: exit status of the first process if it exited on its own; None if a signal or the launcher ended it.
        signal: name of the signal that ended the first process, "SIGSEGV"; None if there was none or the launcher sent it.
        cause: one of
            "result": every rank wrote a result, or some ranks did and the others did not write theirs in time;
            "exit": the first process exited, and no rank wrote a result;
            "deadline": a limit was passed (`evidence["deadline"]`), or the harness was not loaded (`evidence["shut_out"]`);
            "stopped": `Running.stop` was called, for the reason in `evidence["stop_reason"]`;
            "lost": a process that the launcher depends on was killed, such as the supervisor; `evidence["stop_reason"]` says
            which.
        phase: last known phase, member of protocol.PHASES.
        results: this trial's rank results, in rank order; results of another trial or attempt are listed as problems instead.
        problems: files that could not be read or belong to another trial, ranks without a result, and processes that would not
            end; one sentence each.
        seconds: from launch until the last process has exited.
        start: "fresh", or "warm" for a fork of a process that had imported torch. Warm only on request.
        spared_s: time that the warm start saved: a fresh start would have reached the program's first line this much later.
        evidence: plain JSON values:
            "log_tail", "stdout_tail": last 8 KiB each, secrets masked;
            "oom_kills": rise of the cgroup's counter; None if it cannot be read;
            "is_harness_seen", "num_steps": whether the harness was loaded, and how many steps it has seen;
            "files_left", "files_new", ...: what happened to the user's files, named as in user_files.Report;
            "ready_s": from launch until torch was imported; None if it was not;
            "why_fresh": why a requested warm start was not possible;
            "why_less": why a warm start imported only the modules in OF_TORCH;
            "deadline", "hang" (see hangs.Hang.as_json), "shut_out", "stop_reason": depending on the cause;
            "node": {"host", "boot_id", "job"} of another machine; "node_lost": whether that machine was lost.
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
        """Returns the facts for `failures.classify`; `device_used_frac` is the largest share of the device's memory in use."""
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
    """A running trial. Used by the study's loop only, from the thread that started it.

    Call `poll` and `progress` several times a second until `poll` returns Ended. Call `stop` at any time. `poll` and
    `progress` read files and return at once; they are cheap enough not to disturb the measured trial. Once a trial has passed a
    deadline, `poll` may take a few seconds, to find out where the trial hangs.
    """

    @abstractmethod
    def poll(self) -> Ended | None:
        """Returns None until all processes of the trial have exited; then returns how it ended (each time the same object).

        The trial is over when every rank has written its result, the first process has exited, a deadline has passed, or `stop`
        was called. The rest of the process tree is then ended: SIGTERM, a grace period, SIGKILL, over several calls. No program
        can make this method raise: `Ended` reports unreadable and foreign results, and endless output is cut.
        """

    @abstractmethod
    def progress(self) -> protocol.Progress | None:
        """Returns the newest progress line of rank 0; None before the harness has written one."""

    def request_stop(self, reason: str) -> None:  # noqa: B027 (`stop` always follows)
        """Begins to end the processes and returns without waiting, so that several trials can end at the same time."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the whole process tree and returns when it is gone, within a few seconds; `poll` then returns Ended.

        Ctrl-C, SIGTERM and SIGHUP do not interrupt the call: they are delivered after it.

        May be called again, even after the end: the first cause is kept. A trial whose results were already complete keeps the
        cause "result".

        Args:
            reason: why it is stopped, such as "interrupted by the user"; becomes `evidence["stop_reason"]`.
        """


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Another machine, or a part of this one, on which trials of a study run one at a time.

    Attributes:
        name: for messages: "n1, job 12", or the number of a part of this machine, "2".
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

        The program sees protocol.SPEC_VARIABLE, protocol.MARK_VARIABLE and the harness's injection folder first on PYTHONPATH.
        Standard input is empty. Output goes to protocol.STDOUT_FILE and protocol.STDERR_FILE in the trial's folder. Result and
        progress files of an earlier attempt in that folder are removed. A command that cannot be started does not raise: the
        trial ends with exit status 127 and its log says why.

        Raises:
            BadInput: the working directory does not exist, the trial's folder cannot be written, or the system rejects the
                arguments or variables (a NUL in them).
        """

    def slots(self) -> list[Slot]:
        """Returns, without waiting, the slots on other machines that are ready now. The first call requests the slots.

        A launcher that starts trials on this machine returns []; for its slots, see `beside`.

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
        """Releases all slots on other machines except the first. From now on, `start` is called only on this launcher."""

    def why_waiting(self) -> str:
        """Returns why trials wait for a machine, "Resources (job 12)"; "" if they do not wait, or if no reason is known yet."""
        return ""

    def watch(self) -> MachineWatch | None:
        """Returns the monitor of the machine that trials run on; None if that is this machine."""
        return None

    def sweep(self, study: Path) -> list[str]:
        """Ends processes that a killed tuner left running for this study. Called before the first trial, never during one.

        A killed tuner normally leaves processes only if its supervisor was killed as well.

        Returns:
            One line for the user per process ended.
        """
        return []

    def close(self) -> None:  # noqa: B027 (most launchers hold nothing)
        """Releases the launcher's resources, and ends processes that still run. Called after the last trial."""

    def unended(self) -> list[str]:
        """Returns, after `close`, a line for the user for each job that may still hold machines."""
        return []
