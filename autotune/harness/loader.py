"""Records one DataLoader of the program: where it was made, from what, and what it has delivered."""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from . import batches, collating, members, persistent, sites, worker
from .checkpointing import is_in_backward
from .members import nothing

# The data set is examined after each of the first NUM_EXAMINED batches. It counts as changing after MIN_CHANGED changes.
NUM_EXAMINED, MIN_CHANGED = 4, 2
MIN_STEPS = 3  # after this many steps of an epoch, it is known whether each takes one batch
MARK = "_autotune_mark"  # attribute of an iterator: number of batches it had yielded when the window opened
_HARNESS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OF_NOTEBOOK = re.compile(r"/ipykernel_\d+/")  # in the file name of a cell; the number is the process id of the kernel


class Loader:
    """Facts about one DataLoader of the program. Does not keep the program's objects alive."""

    # What every batch or step reads or writes. A dictionary of so many attributes costs more time than a slot.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "fed_step",
        "is_read",
        "last_facts",
        "num_steps_fed",
        "num_steps_running",
        "num_yields",
        "samples",
        "thread",
        "total_batches",
        "total_samples",
        "total_wait_s",
        "usual_batch",
        "wait_s",
    )

    def __init__(self, number: int, arguments: Dict[str, Any]) -> None:
        self.number, self.ordinal = number, 0  # its place among all loaders, and among the loaders made at the same site
        self.stack, code = _construction()
        self.site = self.stack[0]
        self.code, self.nth = sites.marked(code, arguments), 0  # identify it even after edits of the program, see sites.py
        self.given = {name: arguments.get(name) for name in ("batch_size", "shuffle", "drop_last")}
        self.given_kinds = [type(arguments.get(name)) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
        self.is_stream = issubclass(self.given_kinds[0], IterableDataset)
        self.num_data = None if self.is_stream else _length(arguments.get("dataset"))
        self.num_drawn = sites.num_drawn(arguments, self.num_data)
        self._dataset = self._batch_sampler = self._given_batch_sampler = self._made = self._iterator = nothing
        self.renew(arguments)
        self.settings: Dict[str, Any] = {}
        self.batch_size: Optional[int] = None
        self.num_shares: Optional[int] = None  # into how many shares, for different ranks, its sampler divides the data
        self.num_workers = 0
        self.counters_file = ""
        self.has_asked_worker_info = False
        self.largest_batch = 0.0
        self.is_shuffled = sites.shuffles(arguments)
        self.sizes = batches.Sizes()
        self._probes: Any = weakref.WeakSet()  # of the iterators that exist
        self._iterators: List[Callable[[], Any]] = []  # weak references to those that exist
        self.usual_batch: Optional[float] = None  # leading dimension of a full batch, if it is the number of samples
        self.has_own_iterators = False  # whether it is of a library's own class, which keeps its iterators itself
        self.is_target = self.is_made_persistent = self.has_added_workers = False
        self.why_restarted = ""  # why its persistent workers were restarted; "" if they were not
        self.why_without_workers = ""  # why workers that the knob has added must not be used; "" if they may be
        # After the last batch: facts about the data set, a weak reference to the sampler, facts about the sampler; None if not
        # needed.
        self.last_facts: Any = None
        self._num_examined = self._num_changed = 0
        # Reasons why several workers would yield other samples than one process (knobs/loader.py); determined in the baseline.
        self.draws_by_itself = self.holds_open_file = False
        # Signs that the program expects batches of one sample, because it uses only the first sample of a batch.
        self.takes_only_first, self.is_unpacked = collating.takes_only_first(arguments.get("collate_fn")), False
        self.last_shape: Tuple[int, ...] = ()  # shape of the last tensor if a batch has several; only for the first batches
        self.rows: Optional[int] = None  # number of samples in an item, if each item of the data set is a whole batch
        self.companion = ""  # site of another loader, from which the steps take a batch as well; "" if there is none
        self.is_watched = False  # whether to compare the generators' states before and after the next fetch
        self.reuses_tensors = False  # whether it writes each batch into the tensor of the last one
        self.is_on_device = False  # whether its batches are on a GPU already
        self._last_tensor: Tuple[Any, int] = (nothing, 0)  # reference to the last batch's first tensor, its version
        self._generators: List[Any] = []  # random generators from which a fetch may draw, while fetches are watched
        self._drawn: List[bytes] = []  # states of `_generators` before a fetch
        # since the last step
        self.samples = 0.0
        self.wait_s = 0.0
        self.num_yields = 0
        self.is_read = False  # whether a batch was fetched while gradients were disabled, as for an evaluation
        self.thread, self.is_read_elsewhere = 0, False  # thread that fetched the last batch; whether another thread steps
        self._evaluated = (0.0, 0.0, 0)  # samples, wait_s, num_yields when the model was last called in evaluation mode
        # over the trial
        self.num_steps_fed = 0
        self.num_steps_before = 0  # steps of the loaders that it replaced; they count as its own when loaders are compared
        self.num_steps_running = 0  # consecutive steps that it fed
        self.fed_step = -1
        self.made_step = 0  # number of steps so far when it was last made
        self._epoch_began = self.steps_per_epoch = 0  # number of steps before this epoch; number of steps in the previous epoch
        self._before_epoch = 0.0, 0  # batches, and steps fed, before this epoch
        self._epoch_length: Optional[int] = None  # its number of batches; None if not known
        self._reading_began = -1  # steps before the last iteration, if it began with gradients disabled; -1 otherwise
        self.total_samples = self.total_wait_s = self.total_batches = 0.0

    @property
    def num_steps_ranked(self) -> int:
        """Steps that this loader and the loaders that it replaced have fed."""
        return self.num_steps_before + self.num_steps_fed

    def renew(self, arguments: Dict[str, Any]) -> None:
        """Records the loader's arguments. Called each time the program makes the loader, for example in each epoch."""
        self._dataset = _weakly(arguments.get("dataset"))
        self._given_batch_sampler = _weakly(arguments.get("batch_sampler"))

    @property
    def dataset(self) -> Any:
        """The data set; None if it no longer exists."""
        return self._dataset()

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader; None if the loader has none or the sampler no longer exists."""
        return self._batch_sampler()

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        self._batch_sampler = _weakly(value)

    @property
    def given_batch_sampler(self) -> Any:
        """The batch sampler with which the loader was constructed; None if there was none or it no longer exists."""
        return self._given_batch_sampler()

    @property
    def num_samples(self) -> Optional[int]:
        """Number of samples in the data set; None if not known."""
        return self.num_data and self.num_data * (self.rows or 1)

    def made(self, loader: Any) -> None:
        """Notes the DataLoader that was made."""
        self._made = _weakly(loader)

    def parts(self) -> Dict[str, Any]:
        """Returns what a worker would be sent, without the harness's changes; only the data set if the loader is gone."""
        names = ("dataset", "collate_fn", "worker_init_fn")
        loader = self._made()
        return {"dataset": self.dataset} if loader is None else {name: members.attribute(loader, name) for name in names}

    @property
    def needs_facts(self) -> bool:
        """Whether to note facts about the data set: true for the first NUM_EXAMINED batches of a loader without workers."""
        return self._num_examined < NUM_EXAMINED and not self.num_workers

    def needs_indices_of(self, probe: Optional[batches.BatchSizeProbe]) -> bool:
        """Adds a new iterator's probe, if it has one, and returns `needs_indices`."""
        if probe is not None:
            self._probes.add(probe)
        return self.needs_indices

    @property
    def needs_indices(self) -> bool:
        """Whether the harness still needs to see the indices of each batch, to count samples or to watch random generators."""
        return self.is_watched or (not self.sizes.is_known and bool(self._probes))

    def examine(self, loader: Any) -> None:
        """Notes whether the data set holds an open file, and the random generators that exist; called at the first iteration.

        A file or a generator that a fetch makes later does no harm, because each worker would make its own. A loader with a
        `worker_init_fn` is not examined, because this function may open files and seed generators in each worker.
        """
        if self._num_examined or self.num_workers > 1 or members.attribute(loader, "worker_init_fn") is not None:
            return
        self.holds_open_file = persistent.holds_open_file(self.dataset)
        if not self.num_workers:
            self._generators = persistent.generators([self.dataset, members.attribute(loader, "collate_fn")])
            self.is_watched = bool(self._generators)

    def begin_fetch(self) -> None:
        """Notes the states of random generators before a batch is fetched."""
        self._drawn = persistent.states(self._generators)

    def note_facts(self, first: Any) -> None:
        """Notes facts about the data set and the sampler after a batch whose first tensor is `first`."""
        self._num_examined += 1
        last, version = self._last_tensor
        self.reuses_tensors = self.reuses_tensors or (first is not None and last() is first and _version(first) != version)
        self._last_tensor = _weakly(first), _version(first)
        self.is_on_device = self.is_on_device or _is_on_device(first)
        if self._drawn:
            self.draws_by_itself = self.draws_by_itself or persistent.states(self._generators) != self._drawn
            self._drawn = []
        self.is_watched = self.is_watched and self.needs_facts
        if not self.is_watched:
            self._generators = []
        self.last_facts = persistent.facts([self.dataset]), self._batch_sampler, persistent.facts([self.batch_sampler])

    def compare(self) -> None:
        """Compares data set and sampler with what they were after the last batch; called before the next batch is fetched."""
        (of_dataset, sampler, of_sampler), self.last_facts = self.last_facts, None
        is_remade = sampler is not self._batch_sampler  # a sampler made anew with its loader does not count as changed
        is_changed = not is_remade and persistent.facts([self.batch_sampler]) != of_sampler
        self._num_changed += is_changed or persistent.facts([self.dataset]) != of_dataset

    def note_inputs(self, shapes: List[Tuple[int, ...]]) -> None:
        """Notes whether the program removes the batch dimension before it calls its models, whose inputs have `shapes`.

        If it does, and inputs and targets (the first and the last tensor) have equally many rows, each item of the loader is a
        whole batch. From then on, its rows are counted as samples.
        """
        shape, last = self.sizes.shape, self.last_shape
        is_removed = len(shape) > 1 and shape[0] == 1 and shape[1] != 1 and shape[1:] in shapes
        self.is_unpacked = self.is_unpacked or (self.batch_size == 1 and is_removed)
        rows = 1 if self.is_unpacked else 0 if self.takes_only_first and shape in shapes else None
        if rows is not None and rows < min(len(shape), len(last)) and last[rows] == shape[rows] > 1:
            self.sizes.dimension, self.rows = rows, shape[rows]
            self.settings["loader.batch_size"] = shape[rows]

    def has_rows(self, number: int) -> bool:
        """Whether the loader yields one item at a time, and each is a whole batch, with inputs and targets of `number` rows."""
        pairs = zip(self.sizes.shape[:2], self.last_shape[:2])  # noqa: B905 (Python 3.9)
        return self.batch_size == 1 and (number, number) in pairs

    @property
    def is_changed_between_batches(self) -> bool:
        """Whether the program changes data set or sampler between batches, so that batches fetched ahead would be outdated."""
        return self._num_changed >= MIN_CHANGED

    def begins(self, iterator: Any) -> None:
        """Notes that an iteration over the loader begins."""
        self._iterator = _weakly(iterator)
        self._iterators = [*(ref for ref in self._iterators if ref() is not None), self._iterator]

    def mark_iterators(self) -> None:
        """Notes, as the window opens, how many batches each iterator has yielded; see `num_at_once`."""
        for iterator in self._running():
            iterator.__dict__[MARK] = _num_yielded(iterator)

    @property
    def num_at_once(self) -> int:
        """How many iterators with workers of their own have yielded since `mark_iterators`: 2 for `zip(loader, loader)`."""
        return max(1, sum(1 for each in self._running() if _num_yielded(each) > each.__dict__.get(MARK, 0)))

    def _running(self) -> List[Any]:
        found = (ref() for ref in self._iterators)
        return [each for each in found if each is not None and not getattr(each, "_shutdown", False)]

    def begins_epoch(self, num_steps: int) -> None:
        """Records that, after `num_steps` steps, the program begins to iterate over the loader again.

        An iteration without steps, such as an evaluation, does not count as an epoch.
        """
        if num_steps > self._epoch_began:
            self.steps_per_epoch, self._epoch_began = num_steps - self._epoch_began, num_steps
        self._reading_began = -1 if torch.is_grad_enabled() else num_steps

    def leaves_unused(self) -> bool:
        """Whether an epoch ended early (by `break`) with a batch that was not trained on; called as the next one begins."""
        taken, num_steps = self.total_batches - self._before_epoch[0], self.num_steps_fed - self._before_epoch[1]
        is_early = self._epoch_length is not None and taken + self.num_yields < self._epoch_length
        is_unused = is_early and self.num_yields > 0 and MIN_STEPS <= num_steps == taken
        self._before_epoch = self.total_batches + (0 if is_unused else self.num_yields), self.num_steps_fed
        loader = self._made()
        counts = getattr(type(loader), "__len__", None)
        self._epoch_length = _length(loader) if counts is DataLoader.__len__ else None  # a subclass may count differently
        return is_unused

    def was_only_read(self, num_steps: int) -> bool:
        """Whether the last iteration had neither gradients nor steps, because the program computed statistics, for example.

        Args:
            num_steps: steps so far.
        """
        return self._reading_began == num_steps and self.num_yields > 0

    def evaluated(self) -> None:
        """Notes that the model was called in evaluation mode, possibly on batches of this loader."""
        self._evaluated = (self.samples, self.wait_s, self.num_yields)

    def note_reader(self) -> bool:
        """Returns whether the batches are fetched by another thread than this one, which makes the steps.

        If so, waits overlap with steps. Returns False within a backward pass: if the optimizer steps in it, this thread may be
        one of autograd.
        """
        self.is_read_elsewhere = self.thread not in (0, threading.get_ident()) and not is_in_backward()
        return self.is_read_elsewhere

    def take(self) -> Tuple[float, float, int]:
        """Returns samples, seconds waited for input and number of batches since the last step.

        Batches before a call in evaluation mode do not count, because they were evaluated. But if no batch came after that
        call, all count: the model was called in both modes on the same batch.
        """
        now, before = (self.samples, self.wait_s, self.num_yields), self._evaluated
        self.samples, self.wait_s, self.num_yields, self._evaluated = 0.0, 0.0, 0, (0.0, 0.0, 0)
        self.is_read = False
        if before[2] == now[2]:
            return now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    @property
    def is_iterated(self) -> bool:
        """Whether the iterator still exists and has more batches; with persistent workers, the loader holds it."""
        iterator = self._iterator()
        try:
            return iterator is not None and iterator._num_yielded < len(iterator)
        except Exception:  # a stream has no length
            return True

    @property
    def is_given_up(self) -> bool:
        """Whether the program dropped the iterator after the batches of one step, so that all steps use the same data."""
        return self.num_steps_fed == 1 and self._iterator() is None

    @property
    def is_shared_out(self) -> bool:
        """Whether the workers divide the data, instead of each worker yielding all of it.

        The workers divide a stream that asks which worker it is in. They are also assumed to divide it if the program itself
        uses several workers; a single worker proves nothing.
        """
        if not self.is_stream or self.has_asked_worker_info or (self.num_workers > 1 and not self.is_target):
            return True
        return any(each.has_asked for each in worker.read(self.counters_file)) if self.counters_file else False

    def is_rebuilt_as(self, other: "Loader") -> bool:
        """Whether this loader has trained and `other` is the same loader made again (e.g. each epoch): same site and arguments.

        In addition, either the data set must be the same object, or the whole call stack must be the same and the old data set
        must be gone or of the same length.
        """
        if not self._is_like(other):
            return False
        is_new_part = self.dataset is None or (self.num_data is not None and self.num_data == other.num_data)
        return self.dataset is other.dataset or (is_new_part and self.stack == other.stack)

    def is_followed_by(self, other: "Loader", num_steps: int) -> bool:
        """Whether `other` takes the place of this loader with a data set of another length, as in each epoch of a curriculum.

        Both must shuffle: a loader for evaluation, which the same line may make, does not.

        Args:
            other: a loader that is about to be made.
            num_steps: steps so far; at least one must have been made since this loader was made.
        """
        return self._is_like(other) and self.is_shuffled and self.stack == other.stack and self.made_step < num_steps

    def _is_like(self, other: "Loader") -> bool:
        is_same_site = self.site == other.site and self.num_steps_fed > 0
        return is_same_site and self.given == other.given and self.given_kinds == other.given_kinds

    def __deepcopy__(self, memo: Any) -> "Loader":
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled DataLoader drops this record, since it may be read where there is no harness


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value) if value is not None else nothing
    except TypeError:  # for example a list
        return lambda: value


