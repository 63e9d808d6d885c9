"""Runs inside a DataLoader worker: counts batches and seconds in a file that the training process reads.

A short trial cannot measure a loader's sustainable rate from outside: while the first step compiles, the workers prepare
workers x prefetch batches, which then seem to cost nothing. So each worker measures its own capacity, the batches it makes per
busy second. The counters are in a memory-mapped file in the trial's folder. This works with fork, forkserver and spawn, and
takes no space in /dev/shm.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import time
from typing import Any, Callable, FrozenSet, List, NamedTuple, Optional, Tuple

from .patches import patches

SLOT = struct.Struct("6d")
READINGS = 8  # tries of `read_together`; if the thread loses its core during each of them, the last one is used
COUNTS, ASKED = struct.Struct("5d"), struct.Struct("d")  # the two parts of a slot: the first five counters, and `has_asked`
UNPICKLE = "__import__('runpy').run_path(folder + '/unpickled.py')['worker_init']()"
OWN_DELAYS = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds of waiting for a core, number of time slices


class Counters(NamedTuple):
    """Counters of one worker.

    Attributes:
        batches: batches fetched.
        busy_s: wall seconds spent fetching them.
        cpu_s: CPU seconds of the worker, for fetching and for everything else.
        delay_s: busy seconds in which the worker was runnable but had no core; 0 if the kernel does not record them.
        began_s: when the current batch was begun, on the monotonic clock; 0 if no batch is being fetched.
        has_asked: 1 if the data set has asked which worker it is in (`get_worker_info`), else 0.
    """

    batches: float
    busy_s: float
    cpu_s: float
    delay_s: float
    began_s: float
    has_asked: float = 0.0


# Notes that the program asks which worker it is in; has an effect only inside a worker.
note_asking: Callable[[], None] = lambda: None  # noqa: E731


class _ByPath:
    """Unpickles to the class `WorkerInit`, even in a worker where the harness was not loaded.

    A spawned worker has no harness if the program has changed PYTHONPATH or the trial's variable in its environment. So the
    pickle refers only to Python's own functions and to the path of this file.
    """

    def __reduce__(self) -> Any:
        return eval, (UNPICKLE, {"folder": os.path.dirname(os.path.abspath(__file__))})


class WorkerInit:
    """A picklable `worker_init_fn` that calls the program's own and wraps the fetcher of this worker process.

    Args:
        path: path of the counters' file; "" for no counting.
        following: the program's own `worker_init_fn`.
        cores: the cores to bind the worker to; None leaves it unbound.
        observe: called in the worker to observe where its time goes (explain/workers.py) or to skip stages
            (explain/skipping.py); None in trials that do neither.
    """

    def __init__(
        self,
        path: str,
        following: Optional[Callable[[int], None]],
        cores: Optional[FrozenSet[int]] = None,
        *,
        observe: Optional[Callable[[], None]] = None,
    ) -> None:
        self.path, self.following, self.cores, self.observe = path, following, cores, observe

    def __reduce__(self) -> Any:
        # The class comes first, so the harness is loaded when `observe`, a function of the harness, is unpickled.
        given = {"kind": _ByPath(), "given": (self.path, self.following, self.cores), "observe": self.observe}
        return eval, ("kind(*given, observe=observe)", given)

    def __call__(self, worker_id: int) -> None:
        """Sets the worker up; called by torch in the worker, before the fetcher is made."""
        if self.cores is not None:
            with contextlib.suppress(OSError):  # the job no longer has these cores
                os.sched_setaffinity(0, self.cores)
        if self.following is not None:
            self.following(worker_id)
        if self.observe is not None:
            self.observe()
        if not self.path:
            return
        try:
            slots = _map(self.path)
        except OSError:
            return  # the folder is gone: the loader must work anyway
        from torch.utils.data._utils import fetch

        global note_asking
        note_asking = functools.partial(ASKED.pack_into, slots, worker_id * SLOT.size + COUNTS.size, 1.0)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patches.install(kind, "fetch", functools.partial(_counted, slots, worker_id * SLOT.size))


def _counted(slots: mmap.mmap, offset: int, fetch: Callable[..., Any]) -> Callable[..., Any]:
    cpu_s, delay_of_s = time.process_time(), _delays()

    def add(batches: float, busy_s: float, delay_s: float, began_s: float) -> None:
        # The slot may hold the counts of other workers with the same number: of earlier epochs, and of other iterations over
        # the loader that run at the same time, as in `zip(loader, loader)`.
        nonlocal cpu_s
        slot, now_s = Counters(*SLOT.unpack_from(slots, offset)), time.process_time()
        sums = slot.batches + batches, slot.busy_s + busy_s, slot.cpu_s + now_s - cpu_s, slot.delay_s + delay_s
        COUNTS.pack_into(slots, offset, *sums, began_s)
        cpu_s = now_s

    def counted_fetch(self: Any, index: Any) -> Any:
        began_delay_s, began_s = read_together(delay_of_s, time.monotonic)
        add(0.0, 0.0, 0.0, began_s)
        try:
            batch = fetch(self, index)
        except BaseException:  # the end of a stream or an error in the data set: no batch was made
            add(0.0, 0.0, 0.0, 0.0)
            raise
        ended_delay_s, ended_s = read_together(delay_of_s, time.monotonic)
        add(1.0, ended_s - began_s, ended_delay_s - began_delay_s, 0.0)
        return batch

    return counted_fetch


def _delays() -> Callable[[], float]:
    """Returns a function that returns how many seconds this thread has waited for a core (a call costs a microsecond)."""
    try:
        descriptor = os.open(OWN_DELAYS, os.O_RDONLY | os.O_CLOEXEC)
        os.pread(descriptor, 64, 0).split()[1]
    except (OSError, IndexError):
        return lambda: 0.0
    return lambda: int(os.pread(descriptor, 64, 0).split()[1]) / 1e9


def read_together(delay_s: Callable[[], float], clock: Callable[[], Any]) -> Tuple[float, Any]:
    """Returns the seconds waited for a core and a clock's time at the same moment.

    The system often takes the core away between the two readings. The wait then counts on only one of them: in one measurement,
    a worker on busy cores seemed blocked for a fifth of its time. So both are read again if there was a wait in between.
    """
    for _ in range(READINGS - 1):
        before_s, now = delay_s(), clock()
        if delay_s() == before_s:
            return before_s, now
    return delay_s(), clock()


def create(path: str, num_workers: int) -> None:
    """Creates the file for the workers of one loader, or enlarges it for more workers.

    Its disk space is allocated now: if the disk were full later, a worker that writes to the mapped file would get SIGBUS.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SLOT.size * num_workers)
    finally:
        os.close(descriptor)


def read(path: str) -> List[Counters]:
    """Returns the current counters of each worker; empty if the file is gone."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError:
        return []
    return [Counters(*SLOT.unpack_from(raw, offset)) for offset in range(0, len(raw) - SLOT.size + 1, SLOT.size)]


def _map(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
