"""Times the convolutions, matrix products and attention of a step again, each call alone, in 32 and in 16 bits.

The ratio of the two times shows how much faster 16 bits are on this device with the shapes of this program. The device's peaks
do not show this, because small products are far from the peaks.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from .documents import CASTS, NARROW, TIMED_FRAC, WIDE
from .peaks import least_s, narrow_type, untouched

# Operators of ATen. Attention is timed only on a CPU: on a CPU without AMX, its backward pass takes three times as long in 16
# bits as in 32 (torch 2.14). That can cost more than 16 bits gain in all other products.
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
NAMES = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm", *ATTENTION)
IN_16_BITS = (NARROW, "float16")
LOGSUMEXP = 5  # position of the argument of attention's backward pass that stays in 32 bits
MAX_S = 2.0  # after this time no further product is timed; products with the most FLOPs come first


class Described(NamedTuple):
    """Properties of a tensor that are needed to make another one like it."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: str


class Products:
    """The matrix products, convolutions and attention calls of one step whose input tensors are all of one type.

    This type is float32 or, where the program itself computes in 16 bits, bfloat16 or float16.
    """

    def __init__(self) -> None:
        # (name, arguments as text) -> [operator, arguments, FLOPs of all calls, number of calls]
        self._seen: Dict[Tuple[str, str], List[Any]] = {}

    def note(self, operator: Any, arguments: Tuple[Any, ...], flops: float) -> None:
        """Records a call of an operator of `torch.ops.aten`, with its positional arguments and its FLOPs."""
        name = str(operator).rpartition(".")[2]
        described = tuple(_described(each) for each in arguments) if name in NAMES else ()
        kept = _kept(operator)
        dtypes = {each.dtype for place, each in enumerate(described) if isinstance(each, Described) and place != kept}
        if len(dtypes) != 1 or not dtypes <= {WIDE, *IN_16_BITS}:
            return
        seen = self._seen.setdefault((name, repr(described)), [operator, described, 0.0, 0])
        seen[2] += flops
        seen[3] += 1

    def timed(self, device: str, index: Optional[int] = None) -> Dict[str, float]:
        """Returns the value of `Memory.products`; see `TrialContext` for device and index."""
        return self._timed(WIDE, narrow_type(device, index), device, index)

    def timed_in_16_bits(self, device: str, index: Optional[int] = None) -> Dict[str, float]:
        """Returns the value of `Memory.products_in_16_bits`."""
        dtypes = [_dtype(described) for _, described, _, _ in self._seen.values()]
        own = max(IN_16_BITS, key=dtypes.count)
        return self._timed(own, own, device, index)

    def _timed(self, dtype: str, narrow: str, device: str, index: Optional[int]) -> Dict[str, float]:
        """Times the operations with inputs of type `dtype`, both in 32 bits and in the 16-bit type `narrow`."""
        found = {WIDE: 0.0, NARROW: 0.0, CASTS: 0.0, TIMED_FRAC: 0.0}
        ours = [seen for seen in self._seen.values() if _dtype(seen[1]) == dtype]
        whole, ends_s = sum(seen[2] for seen in ours), time.perf_counter() + MAX_S
        with untouched(device, index):
            for operator, described, flops, count in sorted(ours, key=lambda seen: -float(seen[2])):
                if time.perf_counter() >= ends_s:
                    break
                wide = [_made(each, device) for each in described]
                for key, seconds in _timed(operator, wide, getattr(torch, narrow), device).items():
                    found[key] += count * seconds
                found[TIMED_FRAC] += flops / whole
        return found if found[TIMED_FRAC] else {}


def _kept(operator: Any) -> Optional[int]:
    """Returns the position of an operator's argument that stays in 32 bits; None if all its tensors are converted."""
    return LOGSUMEXP if str(operator).endswith(ATTENTION[1]) else None


def _dtype(described: Tuple[Any, ...]) -> str:
    """Returns the type of an operator's input tensors."""
    return next(each.dtype for each in described if isinstance(each, Described))


def _timed(operator: Any, wide: List[Any], dtype: Any, device: str) -> Dict[str, float]:
    kept = _kept(operator)
    narrow = _narrowed(wide, dtype, kept)
    return {
        WIDE: least_s(functools.partial(operator, *wide), device),
        NARROW: least_s(functools.partial(operator, *narrow), device),
        CASTS: least_s(functools.partial(_narrowed, wide, dtype, kept), device),
    }


def _narrowed(arguments: List[Any], dtype: Any, kept: Optional[int]) -> List[Any]:
    """Returns the arguments with their tensors in a 16-bit type, except the one at position `kept`."""

    def is_cast(place: int, each: Any) -> bool:
        return isinstance(each, torch.Tensor) and place != kept

    return [each.to(dtype) if is_cast(place, each) else each for place, each in enumerate(arguments)]


def _described(argument: Any) -> Any:
    if not hasattr(argument, "untyped_storage"):
        return argument
    return Described(tuple(map(int, argument.shape)), argument.stride(), str(argument.dtype).rpartition(".")[2])


def _made(described: Any, device: str) -> Any:
    if not isinstance(described, Described):
        return described
    size = 1 + sum((length - 1) * stride for length, stride in zip(*described[:2]))  # noqa: B905 (Python 3.9)
    return torch.rand(max(size, 0), device=device).as_strided(described.shape, described.strides)
