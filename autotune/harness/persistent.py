"""Keeps persistent workers (loader.persistent_workers) from changing what a program computes that was written without them.

Torch gives a loader with persistent workers a single iterator. So an iteration that begins while another one is under way
starts that one again from the first batch. Moreover, changes that the program makes between two epochs, to the data set or the
collate function, do not reach the workers. In both cases new workers are started, as the program expects.
"""

from __future__ import annotations

import functools
import gc
import sys
import zlib
from collections import deque
from typing import Any, Callable, Dict, List, Tuple

from . import members
from .batches import LONG, PLAIN
from .patches import patches

SENT = "_autotune_sent"  # attribute of a loader: facts about what its workers were sent
OVER = "_autotune_is_over"  # attribute of an iterator: whether the program has received all batches of the epoch
PARTS = ("dataset", "collate_fn", "worker_init_fn")
MAX_DEPTH, MAX_FACTS = 3, 1000  # of objects within objects; of facts in all
MAX_ITEMS, MAX_BYTES = 10**5, 2**20  # of a list or array that are compared; this takes a millisecond
CHANGED = "the program changes its data set or collate function between epochs, so the workers were started anew"
NESTED = "the program iterates over the loader again before an iteration has ended, so more workers were started"


def watch(loader: Any) -> None:
    """Watches a loader whose workers are persistent because of the knob."""
    loader.__dict__[SENT] = None
    _install()


@functools.lru_cache(maxsize=None)
def _install() -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def around_begin(begin: Callable[[Any], Any]) -> Any:
        def __iter__(loader: Any) -> Any:
            if SENT in loader.__dict__:
                _prepare(loader.__dict__)
            return begin(loader)

        return __iter__

    def around_advance(advance: Callable[[Any], Any]) -> Any:
        def __next__(iterator: Any) -> Any:
            try:
                return advance(iterator)
            except StopIteration:
                iterator.__dict__[OVER] = True
                raise

        return __next__

    patches.install(DataLoader, "__iter__", around_begin)
    patches.install(_BaseDataLoaderIter, "__next__", around_advance)


def _prepare(kept: Dict[str, Any]) -> None:
    """Makes torch start new workers for the iteration that begins if the old ones cannot be used.

    Args:
        kept: the attributes of the loader.
    """
    sent = facts([kept.get(name) for name in PARTS])
    if kept.get("_iterator") is not None:
        if sent == kept[SENT] and not _is_in_use(kept):
            kept["_iterator"].__dict__.pop(OVER, None)
            return
        kept["_iterator"] = None
        record = kept.get("_autotune")
        if record is not None:
            record.why_restarted = CHANGED if sent != kept[SENT] else NESTED
    kept[SENT] = sent


def _is_in_use(kept: Dict[str, Any]) -> bool:
    """Whether the program may ask the loader's iterator for more batches of the epoch that it has begun."""
    num_others, iterator = _num_references(kept) - ALONE, kept["_iterator"]
    if not num_others or OVER in iterator.__dict__:
        return False
    try:
        is_at_end = iterator._num_yielded >= len(iterator)
    except Exception:  # a stream has no length
        is_at_end = False
    if not is_at_end:
        return True
    # Some libraries count the batches, and keep the iterator in a list. A loop of the program asks once more for a batch.
    holders = [each for each in gc.get_referrers(iterator) if type(each) in (list, dict) and each is not kept]
    return num_others > len(holders)


def _num_references(kept: Dict[str, Any]) -> int:
    return sys.getrefcount(kept["_iterator"])


ALONE = _num_references({"_iterator": object()})  # when nothing but the loader refers to the iterator


def facts(things: List[Any]) -> List[Tuple[Any, ...]]:
    """Returns facts about objects, which differ once the program has changed these objects or those that they hold."""
    found: List[Tuple[Any, ...]] = []
    for thing in things:
        _add_facts(thing, found, 0)
    return found


def _add_facts(value: Any, found: List[Tuple[Any, ...]], depth: int) -> None:
    if len(found) >= MAX_FACTS:
        return
    if type(value) in PLAIN:
        found.append((value,))
        return
    is_container = type(value) in (list, tuple, dict, set, deque)
    found.append((id(value), len(value) if is_container else 0, _content(value)))
    if depth > MAX_DEPTH or issubclass(type(value), type):
        return
    for each in _items(value) if is_container else _attributes(value):
        _add_facts(each, found, depth + 1)


def _items(container: Any) -> List[Any]:
    return list(container.values() if type(container) is dict else container) if len(container) <= LONG else []


def _attributes(thing: Any) -> List[Any]:
    return [members.attribute(thing, "__self__"), *members.held(thing).values()]  # the first: the object of a bound method


def _content(value: Any) -> int:
    """Returns a number that changes with the content of a tensor, an array, or a long list of plain values; 0 for the rest."""
    from torch import Tensor

    try:
        if type(value) is Tensor:
            is_shared = value.is_shared()  # type: ignore[no-untyped-call]  # then the workers see its changes
            return 0 if is_shared else int(value._version)
        if type(value) in (list, tuple):
            return hash(tuple(value[:MAX_ITEMS])) if len(value) > LONG and type(value[0]) in PLAIN else 0
        is_array = members.attribute(value, "__array_interface__") is not None
        return zlib.crc32(memoryview(value).cast("B")[:MAX_BYTES]) if is_array else 0
    except Exception:  # it cannot be read this way
        return 0