def _num_yielded(iterator: Any) -> int:
    return int(getattr(iterator, "_num_yielded", 0))  # absent while its workers start, or if they could not start


def _version(value: Any) -> int:
    """Returns a number that grows each time a tensor is written to; 0 for other objects."""
    return int(value._version) if isinstance(value, Tensor) and not Tensor.is_inference(value) else 0


def _is_on_device(value: Any) -> bool:
    """Whether a value is a tensor outside of host memory."""
    device: Any = Tensor.device
    return isinstance(value, Tensor) and device.__get__(value).type != "cpu"


def _length(dataset: Any) -> Optional[int]:
    try:
        return len(dataset)  # runs the program's code, as torch's samplers do; there is no other way to get the length
    except Exception:  # a stream, or a length that fails
        return None


def _construction() -> Tuple[List[str], str]:
    """Returns "file:line" of the callers outside torch and the harness, nearest first, and the nearest's code (sites.py)."""
    library = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

    def is_skipped(name: str) -> bool:
        return name.startswith((library, _HARNESS, "<frozen"))

    nearest: Any = None
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        if not is_skipped(frame.f_code.co_filename):
            nearest = nearest or frame
            found.append(f"{_OF_NOTEBOOK.sub(os.sep, frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return found or ["?"], sites.code_of(nearest, is_skipped)
