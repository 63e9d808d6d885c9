"""Trains without some stages of the loader or functions of the program, to measure what they cost.

Each process keeps their first few results and then hands these out in turn, so shapes and sizes stay realistic. The rate is
what training would reach if they took no time. What the program computes means nothing in such a trial.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import types
from collections.abc import MutableMapping
from typing import Any, Dict, Hashable, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from ..patches import patches
from .documents import COLLATE, DECODE, FUNCTION, ITEM
from .sources import OWN, Sources, name_of
from .stages import Stages

KEPT, KEPT_BATCHES = 16, 2  # results of a stage that are kept in each process; batches are large
KEPT_CALLS = 4  # results of a function of the program
KEPT_BYTES = 256 << 20  # no more results are kept once they take this much memory
# A program may make new data sets and transforms each epoch. The oldest results are dropped beyond these limits of a process.
MOST_STAGES, MOST_BYTES = 1000, 4 * KEPT_BYTES
MOST_DECORATORS = 8  # of a function that is looked for
ONCE = ("send", "__next__", "__enter__")  # what has one of these, a generator for example, can be used only once


class Again:
    """The first results of a stage, handed out in turn once there are enough of them.

    Args:
        stage: what makes the results; kept alive, because results are found by its identity.
        most: number of results to keep.
    """

    def __init__(self, stage: Any, most: int = KEPT) -> None:
        self._stage, self._most = stage, most
        self._results: List[Any] = []
        self.num_bytes = self._turn = 0

    @property
    def is_full(self) -> bool:
        """Whether there are enough results."""
        return bool(self._results) and (len(self._results) >= self._most or self.num_bytes >= KEPT_BYTES)

    def keep(self, result: Any) -> Any:
        """Keeps a result, and returns it."""
        self._results.append(result)
        self.num_bytes += _num_bytes(result)
        return result

    def next(self) -> Any:
        """Returns an earlier result, beginning with the first: stages that take turns, as for image and mask, stay in turn."""
        result = self._results[self._turn % len(self._results)]
        self._turn += 1
        return result


class Items:
    """Takes the place of a map-style data set and hands out its first samples again and again."""

    def __init__(self, dataset: Any, again: Again) -> None:
        self.dataset_of_program, self._again = dataset, again

    def __getitem__(self, index: Any) -> Any:
        """Returns a sample."""
        again = self._again
        return apart(again.next() if again.is_full else again.keep(self.dataset_of_program[index]))

    def __getitems__(self, indices: Sequence[Any]) -> List[Any]:
        """Returns the samples of a batch."""
        many = getattr(self.dataset_of_program, "__getitems__", None)
        if not many or self._again.is_full:
            return [self[index] for index in indices]
        items = many(indices)
        if not isinstance(items, (list, tuple)) or len(items) != len(indices):
            raise RuntimeError("autotune: samples that a data set has already collated cannot be skipped")
        return [apart(self._again.keep(item)) for item in items]

    def __len__(self) -> int:
        """Returns the number of samples in the data set."""
        return len(self.dataset_of_program)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the data set."""
        return getattr(self.dataset_of_program, name)


