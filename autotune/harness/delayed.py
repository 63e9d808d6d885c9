"""Delays the conversion of image bytes to floats until the images are on the device.

A data set typically ends by converting an image's bytes to floats, and by shifting and scaling them channel by channel. During
fetches of the training loader these operations are recorded instead of executed: `Tensor.to(torch.float32)` of bytes returns a
`Delayed`, and arithmetic with a number, or with one number per channel, adds to the record. Stacking, sending from a worker and
pinning keep the bytes. Moving to a device transfers the bytes and applies the record there, in the program's order. Any other
operation computes the floats first, so the program always sees the values it would have seen.
"""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from . import adapters
from .knobs.transfer import as_to, where_to
from .patches import patches

MIN_VALUES = 256  # a tensor with fewer values is not delayed: its arithmetic costs less than recording it
Operand = Union[float, Tuple[float, ...]]  # one number for all values, or one per channel
Steps = Tuple[Tuple[str, Operand], ...]  # (name of the in-place method, operand) of each recorded operation

ARITHMETIC = {
    **{name + end: name + "_" for name in ("add", "sub", "mul", "div") for end in ("", "_")},
    **{"__add__": "add_", "__sub__": "sub_", "__mul__": "mul_", "__truediv__": "div_", "true_divide": "div_"},
}
# Properties and methods that are answered without computing the floats.
PROPERTIES = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_nested", "is_sparse"),
    *("is_cuda", "is_quantized", "is_meta", "is_mkldnn", "_version"),
}
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "is_inference", "__len__", "__hash__"),
}


class State:
    """The state of delaying in this process.

    Attributes:
        is_on: whether a fetch of the training loader is under way.
        is_worker: whether this is a worker of the training loader, which sends its batches to another process.
        num_batches: batches of bytes that were made in this process or received from a worker.
        num_on_device: conversions done on a device.
    """

    def __init__(self) -> None:
        self.is_on = self.is_worker = False
        self.num_batches = self.num_on_device = 0


state = State()


class Content:
    """The bytes of an image or batch, which are never written to, and the operations to apply to them, in order.

    Once the floats have been computed, they are kept here too. Delayed tensors that are aliases share one content.
    """

    __slots__ = ("data", "floats", "steps")

    def __init__(self, data: Tensor, steps: Steps) -> None:
        self.data, self.steps = data, steps
        self.floats: Optional[Tensor] = None

    def value(self) -> Tensor:
        """Returns the floats, the same tensor each time."""
        if self.floats is None:
            self.floats = computed(self.data, self.steps)
        return self.floats


class Delayed(Tensor):
    """A tensor that stands for the floats of a `Content`."""

    content: Content
    kind: Any = None  # the Tensor subclass of the floats; None for plain tensors

    @staticmethod
    def of(content: Content, kind: Any = None) -> Any:
        """Returns a tensor that stands for the content's floats as a tensor of class `kind` (None: a plain tensor)."""
        data, cls = content.data, Delayed if kind is None else _stand_in(kind)
        made = Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=torch.float32, device=data.device)
        made.content = content
        return made

    def as_subclass(self, cls: Any) -> Any:
        """Returns the floats as a tensor of class `cls`; overridden because torch does not dispatch this call."""
        if self.content.floats is None and (cls is Tensor or _stand_in(cls) is not None):
            return Delayed.of(self.content, None if cls is Tensor else cls)
        return plain(self).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercepts every operation on a delayed tensor."""
        kwargs, name, first = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, Delayed) and first.content.floats is None:
            if name in QUESTIONS or (name == "__get__" and func.__self__.__name__ in PROPERTIES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            handled = _handled(name, first, args[1:], kwargs)
            if handled is not None:
                return handled
        elif name == "stack" and state.is_on and _is_along_first_dimension(args, kwargs) and _is_alike(first):
            return _stack(first, torch.stack)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operation that did not go through `__torch_function__`, with the floats in place of delayed tensors."""
        return func(*tree_map(_floats, args), **tree_map(_floats, kwargs or {}))


def plain(value: Any) -> Any:
    """Returns the floats that a delayed tensor stands for, as a tensor of its `kind`; any other value unchanged."""
    if not isinstance(value, Delayed):
        return value
    floats = value.content.value()
    return floats if value.kind is None else floats.as_subclass(value.kind)


def _floats(value: Any) -> Any:
    return value.content.value() if isinstance(value, Delayed) else value


def computed(data: Tensor, steps: Steps) -> Tensor:
    """Returns the floats computed from bytes, on the bytes' device."""
    floats = torch.empty_like(data, dtype=torch.float32).copy_(data)
    for name, operand in _on_device(steps, data.device):
        getattr(floats, name)(operand)
    return floats


@functools.lru_cache(maxsize=64)
def _on_device(steps: Steps, device: torch.device) -> Sequence[Tuple[str, Tensor]]:
    # Operands are tensors, because CUDA replaces division by a plain number with multiplication by its reciprocal, whose result
    # may differ in the last bit.
    found = []
    for name, operand in steps:
        shape = (-1, 1, 1) if isinstance(operand, tuple) else ()
        found.append((name, torch.tensor(operand, dtype=torch.float32, device=device).view(shape)))
    return found


# --- operations that do not need the floats ---


