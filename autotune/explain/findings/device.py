"""Rules for computation: the optimizer's kernels, many small operators, operators that only move memory, padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import (
    AMP,
    COMPILE,
    COMPUTING,
    LAUNCH_FRAC,
    computing_phases_s,
    gain_on_device,
    narrow_type,
    traced,
    waiting_frac,
    waits_for_host,
)
from autotune.explain.findings.finding import Finding
from autotune.explain.findings.products import ALIGNED_SAVES, saved_by_padding_s, slow_products
from autotune.explain.gains import Gain
from autotune.explain.kernel_names import CUSTOM
from autotune.explain.roofline import MATRIX_KINDS
from autotune.harness.explain.documents import COLLATE, IN_ALL, OPTIMIZER, PADDED
from autotune.quantities import percent_text, step_time_text
from autotune.records import KnobValue

OPTIMIZER_KNOB, BATCH = "optimizer.implementation", "loader.batch_size"
CALLING = (*COMPUTING, OPTIMIZER)  # phases in which a program calls operators
OPERATOR_S = 8e-6  # host seconds for calling an operator and its autograd node, even if they compute almost nothing
WORK_S = 50e-6  # a call that takes this long does real work, even under a profiler and on a busy machine
# On a GPU, `launch_bound` yields a finding if the GPU waits for its host for at least LAUNCH_FRAC of the step (without its
# input). LEAST_WAITING_FRAC is enough if calling the operators would explain at least EXPLAINED_FRAC of the waiting time.
# Otherwise the host may do other work in that time.
EXPLAINED_FRAC, LEAST_WAITING_FRAC = 0.5, 0.3
LARGER_BATCH = 4  # the larger batch to try, as a multiple of today's
NOT_GROWING_FRAC = (0.25, 0.7, 1.0)  # share of the calling time that a larger batch leaves as it is: at least, usually, at most
COMPILED_FRAC = (0.1, 0.5, 0.9)  # share of the calling time that compiled code saves: at least, usually, at most
# An operator that uses a smaller share of the memory's bandwidth is limited by something else. For a GPU, the bandwidth is that
# of the data sheet. A plain copy reaches only about 80 % of it (79 % on an H200), so the limit for a GPU is lower.
LEAST_BANDWIDTH_FRAC, LEAST_DOCUMENTED_FRAC = 0.5, 0.4
MEMORY_BOUND_FRAC = 0.1  # there is a finding only if memory-bound operators take at least this share of the step
MAX_NAMED = 3  # maximum number of memory-bound operators that a finding names
LEAST_SHAPE_FRAC = 0.2  # a shape is named if its operators take at least this share of the time of memory-bound operators
FUSED_FRAC = (0.0, 0.3, 0.8)  # share of memory-bound operators' seconds that fusing them saves: at least, usually, at most
NOT_FUSED = (*MATRIX_KINDS, "embedding and indexing", "collective", "compiled", CUSTOM)  # never count as memory-bound
FASTER_OPTIMIZER = (1.5, 3.0, 8.0)  # how many times as fast a fused update is: at least, usually, at most
LEAST_PADDED_FRAC = 0.1  # a smaller share gives no finding, because short runs of equal tokens also occur without padding
BUCKETED_FRAC = 0.8  # share of the padding that is gone if batches consist of samples of similar length


def unfused_optimizer(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if the weights are updated one by one although one kernel could update them."""
    seconds, value = evidence.phases_s.get(OPTIMIZER, 0.0), _faster_optimizer(evidence)
    if value is None:
        return
    own = [line for line in evidence.own_lines() if line.phase == OPTIMIZER]
    yield Finding(
        cause="unfused optimizer",
        where=evidence.place_of(own[0]) if own else "optimizer.step()",
        evidence=f"the update takes {evidence.of_step(seconds)}",
        gain=evidence.gain((seconds * (1 - 1 / times) for times in FASTER_OPTIMIZER), "predicted"),
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
    (knob, value), idle = _relief(evidence), waiting_frac(evidence)
    phases = CALLING if knob == BATCH and _faster_optimizer(evidence) is None else COMPUTING  # the update is not compiled
    busy_s = evidence.step_s - evidence.input_s
    if idle is None and OPTIMIZER not in phases:
        busy_s -= evidence.phases_s.get(OPTIMIZER, 0.0)
    rows = [row for row in operations.by_operator if row.get("phase") in phases]
    others = [row for row in operations.by_operator if row.get("phase") == OPTIMIZER and OPTIMIZER not in phases]
    count = operations.count - math.fsum(row["count"] for row in others)
    overhead_s = _calling_s(evidence, rows, count, phases) if idle is None else idle * evidence.step_s
    is_explained = idle is not None and count * OPERATOR_S >= EXPLAINED_FRAC * overhead_s
    if overhead_s < (LEAST_WAITING_FRAC if is_explained else LAUNCH_FRAC) * busy_s:
        return
    if value is None:
        gain = evidence.gain((0.0, COMPILED_FRAC[1] * overhead_s, overhead_s), "bound")
        basis = f"up to {OPERATOR_S * 1e6:.0f} us per operator; no untried setting would make operators fewer or larger"
    elif knob == BATCH:
        gain = gain_of_larger_batch(overhead_s / evidence.step_s, float(value) / evidence.batch)
        each = f"{NOT_GROWING_FRAC[0] * OPERATOR_S * 1e6:.0f} to {OPERATOR_S * 1e6:.0f} us"
        basis = f"{each} for each call of an operator, and a call processes more samples in a larger batch"
    else:
        gain = evidence.gain((frac * overhead_s for frac in COMPILED_FRAC), "predicted")
        basis = "compiled code usually saves 10 to 90 % of the calls"
    seen = "calling them takes up to" if idle is None else "the GPU waits for the host for"
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
    bound = [entry for entry in traced(evidence) if _moves_memory(entry, least)]
    seconds = math.fsum(entry["seconds"] for entry in bound)
    if not bound or seconds < MEMORY_BOUND_FRAC * evidence.step_s or waits_for_host(evidence):
        return
    by_operator = _summed((str(entry["operator"]), entry["seconds"]) for entry in bound)
    shapes = _by_shape(bound)
    narrow = narrow_type(evidence)
    knob, value = (COMPILE, "default") if evidence.may_set(COMPILE, "default") else (AMP, narrow) if narrow else ("", None)
    low, mid, high = (seconds * frac for frac in FUSED_FRAC)
    padded_s = math.fsum(saved_by_padding_s(slow, rate) for slow, rate, _ in slow_products(evidence)) if knob == COMPILE else 0
    also = "; compiling may also pad the unaligned products" if padded_s else ""
    yield Finding(
        cause="memory-bound operators",
        where=next(iter(by_operator)),
        evidence=f"{evidence.of_step(seconds)} are spent on moving memory: {_listed(by_operator)}{_largest(shapes, seconds)}",
        gain=gain_on_device(evidence, (low, mid, high + ALIGNED_SAVES[-1] * padded_s), "bound"),
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
    """Returns shape of the first input -> seconds, most seconds first. Shapes of equal size count as one."""
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

    For the lower end, each batch is cut at the end of its longest sample. Half of the saving counts, because not all work grows
    with the length. The estimate assumes batches of samples of similar length, in which BUCKETED_FRAC of the padding is gone.
    The upper end assumes attention, whose work grows with the square of the length. The shares of padding are from one step.
    """
    found = evidence.memory[0].padding if evidence.memory else {}
    padded, in_all = (min(1.0, found.get(name, 0.0)) for name in (PADDED, IN_ALL))
    if padded < LEAST_PADDED_FRAC or waits_for_host(evidence):
        return
    computing_s = computing_phases_s(evidence)
    least, usual, most = 0.5 * in_all, BUCKETED_FRAC * padded, 1 - (1 - padded) ** 2
    collate = next((stage for stage in evidence.first.stages if stage.name == COLLATE and stage.file), None)
    yield Finding(
        cause="padding",
        where=evidence.place(collate.file, collate.line) if collate else "tokens of a batch",
        evidence=f"{percent_text(padded)} of the tokens are padding; {evidence.of_step(computing_s)} in forward and backward",
        gain=gain_on_device(evidence, (least * computing_s, max(least, usual) * computing_s, most * computing_s), "predicted"),
        basis=f"the tokens of one step; {percent_text(in_all)} are at positions where all samples of the batch are padded",
        code="pad each batch only to its longest sample, and put samples of similar length into a batch, or pack them",
    )
