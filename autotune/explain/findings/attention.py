"""A rule for attention that stores the scores of all pairs of positions, instead of computing them in one kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import COMPUTING, gain_on_device, traced, waits_for_host
from autotune.explain.findings.finding import Finding
from autotune.explain.roofline import MATRIX_KINDS

CAUSE = "unfused attention"
SOFTMAX = "aten::_softmax"  # attention applies it to the scores; the loss uses log_softmax instead
PRODUCTS, FALLBACK = ("aten::bmm", "aten::baddbmm"), "aten::_scaled_dot_product_attention_math"
LEAST_LENGTH = 64  # scores of shorter sequences are small
# Share of the seconds of operators on the scores, except products, that a fused kernel saves: at least, usually, at most. The
# share may exceed 1, because the remaining products no longer load and store the scores.
SAVED_FRAC = (0.3, 0.8, 1.5)
Key = tuple[int, int, int]  # number of elements of a tensor, and its last two sizes


def unfused_attention(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if operators such as softmax and dropout take much time on tensors of attention scores."""
    rows = [row for row in traced(evidence) if row.get("phase") in COMPUTING]
    sizes = _score_sizes(rows)
    on_scores = [row for row in rows if row["kind"] not in MATRIX_KINDS and any(map(sizes.__contains__, _keys(row)))]
    if not on_scores or waits_for_host(evidence):
        return
    seconds = math.fsum(row["seconds"] for row in on_scores)
    top = max(on_scores, key=lambda row: row["seconds"])
    shape = str(top["shapes"]).split(", ")[0]
    is_fallback = any(row["operator"] == FALLBACK for row in rows)
    yield Finding(
        cause=CAUSE,
        where=evidence.model_place,
        evidence=f"{evidence.of_step(seconds)} are spent on scores of all pairs of positions ({shape}), outside of products",
        gain=gain_on_device(evidence, (min(frac * seconds, evidence.step_s) for frac in SAVED_FRAC), "predicted"),
        basis="operators on tensors of this size; a fused kernel does not store the scores",
        code="give scaled_dot_product_attention inputs for which it has a fast kernel (16 bits, no mask that needs a gradient)"
        if is_fallback
        else "torch.nn.functional.scaled_dot_product_attention; for nn.MultiheadAttention, need_weights=False",
    )


def _score_sizes(rows: Sequence[Mapping[str, Any]]) -> set[Key]:
    """Returns the keys of tensors that are a result of batched products and have a softmax over them."""
    found = {key for row in rows if row["operator"] == SOFTMAX for key in _keys(row) if min(key[1:]) >= LEAST_LENGTH}
    return found & {key for row in rows if row["operator"] in PRODUCTS for key in _result_keys(row)}


def _keys(row: Mapping[str, Any]) -> list[Key]:
    """Returns the key of an operator's first input; [] if it has fewer than three dimensions or is unknown."""
    shape = next(iter(_shapes(row)), [])
    return [(math.prod(shape), shape[-2], shape[-1])] if len(shape) >= 3 else []


def _result_keys(row: Mapping[str, Any]) -> list[Key]:
    """Returns the key of the result of a batched product; [] if unknown."""
    factors = _shapes(row)[-2:]
    if len(factors) != 2 or any(len(shape) != 3 for shape in factors):
        return []
    (batch, length, _), (_, _, others) = factors
    return [(batch * length * others, length, others)]


def _shapes(row: Mapping[str, Any]) -> list[list[int]]:
    """Returns the shapes of an operator's inputs, as far as they are known: [[16, 512, 64], [16, 64, 512]]."""
    texts = [text.split("x") for text in str(row.get("shapes") or "").split(", ")]
    return [[int(size) for size in sizes] for sizes in texts if all(size.isdecimal() for size in sizes)]
