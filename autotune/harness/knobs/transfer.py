"""Copies batches to the device without blocking the program, or copies each batch in advance, during the previous step.

The program keeps its own `batch.to(device)`, and its loaders still yield batches on the host. With loader.non_blocking, a copy
of a tensor that a loader has yielded does not block. With loader.device_prefetch, the copy was already made on a side stream
while the previous step was computed. Only tensors that the program was seen to move are copied ahead. If the program changes
such a tensor on the host, the tensor is copied again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .. import adapters, batches
from ..context import TrialContext
from ..patches import patches
from ..protocol import APPLIED, NOT_APPLICABLE, KnobReport
from .base import ON_THE_CPU, KnobHandler

NON_BLOCKING, AHEAD = "loader.non_blocking", "loader.device_prefetch"
KEYS = (NON_BLOCKING, AHEAD)
NOTHING_TO_COPY = f"{ON_THE_CPU}: no batch is copied to a device"
UNSEEN = "no tensor of a loader's batches was seen to be moved by Tensor.to() or Tensor.cuda()"
TOO_EARLY = (
    "the program changes its data set or sampler between batches, and a batch fetched ahead would be made before the change"
)
REUSED = "the loader writes each batch into the tensors of the last one, which may still be copied"
NOT_AHEAD = "no batch had been copied ahead when the program moved it"


class Moves:
    """Where the program moves the batches of one loader."""

    def __init__(self) -> None:
        self.devices: Dict[int, Any] = {}  # position of a tensor in the batch -> device it is moved to
        self.num_waiting = 0  # copies made ahead and not used yet

    def __reduce__(self) -> Any:
        return type(None), ()  # pickled as None, because a pickled DataLoader does not need it


class Leaf:
    """One tensor of a batch, as the loader yielded it."""

    def __init__(self, tensor: Any, place: int, moves: Moves, forget: Callable[[Any], None]) -> None:
        self.tensor = weakref.ref(tensor, forget)
        self.place, self.moves = place, moves
        self.version = tensor._version
        self.copy: Optional[Tuple[Any, Any]] = None  # the copy on the device, the event that marks its completion

    def take(self) -> Optional[Tuple[Any, Any]]:
        """Returns and forgets the copy made ahead; None without one."""
        copy, self.copy = self.copy, None
        if copy is not None:
            self.moves.num_waiting -= 1
        return copy


class SideStreams:
    """Copies tensors while the device computes. Only this class of the module needs CUDA."""

    def __init__(self) -> None:
        self._streams: Dict[Any, Any] = {}

    def copy(self, tensor: Any, device: Any) -> Tuple[Any, Any]:
        """Returns a tensor's copy on a device and the event that marks its completion."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            return torch.Tensor.to(tensor, device, non_blocking=True), stream.record_event()

    def hand_over(self, copy: Any, event: Any) -> None:
        """Makes later work on the current stream wait for a copy, and keeps the copy's memory until that work is done."""
        current = torch.cuda.current_stream(copy.device)
        current.wait_event(event)
        copy.record_stream(current)


