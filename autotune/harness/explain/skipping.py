"""Trains without some stages of the loader or functions of the program, to measure what they cost.

Each process keeps the first few results of the skipped code and then returns them again one after the other, so shapes and
sizes stay realistic. The measured rate is what training would reach if that code took no time. What the program computes in
such a trial is meaningless.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
import types
from multiprocessing.util import Finalize
from typing import Any, Callable, Dict, Hashable, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from ..patches import patches
from ..protocol import SCRATCH
from . import kept_results
from .documents import COLLATE, DECODE, FUNCTION, ITEM
from .kept_results import KEPT_BYTES, Again, Left, Pixels, Place, apart, copied
from .sources import OWN, Sources, name_of
from .stages import Stages

# Limits for the results of collating. Batches of sequences differ in length, and so in the duration of their steps. Therefore,
# more than two batches are kept if possible. But batches can be large, and collating is skipped only once enough are kept.
BATCHES: Dict[str, Any] = {"most": 16, "least": 2, "most_bytes": 32 << 20, "most_s": 0.5}
KEPT_CALLS = 4  # results of a program's function that are kept for each place that calls it
# A program may make new data sets and transforms each epoch. Beyond these limits, a process drops the oldest results.
MOST_STAGES, MOST_BYTES = 1000, 4 * KEPT_BYTES
MOST_DECORATORS = 8  # layers of decorators around a function that are searched
ONCE = ("send", "__next__", "__enter__")  # an object with one of these attributes, such as a generator, can be used only once


class Items:
    """Replaces a map-style data set and returns its first samples again and again."""

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

    Attributes:
        is_training: returns whether the loader that is making a batch feeds the training; if not, its samples are not replaced.
        by_place: the results of each stage that began in this process, unless they were dropped.

    Args:
        names: the stages, as in `Stage.name`; ITEM stands for a whole sample of a map-style data set.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._again: Dict[Hashable, Again] = {}
        self.is_training: Callable[[], bool] = lambda: True
        self.by_place: Dict[Place, Again] = {}
        self._begun_of: Dict[Place, int] = {}  # place without its last item -> number of stages so far at such places
        self._before: Dict[Place, Again] = {}  # results that earlier workers have saved

    def timed(self, name: str, function: Any, args: Any, kwargs: Any, where: Tuple[int, ...] = ()) -> Any:
        """Calls a function as a stage, as in `Stages`; once enough of its results are kept, returns one of these instead."""
        if name not in self._names or not self._is_timing or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        if name == COLLATE:
            num = len(args[0]) if isinstance(args[0], (list, tuple)) else 0  # number of samples; 0 without batching
            dataset = self._dataset()  # distinguishes loaders that share torch's default_collate
            again = self._results((id(function), id(dataset), num), (function, dataset), (name, num), BATCHES)
            if again.is_full:
                return copied(again.next())
            began_s = time.perf_counter()
            batch = function(*args, **kwargs)
            return copied(again.keep(batch, time.perf_counter() - began_s))
        again = self._results((id(function), *where), function, (name, *where))
        return apart(again.next() if again.is_full else again.keep(function(*args, **kwargs)))

    def _dataset(self) -> Any:
        """Returns the program's data set from which the current batch is made."""
        dataset = self._collating[-1][0].dataset if self._collating else None
        return dataset.dataset_of_program if isinstance(dataset, Items) else dataset

    def _results(self, key: Hashable, stage: Any, place: Place, limits: Optional[Dict[str, Any]] = None) -> Again:
        """Returns the results of a stage.

        Args:
            key: identifies the stage in this process.
            stage: what makes the results.
            place: the stage's name, and what else its results depend on.
            limits: arguments of `Again` that limit how many results are kept.
        """
        known = self._again
        if key not in known:
            while known and (len(known) >= MOST_STAGES or sum(each.num_bytes for each in known.values()) >= MOST_BYTES):
                self._drop(known.pop(next(iter(known))))
            known[key] = self._begun(stage, place, limits)
        return known[key]

    def _drop(self, dropped: Again) -> None:
        for place in [place for place, each in self.by_place.items() if each is dropped]:
            del self.by_place[place]

    def _begun(self, stage: Any, place: Place, limits: Optional[Dict[str, Any]]) -> Again:
        """Returns a stage's first results: those that earlier workers saved for the same stage, or an empty `Again`."""
        number = self._begun_of.get(place, 0)
        self._begun_of[place] = number + 1
        place = (*place, number)
        before = self._before.get(place)
        is_same = before is not None and before.kind == kept_results.kind_of(stage)
        made = before.taken_over(stage) if before is not None and is_same else Again(stage, **(limits or {}))
        self.by_place[place] = made
        return made

    def _timed_fetch(self, fetch: Any, fetcher: Any, index: Any, num: int) -> Any:
        if not self._collating or self._collating[-1][0] is not fetcher:
            self._begin_with(fetcher)
        self._is_timing = True  # in this class, it means that stages are skipped, which is done in every batch
        batch = fetch(fetcher, index)
        if self.num_fetches == 1:
            self._patch_libraries()  # the first batch may have imported some
        return batch

    def _begin_with(self, fetcher: Any) -> None:
        super()._begin_with(fetcher)
        if ITEM not in self._names or not self.is_training():
            return
        if isinstance(fetcher.dataset, Items):  # already replaced, because two loaders alternate
            return
        if hasattr(fetcher, "dataset_iter"):
            raise RuntimeError("autotune: samples of a stream cannot be skipped")
        dataset = fetcher.dataset
        fetcher.dataset = Items(dataset, self._results(id(dataset), dataset, (ITEM,)))

    def _around_load(self, load: Any) -> Any:
        def load_again(image: Any) -> Any:  # PIL calls it at each use of the pixels; the first call decodes
            is_skipped = DECODE in self._names and self._is_timing and bool(image.tile)
            if not is_skipped or threading.get_ident() != self._thread:
                return load(image)
            again = self._results((id(load), image.mode), load, (DECODE, image.mode))
            if not again.is_full:
                pixels = load(image)
                again.keep(Pixels(image))
                return pixels
            again.next().put_into(image)
            return load(image)  # nothing is left to decode

        return load_again

    def enter(self, is_training: Callable[[], bool], before: Dict[Place, Again]) -> None:
        """Notes that batches are made in this thread from now on.

        A forked worker may run in another thread than the one that was noted in its parent.

        Args:
            is_training: see the class.
            before: results that earlier workers have saved.
        """
        self._thread = threading.get_ident()
        self._patch_libraries()  # the program may have imported some since the last call
        self.num_fetches = 0  # the first batch of this process may import more
        self.is_training, self._before, self.by_place, self._begun_of = is_training, before, {}, {}


