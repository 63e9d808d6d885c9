"""Times the stages in which a loader makes batches: reading, decoding, each transform, the rest of an item, collating.

Stages are timed in the loader's worker processes or, without workers, in the training process. A stage's seconds do not
include the seconds of other stages that run within it.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from ..patches import Patch, patches, replace_of_object
from ..worker import OWN_DELAYS, _delays, read_together
from .documents import COLLATE, DECODE, HANDOVER, ITEM, PIN, READ, TRANSFORM, Stage
from .sources import OWN, Sources, code_of, name_of

CHEAP_S = 200e-6  # if a sample takes less time than this, only one batch in ONE_IN is timed
ONE_IN = 32
# Functions that read or decode, as (module, function, stage). They are timed if the program has imported their module.
FUNCTIONS = (
    ("builtins", "open", READ),
    ("io", "open", READ),
    ("PIL.Image", "open", READ),
    ("numpy", "load", READ),
    ("torch", "load", READ),
    ("torchvision.io.image", "read_file", READ),
    ("torchvision.io.image", "decode_image", DECODE),
    ("torchvision.io.image", "decode_jpeg", DECODE),
    ("torchvision.io.image", "decode_png", DECODE),
    ("cv2", "imread", DECODE),
    ("cv2", "imdecode", DECODE),
    ("torchaudio", "load", DECODE),
    ("soundfile", "read", DECODE),
)
COMPOSES = ("torchvision.transforms.transforms", "torchvision.transforms.v2._container")
MAX_DATASETS = 8  # data sets may wrap data sets: at most this many levels are searched for the program's own code

Place = Tuple[str, int, str]  # file, line, function; ("", 0, "") if the code is not the program's own
NOWHERE: Place = ("", 0, "")


class Stages:
    """Times the stages in this process.

    Attributes:
        num_fetches, num_samples: batches made, and samples requested from the data set.
        num_timed: samples of the batches that were timed.
        is_fetching: whether a batch is being made.
        is_observed: returns whether the batch that is about to be made belongs to the loader whose stages are timed.
        totals: stage -> [wall seconds, CPU seconds, seconds waited for a core, CPU seconds of others, calls], of timed batches.
            The others are this process's child processes and, in a worker, its other threads.
        places: stage -> file, line and function of its code.
    """

    def __init__(self, *, is_worker: bool = False) -> None:
        self._sources = Sources()
        self._others_s = _of_children_and_threads if is_worker else _of_children
        self._thread = threading.get_ident()
        self._delay_s = _delays()
        self.knows_delays = os.path.exists(OWN_DELAYS)
        self.num_fetches = self.num_samples = self.num_timed = 0
        self.is_fetching = self._is_timing = False
        self.is_observed: Callable[[], bool] = lambda: True
        self._one_in = 1
        self.totals: Dict[str, List[float]] = {}
        self.places: Dict[str, Place] = {}
        self._open: List[List[float]] = []  # for each stage that is running, the times of the stages inside it
        self._patches: List[Patch] = []
        self._collating: List[Tuple[Any, Any]] = []  # the current fetcher and its original collate_fn
        self._done: Set[Tuple[int, str]] = set()  # what is patched: id of the owner, name of its attribute

    def timed(self, name: str, function: Any, args: Any, kwargs: Any, where: Tuple[int, ...] = ()) -> Any:
        """Calls a function and times it as a stage. Only subclasses use `where`: (position in a Compose, its length)."""
        if not self._is_timing or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        begin = self._now()
        self._open.append([0.0] * len(begin))
        try:
            return function(*args, **kwargs)
        finally:
            spent = [end - start for end, start in zip(self._now(), begin)]  # noqa: B905 (Python 3.9)
            self._add(name, [all_ - inner for all_, inner in zip(spent, self._open.pop())])  # noqa: B905 (Python 3.9)
            if self._open:
                self._open[-1] = [outer + own for outer, own in zip(self._open[-1], spent)]  # noqa: B905

    def _now(self) -> Tuple[float, float, float, float]:
        """Returns wall seconds, CPU seconds, seconds waited for a core (all read at once), and CPU seconds of others."""
        delay_s, (now_s, cpu_s) = read_together(self._delay_s, _clocks)
        return now_s, cpu_s, delay_s, self._others_s()

    def _add(self, name: str, spent: List[float]) -> None:
        total = self.totals.setdefault(name, [0.0] * (len(spent) + 1))
        for position, each in enumerate((*spent, 1.0)):
            total[position] += each

    def around_fetch(self, fetch: Any) -> Any:
        """Returns a fetcher's `fetch` wrapped so that a batch is timed."""

        def timed_fetch(fetcher: Any, index: Any) -> Any:
            if self.is_fetching or threading.get_ident() != self._thread or not self.is_observed():
                return fetch(fetcher, index)
            num = len(index) if isinstance(index, (list, tuple)) else 1
            self.num_fetches += 1
            self.num_samples += num
            self.is_fetching = True
            try:
                if self.num_fetches % self._one_in:
                    return fetch(fetcher, index)
                return self._timed_fetch(fetch, fetcher, index, num)
            finally:
                self.is_fetching = self._is_timing = False

        return timed_fetch

    def _timed_fetch(self, fetch: Any, fetcher: Any, index: Any, num: int) -> Any:
        if not self._collating or self._collating[-1][0] is not fetcher:
            self._begin_with(fetcher)
        self._is_timing, begin_s = True, time.perf_counter()
        batch = self.timed(ITEM, fetch, (fetcher, index), {})
        self.num_timed += num
        self._one_in = 1 if time.perf_counter() - begin_s >= CHEAP_S * num else ONE_IN
        if self.num_fetches == 1:
            self._patch_libraries()  # the first batch may have imported some
        return batch

    def _begin_with(self, fetcher: Any) -> None:
        """Wraps the collate function of a new fetcher, and notes which code of the program collates and makes its items."""
        self._restore_collate()
        self._collating.append((fetcher, fetcher.collate_fn))
        self.places[COLLATE] = self._place(fetcher.collate_fn, ("__call__",))
        self.places[ITEM] = self._place_of_items(fetcher.dataset)

        def around(collate: Any) -> Any:
            return lambda *args, **kwargs: self.timed(COLLATE, collate, args, kwargs)

        replace_of_object(fetcher, "collate_fn", around)

    def _restore_collate(self) -> None:
        while self._collating:
            fetcher, collate = self._collating.pop()
            fetcher.collate_fn = collate

    def _place(self, thing: Any, names: Tuple[str, ...] = ()) -> Place:
        code = code_of(thing, names)
        if code is None or self._sources.kind(code) is not OWN:
            return NOWHERE
        return os.path.abspath(code.co_filename), code.co_firstlineno, name_of(code)

    def _place_of_items(self, dataset: Any) -> Place:
        for _ in range(MAX_DATASETS):  # a data set may hold another, as Subset does
            for name in ("__getitems__", "__getitem__", "__iter__"):
                place = self._place(getattr(type(dataset), name, None))
                if place != NOWHERE:
                    return place
            several = getattr(dataset, "datasets", ())
            several = several.values() if isinstance(several, dict) else several if isinstance(several, (list, tuple)) else ()
            inner = getattr(dataset, "dataset", None)
            dataset = next(iter(several), None) if inner is None else inner  # `inner` may be an array, without a truth value
        return NOWHERE

    def install(self) -> None:
        """Starts to time the batches that are made in this process."""
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._patches.append(patches.install(kind, "fetch", self.around_fetch))
        self._patch_libraries()

    def _patch_libraries(self) -> None:
        for module, name, stage in FUNCTIONS:
            self._patch_once(sys.modules.get(module), name, functools.partial(self._around, stage))
        for module in COMPOSES:
            compose = getattr(sys.modules.get(module), "Compose", None)
            self._patch_once(compose, "forward" if hasattr(compose, "forward") else "__call__", self._around_compose)
        self._patch_once(getattr(sys.modules.get("PIL.ImageFile"), "ImageFile", None), "load", self._around_load)

    def _patch_once(self, owner: Any, name: str, wrap: Any) -> None:
        if owner is not None and hasattr(owner, name) and (id(owner), name) not in self._done:
            self._done.add((id(owner), name))
            self._patch(owner, name, wrap)

    def install_hand_over(self) -> None:
        """Times, in the training process, how batches are received from workers and pinned."""
        from torch.utils.data._utils import pin_memory

        self._patch(ForkingPickler, "loads", functools.partial(self._around_any_thread, HANDOVER))
        self._patch(pin_memory, "pin_memory", functools.partial(self._around_any_thread, PIN))

    def install_sending(self) -> None:
        """Times, in a worker, how batches are sent."""
        self._patch(ForkingPickler, "dumps", functools.partial(self._around_any_thread, HANDOVER))

    def uninstall(self) -> None:
        """Removes the patches."""
        self._is_timing = False
        self._restore_collate()
        while self._patches:
            self._patches.pop().uninstall()

    def _patch(self, owner: Any, name: str, wrap: Any) -> None:
        self._patches.append(patches.install(owner, name, wrap))

    def _around(self, stage: str, function: Any) -> Any:
        def staged(*args: Any, **kwargs: Any) -> Any:
            return self.timed(stage, function, args, kwargs) if self._is_timing else function(*args, **kwargs)

        return staged

    def _around_load(self, load: Any) -> Any:
        def staged_load(image: Any) -> Any:  # PIL calls it at each use of the pixels; the first call decodes
            return self.timed(DECODE, load, (image,), {}) if self._is_timing and image.tile else load(image)

        return staged_load

    def _around_compose(self, call: Any) -> Any:
        def composed(compose: Any, *inputs: Any, **named: Any) -> Any:
            if not self._is_timing or threading.get_ident() != self._thread:
                return call(compose, *inputs, **named)
            inputs = (*inputs, *named.values())  # torchvision allows one input by name, if it is the only input
            transforms, are_several, outputs = compose.transforms, len(inputs) > 1, inputs[0]
            for position, transform in enumerate(transforms):
                name = self._name(transform)
                outputs = self.timed(name, transform, inputs, {}, (position, len(transforms)))
                inputs = outputs if are_several else (outputs,)
            return outputs

        return composed

    def _name(self, transform: Any) -> str:
        given = getattr(transform, "lambd", transform)  # torchvision's Lambda
        name = f"{TRANSFORM}: {getattr(given, '__name__', type(given).__name__)}"
        if name not in self.places:
            self.places[name] = self._place(given, ("forward", "__call__", "transform"))
        return name

    def _around_any_thread(self, stage: str, function: Any) -> Any:
        depth = threading.local()

        def staged(*args: Any, **kwargs: Any) -> Any:
            if getattr(depth, "is_inside", False):
                return function(*args, **kwargs)
            depth.is_inside = True
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth.is_inside = False
                self._add(stage, [time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s, 0.0, 0.0])

        return staged

    def counts(self) -> Dict[str, Any]:
        """Returns the counts so far, as plain data that can be added and subtracted."""
        return {
            "fetches": self.num_fetches,
            "samples": self.num_samples,
            "timed": self.num_timed,
            "totals": {name: list(total) for name, total in list(self.totals.items())},
        }


