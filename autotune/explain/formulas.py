"""Computes the FLOPs and the bytes of an operator from the shapes that torch.profiler recorded.

A multiplication and an addition count as two FLOPs, as in torch.utils.flop_count. Only matrix products, convolutions and
attention have FLOPs. Bytes are the minimum traffic: each input read once, each output written once. None means unknown.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from autotune.explain.kernel_names import operator_kind

Dims = list[list[int]]
# Exceptions that a formula may raise: a trace may contain anything, including arguments that do not fit the operator.
UNKNOWN = (LookupError, TypeError, ValueError, SyntaxError, ArithmeticError, AttributeError, RecursionError, MemoryError)

ITEM_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "long int": 8,
    "long": 8, "int": 4, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8,
}  # fmt: skip
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8",
}  # fmt: skip
# Kinds of operators whose output is assumed to be as large as their largest input.
_WRITES_AS_MUCH = ("elementwise", "normalisation", "random", "loss", "attention", "copy and layout")
_WRITES_ONLY = re.compile(r"::(fill|zero)_$")
_READS_ALL = (*_WRITES_AS_MUCH, "reduction", "pooling")
# Operators that move no data themselves: views, and operators such as `to` that call `copy_` for it.
_VIEWS = re.compile(
    r"::(view|reshape|_unsafe_view|t|transpose|permute|expand|expand_as|slice|select|detach|as_strided|narrow|split\w*|chunk|"
    r"squeeze|unsqueeze|flatten|alias|unbind|numpy_T|empty\w*|new_empty\w*|resize_|set_|to|_reshape_alias|lift_fresh|"
    r"resolve_conj|resolve_neg|contiguous|unfold|movedim|result_type|item|_local_scalar_dense|is_\w+|size|stride)_?$"
)
_ATTENTION = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)\w*attention\w*")
# Operators of the backends. They have no formula, because the order of their arguments differs. They run inside
# operators of ATen that have formulas.
BACKEND = re.compile(
    r"::(mkldnn|cudnn|miopen|mps)_\w*convolution|slow_conv|conv_depthwise|thnn_conv|"
    r"::_(flash|efficient|cudnn)_attention_(forward|backward)"
)


def flops_of(name: str, arguments: Mapping[str, Any]) -> float | None:
    """Returns the FLOPs of a call, given its `Trace.arguments`; None if there is no formula or the shapes are unknown."""
    formula = FORMULAS.get(name) or (_attention if _ATTENTION.search(name) else None)
    if formula is None:
        return None
    try:
        return float(formula(name, arguments))
    except UNKNOWN:
        return None


def bytes_of(name: str, arguments: Mapping[str, Any]) -> float | None:
    """Returns the minimum bytes that a call reads and writes; None if unknown, 0 for views."""
    if _VIEWS.search(name):
        return 0.0
    sizes = _input_bytes(arguments)
    kind = operator_kind(name)
    if not sizes:
        return None if sizes is None else 0.0
    if name in FORMULAS:
        return _traffic(name, arguments, sizes)
    if kind not in _READS_ALL:
        return None
    is_counted = name.rpartition("::")[2] == "copy_" or bool(_WRITES_ONLY.search(name))  # the output is one of the inputs
    return float(sum(sizes) + (max(sizes) if kind in _WRITES_AS_MUCH and not is_counted else 0))


def dtype_of(arguments: Mapping[str, Any]) -> str | None:
    """Returns the dtype in which an operator computes: the dtype of its first floating-point tensor; None if unknown."""
    dims, types = arguments.get("dims") or [], arguments.get("types") or []
    return next((DTYPES[kind] for kind, shape in zip(types, dims, strict=False) if shape and kind in DTYPES), None)


def _input_bytes(arguments: Mapping[str, Any]) -> list[int] | None:
    """Returns the bytes of each tensor argument except scalars; None if a tensor's type is unknown or nothing was recorded."""
    if "dims" not in arguments:
        return None
    found = []
    for shape, kind in zip(arguments.get("dims") or [], arguments.get("types") or [], strict=False):
        if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
            return None  # a list of tensors, whose types are not recorded
        if shape and kind not in ("ScalarList", "Scalar"):
            if kind not in ITEM_BYTES:
                return None
            found.append(math.prod(shape) * ITEM_BYTES[kind])
    return found


