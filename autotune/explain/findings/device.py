"""Rules for computation: precision, the optimizer's kernels, many small operators, operators that only move memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding
from autotune.explain.gains import Gain, Kind
from autotune.explain.names import CUSTOM, operator_kind
from autotune.explain.roofline import TF32
from autotune.harness.explain.documents import (
    BACKWARD,
    CASTS,
    COLLATE,
    FORWARD,
    IN_ALL,
    NARROW,
    OPTIMIZER,
    PADDED,
    TIMED_FRAC,
    WIDE,
)
from autotune.quantities import flops_text, percent_text, step_time_text
from autotune.records import KnobValue

AMP, OPTIMIZER_KNOB, BATCH, COMPILE = ("precision.amp", "optimizer.implementation", "loader.batch_size", "compile.mode")
CHANNELS_LAST = "layout.channels_last"
PRODUCT_KINDS = ("matmul", "convolution")
MATRIX_KINDS = (*PRODUCT_KINDS, "attention")
COMPUTING = (FORWARD, BACKWARD)
CALLING = (*COMPUTING, OPTIMIZER)  # phases in which a program calls operators
FAST_16_BIT = {"amx_bf16", "avx512_bf16", "avx10_2", "sve_bf16"}
LEAST_FLOPS_PER_S = 2e10  # a CPU that does fewer FLOPs per second is assumed to compute no large matrix products
MATRIX_FRAC = 0.7  # assumed share of matrix products in the time of forward and backward, if no trace shows it
OPERATOR_S = 8e-6  # host seconds for calling an operator and its autograd node, even if they compute almost nothing
# A step is launch-bound if the GPU waits for the host for at least this share of the step. On a CPU, it is launch-bound if
# calling operators takes at least this share. The time of the input does not count.
LAUNCH_FRAC = 0.6
WORK_S = 50e-6  # a call that takes this long does real work, even under a profiler and on a busy machine
IDLE_FRAC = 0.2  # if a GPU is idle for a larger share of the step, less work for the GPU may not shorten the step
LARGER_BATCH = 4  # the larger batch to try, as a multiple of today's
NOT_GROWING_FRAC = (0.25, 0.7, 1.0)  # share of the calling time that a larger batch leaves as it is: at least, usually, at most
COMPILED_FRAC = (0.1, 0.5, 0.9)  # share of the calling time that compiled code saves: at least, usually, at most
# How many times as fast 16-bit matrix products are, if the program's own products were not timed: at least, usually, at most.
FASTER_16_BIT = (1.1, 2.0, 8.0)
# Products are timed alone. In a step, where memory is new and caches are cold, at least this share of the saving remains.
LEFT_FRAC = 0.5
HALF_BYTES = 0.5  # in 16 bits, operators other than products move half the bytes and save at most this share of their time
# An operator that uses a smaller share of the memory's bandwidth is limited by something else. For a GPU, the bandwidth is that
# of the data sheet, of which a plain copy reaches about 80 % (79 % on an H200), so the same limit is a smaller share of it.
LEAST_BANDWIDTH_FRAC, LEAST_DOCUMENTED_FRAC = 0.5, 0.4
MEMORY_BOUND_FRAC = 0.1  # there is a finding only if memory-bound operators take at least this share of the step
MAX_NAMED = 3  # maximum number of memory-bound operators that a finding names
LEAST_SHAPE_FRAC = 0.2  # a shape is named if its operators take at least this share of the time of memory-bound operators
FUSED_FRAC = (0.0, 0.3, 0.8)  # share of memory-bound operators' seconds that fusing them saves: at least, usually, at most
FEWER_BYTES = ((COMPILE, "default"), (AMP, "bf16"))  # settings that move fewer bytes
NOT_FUSED = (*MATRIX_KINDS, "embedding and indexing", "collective", "compiled", CUSTOM)  # never count as memory-bound
# Seconds that channels_last saves, as a multiple of the conversions' seconds: at least, usually, at most. Pooling and
# normalisation also have faster kernels for channels_last.
NOT_CONVERTED = (0.5, 1.0, 2.0)
# Numbers that the fast kernels on Tensor Cores load at once: 16 bytes. Sizes of products should be multiples of these.
LOADED_AT_ONCE = {"float16": 8, "bfloat16": 8, TF32: 4}
SLOW_FRAC = 0.5  # an unaligned product is slow if it has at most this share of the aligned products' rate
USUAL_PEAK_FRAC = 0.5  # assumed share of the peak at which aligned products run, if the program has none
# Seconds that padding saves, relative to products of the padded sizes at that rate: at least, usually, at most.
ALIGNED_SAVES = (0.5, 0.85, 1.05)
# A size is padded to a multiple of the first of these numbers that makes it at most MAX_PADDING times as large, or of the last.
MULTIPLES, MAX_PADDING = (64, 32, 16, 8), 1.02
MAX_SIZES = 2  # a finding names at most this many sizes
FASTER_OPTIMIZER = (1.5, 3.0, 8.0)  # how many times as fast a fused update is: at least, usually, at most
LEAST_PADDED_FRAC = 0.1  # short runs of equal tokens occur by chance
BUCKETED_FRAC = 0.8  # share of the padding that is gone if batches consist of samples of similar length


def low_precision(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if matrix products run in 32 bits although the device is faster in 16 bits."""
    if evidence.value(AMP) != "off" or not evidence.may_set(AMP, "bf16"):
        return
    products = _products(evidence)
    share = _matrix_share(evidence, products)
    has_units = evidence.is_cuda or bool(FAST_16_BIT & evidence.host_context.cpu_isa)
    is_faster = products[NARROW] < products[WIDE] if products else has_units
    if not is_faster or not share or _waits_for_host(evidence):
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
        value="bf16",
    )


