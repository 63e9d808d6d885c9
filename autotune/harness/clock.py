"""Times the ends of steps: on a CPU by the monotonic clock, on a GPU by one CUDA event per step, read without waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Deque, Iterator, List, NamedTuple, Optional, Tuple


class Finished(NamedTuple):
    """A finished step."""

    end_s: float  # since the end of the first step, without steps that `open_window` drops
    step_s: float  # since the end of the previous step
    busy_s: float  # step_s minus the time that the step waited for its input
    samples: float
    wait_s: float  # host seconds inside the loader's __next__
    is_foreign: bool  # the step contained an evaluation, or a batch of a loader that does not feed the training
    is_quiet: bool  # nothing was compiled and no memory segment was allocated


RUN_AHEAD = 8  # maximum number of steps that the host queues ahead of a GPU; part of `num_ahead` (last_step.py)


class HostClock:
    """Times the ends of steps on the host; correct if the device is the CPU.

    Attributes:
        waiting: what `mark` has noted since the last call of `finished`. Always the same list object, because the hook from
            `Session.plain_step_hook` appends to it.
    """

    run_ahead = 0

    def __init__(self) -> None:
        self._origin_s: Optional[float] = None  # the end of the first step
        self._last_s = 0.0
        self.waiting: List[Tuple[float, Optional[float], float, bool]] = []
        self._is_noisy = False
        self.begin: Any = None  # never set, see CudaClock
        self.gap_frac: Optional[float] = None

    @property
    def origin_s(self) -> float:
        """When the first step ended, monotonic clock."""
        return self._origin_s or 0.0

    def batch_is_there(self) -> None:
        """Called before each forward of a step."""

    def batch_is_asked(self) -> None:
        """Called when the program asks for a batch after the first forward of a step."""

    def mark(self, samples: float, wait_s: float, is_foreign: bool) -> float:
        """Marks the end of a step and returns the host's time, monotonic clock. Must be fast: it runs at every step."""
        now_s = time.monotonic()
        self.waiting.append((now_s, samples, wait_s, is_foreign))
        return now_s

    def leave_out(self) -> None:
        """Leaves out the time since the last step; the next step begins now."""
        self.waiting.append((time.monotonic(), None, 0.0, False))

    def noise(self) -> None:
        """Notes that something was compiled or memory was allocated in the steps marked since the last call of `finished`."""
        self._is_noisy = True

    def finished(self) -> Iterator[Finished]:
        """Yields the steps finished since the last call, except the first step of all, whose end is the origin of time."""
        waiting = list(self.waiting)
        del self.waiting[: len(waiting)]  # in place; another thread may append meanwhile
        is_quiet, self._is_noisy = not self._is_noisy, False
        if self._origin_s is None and waiting:
            self._origin_s = self._last_s = waiting.pop(0)[0]
        origin_s, last_s, new = self._origin_s or 0.0, self._last_s, tuple.__new__
        for now_s, samples, wait_s, is_foreign in waiting:
            step_s, last_s = now_s - last_s, now_s
            if samples is None:
                continue
            busy_s = step_s - wait_s if step_s > wait_s else 0.0
            # `tuple.__new__` is faster than the constructor; this runs for every step.
            yield new(Finished, (now_s - origin_s, step_s, busy_s, samples, wait_s, is_foreign, is_quiet))
        self._last_s = last_s

    def open_window(self) -> None:
        """Called when the window opens. Does nothing: there is no device to wait for."""

    def close_window(self) -> None:
        """Called when the window ends."""


