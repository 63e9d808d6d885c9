"""Counts the samples in a batch, whatever its layout.

The leading dimension of a batch's first tensor need not be the number of samples. It may be the length of the sequence, or all
documents of a batch may be packed into one row. But a loader's sampler shows how many samples it requests for each batch. If
one dimension of the first tensor equals that number in NUM_COMPARED batches, this dimension gives the count from then on.
Otherwise the number that the sampler requests is the count.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import Any, Deque, Iterator, List, Optional, Tuple

from torch import Tensor
from torch.nn import Parameter

from . import members

NUM_COMPARED = 16  # number of batches whose shapes are compared with the number of samples that the sampler requested
MOST_SHORT = 3  # if more first batches than this are smaller than requested, the sampler's number is always the count
MAX_DEPTH = 3  # levels of nested lists, dictionaries and objects that are searched for tensors
LONG = 16  # a longer list is skipped if its first and last items are plain: it probably holds words or ids
MAX_NODES = 64  # nodes of an input's autograd graph that are searched for parameters
PLAIN = (int, float, bool, str, bytes, type(None))
INTEGERS = ("torch.int32", "torch.int64")
_DTYPE: Any = Tensor.dtype
_GRAD_FN: Any = Tensor.grad_fn


class BatchSizeProbe:
    """Records how many samples a batch sampler asks for, batch by batch, in one pass over a loader."""

    def __init__(self) -> None:
        self.asked: Deque[int] = deque()
        self.is_active = True

    def begin(self) -> None:
        """Forgets the last epoch's sizes: with persistent workers, an iterator and its probe serve several epochs."""
        self.asked.clear()

    def note(self, indices: Any) -> None:
        """Records the size of a batch that the sampler asks for."""
        if self.is_active:
            self.asked.append(_num_indices(indices))

    def last(self) -> int:
        """Returns how many indices the sampler gave for the batch that the loader just yielded; 0 if this was not recorded."""
        return self.asked.popleft() if self.asked else 0


def probe_batch_size(iterator: Any) -> Optional[BatchSizeProbe]:
    """Returns a probe for the batch sampler of a new loader iterator; None if the loader has no batch sampler.

    The probe does not replace the iterator's sampler, because some iterators save the sampler's state in a checkpoint.
    """
    return BatchSizeProbe() if getattr(iterator, "_auto_collation", False) else None


class Sizes:
    """Counts the samples in the batches of one loader."""

    def __init__(self) -> None:
        self._dimensions: Optional[List[int]] = None  # dimensions whose size was the sampler's number in all batches so far
        self._num_compared = self._num_short = 0
        self.dimension: Optional[int] = None  # the dimension of the first tensor that counts samples; None until known
        self.shape: Tuple[int, ...] = ()  # of the first tensor in the last batch
        self._is_packed: Optional[bool] = None  # whether batches are rows of tokens; determined only without a sampler
        # Shape of the loader's last item, if neither the sampler nor the loader makes batches.
        self._unbatched: Optional[Tuple[int, ...]] = None
        # Whether each item of such a loader is a single sample; None until the shape of a model's input shows it.
        self._is_single: Optional[bool] = None

    @property
    def unit(self) -> str:
        """What is counted: "samples" or "tokens"."""
        return "tokens" if self._is_packed else "samples"

    @property
    def is_known(self) -> bool:
        """Whether the shape gives the count, so that the sampler need not be watched."""
        return self.dimension is not None

    def count(self, batch: Any, shape: Tuple[int, ...], asked: int, batch_size: Optional[int]) -> float:
        """Returns the samples of a batch, or its tokens if `unit` is "tokens".

        Args:
            batch: as the loader yields it.
            shape: of the first tensor in it.
            asked: number of indices that the sampler gave for the batch; 0 if unknown.
            batch_size: the loader's batch size; None if it has none.
        """
        self.shape = shape
        if self.dimension is not None and self.dimension < len(shape):
            return shape[self.dimension]
        if not asked:
            return self._without_sampler(batch, shape, batch_size)
        return self._compared(shape, asked)

    def _compared(self, shape: Tuple[int, ...], asked: int) -> float:
        fitting = [dimension for dimension, size in enumerate(shape) if size == asked]
        if self._dimensions is None and not fitting and (not shape or shape[0] < asked) and self._num_short < MOST_SHORT:
            self._num_short += 1
            return asked  # the program may have dropped samples of this batch, so a later batch decides
        if self._dimensions is None:
            self._dimensions = fitting
        elif self._dimensions and not fitting and self._dimensions[0] < len(shape) and shape[self._dimensions[0]] < asked:
            return shape[self._dimensions[0]]  # smaller than requested: a stream's last batch, or samples were dropped
        else:
            self._dimensions = [dimension for dimension in self._dimensions if dimension in fitting]
        self._num_compared += 1
        if self._dimensions and self._num_compared >= NUM_COMPARED:
            self.dimension = self._dimensions[0]
        return asked

    def _without_sampler(self, batch: Any, shape: Tuple[int, ...], batch_size: Optional[int]) -> float:
        leading = shape[0] if shape else 0
        if batch_size is not None:
            return num_samples(batch, leading, batch_size)
        if self._is_packed is None:
            self._is_packed = is_packed(batch, shape)
        if self._is_packed or self._is_single:
            return _row(shape) if self._is_packed else 1
        self._unbatched = shape
        return leading

    def are_single(self, called: Tuple[int, ...]) -> bool:
        """Whether a call shows for the first time that the items that the loader yields are single samples.

        This is so if the model's input has one leading dimension more than the loader's item.

        Args:
            called: the shape of the model's input.
        """
        if self._unbatched is None or self._is_single is not None or not called:
            return False
        self._is_single = called[1:] == self._unbatched
        return self._is_single


