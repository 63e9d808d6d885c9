"""One trial's state in one process: what was asked, what was seen, when it is over.

Every process of a trial that imports torch has a session. It becomes the trial's voice only at the first optimizer step
(`activate`); loader workers, launch agents and helpers never get there and never write a result.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from typing import Any, Dict, List, Optional

from . import affinity, protocol
from .apply import attention as apply_attention
from .apply import device as apply_device
from .apply import memory as apply_memory
from .apply import process as apply_process
from .clock import Finished, make_clock
from .meter import DONE, STEADY, WARMUP, Meter

HEARTBEAT_S = 0.2  # at most five lines a second
INSPECT_STEPS = 5  # every optimizer has had its turn, and there are steps to time roughly
PARITY_STEPS = 8  # a parity run makes so many, however slow they are
EAGER_STEPS = 8  # looked at one by one
LOOK_S = 0.1  # then at most ten looks a second: two blocks, as a look finds its code cold and costs some for that
EXIT_BROKEN = 70  # EX_SOFTWARE: the harness itself failed
LAST_RANK_S = 5.0
ANNOUNCE_AHEAD = 2  # rank 0 announces the last step this many steps ahead: every rank sees it in time (collectives keep step)


class Session:
    """The harness in this process."""

    def __init__(self, spec_path: str) -> None:
        self.spec = protocol.read_spec(spec_path)
        self.pid = os.getpid()
        self.started_s = time.monotonic()
        self.binder = affinity.Binder(self.spec.knobs, self.spec.device)  # before torch counts the cores
        self.phase = ""
        self.phases_s: Dict[str, float] = {}
        self._phase_since_s = self.started_s
        self.is_active = False
        self.is_over = False
        self.rank, self.world_size = _rank_from_environment()
        self._is_child = _is_multiprocessing_child()
        self._progress = self._spare = -1
        self._is_applying = self.spec.mode == "apply"
        if not self._is_applying:
            self._spare = os.open(os.devnull, os.O_RDONLY)  # given back for the result of a program that has used them all up
        self._next_beat_s = self._next_look_s = 0.0
        self.speaks = not self._is_applying and self._is_first_to_speak()  # writes progress lines
        self.num_steps = 0
        self._is_stepped_by_hand = False  # the program tells its steps: `autotune.trial_step`
        self._stated_samples: Optional[float] = None
        self.steps: Dict[str, List[float]] = {"end_s": [], "samples": [], "wait_s": []}
        self.error: Optional[Dict[str, str]] = None
        self.failed_s: Optional[float] = None
        self.meter: Optional[Meter] = None
        self.clock: Any = None
        self.device = "cpu"
        self.window_wait_s = self.window_busy_s = self.window_s = self.window_samples = 0.0
        self._last_seen: Any = None
        self._is_full = False  # the window has all it needs
        self._is_plain = False  # nothing is looked for any more: steps may take the short way
        self._stop_at: Optional[int] = None
        self._eager_steps = max(EAGER_STEPS, self.spec.max_steps or 0)
        self.enter("import")

    # --- start ---

    def torch_is_there(self) -> None:
        """Called once torch has been executed: applies what is applied early and watches for training."""
        from . import applied, boot, gradients, loaders, losses, modules, optimizers, process, ranks, supply

        self.applied: Any = applied.Applied(self, is_called=boot.is_called) if self._is_applying else None
        process.limit_memory(self.spec)
        apply_process.apply(self.spec.knobs)
        apply_attention.apply(self.spec.knobs)
        if self.spec.seed is not None:
            losses.seed_everything(self.spec.seed)
        self.losses: Any = None if self._is_applying else losses.LossWatch(self, self.spec.max_steps)
        self.memory = process.MemoryWatch()
        self.loaders = loaders.LoaderWatch(self)
        self.supply = supply.Supply(self.loaders, self.binder)
        self.modules = modules.ModuleWatch(self)
        self.communication = ranks.Communication(self.modules.parallel)
        self.optimizers = optimizers.OptimizerWatch(self)
        self.gradients = gradients.Gradients(self)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)
        self.enter("init")

    def _is_first_to_speak(self) -> bool:
        # One process tells of the time before training. Those it starts (compile workers, helpers) begin to speak when they
        # train themselves.
        is_first = protocol.SPEC_VARIABLE + "_IS_SPOKEN_FOR" not in os.environ and self.rank == 0
        os.environ[protocol.SPEC_VARIABLE + "_IS_SPOKEN_FOR"] = "1"
        return is_first

    def speak(self) -> None:
        """From now on this process writes progress lines: it trains."""
        self.speaks = not self._is_applying

    def _forked(self) -> None:
        # A fork may go on to train (a launcher that forks its ranks); one of a process that trains does not.
        self.pid = os.getpid()
        self._is_child, self.speaks = True, False
        self.is_over = self.is_over or self.is_active
        self._is_plain = False

    def note_error(self, kind: Any, value: Any, trace: Any) -> None:
        """Keeps the exception that is about to end the program."""
        self.failed_s = time.monotonic()
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
        if self.rank != 0 or not self.speaks:
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

    # --- steps ---

    def activate(self) -> None:
        """Called before the first optimizer step is counted: from now on this process speaks for its rank."""
        self.is_active = True
        self.speak()
        self.rank, self.world_size = _rank_of_process_group(self.rank, self.world_size)
        self.device = self.modules.device_type()
        if not self._is_applying:
            self.clock = make_clock(self.device)
            self.memory.begin(self.device, self.spec.memory_limit_bytes)
        apply_memory.begin(self.spec.knobs, self.device, self.spec.memory_limit_bytes)
        apply_process.apply(self.spec.knobs)  # again: the program may have set its own at start-up
        apply_attention.apply(self.spec.knobs)
        apply_device.apply(self.spec.knobs, self.device)
        self.binder.bind_again()

    def plain_step_hook(self, otherwise: Any) -> Any:
        """Returns the hook after the steps of an optimizer at rest: steps as nearly all are, fed one batch by one loader.

        The same as `step_done` in one call with everything at hand: measured, a call of cold code costs a microsecond, and a
        step had seventeen.

        Args:
            otherwise: the hook for all other steps.
        """
        modules, touched, training, mark = self.modules, self.loaders.touched, self.loaders.training, self.clock.mark

        def after_plain_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if len(touched) != 1 or touched[0] is not training or modules.is_evaluated or not self._is_plain:
                otherwise(optimizer, args, kwargs)
                return
            touched.clear()
            self.num_steps = training.fed_step = self.num_steps + 1
            samples, wait_s = training.samples, training.wait_s
            training.total_samples += samples
            training.total_wait_s += wait_s
            training.total_batches += training.num_yields
            training.num_steps_fed += 1
            training.num_steps_running += 1
            training.samples = training.wait_s = training.num_yields = 0
            now_s = mark(samples, wait_s, False)
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S
                try:
                    self._look(now_s)
                except Exception:
                    self.broke("looking at the steps")

        after_plain_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return after_plain_step

    def step_done(self) -> None:
        """Called after every counted optimizer step; everything here is on the program's critical path."""
        if self.is_over or self._is_stepped_by_hand:
            return
        try:
            self._step_done()
        except Exception:
            self.broke("counting a step")

    def trial_step(self, samples: Optional[float]) -> None:
        """Counts a step by the program's own word; from the first on, those of its optimizers count no more.

        Args:
            samples: of this step, in this process; None leaves them to the loader, or counts steps.
        """
        if self.is_over:
            return
        self._is_stepped_by_hand, self._is_plain, self._stated_samples = True, False, samples
        try:
            self._step_done()
        except Exception:
            self.broke("counting a step")

    def _step_done(self) -> None:
        if not self.is_active:
            self.activate()
        self.num_steps += 1
        if self.modules.is_looking:
            self.modules.step_done()
        if self._is_applying:
            self.applied.step_done()
            return
        samples, wait_s, is_foreign = self.loaders.take_step(self.modules.take_samples(), self.modules.unit)
        if self._stated_samples is not None:
            samples = float(self._stated_samples)
            self.loaders.unit, self.loaders.unit_source = "samples", "autotune.trial_step"
        if self.modules.is_evaluated:
            is_foreign = self.modules.take_evaluated() or is_foreign
        now_s = self.clock.mark(samples, wait_s, is_foreign)
        # Short steps are looked at several at once: cold code at every step costs far more than it does in a row.
        if now_s >= self._next_look_s or self.num_steps <= self._eager_steps or self.world_size > 1:
            self._next_look_s = now_s + LOOK_S
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        if not self._is_quiet():
            self.clock.noise()
        self._feed(list(self.clock.finished()))
        # The loader's batches say how many samples a step has: its calls need not (a GPU's clock wants to know of them).
        self.modules.is_counting = self.device == "cuda" or self.loaders.unit_source != "loader"
        self.modules.settle()
        if self.num_steps == 1:
            self._first_step()
        is_alone = self.world_size == 1 and not self._is_stepped_by_hand and self.loaders.unit_source == "loader"
        is_settled = not self.modules.is_looking and self.optimizers.scaler is None and self.num_steps > self._eager_steps
        self._is_plain = is_alone and is_settled
        self.optimizers.settle(is_at_rest=self._is_plain and not self.modules.is_counting)
        if self._must_leave():
            self.leave("measured")
        if now_s >= self._next_beat_s:
            self.beat(now_s)
            self.memory.look(now_s)
            self.losses.look_again(now_s)

    def _first_step(self) -> None:
        # Ranks keep step: each has an equal part of the rate.
        race, promote = (
            None if limit is None else limit / self.world_size
            for limit in (self.spec.race_below_per_s, self.spec.promote_above_per_s)
        )
        width = max(1, self.loaders.num_workers())
        self.meter = Meter(self.spec.rules, width, race_below_per_s=race, promote_above_per_s=promote)
        self.enter("compile" if self.modules.is_compiled() else "warmup")

    def _is_quiet(self) -> bool:
        segments, retries = self.memory.movement()
        if self.phase == "steady":
            segments = 0  # one more segment disturbs nothing there
            retries = 0  # thrashing is told by their number in the result: no reason to begin the window anew
        seen = (self.modules.num_graphs(), segments, retries, self.phase == "steady")
        last, self._last_seen = self._last_seen, seen
        if last is not None and last[3] != seen[3]:
            return bool(last[0] == seen[0])
        return last is None or bool(last == seen)

    def _feed(self, steps: List[Finished]) -> None:
        meter = self.meter
        if meter is None or not steps:
            return
        self.steps["end_s"] += [step.end_s for step in steps]
        self.steps["samples"] += [step.samples for step in steps]
        self.steps["wait_s"] += [step.wait_s for step in steps]
        if self._stop_at is not None:
            return  # the window is over
        if self.spec.mode == "parity":  # nothing is measured: it is over after so many steps, or so much time since the first
            is_late = self.steps["end_s"][-1] - self.steps["end_s"][0] >= (self.spec.max_s or math.inf)
            is_late = is_late and self.num_steps >= PARITY_STEPS
            self._is_full = is_late or self.num_steps >= (self.spec.max_steps or 0)
            return
        steps = [step for step in steps if not step.is_foreign]  # with an evaluation in it, say: not training time
        if meter.phase == WARMUP:
            meter.is_draining = self.supply.drains_within(self.spec.rules.drain_max_s)
        while meter.phase == WARMUP and steps:
            step = steps.pop(0)
            if meter.feed(step.step_s, step.samples, is_quiet=step.is_quiet) == STEADY:
                self._open_window()
            elif step.is_quiet:
                self.enter("warmup")
        if meter.phase == STEADY and steps:
            self._feed_window(meter, steps)
        self._is_full = meter.phase == DONE

    def _open_window(self) -> None:
        self.window_wait_s = self.window_busy_s = self.window_s = self.window_samples = 0.0
        self.clock.open_window()
        self.supply.open_window()
        self.optimizers.open_window()
        self.memory.open_window()
        self.enter("steady")

    def _feed_window(self, meter: Meter, steps: List[Finished]) -> None:
        self.window_wait_s += sum([step.wait_s for step in steps])
        self.window_busy_s += sum([step.busy_s for step in steps])
        self.window_s += sum([step.step_s for step in steps])
        self.window_samples += sum([step.samples for step in steps])
        is_quiet = all([step.is_quiet for step in steps])
        meter.is_draining = self.supply.is_falling
        meter.feed_window([step.step_s for step in steps], [step.samples for step in steps], is_quiet=is_quiet)
        if meter.phase == DONE:
            self.supply.close_window()
        elif meter.phase == WARMUP:  # something was compiled: from the start
            self.enter("compile" if self.modules.is_compiled() else "warmup")

    def _must_leave(self) -> bool:
        if self.spec.mode == "inspect":
            return self.num_steps >= INSPECT_STEPS
        if self.world_size == 1:
            return self._is_full
        # Ranks that left one by one would deadlock the others' collectives: rank 0 announces the last step.
        stop = os.path.join(self.spec.folder, protocol.STOP_FILE)
        if self._stop_at is not None:
            if self.communication.is_looking:
                self.communication.step_done()
        elif self.rank == 0 and self._is_full:
            self._stop_at = self.num_steps + ANNOUNCE_AHEAD + self.clock.run_ahead + self._num_steps_after()
            protocol.write_json(stop, {"step": self._stop_at})
            self._look_at_communication()
        elif os.path.exists(stop):
            with open(stop, encoding="utf-8") as file:
                self._stop_at = int(json.load(file)["step"])
            self._look_at_communication()
        return self._stop_at is not None and self.num_steps >= self._stop_at

    def _num_steps_after(self) -> int:
        window = self.meter.window() if self.meter is not None and self.spec.mode == "measure" else None
        return 0 if window is None else self.communication.num_steps(window.seconds / max(1, window.steps))

    def _look_at_communication(self) -> None:
        if self.spec.mode == "measure":
            self.communication.begin(is_compiled=self.modules.num_graphs() > 0)

    # --- end ---

    def leave(self, status: str) -> None:
        """Writes the result and ends the process at once: `except:` in the program cannot catch this."""
        self.clock.close_window()
        self.enter("exit")
        self.write_result(status)
        self.is_over = True
        try:
            if self.communication.probe():
                self.write_result(status)
            if self.rank == 0:
                self._await_other_ranks()
                _say(f"autotune: trial {self.spec.trial} is measured; autotune ends the program here")
            _end_daemons()
        finally:
            os._exit(0)

    def _await_other_ranks(self) -> None:
        # Rank 0 may hold the store that the others still talk to.
        names = [protocol.result_file(rank) for rank in range(1, self.world_size)]
        until_s = time.monotonic() + LAST_RANK_S
        while time.monotonic() < until_s and not all(os.path.exists(os.path.join(self.spec.folder, name)) for name in names):
            time.sleep(0.01)

    def broke(self, doing: str) -> None:
        """Called in an `except` block around the harness's own code: its faults end the trial in the open, as a failed result.

        When the program is not measured but run (mode "apply"), the harness stands aside instead.
        """
        if self._is_applying:
            from . import boot

            if not self.is_over:
                boot.stand_aside(doing)
            self.is_over = True
            with contextlib.suppress(Exception):  # it may have failed before they were there
                self.modules.is_looking = False
                self.modules.stop_looking()
            return
        sys.stderr.write(f"autotune: the harness failed while {doing}\n{traceback.format_exc()}")
        if self.is_over:
            return
        self.is_over = True
        self.note_error(*sys.exc_info())
        assert self.error is not None
        self.error["message"] = f"autotune's harness failed while {doing}: {self.error['message']}"
        try:
            from . import report

            path = os.path.join(self.spec.folder, protocol.result_file(self.rank))
            protocol.write_json(path, report.bare(self, "failed"))
        finally:
            os._exit(EXIT_BROKEN)

    def give_up(self, why: str) -> None:
        """Ends a program that cannot be measured, with what was seen of it, and the process at once."""
        if self.is_over or self.spec.mode == "apply":
            return
        self.is_over = True
        self.error = {"type": protocol.UNMEASURABLE, "message": why, "traceback": ""}
        try:
            from . import report

            protocol.write_json(os.path.join(self.spec.folder, protocol.result_file(self.rank)), report.unmeasured(self))
            _say(f"autotune: {why}; autotune ends the program here")
            _end_daemons()
        finally:
            os._exit(0)

    def _at_exit(self) -> None:
        # The program ended by itself, or by an exception, before the window was full.
        if self.is_over or threading.current_thread() is not threading.main_thread():
            return
        if self._is_applying:
            try:
                if not self._is_child:
                    self.applied.at_exit()
            except Exception:
                self.broke("ending")
            return
        self._give_spare_back()
        value = getattr(sys, "last_value", None)  # set by the interpreter whatever has become of sys.excepthook
        if value is not None and not isinstance(value, KeyboardInterrupt):
            self.note_error(type(value), value, value.__traceback__)
            self.error = {**(self.error or {}), **self.loaders.dead_worker()}
        try:
            if self.is_active:
                self._end()
            elif self.error is not None and not self._is_child:
                self._tell_error()
        except Exception:
            self.broke("writing the result")

    def _give_spare_back(self) -> None:
        with contextlib.suppress(OSError):  # the program has closed what it does not know
            os.close(self._spare)

    def _end(self) -> None:
        try:
            self.clock.close_window()
        except Exception:  # a device in error: what was measured is told all the same
            traceback.print_exc()
        self.enter("exit")
        self.write_result("failed" if self.error else "ended")
        self.is_over = True

    def _tell_error(self) -> None:
        # Nothing trained in this process, but an exception ended it: before training, or one that a rank of its own raised.
        from . import report

        path = os.path.join(self.spec.folder, protocol.result_file(self.rank))
        found = report.bare(self, "failed")
        found.memory = self.memory.summary()
        if os.path.exists(path):
            found = protocol.read_result(path)
            if found.status != "ended":
                return
            found.status, found.error, found.failed_s = "failed", self.error, self.failed_s
        protocol.write_json(path, found)

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
    return any(word.startswith("--multiprocessing-fork") for word in getattr(sys, "orig_argv", sys.argv))


def _say(line: str) -> None:
    try:
        print(line, flush=True)
        sys.stderr.flush()
    except Exception:  # the program has closed them, or the disk is full
        pass


def _end_daemons() -> None:
    # What multiprocessing does at a normal exit: loader workers would notice only after seconds that nobody needs them.
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        if child.daemon:
            child.terminate()
