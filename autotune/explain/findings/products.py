"""Rules for matrix products and convolutions: their precision, the layout of images, sizes that are not aligned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import (
    AMP,
    COMPILE,
    COMPUTING,
    computing_phases_s,
    gain_on_device,
    narrow_type,
    traced,
    waits_for_host,
)
from autotune.explain.findings.finding import Finding
from autotune.explain.gains import Gain
from autotune.explain.kernel_names import operator_kind
from autotune.explain.roofline import MATRIX_KINDS, TF32
from autotune.harness.explain.documents import CASTS, NARROW, TIMED_FRAC, WIDE
from autotune.quantities import flops_text, percent_text

CHANNELS_LAST = "layout.channels_last"
PRODUCT_KINDS = ("matmul", "convolution")
FAST_16_BIT = {"amx_bf16", "avx512_bf16", "avx10_2", "sve_bf16"}
LEAST_SLOWDOWN = 1.25  # 16-bit products are slow if they take this many times as long as in 32 bits
LEAST_FLOPS_PER_S = 2e10  # a CPU that does fewer FLOPs per second is assumed to compute no large matrix products
MATRIX_FRAC = 0.7  # assumed share of matrix products in the time of forward and backward, if no trace shows it
# How many times as fast 16-bit matrix products are, if the program's own products were not timed: at least, usually, at most.
FASTER_16_BIT = (1.1, 2.0, 8.0)
# Products are timed alone. In a step, where memory is new and caches are cold, at least this share of the saving remains.
LEFT_FRAC = 0.5
HALF_BYTES = 0.5  # in 16 bits, operators other than products move half the bytes and save at most this share of their time
# Seconds that channels_last saves, as a multiple of the conversions' seconds: at least, usually, at most. Pooling and
# normalisation also have faster kernels for channels_last.
NOT_CONVERTED = (0.5, 1.0, 2.0)
# Numbers that the fast kernels on Tensor Cores load at once: 16 bytes. Sizes of products should be multiples of these.
LOADED_AT_ONCE = {"float16": 8, "bfloat16": 8, TF32: 4}
SLOW_FRAC = 0.5  # an unaligned product is slow if it has at most this share of the aligned products' rate
USUAL_PEAK_FRAC = 0.5  # assumed share of the peak at which aligned products run, if the program has none
# Seconds that padding really saves, as a multiple of the result of `saved_by_padding_s`: at least, usually, at most.
ALIGNED_SAVES = (0.5, 0.85, 1.05)
# These numbers are tried in order. A size is padded to a multiple of the first that makes it at most MAX_PADDING times as
# large; if none does, to a multiple of the last.
MULTIPLES, MAX_PADDING = (64, 32, 16, 8), 1.02
MAX_SIZES = 2  # a finding names at most this many sizes


def low_precision(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if matrix products run in 32 bits although the device is faster in 16 bits."""
    value = narrow_type(evidence)
    if evidence.value(AMP) != "off" or value is None:
        return
    products = _products(evidence)
    share = _matrix_share(evidence, products)
    has_units = evidence.is_cuda or bool(FAST_16_BIT & evidence.host_context.cpu_isa)
    is_faster = products[NARROW] < products[WIDE] if products else has_units
    if not is_faster or not share or waits_for_host(evidence):
        return
    rate = _flops_per_s(evidence)
    rounded = ", as TF32" if evidence.operations and evidence.operations[0].is_tf32 else ""
    yield Finding(
        cause="32-bit arithmetic",
        where="convolutions and matrix products",
        evidence=f"{percent_text(share)} of the step in float32 products{rounded}" + (f", {flops_text(rate)}" if rate else ""),
        gain=_gain_of_16_bits(evidence, share, products),
        basis=_basis_of_16_bits(products),
        knob=AMP,
        value=value,
    )


def _products(evidence: Evidence) -> dict[str, float]:
    """Returns the time of the step's products in each precision, as in `documents.Memory.products`; {} if unknown."""
    found = evidence.memory[0].products if evidence.memory else {}
    return dict(found) if found.get(WIDE) and found.get(NARROW) else {}


def _gain_of_16_bits(evidence: Evidence, share: float, products: dict[str, float]) -> Gain:
    """Returns the gain of 16 bits, by Amdahl's law, from the share of products and their times in both precisions.

    The lower end assumes that every input of every product is converted first, and counts LEFT_FRAC of the remaining saving.
    The upper end assumes that nothing is converted, and that the operators between the products move half as many bytes. The
    estimate is the mean of the seconds saved at both ends.
    """
    step_s = evidence.step_s
    if not products:
        low, mid, high = (share * step_s * (1 - 1 / times) for times in FASTER_16_BIT)
        return gain_on_device(evidence, (0.5 * low, mid, high), "predicted")
    left = products[NARROW] / products[WIDE]
    with_casts = min(1.0, left + products.get(CASTS, 0.0) / products[WIDE])
    low, bare = LEFT_FRAC * share * step_s * (1 - with_casts), share * step_s * (1 - left)
    computing_s = max(computing_phases_s(evidence), share * step_s)
    # Share of the other operators that is assumed to lie between products: 1 if products take at least half of the computing.
    is_around = min(1.0, 2 * share * step_s / computing_s)
    high = bare + HALF_BYTES * is_around * (computing_s - share * step_s)
    return gain_on_device(evidence, (low, (low + high) / 2, high), "predicted")