def _products(evidence: Evidence) -> dict[str, float]:
    """Returns the time of the step's products in each precision, as in `documents.Memory.products`; {} if unknown."""
    found = evidence.memory[0].products if evidence.memory else {}
    return dict(found) if found.get(WIDE) and found.get(NARROW) else {}


def _gain_of_16_bits(evidence: Evidence, share: float, products: dict[str, float]) -> Gain:
    """Returns the gain of 16 bits, by Amdahl's law, from the share of products and their times in both precisions.

    For the lower end, every input of every product is converted first, and LEFT_FRAC of the remaining saving counts. For the
    upper end, nothing is converted, and the operators between the products move half as many bytes. The estimate is halfway
    between these two, in seconds saved.
    """
    step_s = evidence.step_s
    if not products:
        low, mid, high = (share * step_s * (1 - 1 / times) for times in FASTER_16_BIT)
        return _gain_on_device(evidence, (0.5 * low, mid, high), "predicted")
    left = products[NARROW] / products[WIDE]
    with_casts = min(1.0, left + products.get(CASTS, 0.0) / products[WIDE])
    low, bare = LEFT_FRAC * share * step_s * (1 - with_casts), share * step_s * (1 - left)
    computing_s = max(_computing_s(evidence), share * step_s)
    # Share of the other operators that is assumed to lie between products: 1 if products take at least half of the computing.
    is_around = min(1.0, 2 * share * step_s / computing_s)
    high = bare + HALF_BYTES * is_around * (computing_s - share * step_s)
    return _gain_on_device(evidence, (low, (low + high) / 2, high), "predicted")


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
    computing_s = _computing_s(evidence)
    if busy_s := evidence.operations[0].busy_s if evidence.operations else None:  # a GPU is idle for part of each phase
        computing_s = min(computing_s, busy_s)
    return min(1.0, (MATRIX_FRAC if traced is None else traced) * computing_s / evidence.step_s)


def _computing_s(evidence: Evidence) -> float:
    return math.fsum(evidence.phases_s.get(phase, 0.0) for phase in COMPUTING)


