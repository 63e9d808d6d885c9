"""Estimates the rate that the loader can sustain, and whether it shares the cores with the step.

While the first step compiles, the workers fill their queues. Until the queues are empty again, steps take more batches than the
workers make, and the rate in a window cannot last. Three rates are measured, in batches per second: K, at which the steps take
batches; P, at which the workers make them; and L, at which the workers could make them undisturbed.

K can last if the queue's length is stable. While the queue shrinks, each step takes one batch from it, and the workers add only
P/K of a batch. Once the queue is empty, each step must wait for the missing 1 - P/K of a batch. The workers make it at rate L,
because the waiting step leaves all cores to them. So a step takes 1/K + (1 - P/K)/L seconds. If the workers have separate
cores, P is L and the rate is min(K, L). If they share the step's cores, P is less.
"""

from __future__ import annotations

import time
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from . import worker
from .cores import num_cores
from .protocol import SEPARATE, SHARED

# A queue that loses less than this share of the batches taken counts as stable. The rate is then wrong by at most this share.
FALL_FRAC = 0.02
LOOK_BACK_S = 1.0  # span over which warm-up judges whether the queue shrinks
LEAST_BATCHES = 3  # with fewer batches in a window, the time that a batch takes is not known
GLANCE_S = 0.1  # minimum time between two readings; without this limit, ranks of a group would read at every step
# The step and the workers share cores if together they ask for more cores than are available: by more than SHARED_FRAC of the
# available cores, and by more than SHARED_CORES cores. A worker asks for a core while it uses one, and also while it waits for
# one that this program uses, because workers that share cores use only what the step leaves them. While a worker waits, all
# cores are in use, by this program or by others. So this program's share of the cores is also its share of the wait.
SHARED_FRAC, SHARED_CORES = 0.05, 0.1


class Reading(NamedTuple):
    """Counters of the training process and of its workers at one moment; batches and CPU seconds since the start."""

    now_s: float
    taken: float  # batches that the steps so far have taken
    cpu_s: float  # CPU seconds of this process
    workers: List[worker.Counters]
    file: str = ""  # path of the workers' counters; each loader has its own

    @property
    def made(self) -> float:
        """Batches made so far, including parts of unfinished ones. These matter in a window of few slow batches."""
        return sum(each.batches + _part_done(each, self.now_s) for each in self.workers)

    @property
    def stock(self) -> float:
        """Batches made and not taken. Only its changes are meaningful: an epoch that is cut short leaves some batches over."""
        return self.made - self.taken


def _part_done(counters: worker.Counters, now_s: float) -> float:
    if not counters.began_s or not counters.batches or not counters.busy_s:
        return 0.0
    return min(1.0, (now_s - counters.began_s) * counters.batches / counters.busy_s)