class SkippedStages(Stages):
    """Replaces stages in this process by their earlier results.

    Args:
        names: the stages, as in `Stage.name`; ITEM stands for a whole sample of a map-style data set.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._again: Dict[Hashable, Again] = {}

    def timed(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function as a stage, or returns one of its earlier results."""
        if name not in self._names or not self._is_timing or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        if name == COLLATE:
            num = len(args[0]) if isinstance(args[0], (list, tuple)) else 0  # of the samples; 0 if the loader makes no batches
            dataset = self._dataset()  # many loaders share torch's default_collate
            again = self._results((id(function), id(dataset), num), (function, dataset), KEPT_BATCHES)
            return copied(again.next() if again.is_full else again.keep(function(*args, **kwargs)))
        again = self._results(id(function), function)
        return apart(again.next() if again.is_full else again.keep(function(*args, **kwargs)))

    def _dataset(self) -> Any:
        """Returns the data set of which a batch is being made."""
        dataset = self._collating[-1][0].dataset if self._collating else None
        return dataset.dataset_of_program if isinstance(dataset, Items) else dataset

    def _results(self, key: Hashable, stage: Any, most: int = KEPT) -> Again:
        if key not in self._again:
            known = self._again
            while known and (len(known) >= MOST_STAGES or sum(each.num_bytes for each in known.values()) >= MOST_BYTES):
                del known[next(iter(known))]
            known[key] = Again(stage, most)
        return self._again[key]

    def _timed_fetch(self, fetch: Any, fetcher: Any, index: Any, num: int) -> Any:
        if not self._collating or self._collating[-1][0] is not fetcher:
            self._begin_with(fetcher)
        self._is_timing = True  # of every batch
        batch = fetch(fetcher, index)
        if self.num_fetches == 1:
            self._patch_libraries()  # those that the first batch has imported
        return batch

    def _begin_with(self, fetcher: Any) -> None:
        super()._begin_with(fetcher)
        if ITEM not in self._names or isinstance(fetcher.dataset, Items):  # two loaders may take turns
            return
        if hasattr(fetcher, "dataset_iter"):
            raise RuntimeError("autotune: samples of a stream cannot be skipped")
        dataset = fetcher.dataset
        fetcher.dataset = Items(dataset, self._results(id(dataset), dataset))

    def _around_load(self, load: Any) -> Any:
        def load_again(image: Any) -> Any:  # PIL calls it at each use of the pixels; the first call decodes
            is_skipped = DECODE in self._names and self._is_timing and bool(image.tile)
            if not is_skipped or threading.get_ident() != self._thread:
                return load(image)
            again = self._results((id(load), image.mode), load)
            if not again.is_full:
                pixels = load(image)
                again.keep(Pixels(image))
                return pixels
            again.next().put_into(image)
            return load(image)  # nothing is left to decode

        return load_again

    def enter(self) -> None:
        """Notes that batches are made in this thread from now on: a worker may be a fork of another thread's process."""
        self._thread = threading.get_ident()
        self.num_fetches = 0  # the first batch of this process may import libraries


class Pixels:
    """The decoded pixels of a PIL image."""

    def __init__(self, image: Any) -> None:
        self.size, self._im = image.size, image.im

    def put_into(self, image: Any) -> None:
        """Gives another image of the same mode these pixels, as if it had been decoded."""
        image.tile, image.im, image._size = [], self._im, self.size
        image.readonly = 1  # PIL copies the pixels before it writes into the image