def num_samples(batch: Any, leading: float, batch_size: int) -> float:
    """Returns how many samples a batch holds, for a loader whose sampler does not show this number.

    This is the first tensor's leading dimension if it is from 1 to the batch size, else the batch size. For batch size 32, the
    result is 20 if the first tensor's shape is [20, 3, 224, 224], and 32 if it is [4096, 64] (flattened tokens). It is also 32
    for a list of 32 images, although the leading dimension of the first image is its channels.
    """
    if leading == batch_size:
        return leading
    if isinstance(batch, (list, tuple)) and len(_items(batch)) == batch_size:
        return batch_size
    return leading if 0 < leading <= batch_size else batch_size


def is_packed(batch: Any, shape: Tuple[int, ...]) -> bool:
    """Whether a batch is one row of sequences without padding between them; `shape` is that of its first tensor.

    Such a batch contains an array of offsets from 0 to the row's length: [0, 5, 9] for sequences of 5 and 4 tokens.
    """
    for tensor in _tensors(batch):
        if not isinstance(tensor, Tensor) or not _is_of_integers(tensor):
            continue
        offsets = members.plain(tensor)
        if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.device.type != "cpu":
            continue
        if int(offsets[0]) == 0 and int(offsets[-1]) == _row(shape):
            return bool((offsets[1:] >= offsets[:-1]).all())
    return False