def _traffic(name: str, arguments: Mapping[str, Any], sizes: list[int]) -> float | None:
    """Returns input and output bytes of an operator that has a formula."""
    dims = arguments["dims"]
    item = ITEM_BYTES.get((arguments.get("types") or [""])[0], 4)
    try:
        if name == "aten::convolution_backward":
            wanted = _values(arguments)[-1]
            return float(sum(sizes) + sum(size for size, is_wanted in zip(sizes[1:], wanted, strict=False) if is_wanted))
        return float(sum(sizes) + item * (_convolution_outputs(arguments) if "conv" in name else _outputs(name, dims)))
    except UNKNOWN:
        return None


# Formulas ------------------------------------------------------------------------------------------------------------------


def _factors(name: str, dims: Dims) -> tuple[list[int], list[int]]:
    first = 1 if "add" in name else 0
    left, right = dims[first], dims[first + 1]
    if len(left) < 2 or len(right) != len(left) or left[-1] != right[-2]:
        raise ValueError("no matrix product")
    return left, right


def _matrix_product(name: str, arguments: Mapping[str, Any]) -> float:
    left, right = _factors(name, arguments["dims"])
    return 2.0 * math.prod(left) * right[-1]


def _outputs(name: str, dims: Dims) -> int:
    left, right = _factors(name, dims)
    return math.prod(left[:-1]) * right[-1]


def _convolution(_: str, arguments: Mapping[str, Any]) -> float:
    weight: list[int] = arguments["dims"][1]
    return 2.0 * _convolved(arguments) * math.prod(weight)


def _convolved(arguments: Mapping[str, Any]) -> int:
    """Returns how often the kernel is applied: batch size times output positions (input positions if transposed)."""
    inputs: list[int] = arguments["dims"][0]
    weight: list[int] = arguments["dims"][1]
    batch, places, kernel = inputs[0], inputs[2:], weight[2:]
    stride, padding, dilation, is_transposed = _values(arguments)[3:7]
    if is_transposed:
        return batch * math.prod(places)
    steps = zip(places, kernel, _each(stride, places), _each(padding, places), _each(dilation, places), strict=True)
    outputs = [(size + 2 * pad - spread * (width - 1) - 1) // step + 1 for size, width, step, pad, spread in steps]
    return batch * math.prod(outputs)


def _convolution_outputs(arguments: Mapping[str, Any]) -> int:
    """Returns the number of elements of a convolution's output."""
    inputs: list[int] = arguments["dims"][0]
    weight: list[int] = arguments["dims"][1]
    stride, padding, dilation, is_transposed, output_padding, groups = _values(arguments)[3:9]
    if not is_transposed:
        return _convolved(arguments) * weight[0]
    places = inputs[2:]
    each = (_each(values, places) for values in (stride, padding, dilation, output_padding))
    outputs: list[int] = [
        (size - 1) * step - 2 * pad + spread * (width - 1) + more + 1
        for size, width, step, pad, spread, more in zip(places, weight[2:], *each, strict=True)
    ]
    return inputs[0] * math.prod(outputs) * weight[1] * int(groups)


def _convolution_backward(_: str, arguments: Mapping[str, Any]) -> float:
    dims: Dims = arguments["dims"]
    gradient, inputs, weight = dims[:3]
    is_transposed, _, _, wanted = _values(arguments)[-4:]
    laid_over = inputs if is_transposed else gradient
    batch, places = laid_over[0], laid_over[2:]
    return 2.0 * batch * math.prod(places) * math.prod(weight) * sum(map(bool, wanted[:2]))


def _attention(name: str, arguments: Mapping[str, Any]) -> float:
    """Returns the FLOPs of attention. Causal attention counts in full, as in torch.utils.flop_count."""
    is_backward = "backward" in name
    dims: Dims = arguments["dims"]
    query, key, value = dims[1:4] if is_backward else dims[:3]
    scores = math.prod(query[:-1]) * key[-2]
    return 2.0 * scores * (3 * query[-1] + 2 * value[-1] if is_backward else query[-1] + value[-1])


def _values(arguments: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments, with None in place of each tensor."""
    return [ast.literal_eval(text) if text else None for text in arguments["values"]]


def _each(values: list[int], places: list[int]) -> list[int]:
    return values * len(places) if len(values) == 1 else values


FORMULAS: Mapping[str, Callable[[str, Mapping[str, Any]], float]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm"), _matrix_product),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