def _traced_matrix_frac(evidence: Evidence, *, is_attention_timed: bool) -> float | None:
    """Returns the share of float32 matrix products in the time of forward's and backward's operators; None if unknown.

    On the CPU, attention counts only if it was timed in both precisions: in 16 bits it can be slower.
    """
    kinds = MATRIX_KINDS if evidence.is_cuda or is_attention_timed else PRODUCT_KINDS
    computing = [entry for entry in _traced(evidence) if entry.get("phase") in COMPUTING]
    total_s = math.fsum(entry["seconds"] for entry in computing)
    wide = [entry for entry in computing if entry.get("dtype") in (WIDE, None)]  # autocast changes no other dtype
    matrix_s = math.fsum(entry["seconds"] for entry in wide if operator_kind(str(entry["operator"])) in kinds)
    return matrix_s / total_s if total_s else None


def _traced(evidence: Evidence) -> list[dict[str, Any]]:
    """Returns rank 0's seconds by operator, as in `Operations.by_operator`; [] if unknown, or distorted by the profiler."""
    operations = evidence.operations[0] if evidence.operations else None
    return [] if operations is None or operations.is_distorted else operations.by_operator


def _waits_for_host(evidence: Evidence) -> bool:
    """Returns whether a GPU waits for its host so long that less work for the GPU would not shorten the step."""
    return (_waiting_frac(evidence) or 0.0) >= LAUNCH_FRAC


def _gain_on_device(evidence: Evidence, saved_s: tuple[float, float, float], kind: Kind) -> Gain:
    """Returns the gain if the device computes for `saved_s` seconds less.

    If a GPU is idle for 10 % of the step, only 90 % of the lower end and of the estimate count. If it is idle for more than
    IDLE_FRAC, the lower end is 0.
    """
    idle, (low, mid, high) = idle_frac(evidence) or 0.0, saved_s
    return evidence.gain(low * (1 - idle) if idle <= IDLE_FRAC else 0.0, mid * (1 - idle), high, kind)


