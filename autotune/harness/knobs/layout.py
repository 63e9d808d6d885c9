"""Sets and reads back the memory format of a module's convolution weights, and sets that of its inputs.

Only tensors of four dimensions are changed or read: `torch.channels_last` exists for no others.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch

from .. import members
from ..protocol import APPLIED, OVERRIDDEN, KnobReport


def lay_out(module: Any, layout: Any) -> None:
    """Sets the memory format of a module's four-dimensional weights; torch's `Module.to` fails on five-dimensional ones."""

    def change(tensor: Any) -> Any:
        return torch.Tensor.to(tensor, memory_format=layout) if torch.Tensor.dim(tensor) == 4 else tensor

    for each in list(members.modules(module)):
        members.convert(each, change)


def with_layout(layout: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    """Calls a module's method with arguments in a memory format; returns what the method returns."""
    args, kwargs = in_layout(layout, args, kwargs)
    return call(self, *args, **kwargs)


def in_layout(layout: Any, args: Any, kwargs: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Returns the arguments of a call, with floating-point tensors of four dimensions in a memory format."""
    return tuple(_laid_out(layout, each) for each in args), {name: _laid_out(layout, each) for name, each in kwargs.items()}


def _laid_out(layout: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and torch.Tensor.dim(value) == 4 and torch.is_floating_point(value):
        return torch.Tensor.contiguous(value, memory_format=layout)
    return value


def verify_layout(roots: List[Any], asked: bool) -> KnobReport:
    """Returns the report of the layout, read back from the modules."""
    # The weight of a depthwise or 1x1 convolution has the same memory layout in both formats and is left out.
    weights = [w for root in roots for w in convolution_weights(root) if not _is_either_format(w)]
    found = bool(weights) and all(is_channels_last(w) for w in weights)
    if weights and found != asked:
        return KnobReport(OVERRIDDEN, "the program has changed the memory format since", found)
    return KnobReport(APPLIED, "", asked)


def convolution_weights(module: Any) -> List[Any]:
    """Returns a module's parameters of four dimensions."""
    return [p for p in members.parameters(module) if torch.Tensor.dim(p) == 4]


def is_channels_last(weight: Any) -> bool:
    """Whether a weight is in channels_last; False if its memory layout is the same in both formats."""
    is_contiguous = torch.Tensor.is_contiguous
    return bool(is_contiguous(weight, memory_format=torch.channels_last) and not is_contiguous(weight))


def _is_either_format(weight: Any) -> bool:
    is_contiguous = torch.Tensor.is_contiguous
    return bool(is_contiguous(weight) and is_contiguous(weight, memory_format=torch.channels_last))
