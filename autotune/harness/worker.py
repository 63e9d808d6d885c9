"""What runs inside a DataLoader worker: counts batches and busy seconds into a file that the training process reads.

A short trial cannot see a loader's sustainable rate from outside: while the first step compiles, the workers fill
workers x prefetch batches, and those look free. The producer side can be measured: a worker's capacity is batches per
busy second. Slots are two float64 in a memory-mapped file of the trial's folder, which works for fork, forkserver and
spawn alike and takes no /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Any, Callable, List, Optional, Tuple

SLOT = struct.Struct("dd")  # batches fetched, seconds spent fetching them


class WorkerInit:
    """`worker_init_fn` that chains the user's own and wraps the fetcher of this worker process. Picklable."""

    def __init__(self, path: str, following: Optional[Callable[[int], None]]) -> None:
        self.path, self.following = path, following

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the worker, before the fetcher is made."""
        if self.following is not None:
            self.following(worker_id)
        try:
            slots = _map(self.path)
        except OSError:
            return  # the folder is gone: the loader must work all the same
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = _counted(kind.fetch, slots, worker_id * SLOT.size)  # type: ignore[method-assign]


def _counted(fetch: Callable[..., Any], slots: mmap.mmap, offset: int) -> Callable[..., Any]:
    state = list(SLOT.unpack_from(slots, offset))  # an earlier epoch's worker of this number has counted, too

    def counted_fetch(self: Any, index: Any) -> Any:
        began_s = time.monotonic()
        batch = fetch(self, index)
        state[0] += 1.0
        state[1] += time.monotonic() - began_s
        SLOT.pack_into(slots, offset, state[0], state[1])
        return batch

    return counted_fetch


def create(path: str, num_workers: int) -> None:
    """Makes the file for the workers of one loader, or room for more of them in it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        if file.tell() < SLOT.size * num_workers:
            file.truncate(SLOT.size * num_workers)


def read(path: str) -> List[Tuple[float, float]]:
    """Returns (batches, busy seconds) of each worker so far; empty when the file is gone."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError:
        return []
    return [SLOT.unpack_from(raw, offset) for offset in range(0, len(raw) - SLOT.size + 1, SLOT.size)]


def _map(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
