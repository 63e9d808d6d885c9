"""Decides which time limit a trial has passed, and where it hangs, from the stacks of all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.harness.protocol import SCRATCH, STACK_FILE, STACK_SIGNAL, STACKS_FILE, place_of
from autotune.launchers.base import Deadlines
from autotune.launchers.progress_file import ProgressFile
from autotune.log_messages import LIBRARY_FILE
from autotune.records import START_PHASES

MOVING_S = 2.0  # a trial that has made progress in this time does not hang: it is slow, or its rate never becomes steady
ANSWER_S = 0.5  # longest wait for one process to write its stacks after a signal
TOTAL_S = 3.0  # longest wait for all processes that are sent a signal
# Longest wait for processes that cannot be sent a signal, and write their stacks once the file STACKS_FILE exists. They look
# for this file once a second.
AWAY_S = 4.0
MAX_STACK_BYTES = 256 << 10
MAX_FRAMES = 12  # number of innermost frames of each process that the evidence contains

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_HARNESS = os.path.join("autotune", "harness") + os.sep
_RECIPE = "/autotune/programs/"  # a recipe's program counts as user code, although autotune may be an installed package
_HELPER = re.compile(
    r"/multiprocessing/(?:resource_tracker|forkserver)\.py$|/torch/_inductor/compile_worker/"
    r"|/torch/distributed/(?:run|launch|elastic/.*|launcher/.*)\.py$"
)
_SERVED = "_serve_one"  # the function in which a process forked by multiprocessing's fork server does its work
_COLLECTIVE = re.compile(r"/torch/distributed/|/torch/nn/parallel/distributed\.py$")
_BACKWARD = "_engine_run_backward"  # autograd's call into C++; at its end DDP waits for the other ranks
_COMPILER = re.compile(r"/torch/_dynamo/convert_frame\.py$|/torch/_inductor/")
_RENDEZVOUS = re.compile(r"/torch/distributed/elastic/rendezvous/")
_IMPORT = "<frozen importlib"
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def passed_limit(deadlines: Deadlines, progress: ProgressFile, *, started_s: float, now_s: float) -> str:
    """Returns the exceeded time limit in words, such as "compile: it did not finish within 300 s"; "" if there is none."""
    phase = progress.phase
    if phase in START_PHASES:
        what, limit_s, since_s = f"start: no training step began (last phase: {phase})", deadlines.start_s, started_s
    elif phase == "compile":
        what, limit_s, since_s = "compile: it did not finish", deadlines.compile_s, progress.since_s
    else:
        what, limit_s, since_s = f"step: nothing moved in phase {phase}", deadlines.step_s, progress.changed_s
    if now_s - since_s > limit_s:
        return f"{what} within {round(limit_s, 1):g} s"
    if now_s - started_s > deadlines.total_s:
        steps = ", still making steps" if is_moving(progress, now_s=now_s) else ""
        return f"total: the trial was not over within {round(deadlines.total_s, 1):g} s (last phase: {phase}{steps})"
    return ""


def is_moving(progress: ProgressFile, *, now_s: float) -> bool:
    """Returns whether a trial has reached warm-up or a later phase, and has made progress in the last MOVING_S."""
    return progress.phase not in (*START_PHASES, "compile") and now_s - progress.changed_s <= MOVING_S


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: str
    function: str

    @property
    def is_user(self) -> bool:
        """Whether its file is the user's: it belongs neither to Python itself nor to an installed package."""
        return _RECIPE in self.file or not LIBRARY_FILE.search(self.file)

    def __str__(self) -> str:
        return f"{_place(self)} in {self.function}"


def _place(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line}"


