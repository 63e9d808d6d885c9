"""Puts a rank's result together from what the session saw."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Dict, Optional, Set

from . import eight_bits, process, protocol, transfer
from .apply import attention as apply_attention
from .apply import device as apply_device
from .apply import loader as apply_loader
from .apply import memory as apply_memory
from .apply import module as apply_module
from .apply import nccl as apply_nccl
from .apply import optimizer as apply_optimizer
from .apply import process as apply_process
from .apply import step as apply_step


def bare(session: Any, status: str) -> protocol.RankResult:
    """Returns what can be said of this rank without asking torch: who it is, how it ended, how long its phases took."""
    spec = session.spec
    return protocol.RankResult(
        trial=spec.trial,
        nonce=spec.nonce,
        rank=session.rank,
        world_size=session.world_size,
        pid=session.pid,
        status=status,
        error=session.ending.error,
        failed_s=session.ending.failed_s,
        phases_s=dict(session.phases.seconds),
        detected={"num_steps": session.num_steps},
    )


def unmeasured(session: Any) -> protocol.RankResult:
    """Returns what was seen of a program that takes no step that could be counted."""
    found = bare(session, "failed")
    found.detected.update(
        loaders=[loader.site for loader in session.loaders.loaders],
        optimizers=[type(o).__name__ for o in session.optimizers.optimizers()],
        num_backwards=session.losses.num_seen,
    )
    found.memory, found.facts = session.memory.summary(), process.facts(session.device)
    return found


def result(session: Any, status: str) -> protocol.RankResult:
    """Returns the result of this rank; a part that fails is left out and named under detected["harness_problems"]."""
    found = bare(session, status)
    found.unit, found.unit_source = session.loaders.unit, session.loaders.unit_source
    problems = []
    for add in (
        _add_rates,
        _add_detected,
        _add_knobs,
        _add_applicability,
        _add_memory,
        _add_loss,
        _add_facts,
    ):
        try:
            add(found, session)
        except Exception as error:
            problems.append(f"{add.__name__}: {type(error).__name__}: {error}")
    if problems:
        found.detected["harness_problems"] = problems
    return found


def knobs(session: Any) -> Dict[str, protocol.KnobReport]:
    """Returns what became of every knob of the spec."""
    found = bare(session, "ended")
    _add_knobs(found, session)
    return found.knobs


def _add_knobs(found: protocol.RankResult, session: Any) -> None:
    spec, training = session.spec, session.loaders.training
    settings = training.settings if training is not None else None
    found.knobs = {
        **apply_process.verify(spec.knobs),
        **apply_nccl.verify(spec.knobs),
        **apply_memory.verify(spec.knobs, session.device),
        **apply_loader.verify(spec.knobs, session.loaders.reports, training, is_known=spec.target is not None),
        **session.loaders.transfer.verify(spec.knobs, session.device),
        **(session.loaders.bits.verify(spec.knobs, session.device, training.total_batches) if training is not None else {}),
        **apply_module.verify(
            spec.knobs,
            session.modules.reports,
            [root.module for root in session.modules.living],
            session.modules.num_graphs(),
            is_run_again=session.modules.checkpointing.is_run_again,
        ),
        **session.modules.parallel.verify(),
        **session.modules.sharding.verify(session.world_size),
        **apply_optimizer.verify(spec.knobs, session.optimizers.reports, session.optimizers.clock()),
        **apply_step.verify(spec.knobs, session.gradients),
        **session.metrics.verify(),
        **apply_attention.verify(spec.knobs, _attention(session), is_compiled=session.modules.is_compiled()),
        **apply_device.verify(spec.knobs, session.device),
    }
    for key, report in session.binder.verify(session.loaders.workers()).items():
        found.knobs.setdefault(key, report)  # without workers the loader's knobs have said so
    for key in spec.knobs:
        found.knobs.setdefault(key, protocol.KnobReport(protocol.NOT_APPLICABLE, "the harness does not know this knob"))
    found.observed = _observed(session, settings)
    _check_passed(found, spec.passed, session)


def _add_applicability(found: protocol.RankResult, session: Any) -> None:
    training = session.loaders.training
    unforked = apply_loader.unforked(training) if session.spec.target is None else {}  # asked once a study
    found.applicability = {
        **apply_loader.applicability(training),
        **unforked,
        **transfer.applicability(session.device),
        **eight_bits.applicability(training),
        **apply_module.applicability(session.modules.told),
        **session.optimizers.applicability,
        **apply_process.applicability(session.device),
        **session.modules.parallel.applicability(session.world_size, session.spec.passed),
        **session.modules.sharding.applicability(session.world_size),
        **apply_step.applicability(session.optimizers),
        **session.metrics.applicability(),
        **apply_attention.applicability(_attention(session), is_compiled=session.modules.is_compiled()),
        **apply_device.applicability(session.device),
        **apply_memory.applicability(session.device),
    }
    found.target = session.loaders.target()


def _add_memory(found: protocol.RankResult, session: Any) -> None:
    found.memory = session.memory.summary()


def _add_loss(found: protocol.RankResult, session: Any) -> None:
    found.loss = session.losses.summary()
    found.scaling = session.optimizers.scaling()


def _add_facts(found: protocol.RankResult, session: Any) -> None:
    found.communication = session.communication.summary()
    found.compiled = _compiled(session)
    found.facts = process.facts(session.device)


def _add_rates(found: protocol.RankResult, session: Any) -> None:
    measured, steps = session.window, session.window.steps
    found.steps = {**{name: [round(v, 7) for v in values] for name, values in steps.items()}, "warmup": 0}
    if measured.meter is None:
        return
    found.steps["warmup"] = measured.meter.warmup_steps
    window = session.peers.window() if session.peers.is_joint else measured.meter.window()
    found.is_at_own_pace = session.peers.is_joint
    if window is None:
        return
    found.window = window
    gap = session.clock.gap_frac
    if gap is not None:
        found.window = dataclasses.replace(window, clock_gap_frac=gap)
    found.data_wait_frac = min(1.0, measured.wait_s / measured.step_s)
    if measured.busy_s > 0:
        rate_per_s = window.rate_per_s if window.cycles else measured.samples / measured.step_s
        found.device_rate_per_s = rate_per_s * measured.step_s / measured.busy_s
    found.throughput_per_s = window.rate_per_s
    if session.loaders.unit_source == "loader":
        _add_supply(found, session, window.rate_per_s)


def _add_supply(found: protocol.RankResult, session: Any, rate_per_s: float) -> None:
    import torch

    supply = session.supply
    supply.close_window()
    regime = supply.regime(torch.get_num_threads() if session.device == "cpu" else None)
    found.regime = regime or ""
    capacity = found.loader_rate_per_s = supply.capacity_per_s()
    found.throughput_per_s = supply.lasting_per_s(rate_per_s, capacity)
    if regime == protocol.SHARED:
        found.device_rate_per_s = None  # the workers slow the step down: what it would do without them cannot be seen here


def _observed(session: Any, settings: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    found: Dict[str, Any] = {**apply_process.observe(), **apply_memory.observe(), **apply_nccl.observe()}
    found.update(settings or {})
    found.update({**apply_step.observe(session.gradients), **session.metrics.observed})
    found.update({apply_attention.KEY: apply_attention.observe(), **apply_device.observe(session.device)})
    if session.modules.roots:
        first = session.modules.told[0].observed
        found.update({key: first[key] for key in apply_module.KEYS})
    found.update({**session.modules.parallel.observed, **session.modules.sharding.observed})
    if session.optimizers.observed is not None:
        found[apply_optimizer.KEY] = session.optimizers.observed
    return found


def _check_passed(found: protocol.RankResult, passed: Dict[str, Any], session: Any) -> None:
    # Knobs that travelled on the command line: the program must have done what it was asked.
    for key, value in passed.items():
        observed, odd = found.observed.get(key), None
        if key == "loader.batch_size" and session.loaders.training is None:
            sizes = [root.sizes for root in session.modules.told]
            odd = next((each.odd_shape for each in sizes if each.odd_shape and not each.is_as_asked), None)
            observed = value if any(each.is_as_asked for each in sizes) else None
        if odd is not None:
            why = f"the command line asked for {value!r}, the model is given {odd!r}"
            found.knobs[key] = protocol.KnobReport(protocol.OVERRIDDEN, why)
        elif observed is None or observed == value:
            found.knobs[key] = protocol.KnobReport(protocol.APPLIED, "", observed)
        else:
            why = f"the command line asked for {value!r}, the program uses {observed!r}"
            found.knobs[key] = protocol.KnobReport(protocol.OVERRIDDEN, why, observed)


def _add_detected(found: protocol.RankResult, session: Any) -> None:
    training, watch = session.loaders.training, session.modules
    loader = None
    if training is not None:
        kind = training.given_kinds[0]
        name = f"{kind.__module__}.{kind.__qualname__}"
        loader = {"site": training.site, "ordinal": training.ordinal, "dataset": name, "num_samples": training.num_data}
        loader.update(training.settings)
    num_fed = training.num_steps_fed if training is not None else 0
    first = watch.told[0].observed if watch.roots else {}
    found.detected = {
        "num_steps": session.num_steps,
        "loader": loader,
        "num_loaders": len(session.loaders.loaders),
        "batches_per_step": training.total_batches / num_fed if num_fed else None,
        "modules": [root.name for root in watch.told],
        "wrappers": list(watch.wrappers),
        "num_parameters": [root.num_parameters for root in watch.told],
        "optimizers": [type(o).__name__ for o in session.optimizers.optimizers()],
        "precision": {"autocast": first.get("precision.amp"), "parameters": first.get("parameter_dtypes")},
        "steps_seen_by": session.writes.source,
        "grad_scaler": session.optimizers.scaler is not None,
        "skipped_steps": session.optimizers.num_skipped,
        "compile": first.get("compile.mode"),
        "world_size": session.world_size,
        "device": session.device,
        "unit": session.loaders.unit,
        "unit_source": session.loaders.unit_source,
    }


def _attention(session: Any) -> Optional[Set[str]]:
    return session.losses.attention if session.losses is not None else None


def _num_cached() -> int:
    """Returns how many graphs were found compiled in the study's cache: by AOTAutograd, or below it by Inductor."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    names = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
    return max(int(counters[group][name]) if group in counters else 0 for group, name in names)


def _compiled(session: Any) -> Dict[str, Any]:
    graphs = session.modules.num_graphs()
    return {
        "graphs": graphs,
        "cached": _num_cached() if graphs else 0,
        "recompile_limit_hit": bool(apply_module._recompile_limit_reason()),
        "seconds": session.phases.seconds.get("compile", 0.0) if graphs else 0.0,
    }