def _row(shape: Tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 and shape[0] == 1 else shape[0] if shape else 0


def first_tensor(batch: Any) -> Any:
    """Returns the first tensor or array (of any library) in a nested batch, without scalars; None if there is none."""
    return next(_tensors(batch), None)


def first_shape(batch: Any) -> Tuple[int, ...]:
    """Returns the shape of a batch's `first_tensor`; () if there is none."""
    return tuple(members.shape_of(first_tensor(batch)) or ())


def last_shape(batch: Any) -> Tuple[int, ...]:
    """Returns the shape of a batch's last tensor; () if it has only one."""
    shapes = [members.shape_of(tensor) for tensor in _tensors(batch)]
    return tuple(shapes[-1] or ()) if len(shapes) > 1 else ()


class CallSizes:
    """Counts the samples that a module is called with, if no loader gives their number.

    If the command line gives a batch size, `count` looks for a dimension of this size in the first tensor of each call. Once
    a call has such a dimension, this dimension gives the number of samples of all later calls. Before that, if the leading
    dimension of a call is a multiple of the batch size, each sample probably has several rows in it. One batch may then be
    split over several calls, so all such calls up to the next backward pass count together as one batch. Any other call counts
    by its leading dimension. If the command line gives no batch size:

    - All elements of an integer matrix count as tokens, so it does not matter which dimension is the batch. The exception is
      tabular data: an integer matrix of categories next to a matrix of floats with the same number of rows.
    - A tensor of floats is one sample if it has one dimension less than the weight of the module's first layer and its leading
      dimension is the layer's number of inputs: a vector for a linear layer, an image for a convolution.
    - Any other input counts by its leading dimension.

    Args:
        asked: the batch size on the command line; None if there is none.
        first: the shape of the weight of the module's first layer; () if unknown.
    """

    def __init__(self, asked: Optional[int], first: Tuple[int, ...] = ()) -> None:
        self.asked = asked if isinstance(asked, int) and asked > 0 else None
        self._first = first
        self.called: Tuple[int, ...] = ()  # shape of the last input
        self.shape: Tuple[int, ...] = ()  # shape of the last input, with a leading 1 if it is a single sample
        self.unit = "samples"
        self.odd_shape: Optional[Tuple[int, ...]] = None  # shape of an input in which no dimension is the requested batch size
        # Whether the last input brings no new samples: it was computed from the output of another module, or it is a part of
        # the batch whose size is on the command line.
        self.continues = False
        self._dimension: Optional[int] = None

    @property
    def is_as_asked(self) -> bool:
        """Whether a dimension of an input had the command line's batch size."""
        return self._dimension is not None

    def count(self, args: Any, kwargs: Any) -> float:
        """Returns the samples of one call, or its tokens if `unit` is "tokens"."""
        tensor = next((each for inputs in (args, kwargs) for each in _tensors(inputs)), None)
        if tensor is None:
            return 0.0
        shape = tuple(members.shape_of(tensor) or ())
        is_one = len(shape) == len(self._first) - 1 and shape[0] == self._first[1] and not _is_of_integers(tensor)
        self.called, self.shape = shape, (1, *shape) if is_one else shape
        self.continues = isinstance(tensor, Tensor) and _is_computed(_GRAD_FN.__get__(tensor))
        if self._dimension is not None and self._dimension < len(shape):
            return float(shape[self._dimension])
        if self.asked is not None:
            return self._as_asked(shape, self.asked)
        if len(shape) > 1 and shape[1] and _is_of_integers(tensor) and not _is_table((args, kwargs), shape):
            self.unit = "tokens"
            return float(shape[0] * shape[1])
        return 1.0 if is_one else float(shape[0])

    def _as_asked(self, shape: Tuple[int, ...], asked: int) -> float:
        if not shape[0]:
            return 0.0
        if asked in shape:
            self._dimension = shape.index(asked)
            return float(asked)
        if shape[0] % asked == 0:  # each sample has several rows; a batch may be split over several calls
            self.continues = True
            return float(asked)
        self.odd_shape = shape
        return float(shape[0])


def _is_computed(grad_fn: Any) -> bool:
    """Whether a tensor with this `grad_fn` was computed from parameters, not only from inputs that need gradients."""
    for number, node in enumerate(members.nodes_of(grad_fn)):
        if number == MAX_NODES or isinstance(getattr(node, "variable", None), Parameter):
            return True  # a parameter, or so many nodes that it must be the graph of a model
    return False


def _is_table(inputs: Any, shape: Tuple[int, ...]) -> bool:
    """Whether the inputs hold a matrix of floats with as many rows as `shape` and a different number of columns."""
    for tensor in _tensors(inputs):
        other = members.shape_of(tensor) or ()
        if len(shape) == len(other) == 2 and other[0] == shape[0] and other[1] != shape[1] and not _is_of_integers(tensor):
            return True
    return False


def _tensors(batch: Any, depth: int = 0) -> Iterator[Any]:
    shape = members.shape_of(batch)
    if shape is not None:
        if len(shape):
            yield batch
        return
    if depth > MAX_DEPTH or isinstance(batch, (str, bytes)):
        return
    for item in parts(batch):
        yield from _tensors(item, depth + 1)


def parts(batch: Any) -> Any:
    """Returns the items of a container, or the values of an object's attributes, that may hold tensors."""
    if isinstance(batch, (dict, list, tuple)):
        items = _items(batch)
        is_plain = len(items) > LONG and type(items[0]) in PLAIN and type(items[-1]) in PLAIN
        return [] if is_plain else items
    keys = members.attribute(batch, "keys")
    if keys is not None:
        with contextlib.suppress(Exception):  # the program's own mapping may raise anything
            return [batch[key] for key in (keys() if callable(keys) else keys)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [members.attribute(batch, field.name) for field in dataclasses.fields(batch)]
    return list(members.held(batch).values())


def _items(batch: Any) -> List[Any]:
    """Returns the items of a dict, list or tuple, without calling methods that its class overrides."""
    kind = next(kind for kind in (dict, list, tuple) if isinstance(batch, kind))
    return list(dict.values(batch) if kind is dict else kind.__iter__(batch))


def _num_indices(indices: Any) -> int:
    try:
        return len(indices)  # may fail: torch only iterates over the indices, so the program's object may have no length
    except Exception:
        return 0


def _is_of_integers(tensor: Any) -> bool:
    return str(_DTYPE.__get__(tensor) if isinstance(tensor, Tensor) else members.attribute(tensor, "dtype")) in INTEGERS