@dataclass(kw_only=True)
class Looked:
    """State and stack of one process.

    Attributes:
        pid: its id.
        state: as psutil names it: "running", "sleeping", "stopped", ...; "" if its stacks came from a file.
        rank: its rank, from its environment; None if the environment has none.
        world_size: number of ranks, from its environment; 1 if the environment does not say.
        host: name of its machine; "" if it runs on this machine.
        frames: frames of the main thread, innermost call first, without the harness's frames; empty if none were reported.
    """

    pid: int
    state: str = ""
    rank: int | None = None
    world_size: int = 1
    host: str = ""
    frames: list[Frame] = field(default_factory=list)

    @property
    def is_worker(self) -> bool:
        """Whether it is a DataLoader worker."""
        return any(frame.function == "_worker_loop" for frame in self.frames)

    @property
    def is_helper(self) -> bool:
        """Whether it only starts or serves other processes, as torchrun and multiprocessing's resource tracker do."""
        is_forked = any(frame.function == _SERVED for frame in self.frames)
        return not is_forked and any(_HELPER.search(frame.file) for frame in self.frames)

    @property
    def is_idle_worker(self) -> bool:
        """Whether it is a DataLoader worker that is not fetching samples, so it waits for its next task."""
        return self.is_worker and not any(frame.function == "fetch" for frame in self.frames)

    @property
    def is_in_loader(self) -> bool:
        """Whether it is inside a DataLoader's `__next__`."""
        return any(frame.function == "__next__" and "/torch/utils/data/" in frame.file for frame in self.frames)

    @property
    def is_compiling(self) -> bool:
        """Whether torch's compiler is running; an import of the compiler's modules does not count."""
        return any(_COMPILER.search(frame.file) and frame.function != "<module>" for frame in self.frames)

    @property
    def waits_for_peers(self) -> bool:
        """Whether it is in a call in which ranks wait for each other: a collective or the backward pass.

        An import does not count, not even one of torch.distributed.
        """
        above = []
        for frame in self.frames:
            if frame.is_user or frame.file.startswith(_IMPORT):
                break
            above.append(frame)
        called = [frame for frame in above if frame.function != "<module>"]
        return any(_COLLECTIVE.search(frame.file) or frame.function == _BACKWARD for frame in called)

    @property
    def where(self) -> str:
        """Where it is, such as "train.py:9 in f (inside poll, popen.py:7)".

        This names the innermost call in user code and, if user code called a library, the innermost call of all. If there is no
        user code on the stack, it names only the innermost call.
        """
        inner = self.frames[0]
        own = next((frame for frame in self.frames if frame.is_user), None)
        if own is None or own is inner:  # None if the innermost 100 frames, which faulthandler writes, are of libraries
            return str(inner)
        if any(frame.file.startswith(_IMPORT) for frame in self.frames[: self.frames.index(own)]):
            return f"{own} (in an import)"
        return f"{own} (inside {inner.function}, {_place(inner)})"

    @property
    def name(self) -> str:
        """Name for messages: "rank 1", or "rank 1 on n2" on another machine; "rank 0" if its rank is not known."""
        return f"rank {self.rank or 0}{f' on {self.host}' if self.host else ''}"


@dataclass(kw_only=True)
class Hang:
    """Where a trial hangs.

    Attributes:
        kind: "stopped", "collective", "loader", "compile", "user code", "rendezvous" or "unknown".
        summary: where and why it hangs, in words, for the trial's reason.
        processes: state and stack of each process, for the evidence.
    """

    kind: str
    summary: str
    processes: list[Looked]

    def as_json(self) -> dict[str, Any]:
        """Returns {"kind", "summary", "processes": [{"pid", "rank", "host", "state", "stack": ["train.py:3 in f", ...]}]}."""
        found = [
            {"pid": p.pid, "rank": p.rank, "host": p.host, "state": p.state, "stack": [*map(_full, p.frames[:MAX_FRAMES])]}
            for p in self.processes
        ]
        return {"kind": self.kind, "summary": self.summary, "processes": found}


def look(processes: Sequence[psutil.Process], log: Path) -> Hang:
    """Returns where a trial hangs. Takes up to TOTAL_S, or up to AWAY_S if stacks of some processes are requested by a file.

    Args:
        processes: the trial's processes on this machine.
        log: file of the trial's standard error, to which processes write their stacks on a signal. Processes on other machines,
            or with another standard error, write theirs to files in the folder "scratch" next to it, once a file requests them.
    """
    begun_s, scratch = time.monotonic(), log.parent / SCRATCH
    with contextlib.suppress(OSError):  # the disk is full or read-only: no stacks are requested by a file
        if scratch.is_dir():
            (scratch / STACKS_FILE).touch()
    here = [found for process in processes if (found := _inspected(process, log, begun_s + TOTAL_S)) is not None]
    away = _answers(scratch, begun_s + AWAY_S)
    reached = {p.pid for p in away if not p.host}
    return understood([*(p for p in here if p.pid not in reached), *away])


def understood(found: Sequence[Looked]) -> Hang:
    """Returns where a trial hangs, from the states and stacks of its processes."""
    known = [p for p in found if p.frames and not p.is_helper]
    workers, ranks = [p for p in known if p.is_worker], [p for p in known if not p.is_worker]
    kind, summary = (
        _stopped(found)
        or _collective(ranks)
        or _loader(ranks, workers)
        or _user_code(ranks)
        or _rendezvous(found)
        or _unknown(found)
    )
    return Hang(kind=kind, summary=summary, processes=list(found))


def _stopped(found: Sequence[Looked]) -> tuple[str, str] | None:
    stopped = [p for p in found if p.state in _STOPPED]
    if not stopped:
        return None
    return "stopped", f"process {stopped[0].pid} of the program is stopped (by SIGSTOP, or in a debugger)"


def _collective(ranks: Sequence[Looked]) -> tuple[str, str] | None:
    numbers = {p.rank for p in ranks if p.rank is not None}
    world_size = max((p.world_size for p in ranks), default=1)
    gone = sorted(set(range(world_size)) - numbers) if numbers else []
    waiting = [p for p in ranks if p.waits_for_peers]
    others = [p for p in ranks if not p.waits_for_peers]
    if not waiting or len(ranks) + len(gone) < 2:
        return None
    here = f"{waiting[0].name} waits for the other ranks at {waiting[0].where}"
    if others:
        return "collective", f"{here}, while {others[0].name} is at {others[0].where}"
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        missing = f"rank {gone[0]} of {world_size}{more} missing"
        return "collective", f"{here}; {missing} (ended, never started, or unable to answer)"
    places = "; ".join(f"{p.name} at {p.where}" for p in waiting[:2])
    return "collective", f"all {len(waiting)} ranks wait for each other: {places}"


