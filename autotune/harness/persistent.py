"""Prevents persistent workers (loader.persistent_workers) from changing the results of a program written without them.

Torch gives a loader with persistent workers a single iterator. So if the program begins an iteration while another one is under
way, both share this iterator, which starts again from the first batch. Moreover, if the program changes the data set or the
collate function between two epochs, the changes do not reach the workers. In both cases new workers are started, as the program
expects. And the samples come in the order that they would have with new workers in each epoch.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import io
import itertools
import logging
import os
import pickle
import random
import stat
import sys
import types
import weakref
import zlib
from collections import deque
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Set, Tuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from . import members
from .batches import LONG, PLAIN
from .patches import patches

SENT = "_autotune_sent"  # attribute of a loader: facts about what its workers were sent
OVER = "_autotune_is_over"  # attribute of an iterator: whether the program has received all batches of the epoch
LEFT = "_autotune_left"  # attribute of an iterator that another one has replaced: the record of the loader (loader.py)
PARTS = ("dataset", "collate_fn", "worker_init_fn")
# The number of levels of nested objects that `facts` looks at, and the maximum number of facts. Eight levels are, for example:
# ConcatDataset, list, Subset, data set, Compose, list, transform, size.
MAX_DEPTH, MAX_FACTS = 8, 1000
MAX_ITEMS, MAX_BYTES = 10**5, 2**20  # at most this many items of a list, or bytes of an array, are hashed
CONTAINERS = (list, tuple, dict, set, deque)
FILES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper)
SHARED = (type, types.ModuleType, logging.Logger)  # belong to the whole process, not to the data set
# Kinds of functions -> attributes with the objects that they use.
FUNCTIONS: Dict[Any, Tuple[str, ...]] = {
    types.FunctionType: ("__closure__",),
    types.CellType: ("cell_contents",),
    functools.partial: ("func", "args", "keywords"),
}
CHANGED = "the program changes its data set or collate function between epochs, so new workers were started"
NESTED = "the program iterates over the loader again before an iteration has ended, so more workers were started"


_watched: List[Any] = []  # weak references to loaders


def watch(loader: Any) -> None:
    """Watches a loader whose workers are persistent because of the knob."""
    remember(loader, _watched)
    loader.__dict__[SENT] = None
    _install()


def remember(loader: Any, watched: List[Any]) -> None:
    """Adds a loader to a list of weak references and removes those that are dead."""
    watched[:] = [*(ref for ref in watched if ref() is not None), weakref.ref(loader)]


def is_remade(loader: Any) -> bool:
    """Whether a library seems to have made this loader from a watched one: it has persistent workers and the same data set."""
    return bool(loader.__dict__.get("persistent_workers")) and is_made_from(loader, _watched)


def is_made_from(loader: Any, watched: List[Any]) -> bool:
    """Whether a loader has the same data set as one of the `watched` loaders, which are given by weak references."""
    dataset = loader.__dict__.get("dataset")
    data = [dataset, members.attribute(dataset, "dataset")]  # the data set may be wrapped as well
    others = [other.__dict__["dataset"] for ref in watched if (other := ref()) is not None]
    return any(each is other for each in data for other in others)


@functools.lru_cache(maxsize=None)
def _install() -> None:
    def around_begin(begin: Callable[[Any], Any]) -> Any:
        def __iter__(loader: Any) -> Any:
            if SENT in loader.__dict__:
                _prepare(loader.__dict__)
            return begin(loader)

        return __iter__

    def around_advance(advance: Callable[[Any], Any]) -> Any:
        def __next__(iterator: Any) -> Any:
            if LEFT in iterator.__dict__:
                iterator.__dict__[LEFT].why_restarted = NESTED  # the program still uses the iterator that was replaced
            try:
                return advance(iterator)
            except StopIteration:
                iterator.__dict__[OVER] = True
                raise

        return __next__

    patches.install(DataLoader, "__iter__", around_begin)
    patches.install(_BaseDataLoaderIter, "__next__", around_advance)


def _prepare(kept: Dict[str, Any]) -> None:
    """Makes torch start new workers if the iteration that is about to begin cannot use the old ones.

    Args:
        kept: the attributes of the loader.
    """
    sent = facts([kept.get(name) for name in PARTS])
    if kept.get("_iterator") is not None:
        if sent == kept[SENT] and not _is_in_use(kept):
            kept["_iterator"].__dict__.pop(OVER, None)
            # For new workers, torch draws a seed. The same draw here keeps later draws, such as the samples' order, the same.
            torch.empty((), dtype=torch.int64).random_(generator=kept.get("generator"))
            return
        record, before, kept["_iterator"] = kept.get("_autotune"), kept["_iterator"], None
        if record is not None and sent != kept[SENT]:
            record.why_restarted = CHANGED
        elif record is not None:
            before.__dict__[LEFT] = record
    kept[SENT] = sent


def _is_in_use(kept: Dict[str, Any]) -> bool:
    """Whether the program may ask the loader's iterator for more batches of the epoch that it has begun."""
    num_others, iterator = _num_references(kept) - ALONE, kept["_iterator"]
    if not num_others or OVER in iterator.__dict__:
        return False
    try:
        ahead = iterator.__dict__.get("_autotune_ahead")  # see transfer.py: a batch that the program has not received yet
        is_waiting = ahead is not None and ahead[2] is None
        is_at_end = iterator._num_yielded - is_waiting >= len(iterator)
    except Exception:  # a stream has no length
        is_at_end = False
    if not is_at_end:
        return True
    # After the last batch, a `for` loop asks once more. Libraries that count batches do not. They keep the iterator in a list
    # or an attribute, so references from lists and dictionaries do not count here.
    holders = [each for each in gc.get_referrers(iterator) if type(each) in (list, dict) and each is not kept]
    return num_others > len(holders)


