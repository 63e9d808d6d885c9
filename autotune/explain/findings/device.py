"""Rules for computation: precision, the optimizer's kernels, many small operators, compilation, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding, ms, percent
from autotune.explain.gains import Gain, Saved, gain_of
from autotune.explain.places import named, place_of
from autotune.harness.explain.documents import BACKWARD, FORWARD, OPTIMIZER
from autotune.records import KnobValue

AMP, OPTIMIZER_KNOB, BATCH, COMPILE, DYNAMIC = (
    "precision.amp",
    "optimizer.implementation",
    "loader.batch_size",
    "compile.mode",
    "compile.dynamic",
)
MATRIX = re.compile(r"conv|addmm|\bmm\b|bmm|matmul|linear|attention", re.IGNORECASE)
FAST_16_BIT = {"amx_bf16", "avx512_bf16", "avx10_2", "sve_bf16"}
LEAST_FLOPS_PER_S = 2e10  # on a CPU, a step with fewer FLOPs a second is not made of large matrix products
MATRIX_FRAC = 0.7  # assumed share of matrix products in forward and backward, if no trace shows their share
OPERATOR_S = 8e-6  # host seconds of an operator that computes almost nothing, including those of its autograd node
# A step is bound by launches if, for at least this share of it, the GPU has nothing to do or the CPU only calls operators.
LAUNCH_FRAC = 0.6
LARGER_BATCH = 4  # the larger batch to try, as a multiple of today's
FASTER_16_BIT = (1.1, 1.7, 3.0)  # how many times as fast 16-bit matrix products are: at least, usually, at most
FASTER_OPTIMIZER = (1.5, 3.0, 8.0)  # how many times as fast a fused update is: at least, usually, at most


def low_precision(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if matrix products run in 32 bits although the device has units for 16 bits."""
    can = evidence.is_cuda or bool(FAST_16_BIT & evidence.host_context.cpu_isa)
    if not (can and evidence.lines and evidence.value(AMP) == "off" and evidence.may_set(AMP, "bf16")):
        return
    measured, share = evidence.effect(AMP, "bf16"), _matrix_share(evidence)
    if measured is None and not share:
        return
    step_s = evidence.step_s
    low, mid, high = (share * step_s * (1 - 1 / times) for times in FASTER_16_BIT)
    rate = _flops_per_s(evidence)
    yield Finding(
        cause="32-bit arithmetic",
        where="convolutions and matrix products",
        evidence=f"{percent(share)} of the step in float32 products" + (f", {rate / 1e9:.3g} GFLOP/s" if rate else ""),
        gain=measured or gain_of(step_s, Saved(low=0.5 * low, mid=mid, high=high), "predicted"),
        basis="trials of this study" if measured else "16-bit products are usually 1.1 to 3 times as fast here",
        knob=AMP,
        value="bf16",
    )


def _flops_per_s(evidence: Evidence) -> float | None:
    known = evidence.memory and evidence.memory[0].flops and evidence.lines
    return evidence.memory[0].flops / evidence.step_s if known and evidence.memory[0].flops else None


def _matrix_share(evidence: Evidence) -> float:
    """Returns the share of the step in matrix products; 0 if they are too few to matter, or nothing is known of them."""
    rate = _flops_per_s(evidence)
    if not evidence.is_cuda and (rate is None or rate < LEAST_FLOPS_PER_S):
        return 0.0
    phases = evidence.first.phases_s
    computing_s = phases.get(FORWARD, 0.0) + phases.get(BACKWARD, 0.0)
    return min(1.0, _traced_matrix_frac(evidence) * computing_s / evidence.step_s)


def _traced_matrix_frac(evidence: Evidence) -> float:
    operations = evidence.operations[0] if evidence.operations else None
    if operations is None or operations.is_distorted or not operations.by_operator:
        return MATRIX_FRAC
    total_s = math.fsum(entry["seconds"] for entry in operations.by_operator)
    matrix_s = math.fsum(entry["seconds"] for entry in operations.by_operator if MATRIX.search(str(entry["operator"])))
    return matrix_s / total_s if total_s else MATRIX_FRAC


