"""Keeps the samples the same if the knob loader.num_workers adds workers to a loader that had none.

Without workers, a sampler draws its random order at the first batch. With workers, torch makes it draw as soon as the iteration
begins. If the program draws random numbers between these moments, as a loop over two zipped loaders does, all later random
numbers would differ.
So the harness asks the workers for batches only when the program asks for its first batch.

Each worker has a copy of the data set. A program that was written without workers may change its data set at any time, even in
the middle of an endless iteration. So the harness compares the data set with its earlier state again and again, but at most
once a second, because a comparison takes time. If the data set has changed, the program still gets the batches that workers
were already asked for. The training process fetches the rest of the iteration itself.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Dict, List

from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

from . import persistent, state
from .patches import patches

LOOK_S, MAX_COST_FRAC = 1.0, 0.01  # at least this many seconds between two checks of the data set; checks' share of the time
ADDED = "_autotune_added"  # attribute: on a loader, marks that its workers were added; on an iterator, its `Copies`
STALE = "the program has changed its data set or collate function in an iteration, while workers still had the old one"
_watched: List[Any] = []  # weak references to loaders


def watch(loader: Any) -> None:
    """Watches a loader that has workers because of the knob."""
    persistent.remember(loader, _watched)
    loader.__dict__[ADDED] = True
    _install()


def is_remade(loader: Any) -> bool:
    """Whether a library seems to have made this loader from a watched one: it has workers and the same data set."""
    return bool(loader.__dict__.get("num_workers")) and persistent.is_made_from(loader, _watched)


@functools.lru_cache(maxsize=None)
def _install() -> None:
    def around_start(start: Callable[..., None]) -> Any:
        def __init__(iterator: Any, loader: Any) -> None:
            iterator.__dict__[ADDED] = Copies(loader.__dict__) if ADDED in loader.__dict__ else None
            start(iterator, loader)

        return __init__

    def around_reset(reset: Callable[..., None]) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> None:
            copies = iterator.__dict__.get(ADDED)
            if copies is not None:
                copies.is_waiting = True
            reset(iterator, *args, **kwargs)

        return _reset

    def around_send(send: Callable[[Any], None]) -> Any:
        def _try_put_index(iterator: Any) -> None:
            copies = iterator.__dict__.get(ADDED)
            if copies is None or not (copies.are_stale or copies.is_waiting):
                send(iterator)

        return _try_put_index

    def around_advance(advance: Callable[[Any], Any]) -> Any:
        def _next_data(iterator: Any) -> Any:
            copies = iterator.__dict__.get(ADDED)
            return advance(iterator) if copies is None else copies.next(iterator, advance)

        return _next_data

    patches.install(_MultiProcessingDataLoaderIter, "__init__", around_start)
    patches.install(_MultiProcessingDataLoaderIter, "_reset", around_reset)
    patches.install(_MultiProcessingDataLoaderIter, "_try_put_index", around_send)
    patches.install(_MultiProcessingDataLoaderIter, "_next_data", around_advance)


class Copies:
    """Finds out, during one iteration over a loader, whether the workers' copies of the data set are outdated.

    Args:
        loader: the loader's attributes.

    Attributes:
        are_stale: whether the program has changed its map-style data set since the iteration began. If so, workers get no more
            indices.
        is_waiting: whether the workers have not been asked for batches yet.
    """

    def __init__(self, loader: Dict[str, Any]) -> None:
        self.are_stale = self.is_waiting = False
        self._parts, self._record = [loader.get("dataset"), loader.get("collate_fn")], loader.get("_autotune")
        self._sent = persistent.facts(self._parts)
        self._next_look_s = time.monotonic() + LOOK_S
        self._fetch: Any = None  # fetches a batch in this process; None while the workers have batches left

    def next(self, iterator: Any, advance: Callable[[Any], Any]) -> Any:
        """Returns the next batch; `advance` returns the workers' next batch."""
        if self.is_waiting:
            self.is_waiting = False
            for _ in range(iterator._prefetch_factor * iterator._num_workers):
                iterator._try_put_index()
        now_s = time.monotonic()
        if now_s >= self._next_look_s and not self.are_stale:
            self._look(iterator, now_s)
        if self._fetch is None:
            try:
                return advance(iterator)
            except StopIteration:
                if not self.are_stale:
                    raise
            self._fetch = _fetcher(iterator)
        return self._fetch(iterator)

    def _look(self, iterator: Any, now_s: float) -> None:
        is_changed = persistent.facts(self._parts) != self._sent
        took_s = time.monotonic() - now_s
        self._next_look_s = now_s + max(LOOK_S, took_s / MAX_COST_FRAC)
        if not is_changed:
            return
        if self._record is not None:
            self._record.why_without_workers = STALE
        self.are_stale = iterator._dataset_kind == _DatasetKind.Map
        rest = "from here on, batches are fetched without workers" if self.are_stale else "set loader.num_workers=0"
        state.say([f"{STALE}: {rest}"])
        if not self.are_stale:  # an IterableDataset: this process cannot go on with a worker's iteration, so checks are useless
            self._next_look_s = float("inf")


def _fetcher(iterator: Any) -> Callable[[Any], Any]:
    """Returns a function that fetches an iterator's next batch in this process, as torch does without workers."""
    pin: Any = _utils.pin_memory.pin_memory
    create: Any = _DatasetKind.create_fetcher
    names = ("_dataset_kind", "_dataset", "_auto_collation", "_collate_fn", "_drop_last")
    fetcher = create(*(getattr(iterator, name) for name in names))

    def fetch(iterator: Any) -> Any:
        data = fetcher.fetch(iterator._next_index())
        return pin(data, iterator._pin_memory_device) if iterator._pin_memory else data

    return fetch