class Supply:
    """Follows the training loader of this process.

    Args:
        loaders: knows the training loader.
        binder: knows the cores to which the process is bound; None if it is not bound.
        num_ranks: returns how many training processes share the cores of this process.
    """

    def __init__(self, loaders: Any, binder: Any = None, num_ranks: Callable[[], int] = lambda: 1) -> None:
        self._loaders, self._binder, self._num_ranks = loaders, binder, num_ranks
        self._before: Optional[Reading] = None  # from LOOK_BACK_S ago or earlier
        self._between: Optional[Reading] = None  # a later reading, which replaces `_before` after LOOK_BACK_S
        self._opened: Optional[Reading] = None
        self._closed: Optional[Reading] = None
        self._seen: Optional[Reading] = None
        self._next_glance_s = 0.0
        self._before_window: Optional[Tuple[Any, float, float, float]] = None  # see `_totals`; None if workers count batches

    def _glance(self) -> Optional[Reading]:
        now_s = time.monotonic()
        if now_s >= self._next_glance_s:
            self._next_glance_s, self._seen = now_s + GLANCE_S, self.read()
        return self._seen

    def read(self) -> Optional[Reading]:
        """Returns the current counters; None without a loader whose workers count batches."""
        training = self._loaders.training
        if training is None or not training.num_workers or not training.counters_file:
            return None
        workers = worker.read(training.counters_file)
        if not any(each.batches for each in workers):
            return None
        return Reading(time.monotonic(), training.total_batches, time.process_time(), workers, training.counters_file)

    # --- warm-up ---

    def drains_within(self, most_s: float) -> bool:
        """Returns whether the queue shrinks and will be empty within `most_s` seconds; called often during warm-up."""
        now = self._glance()
        if now is None:
            return False
        if self._before is None:
            self._before = self._between = now
        before = self._before
        if self._between is not None and now.now_s - self._between.now_s >= LOOK_BACK_S:
            self._before, self._between = self._between, now
        fall, seconds = before.stock - now.stock, now.now_s - before.now_s
        left = now.stock - len(now.workers)  # workers deliver round-robin, so one batch per worker counts as an empty queue
        if left <= 0 or fall <= max(FALL_FRAC * (now.taken - before.taken), 1):
            return False
        return left * seconds / fall <= most_s

    # --- window ---

    def open_window(self) -> None:
        """Reads the counters as the window opens."""
        self._opened, self._closed = self.read(), None
        if self._opened is not None:
            self._loaders.training.mark_iterators()
        self._before_window = self._totals() if self._opened is None else None

    def close_window(self) -> None:
        """Reads the counters as the window closes. If another loader trains now, discards those from the window's opening."""
        if self._closed is None:
            self._closed = self.read()
            if self._opened is not None and self._closed is not None and self._opened.file != self._closed.file:
                self._opened = None

    @property
    def fall_frac(self) -> float:
        """Batches that the queue lost in the window, per batch taken; negative if the queue grew."""
        if self._opened is None:
            return 0.0
        end = self._closed or self._glance()
        if end is None or end.file != self._opened.file or end.taken <= self._opened.taken:
            return 0.0
        return (self._opened.stock - end.stock) / (end.taken - self._opened.taken)

    @property
    def is_falling(self) -> bool:
        """Whether more batches were taken in the window than were made in it."""
        return self.fall_frac > FALL_FRAC

    def regime(self, num_threads: Optional[int]) -> Optional[str]:
        """Returns SEPARATE or SHARED; None without workers.

        Args:
            num_threads: threads of a step on the CPU; None if a GPU computes and the process only launches its work.
        """
        begin, end = self._opened, self._closed
        if begin is None or end is None or end.now_s <= begin.now_s:
            return None
        seconds, main_cpu_s = end.now_s - begin.now_s, end.cpu_s - begin.cpu_s
        before = [_counters_of(begin, index) for index in range(len(end.workers))]
        cpu_s = sum(now.cpu_s - then.cpu_s for now, then in zip(end.workers, before))  # noqa: B905 (Python 3.9)
        delay_s = sum(now.delay_s - then.delay_s for now, then in zip(end.workers, before))  # noqa: B905
        cores = self._num_cores()
        own = num_threads if num_threads is not None else min(1.0, main_cpu_s / seconds)
        own_frac = min(1.0, (main_cpu_s + cpu_s) / (cores * seconds))
        asked = own + (cpu_s + own_frac * delay_s) / seconds
        return SHARED if asked > cores + max(SHARED_FRAC * cores, SHARED_CORES) else SEPARATE

    def capacity_per_s(self) -> Optional[float]:
        """Returns L, the samples per second that the loader can sustain alone; None without a loader or counts.

        With workers, it is the sum of what each worker makes per busy second, not counting seconds in which it had no core. If
        iterations over the loader run at the same time, their workers share counters, so the sum is multiplied by the number of
        iterations. The result is limited to what all cores together can make. Without workers, L is the number of samples per
        second in __next__.
        """
        training = self._loaders.training
        if training is None or not training.total_batches:
            return None
        per_batch = float(training.total_samples / training.total_batches)
        end = self._closed or self.read()
        if end is None:
            return self._rate_in_next()
        rates, batches, cpu_s = [], 0.0, 0.0
        for index, now in enumerate(end.workers):
            made, busy_s = now.batches, now.busy_s - now.delay_s
            before = _counters_of(self._opened, index)
            batches, cpu_s = batches + made - before.batches, cpu_s + now.cpu_s - before.cpu_s
            if made - before.batches >= LEAST_BATCHES:  # use the window alone, without the first batch's cold start
                made, busy_s = made - before.batches, busy_s - (before.busy_s - before.delay_s)
            if busy_s > 0:
                rates.append(made / busy_s)
        if not rates:
            return None
        most = self._num_cores() * batches / cpu_s if cpu_s > 0 else float("inf")
        return float(min(sum(rates) * training.num_at_once, most) * per_batch)

    def _totals(self) -> Tuple[Any, float, float, float]:
        """Returns the training loader and its batches, samples and seconds in __next__ so far."""
        training = self._loaders.training
        if training is None:
            return None, 0.0, 0.0, 0.0
        return training, training.total_batches, training.total_samples, training.total_wait_s

    def _rate_in_next(self) -> Optional[float]:
        """Returns the samples per second in __next__, without the first batch's cold start if the window has enough batches."""
        before, (training, *totals) = self._before_window, self._totals()
        if before is not None and before[0] is training and totals[0] - before[1] >= LEAST_BATCHES:
            totals = [now - then for now, then in zip(totals, before[1:])]  # noqa: B905 (Python 3.9)
        _, samples, wait_s = totals
        return samples / wait_s if wait_s > 0 else None

    def _num_cores(self) -> float:
        bound = self._binder.num_cores if self._binder is not None else None
        return num_cores() / self._num_ranks() if bound is None else float(bound)

    def lasting_per_s(self, rate_per_s: float, capacity_per_s: Optional[float]) -> float:
        """Returns the samples per second that can last, from the rate of the window (K) and the loader's capacity (L)."""
        if not self.is_falling or not capacity_per_s:
            return rate_per_s
        return 1 / (1 / rate_per_s + self.fall_frac / capacity_per_s)


def _counters_of(reading: Optional[Reading], index: int) -> worker.Counters:
    workers = reading.workers if reading is not None else []
    return workers[index] if index < len(workers) else worker.Counters(0.0, 0.0, 0.0, 0.0, 0.0)