def skip_functions(names: Iterable[str], *, is_needed: bool = True) -> None:
    """Skips functions of the program from now on; called once the program trains, when all its modules are imported.

    Args:
        names: the functions, as "function: FILE: NAME"; names of another form are ignored.
        is_needed: whether each function must exist in this process. It may be false because, for example, only rank 0 imports
            the code that logs.

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
                raise RuntimeError(f"autotune: {function} cannot be skipped: it is in no module or class of the program")
            if _is_running(file, function):
                raise RuntimeError(f"autotune: {function} cannot be skipped, because it calls the optimizer")
            _not_skipped_yet.add(function)
            for owner, attribute in places:
                patches.install(owner, attribute, functools.partial(_around, function, vars(owner)[attribute]))


def check_skipped() -> None:
    """Checks that the functions were skipped.

    Raises:
        RuntimeError: a function was not skipped: the program rarely calls it, or keeps it elsewhere (e.g. a list of callbacks).
    """
    if _not_skipped_yet:
        why = "the program rarely calls it, or keeps it elsewhere than in its module or class"
        raise RuntimeError(f"autotune: {', '.join(sorted(_not_skipped_yet))} was never skipped: {why}")


def _is_running(file: str, name: str) -> bool:
    """Whether a function is running in this thread. If so, it calls the optimizer, whose step has called this code."""
    return any(_is_code(frame.f_code, file, name) for frame, _ in traceback.walk_stack(sys._getframe()))


def _is_code(code: Any, file: str, name: str) -> bool:
    return name_of(code) == name and os.path.abspath(code.co_filename) == file


def _places(file: str, name: str) -> List[Tuple[Any, str]]:
    """Returns the modules and classes that hold a function, each with the function's name there."""
    sources, found = Sources(), []
    known: Set[int] = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or sources.kind_of_file(path) is not OWN:
            continue
        for owner in _owners(module, known):
            for attribute, value in list(vars(owner).items()):
                if any(_is_code(function.__code__, file, name) for function in _functions(value)):
                    found.append((owner, attribute))
    return found