def _basis_of_16_bits(products: dict[str, float]) -> str:
    if not products:
        return "16-bit products are usually 1.1 to 8 times as fast; the pass `memory` measures the products of this program"
    times = products[WIDE] / products[NARROW]
    return f"the program's products, timed alone: {times:.2g} times as fast in 16 bits"


def _flops_per_s(evidence: Evidence) -> float | None:
    flops = evidence.memory[0].flops if evidence.memory else None
    return flops / evidence.step_s if flops else None


def _matrix_share(evidence: Evidence, products: dict[str, float]) -> float:
    """Returns the share of the step in matrix products; 0 if it is too small to matter, or unknown."""
    traced, rate = _traced_matrix_frac(evidence, is_attention_timed=bool(products)), _flops_per_s(evidence)
    if traced is None and products:
        return min(1.0, products[WIDE] / products.get(TIMED_FRAC, 1.0) / evidence.step_s)
    if not products and not evidence.is_cuda and (rate is None or rate < LEAST_FLOPS_PER_S):
        return 0.0
    computing_s = computing_phases_s(evidence)
    if busy_s := evidence.operations[0].busy_s if evidence.operations else None:  # a GPU is idle for part of each phase
        computing_s = min(computing_s, busy_s)
    return min(1.0, (MATRIX_FRAC if traced is None else traced) * computing_s / evidence.step_s)


def _traced_matrix_frac(evidence: Evidence, *, is_attention_timed: bool) -> float | None:
    """Returns the share of float32 matrix products in the time of forward's and backward's operators; None if unknown.

    On the CPU, attention counts only if it was timed in both precisions: in 16 bits it can be slower.
    """
    kinds = MATRIX_KINDS if evidence.is_cuda or is_attention_timed else PRODUCT_KINDS
    computing = [entry for entry in traced(evidence) if entry.get("phase") in COMPUTING]
    total_s = math.fsum(entry["seconds"] for entry in computing)
    wide = [entry for entry in computing if entry.get("dtype") in (WIDE, None)]  # autocast changes no other dtype
    matrix_s = math.fsum(entry["seconds"] for entry in wide if operator_kind(str(entry["operator"])) in kinds)
    return matrix_s / total_s if total_s else None