def _clocks() -> Tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _of_children() -> float:
    """Returns the CPU seconds of this process's child processes that have ended, such as a decoder that it has called."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _of_children_and_threads() -> float:
    """Returns the CPU seconds of child processes and of all other threads.

    Not used in the training process: torch's threads there keep cores busy while they wait for work, which would be included.
    """
    return _of_children() + time.process_time() - time.thread_time()


def stages_of(counts: Dict[str, Any], places: Dict[str, Place], where: str, *, knows_delays: bool) -> List[Stage]:
    """Returns the stages, with their seconds per sample.

    Args:
        counts: the sum of `Stages.counts` over all processes.
        places: stage -> its code.
        where: MAIN or WORKER.
        knows_delays: whether the time waited for a core is known.
    """
    found = []
    for name, (wall_s, cpu_s, delay_s, others_s, calls) in counts["totals"].items():
        samples = max(1, counts["samples"] if name in (HANDOVER, PIN) else counts["timed"])
        waited_s, others_s = max(0.0, wall_s - cpu_s - delay_s), max(0.0, others_s)
        cpu_s += min(waited_s, others_s)  # for this long, the stage waits for threads or processes that compute
        blocked_s = max(0.0, waited_s - others_s) / samples if knows_delays and name not in (HANDOVER, PIN) else None
        file, line, function = places.get(name, NOWHERE)
        found.append(Stage(name, where, wall_s / samples, cpu_s / samples, blocked_s, int(calls), file, line, function))
    return sorted(found, key=lambda stage: _order(stage.name))


def together(counts: List[Dict[str, Any]], before: Sequence[Dict[str, Any]] = ()) -> Dict[str, Any]:
    """Returns the sum of several processes' counts, minus their earlier counts."""
    totals: Dict[str, List[float]] = {}
    signed = [(each, 1) for each in counts] + [(each, -1) for each in before]
    for each, sign in signed:
        for name, total in each["totals"].items():
            known = totals.get(name, [0.0] * len(total))
            totals[name] = [a + sign * b for a, b in zip(known, total)]  # noqa: B905 (Python 3.9)
    return {
        **{key: sum(sign * each[key] for each, sign in signed) for key in ("fetches", "samples", "timed")},
        "totals": totals,
    }


def _order(name: str) -> int:
    names = (READ, DECODE, TRANSFORM, ITEM, COLLATE, HANDOVER, PIN)
    return names.index(TRANSFORM) if name.startswith(TRANSFORM) else names.index(name)