class CudaClock:
    """Records one event per step on the device's current stream and reads it once it has completed.

    The host waits for an event only if it is more than RUN_AHEAD steps ahead of the device. The device is synchronised at both
    ends of the window.

    Attributes:
        begin: the event before the first forward of the current step; None until then.
        gap_frac: difference between the window's wall time and the sum of the times between events, as a share of the wall
            time; at most 0.01 if the clock is right.

    Args:
        device: index of the GPU that trains, which need not be the current device; None for the current one.
    """

    run_ahead = RUN_AHEAD

    def __init__(self, device: Optional[int] = None) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._synchronize = torch.cuda.synchronize  # saved before `explain` patches it to record where the program waits
        self._device = device
        self._pending: Deque[Any] = deque()
        self._last: Any = None
        self.begin: Any = None
        self._thread = 0  # thread of `begin`
        self._stream: Any = None  # stream of `begin`
        self._asked: Any = None  # event at which the next batch of the step was asked for; None after a forward
        self._waits: List[Tuple[Any, Any]] = []  # events between which the device waited for the step's later batches
        self._end_s = 0.0
        self._opened_s: Optional[float] = None
        self._gaps_s = 0.0
        self._num_marked = self._num_finished = self._noisy_until = 0
        self._is_idle = False  # whether the next step to finish began on an idle device; its time is then dropped
        self.gap_frac: Optional[float] = None

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _now(self) -> Any:
        return self._event(self._cuda.current_stream(self._device))

    def batch_is_there(self) -> None:
        """Called before each forward of a step: the device has its input, until `batch_is_asked` or the end of the step."""
        if (self.begin is not None and self._asked is None) or self._cuda.is_current_stream_capturing():
            return
        if self.begin is None:
            self._thread, self._stream = threading.get_ident(), self._cuda.current_stream(self._device)
            self.begin = self._event(self._stream)
        else:
            self._waits.append((self._asked, self._event(self._stream)))
            self._asked = None

    def batch_is_asked(self) -> None:
        """Called when the program asks for another batch after the first forward of a step, to accumulate gradients."""
        is_own = self._asked is None and threading.get_ident() == self._thread
        if is_own and not self._cuda.is_current_stream_capturing():
            self._asked = self._event(self._stream)

    def mark(self, samples: float, wait_s: float, is_foreign: bool) -> float:
        """Marks the end of a step and returns the host's time, monotonic clock. Must be fast: it runs at every step."""
        self._pending.append((self._now(), self.begin, self._waits, samples, wait_s, is_foreign))
        self._begin_step()
        if len(self._pending) > RUN_AHEAD:
            self._pending[-RUN_AHEAD - 1][0].synchronize()  # RUN_AHEAD steps stay queued, so the device is never idle
        return time.monotonic()

    def leave_out(self) -> None:
        """Leaves out the time since the last step; the next step begins now."""
        self._pending.append((self._now(), None, [], None, 0.0, False))
        self._begin_step()

    def _begin_step(self) -> None:
        self.begin = self._asked = None
        self._waits = []
        self._num_marked += 1

    def noise(self) -> None:
        """Notes that something was compiled or memory was allocated in the steps marked so far."""
        self._noisy_until = self._num_marked

    def finished(self) -> Iterator[Finished]:
        """Yields the steps whose events have completed since the last call, except the very first step, the origin of time."""
        while self._pending and self._pending[0][0].query():
            event, begin, waits, samples, wait_s, is_foreign = self._pending.popleft()
            self._num_finished += 1
            if self._last is None:
                self._last = event
                continue
            step_s = self._last.elapsed_time(event) / 1e3
            self._last = event
            if self._opened_s is not None:
                self._gaps_s += step_s
            if samples is not None and self._is_idle:
                self._is_idle = False
                continue
            self._end_s += step_s
            if samples is None:
                continue
            busy_s = begin.elapsed_time(event) / 1e3 if begin is not None else step_s
            busy_s = max(0.0, busy_s - sum(asked.elapsed_time(there) for asked, there in waits) / 1e3)
            is_quiet = self._num_finished > self._noisy_until
            yield Finished(self._end_s, step_s, busy_s, samples, wait_s, is_foreign, is_quiet)

    def open_window(self) -> None:
        """Waits for the device and opens the window; called again when the window restarts.

        The window begins after the next step. That step takes longer than usual, because the device has to wait until the host
        has fetched a batch and queued the step's work. Usually the host does this while the device computes earlier steps.
        """
        self._synchronize(self._device)
        end_s = self._end_s
        for _ in self.finished():  # drops the steps that were queued before the window
            pass
        self._end_s = end_s  # otherwise the next step would seem to take as long as all dropped steps together
        self._is_idle = True
        self._opened_s, self._gaps_s = time.monotonic(), 0.0

    def close_window(self) -> None:
        """Waits for the device and compares the window's wall time with the sum of the times between events."""
        if self._opened_s is None:
            return
        self._synchronize(self._device)
        closed_s = time.monotonic()
        for _ in self.finished():
            pass
        wall_s = closed_s - self._opened_s
        if wall_s > 0 and self._gaps_s > 0:
            self.gap_frac = abs(self._gaps_s - wall_s) / wall_s


def make_clock(device_type: str, index: Optional[int] = None) -> Any:
    """Returns the clock for the device that holds the model; see `TrialContext.device_index`."""
    return CudaClock(index) if device_type == "cuda" else HostClock()
