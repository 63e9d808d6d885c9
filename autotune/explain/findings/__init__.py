"""Finds what costs time in a configuration, with one rule per cause. Each finding has a place and an estimated gain."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from autotune.explain.evidence import Evidence
from autotune.explain.findings import (
    attention,
    compiling,
    copies,
    debugging,
    device,
    host,
    memory,
    pipeline,
    products,
    ranks,
    restarts,
)
from autotune.explain.findings.finding import Finding, Rule
from autotune.explain.gains import LEAST_GAIN

__all__ = ["RULES", "Finding", "found", "ranked"]

RULES: dict[str, Rule] = {
    pipeline.STORAGE: partial(pipeline.stage_costs, cause=pipeline.STORAGE),
    pipeline.DECODING: partial(pipeline.stage_costs, cause=pipeline.DECODING),
    pipeline.AUGMENTATION: partial(pipeline.stage_costs, cause=pipeline.AUGMENTATION),
    pipeline.COLLATING: partial(pipeline.stage_costs, cause=pipeline.COLLATING),
    pipeline.WORKERS: pipeline.too_few_workers,
    restarts.CAUSE: restarts.restarted_workers,
    "synchronous copies": copies.synchronous_copies,
    "exposed copies": copies.exposed_copies,
    host.ITEM: partial(host.costs, cause=host.ITEM),
    host.LOGGING: partial(host.costs, cause=host.LOGGING),
    host.METRICS: partial(host.costs, cause=host.METRICS),
    host.COLLECTION: host.collections,
    host.PYTHON: partial(host.costs, cause=host.PYTHON),
    "launch-bound": device.launch_bound,
    "memory-bound operators": device.memory_bound,
    attention.CAUSE: attention.unfused_attention,
    "recompilation": compiling.recompilation,
    "graph breaks": compiling.graph_breaks,
    "32-bit arithmetic": products.low_precision,
    "slow 16-bit arithmetic": products.slow_16_bits,
    "layout conversions": products.layout_conversions,
    "unaligned products": products.unaligned_products,
    "unfused optimizer": device.unfused_optimizer,
    "padding": device.padded_tokens,
    "communication": ranks.communication,
    "rank skew": ranks.skew,
    "allocator retries": memory.allocator_retries,
    "memory fragmentation": memory.fragmentation,
    "page faults": memory.page_faults,
    debugging.ANOMALY: debugging.anomaly_detection,
}
# Causes that are, or may be, in the input itself. All other causes are in the work of the step. If the loader limits the rate,
# removing a cause in the work of the step gains less.
OF_INPUT = {*pipeline.CAUSES, restarts.CAUSE, "rank skew"}


def found(evidence: Evidence) -> list[Finding]:
    """Returns the findings on a configuration, in the order of `ranked`.

    Returns [] for a healthy program, and if there are no documents of the pass "lines", which contain the duration of a step.
    """
    if not evidence.lines:
        return []
    every = [(cause, finding) for cause, rule in RULES.items() for finding in rule(evidence)]
    return ranked(one if cause in OF_INPUT else pipeline.limited_by_loader(evidence, one) for cause, one in every)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings whose middle gain is LEAST_GAIN or more, sorted by the mean of the middle and the lower end.

    The middle alone would put a wild guess first. The lower end alone would put 40 % [1, 123] after 9 % [5, 13]. But at best,
    the first finding gains 123 % and the second only 13 %. At worst, the first gains 1 % and the second 5 %, hardly more. A
    lower end below 0 counts as 0.
    """
    kept = [finding for finding in findings if finding.gain.mid >= LEAST_GAIN]
    return sorted(kept, key=lambda one: -(one.gain.mid + max(0.0, one.gain.low)))
