"""Finds what costs time in a configuration: one rule a cause, each with a place and a sized gain."""

from __future__ import annotations

from functools import partial

from autotune.explain.evidence import Evidence
from autotune.explain.findings import compiling, device, host, memory, pipeline, ranks
from autotune.explain.findings.finding import Finding, Rule
from autotune.explain.gains import LEAST_GAIN

__all__ = ["RULES", "Finding", "found"]

RULES: dict[str, Rule] = {
    pipeline.STORAGE: partial(pipeline.stage_costs, cause=pipeline.STORAGE),
    pipeline.DECODING: partial(pipeline.stage_costs, cause=pipeline.DECODING),
    pipeline.AUGMENTATION: partial(pipeline.stage_costs, cause=pipeline.AUGMENTATION),
    pipeline.COLLATING: partial(pipeline.stage_costs, cause=pipeline.COLLATING),
    pipeline.WORKERS: pipeline.too_few_workers,
    "synchronous copies": host.synchronous_copies,
    host.ITEM: partial(host.costs, cause=host.ITEM),
    host.LOGGING: partial(host.costs, cause=host.LOGGING),
    host.METRICS: partial(host.costs, cause=host.METRICS),
    host.COLLECTION: host.collections,
    host.PYTHON: partial(host.costs, cause=host.PYTHON),
    "launch-bound": device.launch_bound,
    "memory-bound operators": device.memory_bound,
    "recompilation": compiling.recompilation,
    "graph breaks": compiling.graph_breaks,
    "32-bit arithmetic": device.low_precision,
    "unfused optimizer": device.unfused_optimizer,
    "communication": ranks.communication,
    "rank skew": ranks.skew,
    "allocator retries": memory.allocator_retries,
    "memory fragmentation": memory.fragmentation,
}
HIDING_FRAC = 0.5  # of a stage's gain: workers that hide so much of it come first


def found(evidence: Evidence) -> list[Finding]:
    """Returns the findings on a configuration, the largest gain first; [] for a healthy program."""
    every = [finding for rule in RULES.values() for finding in rule(evidence)]
    return ranked([finding for finding in every if finding.gain.mid >= LEAST_GAIN], evidence)


def ranked(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """Returns findings by gain; workers come before the stages that they would hide."""
    ordered = sorted(findings, key=lambda finding: -finding.gain.mid)
    workers = next((one for one in ordered if one.cause == pipeline.WORKERS), None)
    if workers is None or evidence.num_workers:
        return ordered
    hidden = [one for one in ordered if one.cause in pipeline.CODE and one.gain.mid * HIDING_FRAC <= workers.gain.mid]
    first = next((index for index, one in enumerate(ordered) if one is workers or one in hidden), 0)
    rest = [one for one in ordered if one is not workers]
    return [*rest[:first], workers, *rest[first:]]
