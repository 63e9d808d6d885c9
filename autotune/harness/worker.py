"""What runs inside a DataLoader worker: counts batches and seconds into a file that the training process reads.

A short trial cannot see a loader's sustainable rate from outside: while the first step compiles, the workers fill
workers x prefetch batches, and those look free. The producer side can be measured: a worker's capacity is batches per
busy second. Counters lie in a memory-mapped file of the trial's folder, which works for fork, forkserver and spawn alike
and takes no /dev/shm.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import time
from typing import Any, Callable, FrozenSet, List, NamedTuple, Optional

from .patches import patches

SLOT = struct.Struct("6d")
COUNTS, ASKED = struct.Struct("5d"), struct.Struct("d")  # its two parts
OWN_DELAYS = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds waited for one, turns


class Counters(NamedTuple):
    """What one worker has done so far.

    Attributes:
        batches: fetched.
        busy_s: wall seconds of fetching them.
        cpu_s: processor seconds of the worker, whatever it did with them.
        delay_s: of the busy seconds, those in which it could have run and had no core; 0 where the kernel does not say.
        began_s: when the batch in hand was begun, on the monotonic clock; 0 when there is none.
        has_asked: whether the data set has asked which worker it is in.
    """

    batches: float
    busy_s: float
    cpu_s: float
    delay_s: float
    began_s: float
    has_asked: float = 0.0


_note_asking: Callable[[], None] = lambda: None  # noqa: E731


def note_asking() -> None:
    """Called when the program asks which worker it is in; means something inside a worker only."""
    _note_asking()


class WorkerInit:
    """`worker_init_fn` that chains the user's own and wraps the fetcher of this worker process. Picklable.

    Args:
        path: of the counters; "" counts nothing.
        following: the program's own.
        cores: that the worker goes to; None leaves it where it is.
        is_of_bytes: whether images stay bytes until they are on the device.
    """

    def __init__(
        self,
        path: str,
        following: Optional[Callable[[int], None]],
        cores: Optional[FrozenSet[int]] = None,
        *,
        is_of_bytes: bool = False,
    ) -> None:
        self.path, self.following, self.cores, self.is_of_bytes = path, following, cores, is_of_bytes

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the worker, before the fetcher is made."""
        if self.cores is not None:
            with contextlib.suppress(OSError):  # they were taken away from all of us
                os.sched_setaffinity(0, self.cores)
        if self.following is not None:
            self.following(worker_id)
        if self.is_of_bytes:
            from . import delayed

            delayed.begin_worker()
        if not self.path:
            return
        try:
            slots = _map(self.path)
        except OSError:
            return  # the folder is gone: the loader must work all the same
        from torch.utils.data._utils import fetch

        global _note_asking
        _note_asking = functools.partial(ASKED.pack_into, slots, worker_id * SLOT.size + COUNTS.size, 1.0)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patches.install(kind, "fetch", functools.partial(_counted, slots, worker_id * SLOT.size))


def _counted(slots: mmap.mmap, offset: int, fetch: Callable[..., Any]) -> Callable[..., Any]:
    earlier = Counters(*SLOT.unpack_from(slots, offset))  # an earlier epoch's worker of this number has counted, too
    batches, busy_s, delay_s = earlier.batches, earlier.busy_s, earlier.delay_s
    cpu_before_s, delay_of_s = earlier.cpu_s - time.process_time(), _delays()

    def counted_fetch(self: Any, index: Any) -> Any:
        nonlocal batches, busy_s, delay_s
        began_s, began_delay_s = time.monotonic(), delay_of_s()
        COUNTS.pack_into(slots, offset, batches, busy_s, cpu_before_s + time.process_time(), delay_s, began_s)
        try:
            batch = fetch(self, index)
        except BaseException:  # a stream's end, or the data set's own trouble: no batch, and none in hand
            COUNTS.pack_into(slots, offset, batches, busy_s, cpu_before_s + time.process_time(), delay_s, 0.0)
            raise
        batches += 1.0
        busy_s += time.monotonic() - began_s
        delay_s += delay_of_s() - began_delay_s
        COUNTS.pack_into(slots, offset, batches, busy_s, cpu_before_s + time.process_time(), delay_s, 0.0)
        return batch

    return counted_fetch


def _delays() -> Callable[[], float]:
    """Returns what tells how long this thread has waited for a core so far, in seconds (a read costs a microsecond)."""
    try:
        descriptor = os.open(OWN_DELAYS, os.O_RDONLY | os.O_CLOEXEC)
        os.pread(descriptor, 64, 0).split()[1]
    except (OSError, IndexError):
        return lambda: 0.0
    return lambda: int(os.pread(descriptor, 64, 0).split()[1]) / 1e9


def create(path: str, num_workers: int) -> None:
    """Makes the file for the workers of one loader, or room for more of them in it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        if file.tell() < SLOT.size * num_workers:
            file.truncate(SLOT.size * num_workers)


def read(path: str) -> List[Counters]:
    """Returns the counters of each worker so far; empty when the file is gone."""
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
