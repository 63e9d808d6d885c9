"""Sets knobs of the training DataLoader in its constructor's arguments and reads them back from the loader."""

from __future__ import annotations

import dataclasses
import inspect
import multiprocessing
from typing import Any, Dict, Optional, Tuple

from torch.utils.data import DataLoader

from .. import collating, members, startable
from ..adapters import reads_batch_size_as_it_goes
from ..context import TrialContext
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from . import affinity, transfer
from .base import KnobHandler

PREFIX = "loader."
BATCH_SIZE = PREFIX + "batch_size"
CONTEXT, IN_ORDER, SHARING = PREFIX + "multiprocessing_context", PREFIX + "in_order", PREFIX + "sharing_strategy"
ARGUMENTS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "multiprocessing_context", "in_order")
OF_STREAMS = ("num_workers", "prefetch_factor", "persistent_workers")  # not changed if each worker would yield the whole stream
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order", "sharing_strategy", "own_cores")
# Arguments that torch rejects or ignores without workers, and their neutral values.
WITHOUT_WORKERS = dict(prefetch_factor=None, persistent_workers=False, multiprocessing_context=None, timeout=0, in_order=True)
ELSEWHERE = (SHARING, affinity.OWN_CORES, *transfer.KEYS)  # not set in a constructor's arguments
FORK = "fork"

NOT_TRAINED_IN_BASELINE = "it is not the loader that trained in the baseline"
NOT_SHUFFLED = "it does not shuffle, and no baseline shows which loader trains, so only loaders that shuffle were changed"
NO_LOADER = "no DataLoader feeds the optimizer's steps"
NO_WORKERS = "has no effect without workers (loader.num_workers=0)"
NO_ARGUMENT = "the DataLoader of this torch has no such argument"
OWN_SAMPLER = "the loader is built with its own batch sampler ({}) without a batch_size"
REFUSED = "the loader's own batch sampler ({}) does not let its batch_size be set: {}"
BATCHES_ITSELF = "the program batches by itself (batch_size=None)"
FIRST_ONLY = "the collate function uses only the first sample of a batch"
UNPACKED = "the program removes the dimension of the batch before it calls its model: it expects batches of one sample"
WHOLE = (
    "each item of the data set is a whole batch, here of {0} samples. If an argument of the program sets its size, write "
    "{{loader.batch_size={0}}} in the command as its value"
)
TOO_FEW = "an epoch has only {} samples"
OTHER_UNIT = (
    "the loader's own batch sampler ({}) has batch_size={}, but the largest of its batches has {} samples: the sampler may "
    "count something else, such as tokens. If an argument of the program sets its batch_size, write "
    "{{loader.batch_size={}}} in the command as its value"
)
COMPANION = (
    "steps also take batches of another loader ({}), whose batch size would stay as it is. If an argument of the program sets "
    "both, write {{loader.batch_size=32}} in the command as its value"
)
UNSHARED = "the IterableDataset was not seen to call get_worker_info(): every worker would yield all of its data"
CHANGED = (
    "the program changes its data set or sampler between batches, which workers would not see: each has its own copy of the "
    "data set and is asked for batches ahead"
)
DRAWS = (
    "the data set or the collate function draws from a random generator of its own, not from the global one of Python, NumPy "
    "or torch: each worker would get a copy, and all copies would draw the same numbers, in every epoch. Give the loader "
    "a worker_init_fn that seeds the copy of each worker"
)
OPEN = (
    "the data set holds an open file, and workers would move each other's position in it. Open the file at the first access "
    "or in the loader's worker_init_fn"
)
REUSED = (
    "the loader writes each batch into the tensors of the last one: a worker would overwrite batches that the program has not "
    "used yet"
)
ON_DEVICE = (
    "the data set or the collate function puts the batches on the GPU, which workers forked from this process cannot use"
)
UNPINNABLE = "the batches of the loader are on the GPU already, and only host memory can be page-locked"
OWN_ITERATORS = "the loader is of a library's own class, which keeps its iterators itself"
ANOTHER_ORDER = "the loader is of a library's own class, which draws the samples in another order with workers than without"
FORKED = "the program has no workers itself, so it may not work with workers that are not forked"
MEANT_ORDER = "the loader does not shuffle: the order of its samples may be intended"


