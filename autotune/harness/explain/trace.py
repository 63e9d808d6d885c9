"""The pass "trace": a few steps under torch.profiler, exported as a trace, which the tuner evaluates."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import time
from typing import Any, List, Optional

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from ..context import TrialContext
from ..protocol import SCRATCH
from .base import Pass, mean_step_s
from .documents import OTHER, TRACE, Traced, trace_file
from .kineto import NO_KERNELS, quiet
from .peaks import peaks
from .phase_marks import Marks
from .sources import Sources
from .syncs import SyncSites

MIN_STEPS, MAX_STEPS = 4, 50  # steps to trace, unless MAX_EVENTS or MAX_S allows fewer
WANTED_S = 0.25  # short steps are traced until they add up to this
MAX_EVENTS = 200_000  # maximum number of events in the whole trace, estimated from those of the first step
MAX_S = 20.0  # after this time under the profiler, no further step is traced
RANGE = "autotune::"


class TracePass(Pass):
    """Traces a first step, to learn how many events a step has, and then as many steps as needed."""

    which = TRACE

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._plain_step_s: Optional[float] = None
        self._profiler: Any = None
        self._range: Any = None
        self._num_wanted: Optional[int] = None  # None while the first step is traced
        self._num_steps = 0
        self._begun_s = self._step_begun_s = self._seconds = 0.0
        self._left_out: List[int] = []  # numbers of steps with an evaluation, and how long they took
        self._left_out_s = 0.0
        self._is_left_out = False  # whether the current step is left out; its number is then the last in `_left_out`

    def begin(self) -> None:
        """See the base class."""
        context = self.context
        self._plain_step_s = mean_step_s(context.window.plain_s)
        self._marks = Marks(context)
        self._marks.on_change = self._enter
        self._syncs = SyncSites(context, self._marks, Sources())  # it also marks copies of batches to the device as a phase
        self._syncs.install()
        self._marks.install()
        self._marks.between_steps = self._start

    def step_done(self) -> None:
        """See the base class."""
        if self._marks.between_steps is not None:  # not called yet, because no phase has begun since the last step
            act, self._marks.between_steps = self._marks.between_steps, None
            act()
        if not self.is_over:
            self._marks.between_steps = self._next

    def leave_out(self, samples: float, wait_s: float) -> None:
        """See the base class."""
        is_traced = self._profiler is not None and self._marks.between_steps is None and not self.is_over
        if is_traced and not self._is_left_out and 2 * len(self._left_out) < self._num_steps + 1:  # at least half count
            self._left_out.append(int(self._profiler.step_num))
            self._is_left_out = True

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.context.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
            # Otherwise kineto, by default or by the user's setting, shuts CUPTI down after the first step's trace. This may
            # happen during the second trace, which then has no events of the GPU (pytorch/kineto #1554).
            os.environ["TEARDOWN_CUPTI"] = "0"
            self._synchronize()
        with quiet(self.notes):
            self._profiler = torch.profiler.profile(
                activities=activities, record_shapes=True, schedule=lambda _: ProfilerAction.RECORD
            )
            self._profiler.start()
        self._num_steps, self._begun_s, self._left_out, self._left_out_s = 0, time.perf_counter(), [], 0.0
        self._step_begun_s = self._begun_s

    def _step_over(self) -> None:
        """Counts the current step, which is over."""
        self._num_steps += 1
        if self._is_left_out:
            self._left_out_s += time.perf_counter() - self._step_begun_s
            self._is_left_out = False

    def _num_kept(self) -> int:
        """Returns the number of finished steps that are not left out."""
        return self._num_steps - len(self._left_out) + self._is_left_out

    def _next(self) -> None:
        self._leave()
        self._step_over()
        elapsed_s = time.perf_counter() - self._begun_s
        if self._num_wanted is None:
            self._stop()
            results = self._profiler.profiler.kineto_results
            num_events = len(results.events()) if results is not None else 0
            self._num_wanted = _num_wanted(self._plain_step_s or elapsed_s, num_events)
            self._start()
        elif self._num_kept() < self._num_wanted and (elapsed_s < MAX_S or not self._num_kept()):
            self._profiler.step()
            self._step_begun_s = time.perf_counter()
        else:
            self._stop()
            self.is_over = True

    def _stop(self) -> None:
        if self.context.device == "cuda":
            self._synchronize()
        self._seconds = time.perf_counter() - self._begun_s
        with quiet(self.notes):
            self._profiler.stop()

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.context.device_index)

    def _enter(self, phase: str) -> None:
        self._leave()
        if phase != OTHER and self._profiler is not None and not self.is_over:
            self._range = record_function(f"{RANGE}{phase}")
            self._range.__enter__()

    def _leave(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def finish(self) -> Optional[Traced]:
        """See the base class."""
        self._leave()
        is_between = self._marks.between_steps is not None
        if self._profiler is not None and not self.is_over and is_between:
            self._step_over()
        if self._profiler is None or self._num_wanted is None or not self._num_kept():
            if self._profiler is not None and not self.is_over:
                with contextlib.suppress(Exception):  # the device failed, for example
                    self._stop()
            self._uninstall()
            return None
        unfinished = [] if self.is_over or is_between else [self._unfinished()]
        if not self.is_over:
            self._stop()
        self._uninstall()
        context = self.context
        is_on_gpu = context.device == "cuda"
        is_whole = self.is_over or context.last_step.is_announced  # rank 0 ends all ranks, once it has traced enough
        file = self._exported()
        if is_on_gpu and file and not self._saw_kernels():
            self.notes.append(NO_KERNELS.format("the trace holds none"))
        return Traced(
            rank=context.rank,
            world_size=context.world_size,
            device=context.device,
            file=file,
            steps=self._num_kept(),
            step_s=(self._seconds - self._left_out_s) / self._num_kept(),
            left_out=[*self._left_out, *unfinished],
            plain_step_s=self._plain_step_s,
            peaks=self.tried("the device's peaks", lambda: peaks(context.device, context.device_index)) if is_whole else {},
        )

    def _unfinished(self) -> int:
        """Leaves out the current step, which is not over, and returns its number."""
        if self._is_left_out:
            self._left_out.pop()  # it is not among the finished steps
            self._is_left_out = False
        self._left_out_s += time.perf_counter() - self._step_begun_s
        return int(self._profiler.step_num)

    def _uninstall(self) -> None:
        self._marks.uninstall()
        self._syncs.uninstall()

    def _exported(self) -> str:
        """Writes the trace and returns the name of its file; "" if it could not be written."""
        name = trace_file(self.context.rank)
        folder = self.context.spec.folder
        scratch, temporary = os.path.join(folder, SCRATCH), os.path.join(folder, f"unfinished.{name}")
        # If torch compressed the trace, it would first write it to TMPDIR. A killed process would leave it there, unmasked.
        plain = os.path.join(scratch, name[: -len(".gz")])
        try:
            os.makedirs(scratch, mode=0o700, exist_ok=True)
            with quiet(self.notes):
                self._profiler.export_chrome_trace(plain)
            with open(plain, "rb") as text, gzip.open(temporary, "wb") as compressed:
                shutil.copyfileobj(text, compressed)
            os.replace(temporary, os.path.join(folder, name))
        except Exception as error:  # a full disk, mostly
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self.notes.append(f"the trace could not be written: {type(error).__name__}: {error}")
            return ""
        finally:
            with contextlib.suppress(OSError):
                os.unlink(plain)
        return name

    def _saw_kernels(self) -> bool:
        return any(event.device_type().name == "CUDA" for event in self._profiler.profiler.kineto_results.events())


def _num_wanted(step_s: float, num_events: int) -> int:
    """Returns how many steps to trace, given the seconds of a step and the number of its events."""
    wanted = max(MIN_STEPS, min(MAX_STEPS, int(WANTED_S / max(step_s, 1e-6))))
    return max(1, min(wanted, MAX_EVENTS // max(1, num_events)))