def layout_conversions(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if convolutions on a GPU convert their images to the layout that Tensor Cores need, and back."""
    seconds = evidence.operations[0].layout_s if evidence.operations else 0.0
    if not seconds or evidence.operations[0].is_distorted or _waits_for_host(evidence):
        return
    can_set = evidence.may_set(CHANNELS_LAST, True)
    low, mid, high = (seconds * times for times in NOT_CONVERTED)
    yield Finding(
        cause="layout conversions",
        where="convolutions",
        evidence=f"{evidence.of_step(seconds)} are spent on converting images between NCHW and NHWC",
        gain=_gain_on_device(evidence, (low, mid, high), "predicted"),
        basis="kernels that convert between layouts; without them, pooling and normalisation are often faster, too",
        code="" if can_set else "keep model and images in torch.channels_last throughout",
        knob=CHANNELS_LAST if can_set else "",
        value=True if can_set else None,
    )


def unaligned_products(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if matrix products on a GPU are slow because of a size such as a vocabulary of 50,257.

    If the rows of a matrix do not begin at multiples of 16 bytes, kernels that load one number at a time run. Products count if
    they are bound by computation and much slower than the aligned products of the step.
    """
    for slow, rate, is_measured in _slow_products(evidence):
        slow_s, slow_flops = math.fsum(one.seconds for one in slow), math.fsum(one.flops for one in slow)
        sizes = list(dict.fromkeys(size for one in slow for size in one.odd_sizes))[:MAX_SIZES]
        low, mid, high = (_saved_by_padding_s(slow, rate) * times for times in ALIGNED_SAVES)
        is_compiled = evidence.value(COMPILE) not in (None, "off")
        yield Finding(
            cause="unaligned products",
            where=f"{slow[0].operator} ({slow[0].shapes})",
            evidence=f"{len(slow)} products with a size of {' or '.join(map(str, sizes))}: {evidence.of_step(slow_s)}, "
            f"{flops_text(slow_flops / slow_s)} instead of {flops_text(rate)}",
            gain=_gain_on_device(evidence, (low, mid, high), "predicted"),
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


def _slow_products(evidence: Evidence) -> Iterator[tuple[list[_Product], float, bool]]:
    """Yields, for each dtype, the products that padding would make faster, longest first.

    With them: the FLOPs per second of aligned products, and whether these were measured in the same step.
    """
    found = _traced(evidence) if evidence.is_cuda and not _waits_for_host(evidence) else []
    every = [product for entry in found if (product := _product_of(entry, evidence.operations[0].is_tf32)) is not None]
    for dtype in dict.fromkeys(one.dtype for one in every):
        products = [one for one in every if one.dtype == dtype]
        aligned = [one for one in products if not one.odd_sizes]
        seconds = math.fsum(one.seconds for one in aligned)
        rate = math.fsum(one.flops for one in aligned) / seconds if aligned else USUAL_PEAK_FRAC * products[0].peak
        if slow := [one for one in products if one.odd_sizes and one.flops <= SLOW_FRAC * rate * one.seconds]:
            yield slow, rate, bool(aligned)


def _saved_by_padding_s(slow: Iterable[_Product], rate: float) -> float:
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


def unfused_optimizer(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if the weights are updated one by one although one kernel could update them."""
    seconds, value = evidence.phases_s.get(OPTIMIZER, 0.0), _faster_optimizer(evidence)
    if value is None:
        return
    low, mid, high = (seconds * (1 - 1 / times) for times in FASTER_OPTIMIZER)
    own = [line for line in evidence.own_lines() if line.phase == OPTIMIZER]
    yield Finding(
        cause="unfused optimizer",
        where=evidence.place_of(own[0]) if own else "optimizer.step()",
        evidence=f"the update takes {evidence.of_step(seconds)}",
        gain=evidence.gain(low, mid, high, "predicted"),
        basis="fused updates are usually 1.5 to 8 times as fast",
        knob=OPTIMIZER_KNOB,
        value=value,
    )


def _faster_optimizer(evidence: Evidence) -> str | None:
    """Returns the implementation that updates the weights with fewer operators; None if no such value can be set."""
    if evidence.value(OPTIMIZER_KNOB) == "fused":
        return None
    return next((value for value in ("fused", "foreach") if evidence.may_set(OPTIMIZER_KNOB, value)), None)


def launch_bound(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if most of a step is spent on calling many small operators instead of on computing.

    Time and operators of the input do not count, since they belong to other findings. The update of the weights counts only if
    the remedy is a larger batch, and no other implementation of the optimizer needs fewer operators.
    """
    operations = evidence.operations[0] if evidence.operations else None
    if operations is None:
        return
    (knob, value), idle = _relief(evidence), _waiting_frac(evidence)
    phases = CALLING if knob == BATCH and _faster_optimizer(evidence) is None else COMPUTING  # compiling changes only the model
    busy_s = evidence.step_s - evidence.input_s
    if idle is None and OPTIMIZER not in phases:
        busy_s -= evidence.phases_s.get(OPTIMIZER, 0.0)
    rows = [row for row in operations.by_operator if row.get("phase") in phases]
    others = [row for row in operations.by_operator if row.get("phase") == OPTIMIZER and OPTIMIZER not in phases]
    count = operations.count - math.fsum(row["count"] for row in others)
    overhead_s = _calling_s(evidence, rows, count, phases) if idle is None else idle * evidence.step_s
    if overhead_s < LAUNCH_FRAC * busy_s:
        return
    if value is None:
        gain = evidence.gain(0.0, COMPILED_FRAC[1] * overhead_s, overhead_s, "bound")
        basis = f"up to {OPERATOR_S * 1e6:.0f} us per operator; no untried setting would make operators fewer or larger"
    elif knob == BATCH:
        gain = gain_of_larger_batch(overhead_s / evidence.step_s, float(value) / evidence.batch)
        each = f"{OPERATOR_S * 2.5e5:.0f} to {OPERATOR_S * 1e6:.0f} us"
        basis = f"{each} for each call of an operator, and a call processes more samples in a larger batch"
    else:
        low, mid, high = (frac * overhead_s for frac in COMPILED_FRAC)
        gain = evidence.gain(low, mid, high, "predicted")
        basis = "compiled code usually saves 10 to 90 % of the calls"
    on_gpu = "neither computes nor communicates" if evidence.communicating_s else "computes nothing"
    seen = "calling them takes up to" if idle is None else f"the GPU {on_gpu} for"
    yield Finding(
        cause="launch-bound",
        where=evidence.model_place,
        evidence=f"{count:.0f} operators per step; {seen} {evidence.of_step(overhead_s)}",
        gain=gain,
        basis=basis,
        code="call fewer and larger operators: a larger batch, fused layers, no loops over small tensors",
        knob=knob,
        value=value,
    )


def _calling_s(evidence: Evidence, rows: Sequence[Mapping[str, Any]], count: float, phases: Sequence[str]) -> float:
    """Returns the seconds of a step in which the CPU calls these operators: at most OPERATOR_S for each call.

    If an operator is a product, or a call takes WORK_S or more, the time beyond OPERATOR_S is real work. Calling cannot take
    longer than the phases that call operators, minus this work.
    """
    working = [row for row in rows if row["kind"] in MATRIX_KINDS or row["seconds"] >= row["count"] * WORK_S]
    work_s = math.fsum(max(0.0, row["seconds"] - row["count"] * OPERATOR_S) for row in working)
    phases_s = math.fsum(evidence.phases_s.get(phase, 0.0) for phase in phases)
    return min(count * OPERATOR_S, max(0.0, phases_s - work_s))


def _relief(evidence: Evidence) -> tuple[str, KnobValue | None]:
    """Returns the setting that makes fewer or larger operators: a larger batch, else compilation, else ("", None)."""
    if larger := evidence.larger(BATCH, evidence.batch, LARGER_BATCH * evidence.batch):
        return BATCH, larger
    modes = ("reduce-overhead", "default") if evidence.is_cuda else ("default",)  # CUDA graphs launch many kernels at once
    mode = next((mode for mode in modes if evidence.may_set(COMPILE, mode)), None)
    return (COMPILE, mode) if mode else ("", None)


def idle_frac(evidence: Evidence) -> float | None:
    """Returns the share of the step in which the GPU computes nothing and is not waiting for input; None if unknown."""
    busy_s = evidence.operations[0].busy_s if evidence.operations else None
    return None if busy_s is None else max(0.0, 1 - (busy_s + evidence.input_s) / evidence.step_s)


def _waiting_frac(evidence: Evidence) -> float | None:
    """Returns the share of the step in which the GPU waits for its host; None if unknown.

    In this time, it neither computes nor communicates, nor is the program waiting for input.
    """
    idle = idle_frac(evidence)
    return None if idle is None else max(0.0, idle - evidence.communicating_s / evidence.step_s)


def gain_of_larger_batch(share: float, times: float) -> Gain:
    """Returns the gain of a larger batch.

    Args:
        share: upper limit for the share of the step that does not grow with the batch, see NOT_GROWING_FRAC.
        times: the larger batch, as a multiple of today's.
    """
    low, mid, high = (times / (frac * share + times * (1 - frac * share)) - 1 for frac in NOT_GROWING_FRAC)
    return Gain(low=low, mid=mid, high=high, kind="predicted")


def memory_bound(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if operators that compute little but move much memory take a large part of the step.

    Only operators without matrix products count, and only if they use much of the memory's bandwidth. If they were fused, they
    would read and write only once.
    """
    least = LEAST_DOCUMENTED_FRAC if evidence.is_cuda else LEAST_BANDWIDTH_FRAC
    bound = [entry for entry in _traced(evidence) if _moves_memory(entry, least)]
    seconds = math.fsum(entry["seconds"] for entry in bound)
    if not bound or seconds < MEMORY_BOUND_FRAC * evidence.step_s or _waits_for_host(evidence):
        return
    by_operator = _summed((str(entry["operator"]), entry["seconds"]) for entry in bound)
    shapes = _by_shape(bound)
    knob, value = next((setting for setting in FEWER_BYTES if evidence.may_set(*setting)), ("", None))
    low, mid, high = (seconds * frac for frac in FUSED_FRAC)
    padded_s = (
        math.fsum(_saved_by_padding_s(slow, rate) for slow, rate, _ in _slow_products(evidence)) if knob == COMPILE else 0
    )
    also = "; compiling may also pad the unaligned products" if padded_s else ""
    yield Finding(
        cause="memory-bound operators",
        where=next(iter(by_operator)),
        evidence=f"{evidence.of_step(seconds)} are spent on moving memory: {_listed(by_operator)}{_largest(shapes, seconds)}",
        gain=_gain_on_device(evidence, (low, mid, high + ALIGNED_SAVES[-1] * padded_s), "bound"),
        basis=f"operators that use at least {percent_text(least)} of the memory's bandwidth, by the roofline{also}",
        code="" if knob else "fuse them with torch.compile, work in place, or use smaller dtypes",
        knob=knob,
        value=value,
    )


def _moves_memory(entry: dict[str, Any], least: float) -> bool:
    is_apart = entry.get("kind") in NOT_FUSED or entry.get("phase") == OPTIMIZER
    return not is_apart and entry.get("bound") == "memory" and (entry.get("roofline_frac") or 0.0) >= least


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns name -> sum of its seconds, most seconds first."""
    sums: dict[str, float] = {}
    for name, seconds in pairs:
        sums[name] = sums.get(name, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _listed(by_name: Mapping[str, float]) -> str:
    """Returns the names with the most seconds: "aten::mul 14.7 ms, aten::copy_ 13.4 ms, aten::add 4.75 ms and 9 more"."""
    named = ", ".join(f"{name} {step_time_text(seconds)}" for name, seconds in list(by_name.items())[:MAX_NAMED])
    return named + (f" and {len(by_name) - MAX_NAMED} more" if len(by_name) > MAX_NAMED else "")


def _by_shape(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns shape of the first input -> seconds, most seconds first. Shapes with equally many elements are one."""
    names: dict[int, str] = {}
    pairs = []
    for entry in entries:
        shape = str(entry.get("shapes") or "").split(", ")[0]
        if all(size.isdecimal() for size in shape.split("x")):
            pairs.append((names.setdefault(math.prod(map(int, shape.split("x"))), shape), entry["seconds"]))
    return _summed(pairs)


def _largest(by_shape: Mapping[str, float], seconds: float) -> str:
    """Returns which tensors take much of these seconds: "; 29.3 ms on 32x512x3072, 12.9 ms on 32x512x50257"."""
    large = [f"{step_time_text(each)} on {shape}" for shape, each in by_shape.items() if each >= LEAST_SHAPE_FRAC * seconds]
    return f"; {', '.join(large)}" if large else ""


def padded_tokens(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if forward and backward compute with much padding.

    For the lower end, each batch is cut at the end of its longest sample, and half of the saving counts, because not all work
    grows with the length. The estimate assumes batches of samples of similar length, in which BUCKETED_FRAC of the padding is
    gone. The upper end assumes attention, whose work grows with the square of the length. The shares are those of one step.
    """
    found = evidence.memory[0].padding if evidence.memory else {}
    padded, in_all = (min(1.0, found.get(name, 0.0)) for name in (PADDED, IN_ALL))
    if padded < LEAST_PADDED_FRAC or _waits_for_host(evidence):
        return
    computing_s = _computing_s(evidence)
    least, usual, most = 0.5 * in_all, BUCKETED_FRAC * padded, 1 - (1 - padded) ** 2
    collate = next((stage for stage in evidence.first.stages if stage.name == COLLATE and stage.file), None)
    yield Finding(
        cause="padding",
        where=evidence.place(collate.file, collate.line) if collate else "tokens of a batch",
        evidence=f"{percent_text(padded)} of the tokens are padding; {evidence.of_step(computing_s)} in forward and backward",
        gain=_gain_on_device(evidence, (least * computing_s, max(least, usual) * computing_s, most * computing_s), "predicted"),
        basis=f"the tokens of one step; {percent_text(in_all)} are at positions where all samples of the batch are padded",
        code="pad each batch only to its longest sample, and put samples of similar length into a batch, or pack them",
    )