def _handled(name: str, image: Delayed, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Returns the result of an operation; None if it needs the floats."""
    if name in ("to", "cuda"):
        return _moved(image, *((args, kwargs) if name == "to" else as_to(*args, **kwargs)))
    if name == "pin_memory":
        return Delayed.of(Content(image.content.data.pin_memory(), image.content.steps))
    if name == "is_pinned":
        return image.content.data.is_pinned()
    if not state.is_on or kwargs:
        return None
    if name == "clone":
        return Delayed.of(Content(image.content.data, image.content.steps), image.kind)
    if name in ARITHMETIC and len(args) == 1:
        return _record_operation(image, name, _operand(args[0], image.content.data.shape))
    return None


def _record_operation(image: Delayed, name: str, operand: Optional[Operand]) -> Any:
    if operand is None:
        return None
    content, steps = image.content, (*image.content.steps, (ARITHMETIC[name], operand))
    if not name.endswith("_") or name.startswith("_"):
        return Delayed.of(Content(content.data, steps))
    content.steps = steps
    return image if image.kind is None else Delayed.of(content)


def _operand(value: Any, shape: Sequence[int]) -> Optional[Operand]:
    """Returns `value` as an operand: a number, or one per channel of an image of `shape` [..., channels, height, width].

    Returns None if `value` is neither.
    """
    if type(value) in (int, float):
        return float(value)
    if type(value) is not Tensor or value.dtype is not torch.float32 or value.device.type != "cpu" or value.requires_grad:
        return None
    if value.numel() == 1 and value.dim() <= len(shape):
        return float(value)
    if value.dim() == 3 and len(shape) >= 3 and value.shape == (shape[-3], 1, 1):
        return tuple(value.flatten().tolist())
    return None


@functools.lru_cache(maxsize=None)
def _stand_in(kind: Any) -> Any:
    made = adapters.stand_in(kind, Delayed)
    if made is not None:
        made.kind = kind
        _register(made)
    return made


def _moved(image: Delayed, args: Any, kwargs: Dict[str, Any]) -> Any:
    device, dtype, non_blocking, layout = where_to(args, kwargs)
    if image.kind is not None or device is None or device.type == "cpu":
        return None
    wanted: Dict[str, Any] = {} if layout is None else {"memory_format": layout}
    floats = computed(image.content.data.to(device, non_blocking=non_blocking, **wanted), image.content.steps)
    state.num_on_device += 1
    return floats if dtype is None else floats.to(dtype)


# --- batches ---


def _is_along_first_dimension(args: Any, kwargs: Dict[str, Any]) -> bool:
    return args[1:] in ((), (0,)) and kwargs in ({}, {"dim": 0})


def _is_alike(images: Any) -> bool:
    """Whether all images are still bytes and have the same recorded operations."""
    if not isinstance(images, (list, tuple)) or not all(isinstance(each, Delayed) for each in images):
        return False
    contents = [each.content for each in images]
    return all(content.floats is None and content.steps == contents[0].steps for content in contents)


def _stack(images: Any, stack: Callable[[Any], Any]) -> Any:
    content = Content(stack([each.content.data for each in images]), images[0].content.steps)
    return Delayed.of(content) if state.is_worker else _arrived(content)


def _arrived(content: Content, kind: Any = None) -> Any:
    """Returns what the program gets: a delayed tensor if this process uses a GPU, which can compute the floats; else floats."""
    state.num_batches += 1
    made = Delayed.of(content, kind)
    return made if torch.cuda.is_initialized() else plain(made)  # type: ignore[no-untyped-call]


def _collate(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    if state.is_on and _is_alike(batch):
        return _stack(batch, collate_tensor_fn)  # a worker stacks straight into shared memory
    return collate_tensor_fn([plain(each) for each in batch])


def _reduce(image: Delayed) -> Any:
    content = image.content
    return (_itself, (plain(image),)) if content.floats is not None else (_received, (content.data, content.steps, image.kind))


def _itself(value: Any) -> Any:
    return value


def _received(data: Tensor, steps: Steps, kind: Any) -> Any:
    return _arrived(Content(data, steps), kind)


def _register(cls: Any) -> None:
    default_collate_fn_map[cls] = _collate
    ForkingPickler.register(cls, _reduce)  # workers send with this pickler; any other pickler stores the floats


# --- entry ---


@functools.lru_cache(maxsize=None)
def watch_conversions() -> None:
    """Patches Tensor.to and Tensor.float; without effect while `state.is_on` is false."""
    _register(Delayed)

    def around(is_conversion: Callable[..., bool], own: Any) -> Any:
        def delaying(self: Any, *args: Any, **kwargs: Any) -> Any:
            if state.is_on and _is_bytes(self) and is_conversion(*args, **kwargs):
                return Delayed.of(Content(self.clone(), ()))  # a copy: the program may write to `self` later
            return own(self, *args, **kwargs)

        return delaying

    patches.install(Tensor, "to", functools.partial(around, _is_conversion))
    patches.install(Tensor, "float", functools.partial(around, lambda *args, **kwargs: not args and not kwargs))


def _is_conversion(*args: Any, **kwargs: Any) -> bool:
    return len(args) + len(kwargs) == 1 and (args[0] if args else kwargs.get("dtype")) is torch.float32


def _is_bytes(value: Any) -> bool:
    return type(value) is Tensor and value.dtype is torch.uint8 and value.dim() > 1 and value.numel() >= MIN_VALUES


def begin_worker() -> None:
    """Turns delaying on for good in a worker of the training loader, where all work is part of a fetch."""
    watch_conversions()
    state.is_on = state.is_worker = True


def during(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a wrapper that delays conversions during a training loader's fetch in the training process."""
    watch_conversions()

    def delaying_fetch(index: Any) -> Any:
        state.is_on = True
        try:
            return fetch(index)
        finally:
            state.is_on = False

    return delaying_fetch