def slow_16_bits(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if the program computes products in 16 bits, and they are slower than in 32 bits on this device.

    Such devices only emulate the format: CPUs without an instruction for it, and GPUs older than Ampere with bfloat16. The
    operators between the products are emulated, too. So the upper end assumes that they speed up by the products' factor.
    """
    times = evidence.memory[0].products_in_16_bits if evidence.memory else {}
    if not times.get(WIDE) or times[NARROW] < LEAST_SLOWDOWN * times[WIDE] or waits_for_host(evidence):
        return
    products_s = min(times[NARROW] / times.get(TIMED_FRAC, 1.0), computing_phases_s(evidence))
    saved_frac = 1 - times[WIDE] / times[NARROW]
    saved_s = (LEFT_FRAC * products_s * saved_frac, products_s * saved_frac, computing_phases_s(evidence) * saved_frac)
    value = next((each for each in ("fp16", "off") if evidence.may_set(AMP, each)), "off")
    code = "train in float32" + (", or in float16 with a GradScaler, which this GPU computes fast" if evidence.is_cuda else "")
    yield Finding(
        cause="slow 16-bit arithmetic",
        where="convolutions and matrix products",
        evidence=f"{percent_text(products_s / evidence.step_s)} of the step in 16-bit products, which take "
        f"{times[NARROW] / times[WIDE]:.2g} times as long as in 32 bits",
        gain=gain_on_device(evidence, saved_s, "predicted"),
        basis="the program's products, timed alone in both",
        **evidence.remedy(AMP, value, code),
    )


def layout_conversions(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if convolutions on a GPU convert their images to the layout that Tensor Cores need, and back."""
    seconds = evidence.operations[0].layout_s if evidence.operations else 0.0
    if not seconds or evidence.operations[0].is_distorted or waits_for_host(evidence):
        return
    yield Finding(
        cause="layout conversions",
        where="convolutions",
        evidence=f"{evidence.of_step(seconds)} are spent on converting images between NCHW and NHWC",
        gain=gain_on_device(evidence, (seconds * times for times in NOT_CONVERTED), "predicted"),
        basis="kernels that convert between layouts; without them, pooling and normalisation are often faster, too",
        **evidence.remedy(CHANNELS_LAST, True, "keep model and images in torch.channels_last throughout"),
    )


def unaligned_products(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if matrix products on a GPU are slow because of a size such as a vocabulary of 50,257.

    If the rows of a matrix do not begin at multiples of 16 bytes, a product runs in kernels that load one number at a time.
    Products count if they are bound by computation and much slower than the aligned products of the step.
    """
    for slow, rate, is_measured in slow_products(evidence):
        slow_s, slow_flops = math.fsum(one.seconds for one in slow), math.fsum(one.flops for one in slow)
        sizes = list(dict.fromkeys(size for one in slow for size in one.odd_sizes))[:MAX_SIZES]
        saved_s = saved_by_padding_s(slow, rate)
        is_compiled = evidence.value(COMPILE) not in (None, "off")
        yield Finding(
            cause="unaligned products",
            where=f"{slow[0].operator} ({slow[0].shapes})",
            evidence=f"{len(slow)} products with a size of {' or '.join(map(str, sizes))}: {evidence.of_step(slow_s)}, "
            f"{flops_text(slow_flops / slow_s)} instead of {flops_text(rate)}",
            gain=gain_on_device(evidence, (saved_s * times for times in ALIGNED_SAVES), "predicted"),
            basis="the rate of the step's aligned products" if is_measured else "half of the peak of the GPU",
            code=f"pad {', '.join(f'{size} to {_padded(size)}' for size in sizes)} (a vocabulary, a width, a length or a batch "
            f"size){'' if is_compiled else ', or try torch.compile, which may pad such sizes itself'}",
        )


class _Product(NamedTuple):
    """A matrix product of a step that is bound by computation.

    Attributes:
        operator, shapes: the operator, and the shapes of its inputs.
        dtype: dtype in which it computes, a key of LOADED_AT_ONCE.
        seconds, flops: seconds and FLOPs of a step.
        padded_flops: FLOPs of a step if all sizes were padded to aligned ones.
        odd_sizes: sizes that are not aligned.
        peak: the device's peak, FLOPs per second.
    """

    operator: str
    shapes: str
    dtype: str
    seconds: float
    flops: float
    padded_flops: float
    odd_sizes: list[int]
    peak: float


def slow_products(evidence: Evidence) -> Iterator[tuple[list[_Product], float, bool]]:
    """Yields, for each dtype, the products that padding would make faster, longest first.

    Each list comes with the FLOPs per second of aligned products, and with whether that rate was measured in the same step.
    """
    found = traced(evidence) if evidence.is_cuda and not waits_for_host(evidence) else []
    every = [product for entry in found if (product := _product_of(entry, evidence.operations[0].is_tf32)) is not None]
    for dtype in dict.fromkeys(one.dtype for one in every):
        products = [one for one in every if one.dtype == dtype]
        aligned = [one for one in products if not one.odd_sizes]
        seconds = math.fsum(one.seconds for one in aligned)
        rate = math.fsum(one.flops for one in aligned) / seconds if aligned else USUAL_PEAK_FRAC * products[0].peak
        if slow := [one for one in products if one.odd_sizes and one.flops <= SLOW_FRAC * rate * one.seconds]:
            yield slow, rate, bool(aligned)


def saved_by_padding_s(slow: Iterable[_Product], rate: float) -> float:
    """Returns the seconds of a step that padding would save if the padded products ran at `rate` FLOPs per second."""
    return math.fsum(max(0.0, one.seconds - one.padded_flops / rate) for one in slow)


def _product_of(entry: Mapping[str, Any], is_tf32: bool) -> _Product | None:
    """Returns a row of `Operations.by_operator` as a product; None if it is another operator, or not bound by computation."""
    dtype = TF32 if is_tf32 and entry.get("dtype") == WIDE else entry.get("dtype")
    flops, seconds, frac = (entry.get(name) for name in ("flops", "seconds", "roofline_frac"))
    if entry.get("kind") != "matmul" or dtype not in LOADED_AT_ONCE or entry.get("bound") != "compute":
        return None
    factors = [shape.split("x") for shape in str(entry.get("shapes") or "").split(", ")[-2:]]
    has_sizes = len(factors) == 2 and all(size.isdecimal() for factor in factors for size in factor)
    if not (flops and seconds and frac and has_sizes):
        return None
    least, sizes = LOADED_AT_ONCE[dtype], [int(size) for size in (*factors[0][-2:], factors[1][-1])]
    padded = math.prod(-(-size // least) * least / size for size in sizes)
    odd_sizes = [size for size in sizes if size % least]
    peak = flops / seconds / frac
    return _Product(entry["operator"], entry["shapes"], dtype, seconds, flops, flops * padded, odd_sizes, peak)


def _padded(size: int) -> int:
    to = [-(-size // multiple) * multiple for multiple in MULTIPLES]
    return next((each for each in to if each <= MAX_PADDING * size), to[-1])