class LoaderKnobs(KnobHandler):
    """Sets the arguments of the training DataLoader."""

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._noted: Dict[str, KnobReport] = {}  # knob key -> why it could not be set at construction
        self._is_forking = False  # whether the knob added workers, and they are forked although fork is not the default

    @property
    def asked(self) -> Dict[str, Any]:
        """Knob key -> value, for the knobs of loaders that this trial sets."""
        return {key: value for key, value in self._context.spec.knobs.items() if key.startswith(PREFIX)}

    def on_loader(self, arguments: Dict[str, Any], info: Any, *, is_chained: bool, is_unshared: bool) -> None:
        """Changes the bound arguments of `DataLoader.__init__` in place and notes knobs that cannot be applied.

        Args:
            arguments: argument name -> value.
            info: the record of this loader (loader.py), in which changes of its workers are noted.
            is_chained: whether the loader is made around the batch sampler of an earlier loader, whose batch size the knob has
                already set.
            is_unshared: whether the data set is a stream that does not ask which worker it is in; its workers must not be
                changed.
        """
        has_workers, were_persistent = bool(arguments.get("num_workers")), bool(arguments.get("persistent_workers"))
        for key, value in self.asked.items():
            if key in ELSEWHERE:
                continue
            name = key[len(PREFIX) :]
            if name == "batch_size":
                problem = None if is_chained else _set_batch_size(arguments, value, info.num_drawn)
            else:
                problem = _problem(name, value, arguments, info, is_unshared=is_unshared)
                if problem is None:
                    arguments[name] = value
            if problem:
                self._noted[key] = KnobReport(NOT_APPLICABLE, problem)
        if not has_workers:
            self._fork_added_workers(arguments)
        self._drop_what_needs_workers(arguments)
        info.is_made_persistent = bool(arguments.get("persistent_workers")) and not were_persistent
        info.has_added_workers = bool(arguments.get("num_workers")) and not has_workers

    def _fork_added_workers(self, arguments: Dict[str, Any]) -> None:
        """Makes a loader fork its workers, unless the program has chosen another way to start processes.

        Called for a program that uses no workers itself. Its author may never have noticed that workers cannot start in the
        default way, which from Python 3.14 on is not fork. If the default is set, that does not count as chosen: Python sets it
        as soon as a library makes a lock or a queue, as tqdm does.
        """
        default = multiprocessing.get_all_start_methods()[0]
        is_chosen = arguments.get("multiprocessing_context") or start_method(None) != default
        if arguments.get("num_workers") and not is_chosen and default != FORK:
            arguments["multiprocessing_context"], self._is_forking = FORK, True

    def _drop_what_needs_workers(self, arguments: Dict[str, Any]) -> None:
        # torch rejects these arguments if there are no workers, so the program's own settings must be reset in such a trial.
        if arguments.get("num_workers", 0):
            return
        for name, neutral in WITHOUT_WORKERS.items():
            if arguments.get(name, neutral) != neutral:
                arguments[name] = neutral
                if PREFIX + name in self.asked:
                    self._noted[PREFIX + name] = KnobReport(NOT_APPLICABLE, NO_WORKERS)

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> value of the training loader; {} without one."""
        training = self._context.loaders.training
        if training is None:
            return {}
        return {key: value for key, value in training.settings.items() if key != BATCH_SIZE or _yields(training, value)}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed, for the training loader of the baseline."""
        training = self._context.loaders.training
        is_asked = self._context.spec.target is None  # only in the baseline: `problem` pickles the objects sent to workers
        why = startable.problem(training.parts()) if training and is_asked else ""
        return {**applicability(training), **({CONTEXT: why} if why else {})}

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report for each knob that no other handler reports, and for CONTEXT if added workers had to be forked."""
        reports = {key: self._report(key, value) for key, value in self.asked.items()}
        if self._is_forking and CONTEXT not in reports:
            reports[CONTEXT] = self._report_forked()
        return {key: report for key, report in reports.items() if report is not None}

    def _report_forked(self) -> Optional[KnobReport]:
        # The trial did not ask for forked workers, but a script that uses the exported loader knobs needs them, too.
        training = self._context.loaders.training
        is_forked = training is not None and training.num_workers and training.settings.get(CONTEXT) == FORK
        return KnobReport(APPLIED, FORKED, FORK) if is_forked else None

    def _report(self, key: str, value: Any) -> Optional[KnobReport]:
        training = self._context.loaders.training
        if training is None:
            return KnobReport(NOT_APPLICABLE, NO_LOADER)
        observed = training.settings.get(key)
        if key in self._noted and observed != value:  # otherwise it was noted for another loader
            return dataclasses.replace(self._noted[key], observed=observed)
        if key[len(PREFIX) :] in OF_WORKERS and not training.num_workers:
            return KnobReport(NOT_APPLICABLE, NO_WORKERS)
        if key in ELSEWHERE:
            return None
        if observed != value:
            is_known = self._context.spec.target is not None
            missed = "" if training.is_target else f" ({NOT_TRAINED_IN_BASELINE if is_known else NOT_SHUFFLED})"
            why = f"{value!r} was requested, but the training loader{missed} has {observed!r}"
            return KnobReport(OVERRIDDEN, why, observed)
        if key == PREFIX + "num_workers" and value and training.why_without_workers:
            return KnobReport(OVERRIDDEN, training.why_without_workers, 0)
        if key == PREFIX + "persistent_workers" and value and training.why_restarted:
            return KnobReport(OVERRIDDEN, training.why_restarted, False)
        if key == PREFIX + "num_workers" and value > 1 and not training.is_shared_out:
            return KnobReport(NOT_APPLICABLE, UNSHARED, observed)
        if key == PREFIX + "batch_size" and not _yields(training, value):
            seen = int(training.largest_batch)
            why = f"{value!r} was requested, but the program's own batch sampler yields batches of {seen}"
            return KnobReport(OVERRIDDEN, why, seen)
        return KnobReport(APPLIED, "", observed)


def _problem(name: str, value: Any, arguments: Dict[str, Any], info: Any, *, is_unshared: bool) -> Optional[str]:
    if name not in ARGUMENTS or (name == "in_order" and not has_in_order()):
        return NO_ARGUMENT
    if is_unshared and name in OF_STREAMS and not (name != "num_workers" and arguments.get("num_workers")):
        return UNSHARED
    if name == "in_order" and value is False and not info.is_shuffled:
        return MEANT_ORDER
    if info.has_own_iterators and name == "persistent_workers":
        return OWN_ITERATORS
    if info.has_own_iterators and name == "num_workers" and bool(value) != bool(arguments.get(name)):
        return ANOTHER_ORDER
    if name == "multiprocessing_context" and value != FORK:
        return startable.problem(arguments) or None
    return None


def has_in_order() -> bool:
    """Returns whether loaders can yield batches in the order in which they are finished (torch 2.6 and later)."""
    return "in_order" in inspect.signature(DataLoader.__init__).parameters


def _set_batch_size(arguments: Dict[str, Any], value: int, num_drawn: Optional[int]) -> Optional[str]:
    if num_drawn is not None and value > num_drawn:
        return TOO_FEW.format(num_drawn)  # with drop_last, there would be no batch at all
    if collating.takes_only_first(arguments.get("collate_fn")):
        return FIRST_ONLY
    sampler = arguments.get("batch_sampler")
    if sampler is not None:
        if not isinstance(members.attribute(sampler, "batch_size"), int):
            return OWN_SAMPLER.format(type(sampler).__name__)
        try:
            sampler.batch_size = value
        except Exception as error:
            return REFUSED.format(type(sampler).__name__, type(error).__name__)
        return None
    if arguments.get("batch_size", 1) is None:
        return BATCHES_ITSELF
    arguments["batch_size"] = value
    return None


def settings(loader: Any, batch_size: Optional[int]) -> Dict[str, Any]:
    """Returns knob key -> value of a constructed loader, without knobs for which it has no value."""
    num_workers = members.attribute(loader, "num_workers", 0)
    found = {
        "loader.batch_size": batch_size,
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": members.attribute(loader, "prefetch_factor") if num_workers else None,
        "loader.pin_memory": bool(members.attribute(loader, "pin_memory")),
        "loader.persistent_workers": bool(members.attribute(loader, "persistent_workers")) if num_workers else None,
        CONTEXT: start_method(members.attribute(loader, "multiprocessing_context")),
        IN_ORDER: bool(members.attribute(loader, "in_order", True)),
    }
    return {key: value for key, value in found.items() if value is not None}


def start_method(context: Any) -> str:
    """Returns "fork", "forkserver" or "spawn": how a multiprocessing_context (None for the default one) starts workers."""
    # Without allow_none, this would set the default for good, and the program could not choose another afterwards.
    own = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
    return str(own or multiprocessing.get_all_start_methods()[0])


def _yields(training: Any, size: int) -> bool:
    # The program's own batch sampler may already have formed its batches when its batch_size is changed.
    sampler, largest = training.given_batch_sampler, training.largest_batch
    is_own = sampler is not None and not reads_batch_size_as_it_goes(sampler)
    return not is_own or not largest or largest == size


def applicability(loader: Any) -> Dict[str, str]:
    """Returns knob key -> why it cannot be changed, for the training loader of the baseline (None: no loader)."""
    if loader is None:
        names = ("batch_size", *ARGUMENTS, "sharing_strategy", "own_cores")
        return {PREFIX + name: NO_LOADER for name in names}
    reasons: Dict[str, str] = {}
    kept: Tuple[str, ...] = OF_STREAMS[:1] if loader.num_workers else OF_STREAMS
    if loader.batch_size is None:
        kind = loader.given_kinds[2]
        is_own = kind is not type(None)
        reasons["loader.batch_size"] = OWN_SAMPLER.format(kind.__name__) if is_own else BATCHES_ITSELF
    elif loader.rows is not None:
        reasons["loader.batch_size"] = WHOLE.format(loader.rows)
    elif loader.takes_only_first or loader.is_unpacked:
        reasons["loader.batch_size"] = FIRST_ONLY if loader.takes_only_first else UNPACKED
    elif loader.companion:
        reasons["loader.batch_size"] = COMPANION.format(loader.companion)
    elif not _yields(loader, loader.batch_size):
        size, seen = loader.batch_size, int(loader.largest_batch)
        reasons[BATCH_SIZE] = OTHER_UNIT.format(loader.given_kinds[2].__name__, size, seen, size)
    elif loader.num_drawn is not None:
        doublings = [loader.batch_size * 2**n for n in range(1, 11)]
        reasons.update({f"loader.batch_size={n}": TOO_FEW.format(loader.num_drawn) for n in doublings if n > loader.num_drawn})
    if not loader.is_shared_out:
        reasons.update({PREFIX + name: UNSHARED for name in kept})
    if loader.is_on_device:
        reasons["loader.pin_memory"] = UNPINNABLE
    signs = (
        (loader.is_on_device, ON_DEVICE),
        (loader.is_changed_between_batches, CHANGED),
        (loader.draws_by_itself, DRAWS),
        (loader.reuses_tensors, REUSED),
        (loader.holds_open_file, OPEN),
        (loader.has_own_iterators and not loader.num_workers, ANOTHER_ORDER),
    )
    if why := next((why for is_seen, why in signs if is_seen), ""):
        reasons.update({PREFIX + name: why for name in kept})
    if loader.has_own_iterators:
        reasons[PREFIX + "persistent_workers"] = OWN_ITERATORS
    if not loader.is_shuffled:
        reasons[IN_ORDER] = MEANT_ORDER
    if not has_in_order():
        reasons[IN_ORDER] = NO_ARGUMENT
    return reasons
