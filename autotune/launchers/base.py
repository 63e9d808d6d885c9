"""What a launcher is: the one interface between the study and the processes of a trial.

A launcher knows nothing of knobs, rates or outcomes: it starts a command with an environment, says what became of it and
leaves no process behind. What that means is decided in failures.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.failures import Facts
from autotune.harness import protocol

Cause = Literal["result", "exit", "deadline", "stopped", "lost"]
Start = Literal["fresh", "warm"]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long a trial may take before it is ended as stuck.

    Attributes:
        start_s: from launch until the first step begins: phases spawn, import, init and first_batch together.
        compile_s: in the phase compile. Compiling is slow, not stuck, so it has a limit of its own.
        step_s: between two progress lines from then on (warmup, steady, exit).
        total_s: from launch to the end of everything.
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
        env: variables added to the tuner's own environment; those of the protocol are set by the launcher and win.
        folder: the trial's folder, `runs/<study>/trials/0007`; made by the launcher when missing.
        spec: what the harness is asked for; written by the launcher. `spec.folder` must be `folder`, absolute.
        deadlines: when to give up.
        warm: modules that may be there before the program's first line, torch and perhaps torchvision: the launcher may then
            fork a process that has imported them instead of starting a fresh interpreter. () for a fresh start.
    """

    argv: list[str]
    cwd: str
    folder: Path
    spec: protocol.Spec
    env: dict[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    warm: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Ended:
    """What became of a trial's processes. None of them is left, or `problems` names those that are.

    Attributes:
        exit_code: of the first process, when it ended by itself; None when a signal or the launcher ended it.
        signal: name of the signal that ended the first process, "SIGSEGV"; None when none did or when the launcher sent it.
        cause: "result": every rank answered (or one answered and the others did not follow in time);
            "exit": the first process ended without that; "deadline": `evidence["deadline"]` names the limit;
            "stopped": `Running.stop` was called, `evidence["stop_reason"]` says why;
            "lost": what the launcher itself stands on was taken away (its supervisor was killed), `stop_reason` says what.
        phase: last one known, member of protocol.PHASES.
        results: this trial's rank results, by rank; those of another trial or attempt are problems instead.
        problems: what could not be read, did not belong here or would not end, one sentence each.
        seconds: from launch to the last process gone.
        start: how it started: "fresh", or "warm" as a fork of a process that had imported torch. Never warm unasked.
        spared_s: what the warm start has spared: a fresh one takes so much longer to the program's first line.
        evidence: {"log_tail", "stdout_tail" (last 8 KiB each, secrets masked), "oom_kills" (rise of the cgroup's counter;
            None where it cannot be read), "is_harness_seen", "num_steps", "files_left", "files_new", "files_kept",
            "files_aside", "files_unguarded" (what became of the user's files, see user_files.Report), "ready_s" (from launch
            to torch imported; None where it was not), "why_fresh" (only where a warm start was asked for and there was none)}
            and, by cause, "deadline" with "hang" (see hangs.Hang.as_json), "stop_reason". Plain JSON values.
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

    def facts(self, spec: protocol.Spec, *, device_used_frac: float | None = None) -> Facts:
        """Returns what `failures.classify` decides from.

        Args:
            spec: what this trial was asked.
            device_used_frac: largest share of the device's memory seen in use by the monitor, of any process; None unknown.
        """
        return Facts(
            exit_code=self.exit_code,
            signal=self.signal,
            cause=self.cause,
            phase=self.phase,
            results=self.results,
            problems=self.problems,
            log_tail=str(self.evidence.get("log_tail", "")),
            stop_reason=str(self.evidence.get("stop_reason", "")),
            deadline=str(self.evidence.get("deadline", "")),
            shut_out=str(self.evidence.get("shut_out", "")),
            hang=str(self.evidence.get("hang", {}).get("summary", "")),
            oom_kills=self.evidence.get("oom_kills") or 0,
            is_harness_seen=bool(self.evidence.get("is_harness_seen")),
            num_steps=int(self.evidence.get("num_steps", 0)),
            asked={**spec.knobs, **spec.passed},
            mode=spec.mode,
            device_used_frac=device_used_frac,
            memory_limit_bytes=spec.memory_limit_bytes,
        )


class Running(ABC):
    """A trial under way. Used by the study's loop only, from the thread that started it.

    Order: `poll` and `progress` in turn, several times a second, until `poll` returns; `stop` at any time. Both look at files
    and return at once, cheaply enough not to disturb the trial that is being measured; only a trial that has passed a deadline
    is looked at for up to a few seconds, to say where it is stuck.
    """

    @abstractmethod
    def poll(self) -> Ended | None:
        """Returns what became of the trial once all its processes are gone, None before; the same object from then on.

        The trial is over when every rank's result is there, the first process has ended, a deadline has passed, or `stop` was
        called. What is left of the process tree is then ended: SIGTERM, a grace, SIGKILL, spread over calls. Raises nothing
        for what the program does: results that cannot be read, foreign results and endless output are all in `Ended`.
        """

    @abstractmethod
    def progress(self) -> protocol.Progress | None:
        """Returns the newest progress line of rank 0; None before the harness has written one."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the whole process tree and returns when it is gone, within a few seconds; `poll` then returns Ended.

        Ctrl-C, SIGTERM and SIGHUP meanwhile do not cut it short: they are heard when it is done.

        May be called twice, and after the end: the first cause stays. A trial whose results were all there already keeps the
        cause "result".

        Args:
            reason: why, for `evidence["stop_reason"]`: "interrupted by the user".
        """


class Launcher(ABC):
    """Starts trials. One lives as long as a study; the tuner's process owns it."""

    @abstractmethod
    def start(self, launch: Launch) -> Running:
        """Returns the trial, started: spec.json is written before the first process exists.

        The program sees protocol.SPEC_VARIABLE, protocol.MARK_VARIABLE and the harness's injection folder first on PYTHONPATH;
        standard input is empty, output goes to protocol.STDOUT_FILE and protocol.STDERR_FILE in the trial's folder. Result and
        progress files of an earlier attempt in that folder are removed. A command that cannot be started is not an
        exception but a trial that ends with exit status 127 and says why in its log.

        Raises:
            BadInput: the working directory does not exist, the trial's folder cannot be written, or the system takes no such
                arguments or variables (a NUL in them).
        """

    def sweep(self, study: Path) -> list[str]:
        """Ends what an earlier, killed tuner left running for this study; called before its first trial, never beside one.

        A tuner that is killed leaves nothing as a rule; what this finds is left when its supervisor was killed with it.

        Args:
            study: the study's folder.

        Returns:
            One line per process ended: for the user.
        """
        return []

    def close(self) -> None:  # noqa: B027 (most launchers hold nothing)
        """Gives back what the launcher holds for the whole study, and ends what still runs. Called after the last trial."""