def copied(batch: Any) -> Any:
    """Returns a batch with tensors of its own, which is the least that collating costs."""
    if hasattr(batch, "clone"):
        return batch.clone()
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, each in batch.items():
            made[key] = copied(each)
        return made
    if type(batch) in (list, tuple):
        return type(batch)(copied(each) for each in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(copied(each) for each in batch)
    return batch


def apart(result: Any) -> Any:
    """Returns a result in containers of its own: the program may take items out of them."""
    if isinstance(result, MutableMapping):
        made = copy.copy(result)
        for key, each in result.items():
            if isinstance(each, (list, MutableMapping)):
                made[key] = apart(each)
        return made
    if type(result) is list:
        return [apart(each) for each in result] if result and isinstance(result[0], (list, MutableMapping)) else list(result)
    return tuple(apart(each) for each in result) if type(result) is tuple else result


def _num_bytes(result: Any) -> int:
    """Returns about how much memory a result takes: 0 if it is not known."""
    if isinstance(result, Pixels):
        return int(result.size[0] * result.size[1] * 4)
    if isinstance(result, dict):
        return sum(map(_num_bytes, result.values()))
    if isinstance(result, (list, tuple)):
        return sum(map(_num_bytes, result))
    size: Any = getattr(result, "nbytes", None)  # of tensors and arrays
    if isinstance(size, int):
        return size
    extent: Any = getattr(result, "size", None)  # of an image
    return extent[0] * extent[1] * 4 if isinstance(extent, tuple) and len(extent) == 2 else 0


def skip_functions(names: Iterable[str], *, is_needed: bool = True) -> None:
    """Skips functions of the program from now on; called once the program trains, when all its modules are imported.

    Args:
        names: "function: FILE: NAME" of each; other names are ignored.
        is_needed: whether each function must exist here. Only rank 0 may have imported what writes its logs, for example.

    Raises:
        RuntimeError: there is no such function although it is needed, or it calls the optimizer.
    """
    for name in names:
        if name.startswith(f"{FUNCTION}: "):
            file, _, function = name[len(FUNCTION) + 2 :].rpartition(": ")
            places = _places(file, function)
            if not places and not is_needed:
                continue
            if not places:
                raise RuntimeError(f"autotune: {function} cannot be skipped")
            if _is_running(file, function):
                raise RuntimeError(f"autotune: {function} cannot be skipped, because it calls the optimizer")
            _never.add(function)
            for owner, attribute in places:
                patches.install(owner, attribute, functools.partial(_skipping, function))


def check_skipped() -> None:
    """Checks that the functions were skipped.

    Raises:
        RuntimeError: one was not: the program rarely calls it, or has kept it elsewhere, for example in a list of callbacks.
    """
    if _never:
        raise RuntimeError(f"autotune: {', '.join(sorted(_never))} was never skipped")


def _is_running(file: str, name: str) -> bool:
    """Whether the thread is in a call of a function, which then has called the optimizer that has just made its first step."""
    frame: Any = sys._getframe()
    while frame is not None:
        if _is_code(frame.f_code, file, name):
            return True
        frame = frame.f_back
    return False


def _is_code(code: Any, file: str, name: str) -> bool:
    return name_of(code) == name and os.path.abspath(code.co_filename) == file


def _places(file: str, name: str) -> List[Tuple[Any, str]]:
    """Returns the owners of a function, modules or a class, each with the function's name there."""
    sources, found = Sources(), []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or sources.kind_of_file(path) is not OWN:
            continue
        owners = [module, *(each for each in list(vars(module).values()) if isinstance(each, type))]
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                if any(_is_code(function.__code__, file, name) for function in _functions(value)):
                    found.append((owner, attribute))
    return list({(id(owner), attribute): (owner, attribute) for owner, attribute in found}.values())


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yields a function and those that its decorators, such as `torch.no_grad()`, are around."""
    for _ in range(MOST_DECORATORS):
        if not isinstance(value, types.FunctionType):
            return
        yield value
        value = vars(value).get("__wrapped__")


def _skipping(name: str, function: Any) -> Any:
    kept: Dict[Hashable, Again] = {}  # for each place of the program that calls the function

    def skipped(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        again = kept.setdefault((caller.f_code, caller.f_lasti), Again(function, KEPT_CALLS))
        if not again.is_full:
            result = _independent(function(*args, **kwargs))
            again.keep(apart(result))
            return result
        _never.discard(name)
        return apart(again.next())

    skipped._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped


def _independent(result: Any) -> Any:
    """Returns a result that can be used again.

    Raises:
        RuntimeError: it can be used only once.
    """
    if any(getattr(one, "requires_grad", False) or any(hasattr(one, name) for name in ONCE) for one in _leaves(result)):
        raise RuntimeError("autotune: a function cannot be skipped whose result is part of the model's graph or serves once")
    return result


def _leaves(result: Any) -> Iterator[Any]:
    """Yields what a result consists of, without its containers."""
    if isinstance(result, (dict, list, tuple)):
        for each in result.values() if isinstance(result, dict) else result:
            yield from _leaves(each)
    else:
        yield result


_skipped: Optional[SkippedStages] = None
_never: Set[str] = set()  # functions to skip that were not skipped yet


def begin(names: Tuple[str, ...]) -> None:
    """Skips stages in this process from now on; in a worker that is a fork, they are skipped already."""
    global _skipped
    if _skipped is None:
        _skipped = SkippedStages(names)
        _skipped.install()
    _skipped.enter()
