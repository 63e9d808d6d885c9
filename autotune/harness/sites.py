"""Recognises, in a real run, the training loader of the study that found the settings.

Within a study the program does not change, so file, line and ordinal identify a loader. By the time of a real run, lines may
have moved (adding a call of `autotune.apply` is enough), the folder may differ, and each epoch may build new loaders. So
`Spec.target` also contains, for each loader, the code that constructs it and its position among the loaders constructed by
that code.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
from typing import Any, Callable, Dict, Iterator, List, Optional
from weakref import ref

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from . import adapters, members
from .knobs.loader import LoaderKnobs

# A loader's code is made from the line that constructs it and the line that called the enclosing function, because one function
# may construct all loaders.
NUM_FRAMES = 2
HASH_DIGITS = 12
SHUFFLED = ":shuffled"
MAX_WRAPPERS = 4  # levels of batch samplers inside one another that are searched


def code_of(frame: Any, is_skipped: Callable[[str], bool]) -> str:
    """Returns "train.py:make_loader:3f2a9c1b2d4e<train.py:main:...", with hashes of the constructing lines, innermost first."""
    found: List[str] = []
    while frame is not None and len(found) < NUM_FRAMES:
        code = frame.f_code
        if not is_skipped(code.co_filename):
            line = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
            if not line:
                return ""  # no source available: fall back to the line number
            digest = hashlib.sha256(line.encode("utf-8", "replace")).hexdigest()[:HASH_DIGITS]
            found.append(f"{os.path.basename(code.co_filename)}:{code.co_name}:{digest}")
        frame = frame.f_back
    return "<".join(found)


def marked(code: str, arguments: Dict[str, Any]) -> str:
    """Returns the code, with SHUFFLED added if the loader looks like a training loader: one line may make all loaders."""
    return f"{code}{SHUFFLED}" if code and looks_like_training(arguments) else code


def looks_like_training(arguments: Dict[str, Any]) -> bool:
    """Returns whether a loader, by its constructor's arguments, shuffles, has its own sampler, or streams."""
    if arguments.get("shuffle") or isinstance(arguments.get("dataset"), IterableDataset):
        return True
    sampler = _sampler(arguments)
    is_in_order = sampler is None or isinstance(sampler, SequentialSampler)
    return not is_in_order and members.attribute(sampler, "shuffle", True) is not False


def shuffles(arguments: Dict[str, Any]) -> bool:
    """Returns whether a loader, by its constructor's arguments, draws samples at random."""
    if isinstance(arguments.get("dataset"), IterableDataset):
        return False  # a stream has its own order
    sampler = _sampler(arguments)
    is_random = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    return bool(arguments.get("shuffle")) or is_random or members.attribute(sampler, "shuffle") is True


def _sampler(arguments: Dict[str, Any]) -> Any:
    """Returns a loader's sampler, which may be inside one or more batch samplers; None if the loader was given no sampler."""
    outer = arguments.get("batch_sampler")
    for _ in range(MAX_WRAPPERS):
        outer = members.attribute(outer, "batch_sampler", outer)
    return members.attribute(outer, "sampler", outer) if outer is not None else arguments.get("sampler")


def num_drawn(arguments: Dict[str, Any], num_data: Optional[int]) -> Optional[int]:
    """Returns how many samples a loader draws in an epoch; None if not known.

    Args:
        arguments: arguments of the loader's constructor.
        num_data: number of items of its data set; None if not known.
    """
    given = arguments.get("batch_sampler")
    sampler = _sampler(arguments) if given is None or members.attribute(given, "sampler") is not None else given
    if num_data is None or sampler is None:
        return num_data
    if sampler is given or not type(sampler).__module__.startswith("torch."):
        return None  # asking for its length would run code of the program that torch may never run
    try:
        return len(sampler)
    except Exception:
        return None