def _owners(owner: Any, known: Set[int]) -> Iterator[Any]:
    """Yields a module or a class, and the classes in it, each once."""
    if id(owner) not in known:
        known.add(id(owner))
        yield owner
        for each in list(vars(owner).values()):
            if isinstance(each, type):
                yield from _owners(each, known)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yields a function or method, and the functions that its decorators (such as `torch.no_grad()`) have wrapped."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    for _ in range(MOST_DECORATORS):
        if isinstance(value, types.FunctionType):
            yield value
        elif not isinstance(value, functools._lru_cache_wrapper):
            return
        value = vars(value).get("__wrapped__")


class Method:
    """Takes the place of a static method or, if `is_of_class`, of a class method."""

    def __init__(self, function: Any, *, is_of_class: bool) -> None:
        self._function, self._is_of_class = function, is_of_class

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return types.MethodType(self._function, owner) if self._is_of_class else self._function


def _around(name: str, held: Any, function: Any) -> Any:
    """Returns the replacement for a function.

    Args:
        name: of the function.
        held: what the module or class holds under its name, for example a `staticmethod`.
        function: what the program gets if it reads the name.
    """
    if isinstance(held, classmethod):
        return Method(_skipping(name, function.__func__), is_of_class=True)
    skipped = _skipping(name, function)
    return Method(skipped, is_of_class=False) if isinstance(held, staticmethod) else skipped


def _skipping(name: str, function: Any) -> Any:
    results: Dict[Hashable, Again] = {}  # for each place of the program that calls the function

    def skipped(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        place = (caller.f_code, caller.f_lasti)
        if (again := results.get(place)) is None:
            again = results[place] = Again(function, KEPT_CALLS)
        if not again.is_full:
            result = _independent(function(*args, **kwargs))
            again.keep(apart(result))
            return result
        _not_skipped_yet.discard(name)
        return apart(again.next())

    skipped._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped


def _independent(result: Any) -> Any:
    """Returns the result of a function, after checking that it can be used again and again.

    Raises:
        RuntimeError: it can be used only once, or belongs to the model's graph.
    """
    if any(getattr(one, "requires_grad", False) or any(hasattr(one, name) for name in ONCE) for one in _leaves(result)):
        raise RuntimeError(
            "autotune: a function whose result is part of the model's graph or can be used only once cannot be skipped"
        )
    return result


def _leaves(result: Any) -> Iterator[Any]:
    """Yields the values in nested dicts, lists and tuples: 1, 2 and 3 for {"a": [1, (2, 3)]}."""
    if isinstance(result, (dict, list, tuple)):
        for each in result.values() if isinstance(result, dict) else result:
            yield from _leaves(each)
    else:
        yield result


_skipped: Optional[SkippedStages] = None
_not_skipped_yet: Set[str] = set()  # functions to skip that were not skipped yet
_left: Dict[int, Left] = {}  # number of a loader -> results that its workers have saved


def begin(
    names: Tuple[str, ...], is_training: Callable[[], bool] = lambda: True, before: Optional[Dict[Place, Again]] = None
) -> SkippedStages:
    """Skips stages in this process from now on. In a forked worker, the patches are inherited and not installed again."""
    global _skipped
    if _skipped is None:
        _skipped = SkippedStages(names)
        _skipped.install()
    _skipped.enter(is_training, before or {})
    return _skipped


def for_workers(names: Tuple[str, ...], folder: str, number: int, *, is_training: bool) -> Callable[[], None]:
    """Returns the function that new workers must call to skip stages.

    Args:
        names: as in `SkippedStages`.
        folder: the trial's folder.
        number: number of the loader.
        is_training: whether this loader feeds the training.
    """
    if number not in _left:
        place = os.path.join(folder, SCRATCH)
        with contextlib.suppress(OSError):  # the disk is full: then each worker starts without earlier results
            os.makedirs(place, mode=0o700, exist_ok=True)
        _left[number] = Left(os.path.join(place, f"kept.{os.getpid()}.{number}"))
    return functools.partial(begin_worker, names, is_training, _left[number].prefix, _left[number].read())


def begin_worker(names: Tuple[str, ...], is_training: bool, prefix: str, before: Dict[Place, Again]) -> None:
    """Skips stages in this worker, and saves their first results for later workers when it ends."""
    skipped = begin(names, lambda: is_training, before)
    Finalize(None, kept_results.leave, args=(prefix, skipped.by_place), exitpriority=0)