class TransferKnobs(KnobHandler):
    """Patches the loaders' iterators, `Tensor.to` and `Tensor.cuda` if a knob asks for it; `streams` makes the copies ahead."""

    keys = KEYS

    def __init__(self, context: TrialContext, streams: Any = None) -> None:
        super().__init__(context)
        self._non_blocking: Optional[bool] = self.asked.get(NON_BLOCKING)
        self._is_ahead = self.asked.get(AHEAD) is True
        self._streams = streams or SideStreams()
        self._leaves: Dict[int, Leaf] = {}
        self.num_moved = self.num_ahead = 0
        if self._non_blocking is not None or self._is_ahead:
            self._patch_iteration()
            self._patch_moves()

    def _patch_iteration(self) -> None:
        def around_start(start: Any) -> Any:
            def __init__(iterator: Any, loader: Any) -> None:
                found = loader.__dict__.get("_autotune_moves")
                if found is None:
                    found = loader.__dict__["_autotune_moves"] = Moves()
                iterator._autotune_moves, iterator._autotune_ahead = found, None
                start(iterator, loader)

            return __init__

        def around_advance(advance: Any) -> Any:
            def __next__(iterator: Any) -> Any:
                # Persistent workers reuse the iterator. A batch fetched ahead in an epoch that was cut short must be dropped.
                # An iterator that saves its position in checkpoints (`state_dict`) must not be ahead of the program.
                moves = getattr(iterator, "_autotune_moves", None)
                if moves is None:  # an iterator from before `autotune.apply`
                    return advance(iterator)
                ahead, iterator._autotune_ahead = iterator._autotune_ahead, None
                if ahead is None or ahead[0] != iterator._num_yielded:
                    ahead = self._fetch(iterator, advance, is_ahead=False)
                if self._is_ahead and moves.devices and ahead[2] is None and not hasattr(iterator, "state_dict"):
                    iterator._autotune_ahead = self._fetch(iterator, advance, is_ahead=True)
                if ahead[2] is None:
                    return ahead[1]
                try:
                    raise ahead[2]
                finally:
                    del ahead  # the exception's traceback holds this frame, and so the program's frames and their tensors

            return __next__

        patches.install(_BaseDataLoaderIter, "__init__", around_start)
        patches.install(_BaseDataLoaderIter, "__next__", around_advance)

    def _fetch(self, iterator: Any, advance: Any, *, is_ahead: bool) -> Tuple[int, Any, Optional[Exception]]:
        """Returns (number of batches yielded so far, the next batch, the exception raised instead)."""
        try:
            batch = advance(iterator)
        except StopIteration:  # raised when the program requests this batch; new, because the old one's traceback holds frames
            return iterator._num_yielded, None, StopIteration()
        except Exception as error:
            return iterator._num_yielded, None, error
        self._mark(batch, iterator._autotune_moves, is_ahead=is_ahead)
        return iterator._num_yielded, batch, None

    def _mark(self, batch: Any, moves: Moves, *, is_ahead: bool) -> None:
        is_on: Any = Tensor.device
        # Only the current and the next batch are copied ahead; otherwise a program that collects batches would fill the device.
        begins = is_ahead and moves.num_waiting <= len(moves.devices)
        for place, tensor in enumerate(batches._tensors(batch)):
            if not isinstance(tensor, Tensor) or is_on.__get__(tensor).type != "cpu" or Tensor.is_inference(tensor):
                continue
            key, device = id(tensor), moves.devices.get(place)
            self._forget(key)  # a data set may yield the same tensor in several batches
            leaf = Leaf(tensor, place, moves, functools.partial(self._forget, key))
            if begins and device is not None:
                leaf.copy = self._streams.copy(tensor, device)
                moves.num_waiting += 1
            self._leaves[key] = leaf

    def _forget(self, key: int, _: Any = None) -> None:
        leaf = self._leaves.pop(key, None)
        if leaf is not None:
            leaf.take()

    def _patch_moves(self) -> None:
        leaves, move, own_to = self._leaves, self._move, torch.Tensor.to

        def around(is_cuda: bool, own: Any) -> Any:
            def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                leaf = leaves.get(id(tensor))
                # A library's tensor may keep its class in `to`, but not in `cuda`. So `to` cannot replace its `cuda`.
                if leaf is None or leaf.tensor() is not tensor or (is_cuda and type(tensor) is not Tensor):
                    return own(tensor, *args, **kwargs)
                return move(leaf, own_to, *as_to(*args, **kwargs)) if is_cuda else move(leaf, own, args, kwargs)

            return moved

        def around_array(own: Any) -> Any:
            def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                for each in (tensor, tensor._base):
                    leaf = leaves.get(id(each))
                    if leaf is not None and leaf.tensor() is each:
                        leaf.take()  # the copy may be outdated soon: writing to the array does not change the tensor's version
                return own(tensor, *args, **kwargs)

            return numpy

        for name in ("to", "cuda"):
            patches.install(torch.Tensor, name, functools.partial(around, name == "cuda"))
        adapters.keep_class_in(torch.Tensor.to)
        if self._is_ahead:
            patches.install(torch.Tensor, "numpy", around_array)

    def _move(self, leaf: Leaf, to: Any, args: Any, kwargs: Any) -> Any:
        tensor: Any = leaf.tensor()
        device, dtype, non_blocking, layout = where_to(args, kwargs)
        if device is None or device.type == "cpu":
            return to(tensor, *args, **kwargs)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.num_moved += 1
        leaf.moves.devices[leaf.place] = device
        wanted = {"device": device, "dtype": dtype or tensor.dtype}
        if layout is not None:
            wanted["memory_format"] = layout
        ready = leaf.take()
        if (
            ready is not None
            and ready[0].device == device
            and tensor._version == leaf.version
            and _has_its_grad(ready[0], tensor)
        ):
            self._streams.hand_over(*ready)
            self.num_ahead += 1
            return to(ready[0], **wanted)
        return to(tensor, **wanted, non_blocking=non_blocking if self._non_blocking is None else self._non_blocking)

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this process."""
        if self._context.device == "cpu":
            return dict.fromkeys(KEYS, NOTHING_TO_COPY)
        training = self._context.loaders.training
        if training is not None and training.reuses_tensors:
            return dict.fromkeys(KEYS, REUSED)
        return {AHEAD: TOO_EARLY} if training is not None and training.is_changed_between_batches else {}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        missing = UNSEEN if not self.num_moved else NOT_AHEAD if key == AHEAD and not self.num_ahead else ""
        if self._context.device == "cpu":
            return KnobReport(NOT_APPLICABLE, NOTHING_TO_COPY, False)
        return KnobReport(NOT_APPLICABLE, missing, False) if asked and missing else KnobReport(APPLIED, "", asked)


def _has_its_grad(copy: Any, tensor: Any) -> bool:
    """Whether a copy made ahead has the same `requires_grad` as a copy made now; the program may have changed it since."""
    return bool(copy.requires_grad == (tensor.requires_grad and torch.is_grad_enabled()))


def where_to(args: Any, kwargs: Dict[str, Any]) -> Tuple[Any, Any, bool, Any]:
    """Returns (device, dtype, non_blocking, memory format) of a call of `Tensor.to`; the device is None if none is given."""
    try:
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):  # copy=True, or wrong arguments, for which `Tensor.to` raises later
        return None, None, False, None
    return device, dtype, non_blocking, layout


def as_to(device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tuple[Any, Dict[str, Any]]:
    """Converts the arguments of `Tensor.cuda` to those of `Tensor.to`."""
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device("cuda" if device is None else device)
    return (where,), {"non_blocking": non_blocking, **kwargs}