class TargetSites:
    """Decides by `Spec.target` which loaders get the loader knobs in mode "apply"; keeps no loader alive once training runs."""

    def __init__(self, target: Optional[List[Dict[str, Any]]]) -> None:
        self._target = target
        self._made: Dict[str, int] = {}  # code -> index of the last loader that it constructed
        self._period: Dict[str, int] = {}  # code -> number of loaders it made before training; each epoch may make them anew
        self._is_training = False
        self._batch_samplers: List[Any] = []  # weak references to the batch samplers of targets

    @property
    def is_unshared(self) -> bool:
        """Whether the target is a stream that does not ask which worker it is in; its number of workers must not change."""
        return any(each.get("is_unshared") for each in self._target or ())

    def nth(self, code: str) -> int:
        """Returns how many loaders were made before by the same code, and counts this one."""
        count = self._made[code] = self._made.get(code, -1) + 1
        return count

    def is_target(self, info: Any, arguments: Dict[str, Any], *, is_chained: bool) -> bool:
        """Returns whether a loader is one whose knobs the study changed.

        Args:
            info: the loader's record, with its site, ordinal, code and nth.
            arguments: arguments of its constructor.
            is_chained: whether it is made around the batch sampler of a target.
        """
        if is_chained:
            return True
        if self._target is None:
            return looks_like_training(arguments)
        return self._is_same(self._target[0], info)  # the other targets are made around the first one

    def _is_same(self, target: Dict[str, Any], info: Any) -> bool:
        code = target.get("code")
        if not code or not info.code:
            return bool(target["site"] == info.site and target["ordinal"] == info.ordinal)
        if code != info.code:
            return False
        if not self._is_training:
            return bool(target["nth"] == info.nth)
        # The loader is made for a later epoch. The same code may also make evaluation loaders, so its position within the epoch
        # is compared.
        return code.endswith(SHUFFLED) or bool(target["nth"] == info.nth % self._period.get(code, 1))

    def begin_training(self, loaders: List[Any]) -> None:
        """Remembers how many loaders each code has made, and the targets among `loaders`; called after the first few steps."""
        self._period = {code: count + 1 for code, count in self._made.items()}
        self._is_training = True
        for info in loaders:
            self.made(info.batch_sampler, info)

    def change(self, info: Any, arguments: Dict[str, Any], knobs: LoaderKnobs) -> None:
        """Applies the knobs to a loader that is made while the program trains, if it is a target."""
        if not knobs.asked:
            return
        info.nth = self.nth(info.code)
        given = arguments.get("batch_sampler")
        is_chained = any(is_around(given, known()) for known in self._batch_samplers)
        info.is_target = self.is_target(info, arguments, is_chained=is_chained)
        if info.is_target:
            knobs.on_loader(arguments, info, is_chained=is_chained, is_unshared=self.is_unshared)

    def made(self, batch_sampler: Any, info: Any) -> None:
        """Remembers the batch sampler of a target, because another loader may be made around it."""
        self._batch_samplers = [known for known in self._batch_samplers if known() is not None]
        if info.is_target and batch_sampler is not None:
            with contextlib.suppress(TypeError):  # it cannot be referenced weakly, such as a list; no sampler is made around it
                self._batch_samplers.append(ref(batch_sampler))


def _nested(batch_sampler: Any) -> Iterator[Any]:
    """Yields a batch sampler, the one inside it, and so on, MAX_WRAPPERS items in all; None after the innermost one."""
    for _ in range(MAX_WRAPPERS):
        yield batch_sampler
        batch_sampler = members.attribute(batch_sampler, "batch_sampler")


def batch_size_of(batch_sampler: Any) -> Optional[int]:
    """Returns the batch size of a batch sampler, or of the one inside it if it has none itself."""
    for each in _nested(batch_sampler):
        size: Optional[int] = members.attribute(each, "batch_size")
        if size is not None or not adapters.reads_batch_size_as_it_goes(each):
            return size
    return None


def num_shares_of(batch_sampler: Any) -> Optional[int]:
    """Returns into how many shares, for different ranks, a batch sampler or its sampler divides the data; None if unknown."""
    for nested in _nested(batch_sampler):
        for each in (nested, members.attribute(nested, "sampler")):
            number = members.attribute(each, "num_replicas")
            if isinstance(number, int) and number > 0:
                return number
    return None


def is_around(outer: Any, inner: Any) -> bool:
    """Whether the batch sampler `outer` is `inner` or was made around it."""
    return inner is not None and any(each is inner for each in _nested(outer))