def unfused_optimizer(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if the weights are updated one by one although one kernel could do it."""
    if not evidence.lines:
        return
    seconds, step_s = evidence.first.phases_s.get(OPTIMIZER, 0.0), evidence.step_s
    value = next((value for value in ("fused", "foreach") if evidence.may_set(OPTIMIZER_KNOB, value)), None)
    if value is None or evidence.value(OPTIMIZER_KNOB) == "fused":
        return
    measured = evidence.effect(OPTIMIZER_KNOB, value)
    low, mid, high = (seconds * (1 - 1 / times) for times in FASTER_OPTIMIZER)
    own = [line for line in evidence.own_lines() if line.phase == OPTIMIZER]
    yield Finding(
        cause="unfused optimizer",
        where=place_of(own[0], evidence.cwd) if own else "optimizer.step()",
        evidence=f"the update takes {ms(seconds)} of a step's {ms(step_s)} ({percent(seconds / step_s)})",
        gain=measured or gain_of(step_s, Saved(low=low, mid=mid, high=high), "predicted"),
        basis="trials of this study" if measured else "fused updates are usually 1.5 to 8 times as fast",
        knob=OPTIMIZER_KNOB,
        value=value,
    )


def launch_bound(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if most of a step goes to calling many small operators, not to what they compute."""
    operations = evidence.operations[0] if evidence.operations else None
    if operations is None or not evidence.lines:
        return
    step_s = evidence.step_s
    overhead_s = min(operations.count * OPERATOR_S, step_s)
    share = 1 - operations.busy_s / step_s if operations.busy_s is not None else overhead_s / step_s
    knob, value = _relief(evidence)
    if share < LAUNCH_FRAC or not knob or value is None:
        return
    measured = evidence.effect(knob, value)
    times = float(value) / evidence.batch if knob == BATCH and isinstance(value, int) else 1 / (1 - 0.5 * share)
    yield Finding(
        cause="launch-bound",
        where=_model_line(evidence),
        evidence=f"calling {operations.count:.0f} operators takes {percent(share)} of a step's {ms(step_s)}",
        gain=measured or _of_larger_batch(share, times),
        basis="trials of this study" if measured else f"{OPERATOR_S * 1e6:.0f} us to call an operator, whatever the batch size",
        knob=knob,
        value=value,
    )


def _relief(evidence: Evidence) -> tuple[str, KnobValue | None]:
    """Returns the setting that makes fewer or larger operators: a larger batch, else compilation; "" for none."""
    larger = [int(value) for value in evidence.domains.get(BATCH, ()) if evidence.may_set(BATCH, value)]
    larger = [value for value in larger if value > evidence.batch]
    known = {value: gain.mid for value in larger if (gain := evidence.effect(BATCH, value))}
    if known:
        return BATCH, max(known, key=lambda value: known[value])
    if larger:
        return BATCH, min(larger, key=lambda value: abs(value - LARGER_BATCH * evidence.batch))
    return (COMPILE, "default") if evidence.may_set(COMPILE, "default") else ("", None)


def _of_larger_batch(share: float, times: float) -> Gain:
    def gain(fixed: float) -> float:
        return times / (fixed + times * (1 - fixed)) - 1

    return Gain(low=gain(0.5 * share), mid=gain(0.95 * share), high=gain(min(1.0, 1.1 * share)), kind="predicted")


def _model_line(evidence: Evidence) -> str:
    own = [line for line in evidence.own_lines() if line.phase in (FORWARD, BACKWARD)]
    return place_of(own[0], evidence.cwd) if own else "forward"


def recompilation(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if torch.compile compiles again and again while it trains."""
    compiled = evidence.first.compiled if evidence.lines else None
    if compiled is None or not compiled.recompilations:
        return
    top = compiled.recompilations[0]
    seconds = compiled.seconds / max(1, evidence.first.steps)
    count = sum(int(entry.get("count") or 1) for entry in compiled.recompilations)
    reason = str(top.get("reason") or "").strip().splitlines()
    may_set = evidence.may_set(DYNAMIC, "true")
    yield Finding(
        cause="recompilation",
        where=named(str(top.get("file") or "?"), int(top.get("line") or 0), evidence.cwd),
        evidence=f"{count} recompilations in {evidence.first.steps} steps, {ms(seconds)} a step"
        + (f": {reason[0][:100]}" if reason else ""),
        gain=gain_of(
            evidence.step_s, Saved(low=0.5 * seconds, mid=seconds, high=min(1.15 * seconds, evidence.step_s)), "predicted"
        ),
        basis="seconds of compiling within the observed steps",
        code="give steps one shape: pad, drop the last batch, bucket lengths; or torch.compile(dynamic=True)",
        knob=DYNAMIC if may_set else "",
        value="true" if may_set else None,
    )


def allocator_retries(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the CUDA allocator runs out of memory and frees its cache within steps."""
    for memory in evidence.memory:
        if memory.alloc_retries and evidence.lines:
            yield Finding(
                cause="allocator retries",
                where=f"rank {memory.rank}",
                evidence=f"{memory.alloc_retries} retries in the observed steps, each frees the cache and waits for the device",
                gain=Gain(low=0.0, mid=0.05, high=0.3, kind="bound"),
                basis="usual cost of freeing the cache; not measured on a GPU yet",
                code="a smaller batch, or memory.allocator=expandable_segments",
            )
