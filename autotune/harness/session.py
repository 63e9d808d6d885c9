"""One trial's state in one process: what was asked, what was seen, when it is over.

Every process of a trial that imports torch has a session. It becomes the trial's voice only at the first optimizer step
(`activate`); loader workers, launch agents and helpers never get there and never write a result.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

from . import protocol
from .apply import process as apply_process
from .clock import Finished, Mark, make_clock
from .meter import DONE, STEADY, WARMUP, Meter

HEARTBEAT_S = 0.2  # at most five lines a second
INSPECT_STEPS = 3
ANNOUNCE_AHEAD = 2  # rank 0 announces the last step this many steps ahead: every rank sees it in time (collectives keep step)


class Session:
    """The harness in this process."""

    def __init__(self, spec_path: str) -> None:
        self.spec = protocol.read_spec(spec_path)
        self.pid = os.getpid()
        self.started_s = time.monotonic()
        self.phase = ""
        self.phases_s: Dict[str, float] = {}
        self._phase_since_s = self.started_s
        self.is_active = False
        self.is_over = False
        self.rank, self.world_size = _rank_from_environment()
        self._speaks_early = not _is_multiprocessing_child() and self.rank == 0
        self._progress = -1
        self._next_beat_s = 0.0
        self.num_steps = 0
        self.steps: Dict[str, List[float]] = {"end_s": [], "samples": [], "wait_s": []}
        self.error: Optional[Dict[str, str]] = None
        self.meter: Optional[Meter] = None
        self.clock: Any = None
        self.device = "cpu"
        self.window_wait_s = self.window_busy_s = 0.0
        self._last_seen: Any = None
        self._is_full = False  # the window has all it needs
        self._stop_at: Optional[int] = None
        self.enter("import")

    # --- start ---

    def torch_is_there(self) -> None:
        """Called once torch has been executed: applies what is applied early and watches for training."""
        from . import loaders, modules, optimizers, process

        process.limit_memory(self.spec)
        apply_process.apply(self.spec.knobs)
        self.losses = process.LossWatch()
        self.memory = process.MemoryWatch()
        self.loaders = loaders.LoaderWatch(self)
        self.modules = modules.ModuleWatch(self)
        self.optimizers = optimizers.OptimizerWatch(self)
        self._chain_excepthook()
        atexit.register(self._at_exit)
        self.enter("init")

    def _chain_excepthook(self) -> None:
        following = sys.excepthook

        def excepthook(kind: Any, value: Any, trace: Any) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                self.note_error(kind, value, trace)
            following(kind, value, trace)

        sys.excepthook = excepthook

    def note_error(self, kind: Any, value: Any, trace: Any) -> None:
        """Keeps the exception that is about to end the program."""
        names = [f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__]
        text = "".join(traceback.format_exception(kind, value, trace))
        self.error = {"type": names[0], "message": str(value)[-2000:], "traceback": text[-8000:]}

    # --- phases and heartbeat ---

    def enter(self, phase: str) -> None:
        """Marks the start of a phase; entering the same one again changes nothing."""
        if phase == self.phase:
            return
        now_s = time.monotonic()
        if self.phase:
            self.phases_s[self.phase] = self.phases_s.get(self.phase, 0.0) + now_s - self._phase_since_s
        self.phase, self._phase_since_s = phase, now_s
        self.beat(now_s)

    def beat(self, now_s: float) -> None:
        """Writes a progress line; the caller sees to the rate."""
        self._next_beat_s = now_s + HEARTBEAT_S
        if self.rank != 0 or not (self.is_active or self._speaks_early) or os.getpid() != self.pid:
            return
        rate = self.meter.rate_per_s if self.meter else None
        line = json.dumps({"time_s": now_s, "phase": self.phase, "step": self.num_steps, "rate_per_s": rate})
        try:
            if self._progress < 0:
                path = os.path.join(self.spec.folder, protocol.PROGRESS_FILE)
                self._progress = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._progress, line.encode() + b"\n")
        except OSError:
            pass  # the disk is full or the folder is gone: the trial's result will say so, the program goes on
        if self.is_active:
            self.memory.sample()

    # --- steps ---

    def activate(self) -> None:
        """Called before the first optimizer step is counted: from now on this process speaks for its rank."""
        self.is_active = True
        self.rank, self.world_size = _rank_of_process_group(self.rank, self.world_size)
        self.device = self.modules.device_type()
        self.clock = make_clock(self.device)
        self.memory.begin(self.device)
        apply_process.apply(self.spec.knobs)  # again: the program may have set its own at start-up

    def step_done(self) -> None:
        """Called after every counted optimizer step; everything here is on the program's critical path."""
        if self.is_over or os.getpid() != self.pid:
            return
        if not self.is_active:
            self.activate()
        self.num_steps += 1
        if self.spec.mode == "apply":
            return
        samples, wait_s, is_foreign = self.loaders.take_step(self.modules.take_samples())
        self.clock.mark(Mark(samples, wait_s, self._is_quiet(), is_foreign))
        for step in self.clock.finished():
            self._feed(step)
        if self.num_steps == 1:
            self._first_step()
        if self._must_leave():
            self.leave("measured")
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self.beat(now_s)

    def _first_step(self) -> None:
        self.meter = Meter(self.spec.rules, max(1, self.loaders.num_workers()))
        self.enter("compile" if self.modules.is_compiled() else "warmup")

    def _is_quiet(self) -> bool:
        seen = (self.modules.num_graphs(), self.memory.num_segments())
        last, self._last_seen = self._last_seen, seen
        return last is None or last == seen

    def _feed(self, step: Finished) -> None:
        meter, mark = self.meter, step.mark
        if meter is None:
            return
        self.steps["end_s"].append(step.end_s)
        self.steps["samples"].append(mark.samples)
        self.steps["wait_s"].append(mark.wait_s)
        if mark.is_foreign:
            return  # an evaluation or another loader's pass lay in this step: not training time
        before = meter.phase
        after = meter.feed(step.step_s, mark.samples, is_quiet=mark.is_quiet)
        if before == STEADY:
            self.window_wait_s += mark.wait_s
            self.window_busy_s += step.busy_s
        if after == WARMUP and mark.is_quiet:
            self.enter("warmup")
        elif before == WARMUP and after == STEADY:
            self.clock.open_window()
            self.loaders.open_window()
            self.enter("steady")
        self._is_full = after == DONE

    def _must_leave(self) -> bool:
        if self.spec.mode == "inspect":
            return self.num_steps >= INSPECT_STEPS
        if self.world_size == 1:
            return self._is_full
        # Ranks that left one by one would deadlock the others' collectives: rank 0 announces the last step.
        stop = os.path.join(self.spec.folder, protocol.STOP_FILE)
        if self._stop_at is None and self.rank == 0 and self._is_full:
            self._stop_at = self.num_steps + ANNOUNCE_AHEAD
            protocol.write_json(stop, {"step": self._stop_at})
        if self._stop_at is None and os.path.exists(stop):
            with open(stop, encoding="utf-8") as file:
                self._stop_at = int(json.load(file)["step"])
        return self._stop_at is not None and self.num_steps >= self._stop_at

    # --- end ---

    def leave(self, status: str) -> None:
        """Writes the result and ends the process at once: `except:` in the program cannot catch this."""
        self.is_over = True
        self.clock.close_window()
        self.enter("exit")
        self.write_result(status)
        print(f"autotune: trial {self.spec.trial} is measured; autotune ends the program here", flush=True)
        sys.stderr.flush()
        os._exit(0)

    def _at_exit(self) -> None:
        # The program ended by itself, or by an exception, before the window was full.
        if self.is_over or os.getpid() != self.pid or self.spec.mode == "apply" or threading.current_thread() is not threading.main_thread():
            return
        if not self.is_active and (self.error is None or _is_multiprocessing_child()):
            return  # nothing trained here: an agent, a helper, a worker
        self.is_over = True
        if self.clock is not None:
            self.clock.close_window()
        path = os.path.join(self.spec.folder, protocol.result_file(self.rank))
        if not self.is_active and os.path.exists(path):
            return
        self.enter("exit")
        self.write_result("failed" if self.error else "ended")

    def write_result(self, status: str) -> None:
        """Writes this rank's result file."""
        from . import report

        result = report.result(self, status)
        protocol.write_json(os.path.join(self.spec.folder, protocol.result_file(self.rank)), result)


def _rank_from_environment() -> "tuple[int, int]":
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def _rank_of_process_group(rank: int, world_size: int) -> "tuple[int, int]":
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank, 1  # several processes without a process group do not train together


def _is_multiprocessing_child() -> bool:
    arguments: Callable[[], List[str]] = lambda: getattr(sys, "orig_argv", sys.argv)  # noqa: E731
    return any(word.startswith("--multiprocessing-fork") for word in arguments())