def _num_references(kept: Dict[str, Any]) -> int:
    return sys.getrefcount(kept["_iterator"])


ALONE = _num_references({"_iterator": object()})  # number of references to an iterator to which only its loader refers


def facts(things: List[Any]) -> List[Tuple[Any, ...]]:
    """Returns facts about objects and what these hold: (5,) for 5, (id, length, hash of the content) for a long list.

    If the program changes an object, a later call returns other facts; changes beyond MAX_DEPTH, MAX_FACTS, MAX_ITEMS and
    MAX_BYTES are missed. Facts are collected level by level, so that the content of one object does not use up MAX_FACTS.
    """
    return [_fact(thing) for thing in _reached(things)]


def _fact(thing: Any) -> Tuple[Any, ...]:
    if type(thing) in PLAIN:
        return (thing,)
    return id(thing), len(thing) if type(thing) in CONTAINERS else 0, _content(thing)


def _reached(things: List[Any]) -> List[Any]:
    """Returns objects and what these hold; see `facts`."""
    found: List[Any] = []
    known: Set[int] = set()
    for _ in range(MAX_DEPTH):
        held: List[Any] = []
        for thing in things[: MAX_FACTS - len(found)]:
            with contextlib.suppress(Exception):  # the program's metaclass may compare its classes with ours, for example
                if type(thing) in PLAIN:
                    found.append(thing)
                elif id(thing) not in known:
                    known.add(id(thing))
                    found.append(thing)
                    held += _held_by(thing)
        things = held
    return found