def _loader(ranks: Sequence[Looked], workers: Sequence[Looked]) -> tuple[str, str] | None:
    waiting = next((p for p in ranks if p.is_in_loader), None)
    if waiting is None:
        return None
    busy = next((p for p in workers if not p.is_idle_worker), None)
    if busy is not None:
        return "loader", f"waiting for the loader, whose worker process {busy.pid} is at {busy.where}"
    if workers:
        return "loader", f"waiting at {waiting.where} for the loader, whose workers are idle"
    return "loader", f"in the loader at {waiting.where}"


def _user_code(ranks: Sequence[Looked]) -> tuple[str, str] | None:
    if not ranks:
        return None
    first = min(ranks, key=lambda p: p.rank or 0)
    if first.is_compiling:
        return "compile", f"in torch's compiler, called at {first.where}"
    return "user code", f"user code at {first.where}"


def _rendezvous(found: Sequence[Looked]) -> tuple[str, str] | None:
    waiting = [p for p in found if any(_RENDEZVOUS.search(frame.file) for frame in p.frames)]
    if not waiting:
        return None
    on = ", ".join(sorted({p.host or platform.node() for p in waiting}))
    what = "waits for the other nodes: fewer than --nnodes have met at --rdzv_endpoint, or some cannot reach it"
    return "rendezvous", f"torchrun on {on} {what}"


def _unknown(found: Sequence[Looked]) -> tuple[str, str]:
    if not found:
        return "unknown", "no process of the trial is left"
    states = ", ".join(f"process {p.pid} {p.state}" for p in found[:3])
    return "unknown", f"no stack could be read ({states})"


# Reading a process's state and stack ---------------------------------------------------------------------------------------


def _inspected(process: psutil.Process, log: Path, until_s: float) -> Looked | None:
    try:
        state = process.status()
        found = Looked(pid=process.pid, state=_in_words(process.pid, state))
        with contextlib.suppress(psutil.AccessDenied):
            if place := place_of(process.environ()):
                found.rank, found.world_size = place
        if state not in _STOPPED and time.monotonic() < until_s and _can_report(process.pid, log):
            found.frames = _reported(process, log)
    except (psutil.Error, OSError):
        return None
    return found


def _answers(scratch: Path, until_s: float) -> list[Looked]:
    """Returns the processes that have written their stacks to a file. While a file is empty, waits for it until `until_s`."""
    while not all(texts := _written(scratch)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return [found for text in texts if (found := _parsed_answer(text)) is not None]


def _written(scratch: Path) -> list[str]:
    texts = []
    for file in sorted(scratch.glob(STACK_FILE.format(host="*", pid="*"))):
        with contextlib.suppress(OSError):  # ESTALE: on a network file system, another node has just replaced this file
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return texts


def _parsed_answer(text: str) -> Looked | None:
    said, _, stacks = text.partition("\n")
    try:
        about = json.loads(said)
        rank, world_size = about["place"] or (None, 1)
        host = "" if about["host"] == platform.node() else str(about["host"])
        return Looked(pid=int(about["pid"]), rank=rank, world_size=world_size, host=host, frames=parsed(stacks))
    except (ValueError, TypeError, LookupError, RecursionError):  # no answer yet, or another program's file
        return None


def _in_words(pid: int, state: str) -> str:
    """Returns the state. For uninterruptible sleep, as when a file server is lost, adds the kernel function it sleeps in."""
    if state != psutil.STATUS_DISK_SLEEP:
        return state
    function = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    return f"{state} in {function if function.strip('0') else 'the kernel'}"  # "0" if the kernel hides the function


def _can_report(pid: int, log: Path) -> bool:
    """Whether the process handles the stack signal (the harness installs a handler), and writes its stderr to this log."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    is_caught = caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
    try:
        return is_caught and os.path.samefile(f"/proc/{pid}/fd/2", log)
    except OSError:  # the process has closed its stderr
        return False


def _reported(process: psutil.Process, log: Path) -> list[Frame]:
    """Makes a process write its stacks to the log; returns the frames of its main thread."""
    before = log.stat().st_size
    process.send_signal(STACK_SIGNAL)
    text, until_s = "", time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        time.sleep(0.01)
        last = text
        with log.open("rb") as file:
            file.seek(before)
            text = file.read(MAX_STACK_BYTES).decode("utf-8", errors="replace")
        if text and text == last:
            break
    return parsed(text)


def parsed(text: str) -> list[Frame]:
    """Returns the main thread's frames, innermost first, without the harness's frames.

    `text` is faulthandler's output, in which the main thread comes last.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(Frame(file=found[1], line=found[2], function=found[3]))
    return [frame for frame in frames if _HARNESS not in frame.file]


def _full(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"
