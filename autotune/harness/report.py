"""Assembles a rank's result."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, Dict

import torch

from . import process, protocol
from .context import TrialContext
from .knobs.module import recompile_limit_reason

AMPLE = 1.25  # a loader that can make more than this many times the samples that steps take never keeps them waiting


def bare(context: TrialContext, status: str) -> protocol.RankResult:
    """Returns the part of the result that does not need torch: identity, exit status, phase times."""
    spec = context.spec
    return protocol.RankResult(
        trial=spec.trial,
        nonce=spec.nonce,
        rank=context.rank,
        world_size=context.world_size,
        pid=context.pid,
        host=os.uname().nodename,
        status=status,
        error=context.ending.error,
        failed_s=context.ending.failed_s,
        phases_s=dict(context.phases.seconds),
        detected={"num_steps": context.num_steps},
    )


def unmeasured(context: TrialContext) -> protocol.RankResult:
    """Returns the result for a program whose steps could not be counted."""
    found = bare(context, "failed")
    found.detected.update(
        loaders=[loader.site for loader in context.loaders.loaders],
        optimizers=[type(o).__name__ for o in context.optimizers.optimizers()],
        num_backwards=context.losses.num_seen if context.losses is not None else 0,
    )
    found.memory, found.facts = context.memory.summary(), process.facts(context.device, context.device_index)
    return found


def result(context: TrialContext, status: str) -> protocol.RankResult:
    """Returns the result of this rank. Parts that fail are left out and listed under detected["harness_problems"]."""
    found = bare(context, status)
    found.unit, found.unit_source = context.loaders.unit, context.loaders.unit_source
    problems = []
    for add in (_add_rates, _add_detected, _add_knobs, _add_applicability, _add_memory, _add_loss, _add_facts):
        try:
            add(found, context)
        except Exception as error:
            problems.append(f"{add.__name__}: {type(error).__name__}: {error}")
    if problems:
        found.detected["harness_problems"] = problems
    return found


def knobs(context: TrialContext) -> Dict[str, protocol.KnobReport]:
    """Returns a report for every knob of the spec."""
    found = bare(context, "ended")
    _add_knobs(found, context)
    return found.knobs


def _add_knobs(found: protocol.RankResult, context: TrialContext) -> None:
    failures = []
    for handler in context.handlers:
        try:
            for key, report in handler.verify().items():
                found.knobs.setdefault(key, report)
            found.observed.update(handler.observe())
        except Exception as error:  # the other handlers' reports still count
            failures.append(error)
            for key in handler.asked:
                found.knobs.setdefault(key, protocol.KnobReport(protocol.NOT_APPLICABLE, f"it cannot be read back: {error}"))
    for key in context.spec.knobs:
        found.knobs.setdefault(key, protocol.KnobReport(protocol.NOT_APPLICABLE, "the harness does not know this knob"))
    _check_passed(found, context.spec.passed, context)
    if failures:
        raise failures[0]


def _add_applicability(found: protocol.RankResult, context: TrialContext) -> None:
    for handler in context.handlers:
        found.applicability.update(handler.applicability())
    found.target = context.loaders.target()


def _add_memory(found: protocol.RankResult, context: TrialContext) -> None:
    found.memory = context.memory.summary()


def _add_loss(found: protocol.RankResult, context: TrialContext) -> None:
    found.loss = context.losses.summary() if context.losses is not None else None
    found.scaling = context.optimizers.scaling()


def _add_facts(found: protocol.RankResult, context: TrialContext) -> None:
    found.communication = context.communication.summary()
    found.compiled = _compiled(context)
    found.facts = process.facts(context.device, context.device_index)


def _add_rates(found: protocol.RankResult, context: TrialContext) -> None:
    measured, steps = context.window, context.window.steps
    if context.loaders.unit == "steps":  # samples of a loader may have been counted before this unit was chosen
        steps = {**steps, "samples": [1.0] * len(steps["samples"])}
    found.ranks_per_batch = context.sharing.ranks_per_batch()
    found.steps = {**{name: [round(v, 7) for v in values] for name, values in steps.items()}, "warmup": 0}
    if measured.meter is None:
        return
    found.steps["warmup"] = measured.meter.warmup_steps
    window = context.peers.window() if context.peers.is_joint else measured.meter.window()
    if context.peers.is_joint:
        found.steps["origin_s"] = context.clock.origin_s
    found.is_at_own_pace = context.peers.is_joint
    if window is None:
        return
    found.window = dataclasses.replace(window, clock_gap_frac=context.clock.gap_frac)
    if measured.step_s:  # in mode "inspect", a process at its own pace (peers.py) may measure no steps
        found.data_wait_frac = min(1.0, measured.wait_s / measured.step_s)
    if measured.busy_s > 0:
        # `measured` may contain last steps that the window's rate leaves out. So only the busy share comes from `measured`. The
        # rate comes from the window: with the rate of all steps in `measured`, D could fall below the window's rate.
        found.device_rate_per_s = window.rate_per_s * measured.step_s / measured.busy_s
    found.throughput_per_s = window.rate_per_s
    if context.loaders.unit_source == "loader":
        _add_supply(found, context, window.rate_per_s)


def _add_supply(found: protocol.RankResult, context: TrialContext, rate_per_s: float) -> None:
    supply = context.supply
    supply.close_window()
    regime = supply.regime(torch.get_num_threads() if context.device == "cpu" else None)
    found.regime = regime or ""
    capacity = found.loader_rate_per_s = supply.capacity_per_s()
    found.throughput_per_s = supply.lasting_per_s(rate_per_s, capacity)
    if regime == protocol.SHARED:
        found.device_rate_per_s = None  # the workers slow the device's steps down: the rate without them is unknown
    training, is_fast = context.loaders.training, capacity is not None and capacity > AMPLE * rate_per_s
    if training is not None and training.is_read_elsewhere and not is_fast:
        found.data_wait_frac = None  # steps may wait for the thread that fetches, and these waits are not seen
        if context.device == "cpu":  # on a GPU, events show when the GPU has input
            found.device_rate_per_s = None


def _check_passed(found: protocol.RankResult, passed: Dict[str, Any], context: TrialContext) -> None:
    # Checks whether the program has applied the knobs that were set on its command line.
    training = context.loaders.training
    for key, value in passed.items():
        observed, odd = found.observed.get(key), None
        if key == "loader.batch_size" and training is not None and training.has_rows(value):
            observed = value
        elif key == "loader.batch_size" and training is None:
            sizes = [root.sizes for root in context.modules.reported]
            odd = next((each.odd_shape for each in sizes if each.odd_shape and not each.is_as_asked), None)
            observed = value if any(each.is_as_asked for each in sizes) else None
        if odd is not None:
            why = f"the command line asks for {value!r}, but the model is given {odd!r}"
            found.knobs[key] = protocol.KnobReport(protocol.OVERRIDDEN, why)
        elif observed is None or observed == value:
            found.knobs[key] = protocol.KnobReport(protocol.APPLIED, "", observed)
        else:
            why = f"the command line asks for {value!r}, but the program uses {observed!r}"
            found.knobs[key] = protocol.KnobReport(protocol.OVERRIDDEN, why, observed)


def _add_detected(found: protocol.RankResult, context: TrialContext) -> None:
    training, watch = context.loaders.training, context.modules
    loader = None
    if training is not None:
        kind = training.given_kinds[0]
        name = f"{kind.__module__}.{kind.__qualname__}"
        loader = {"site": training.site, "ordinal": training.ordinal, "dataset": name, "num_samples": training.num_samples}
        loader.update(context.handlers.loader.observe())
    num_fed = training.num_steps_fed if training is not None else 0
    num_batches = training.total_batches if training is not None else 0.0
    first = watch.reported[0].observed if watch.roots else {}
    found.detected = {
        "num_steps": context.num_steps,
        "loader": loader,
        "num_loaders": len(context.loaders.loaders),
        "batches_per_step": num_batches / num_fed if num_fed else None,
        "modules": [root.name for root in watch.reported],
        "wrappers": list(watch.wrapping.names),
        "num_replicas": first.get("num_replicas", 1),
        "num_parameters": [root.num_parameters for root in watch.reported],
        "optimizers": [type(o).__name__ for o in context.optimizers.optimizers()],
        "precision": {
            "autocast": None if first.get("policy") else first.get("precision.amp"),
            "policy": first.get("policy"),
            "parameters": first.get("parameter_dtypes"),
        },
        "steps_seen_by": context.writes.source or context.optimizers.source,
        "grad_scaler": context.optimizers.scaler is not None,
        "compile": first.get("compile.mode"),
        "world_size": context.world_size,
        "device": context.device,
        "unit": context.loaders.unit,
        "unit_source": context.loaders.unit_source,
    }


def _num_cached() -> int:
    """Returns how many compiled graphs AOTAutograd, or Inductor below it, found in the study's cache."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    names = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
    return max(int(counters[group][name]) if group in counters else 0 for group, name in names)


def _compiled(context: TrialContext) -> Dict[str, Any]:
    graphs = context.modules.num_graphs()
    return {
        "graphs": graphs,
        "cached": _num_cached() if graphs else 0,
        "recompile_limit_hit": bool(recompile_limit_reason()),
        "seconds": context.phases.seconds.get("compile", 0.0) if graphs else 0.0,
    }