def generators(things: List[Any]) -> List[Any]:
    """Returns the random generators of this process: those that `things` hold, and those in global variables or elsewhere.

    The global generators of Python, torch and NumPy are left out, because torch seeds these in each worker.
    """
    numpy, tempfile = sys.modules.get("numpy.random"), sys.modules.get("tempfile")
    own = [random._inst, torch.default_generator, numpy and numpy.mtrand._rand]
    own.append(getattr(getattr(tempfile, "_name_sequence", None), "_rng", None))  # draws names of files
    kinds = (random.Random, torch.Generator, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    found = {id(each): each for each in (*_reached(things), *gc.get_objects()) if issubclass(type(each), kinds)}
    return [each for each in found.values() if all(each is not one for one in own)][:MAX_FACTS]


def states(found: List[Any]) -> List[bytes]:
    """Returns the states of random generators."""
    told = []
    for each in found:
        with contextlib.suppress(Exception):  # a generator without a state, such as random.SystemRandom
            told.append(pickle.dumps(_state(each)))
    return told


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def holds_open_file(dataset: Any) -> bool:
    """Whether a data set holds a file that is open for reading: forked workers would move each other's position in it."""
    return any(map(_is_open_file, _reached([dataset])))


def _is_open_file(thing: Any) -> bool:
    try:
        is_read = type(thing) in FILES and not thing.closed and thing.readable()
        return is_read and stat.S_ISREG(os.fstat(thing.fileno()).st_mode)
    except Exception:  # it has no descriptor, for example
        return False


def _held_by(thing: Any) -> List[Any]:
    kind = type(thing)
    if kind in CONTAINERS:
        first = _items(thing, LONG)
        return first if len(thing) <= LONG or type(first[0]) not in PLAIN else []
    if issubclass(kind, SHARED):
        return []
    if kind is types.MethodType:
        return _used_by(thing)
    return [*(members.attribute(thing, name) for name in FUNCTIONS.get(kind, ())), *members.held(thing).values()]


def _used_by(method: Any) -> List[Any]:
    """Returns what a method uses: the attributes of `self` that its code names, or `self` if the code may use others.

    `self` may be a whole trainer, and most of a trainer changes at each step.
    """
    owner = method.__self__
    kind: Any = type(owner)
    names, own = _names_used(method.__func__, kind), members.held(owner)
    if names is None:
        return [owner]
    tables = [own, *(own.get(table, {}) for table in members.TABLES)]
    return [table[name] for table in tables for name in sorted(names) if name in table]


@functools.lru_cache(maxsize=None)
def _names_used(method: Any, kind: Any) -> Optional[FrozenSet[str]]:
    """Returns the attributes that a method, and methods that it calls on the same object, may use; None if not known."""
    names: Set[str] = set()
    waiting, known = [method], set()
    while waiting:
        function = waiting.pop()
        if type(function) is not types.FunctionType or function.__closure__ or not function.__code__.co_argcount:
            return None
        known.add(function)
        found = _named(function.__code__, function.__code__.co_varnames[0])
        if found is None:
            return None
        names |= found
        for held in (inspect.getattr_static(kind, name, None) for name in found):
            if type(held) is types.FunctionType and held not in known:
                waiting.append(held)
            elif type(held) not in (types.FunctionType, staticmethod) and hasattr(type(held), "__get__"):
                return None  # for example a property
    return frozenset(names)


def _named(code: types.CodeType, own: str) -> Optional[Set[str]]:
    """Returns the attributes of the variable `own` that code reads or writes; None if the code uses it in any other way."""
    found: Set[str] = set()
    is_loaded = False
    for each in dis.get_instructions(code):
        if is_loaded and each.opname not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            return None
        if is_loaded:
            found.add(str(each.argval))
        is_load = "LOAD_FAST" in each.opname or "LOAD_DEREF" in each.opname
        loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # one instruction may load two variables
        is_loaded = is_load and loaded[-1] == own
        if is_load and own in loaded[:-1]:
            return None
    for inner in code.co_consts:  # functions in the code and, before Python 3.12, comprehensions
        if isinstance(inner, types.CodeType) and own in inner.co_freevars:
            more = _named(inner, own)
            if more is None:
                return None
            found |= more
    return found


def _items(container: Any, number: int) -> List[Any]:
    return list(itertools.islice(container.values() if type(container) is dict else container, number))


def _content(value: Any) -> int:
    """Returns a number that changes with the content of a tensor, an array, or a long list or dictionary; 0 for the rest."""
    try:
        if type(value) in (Tensor, Parameter):
            is_shared = value.is_shared()  # workers see changes of a shared tensor
            return 0 if is_shared else int(value._version)
        if type(value) in CONTAINERS:
            items = _items(value, MAX_ITEMS) if len(value) > LONG else []
            return hash(tuple(items if items and type(items[0]) in PLAIN else map(id, items)))
        return zlib.crc32(memoryview(value).cast("B")[:MAX_BYTES])
    except Exception:  # it cannot be read this way
        return 0
