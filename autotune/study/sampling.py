"""Gives the sampler facts about machine and configurations that the trials in Optuna's journal do not contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import optuna

from autotune.knobs.base import Knob, no_seed
from autotune.knobs.catalogue import knob
from autotune.records import Knobs, KnobValue
from autotune.search import Machine, RatesSampler, Rules, SamplerOptions
from autotune.trials.session import Session

WORKERS, THREADS = "loader.num_workers", "threads.intra"
MOST_KNOWN = 20_000  # when this many full configurations are cached, the cache is emptied
GPU_THREADS_FRAC = 0.25  # assumed effect of the host's threads on a step on a GPU, relative to their effect on a step on a CPU
# `Knob.usual_spread` says how much the logarithm of the rate usually varies with a knob's values. The sampler gets it as a
# multiple of this number, the value of most knobs.
USUAL_SPREAD = 0.3


def machine_of(session: Session) -> Machine:
    """Returns the facts about the machine that a sampler uses. Call it after the baseline."""
    here, reference = session.host_context, session.resolved.reference
    memory_bytes = session.memory_capacity_bytes
    keep_free_frac = session.inputs.config.constraints.memory_free_frac
    threads = reference.get(THREADS)
    return Machine(
        num_cores=float(here.num_cores) if here else None,
        is_cpu=here is not None and not here.has_cuda,
        memory_bytes=memory_bytes * (1 - (keep_free_frac or 0.0)) if memory_bytes else None,
        workers=float(reference.get(WORKERS) or 0),
        threads=float(threads) if threads else None,
    )


def inform(
    sampler: optuna.samplers.BaseSampler,
    session: Session,
    *,
    is_open: Callable[[Knobs], bool],
    may_win: Callable[[Knobs], bool],
    running: Callable[[], Sequence[Knobs]],
) -> None:
    """Tells a sampler which configurations exist, which of them may still be tried, and what they cost.

    Args:
        sampler: any sampler; only RatesSampler uses these facts.
        session: the study.
        is_open: whether a full configuration is new and fits the budget.
        may_win: whether a measured configuration may still win, that is, loss parity has not ruled it out.
        running: returns the searched knobs of each running trial, except trials that the sampler proposed.
    """
    if not isinstance(sampler, RatesSampler):
        return
    space, search = session.resolved, session.inputs.config.search

    known: dict[tuple[tuple[str, KnobValue], ...], Knobs] = {}

    def full(params: Mapping[str, KnobValue]) -> Knobs:
        """Returns the full configuration, cached because each proposal needs hundreds. Callers must not change it."""
        key = tuple(params.items())
        if key not in known:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[key] = space.active({**space.reference, **params})
        return known[key]

    knobs = {key: knob(key) for key in space.domains}
    sampler.rules = Rules(
        active=lambda params: {key: value for key, value in full(params).items() if key in params},
        is_open=lambda params: is_open(full(params)),
        may_win=lambda params: may_win(full(params)),
        expected_s=lambda params: session.costs.expected_s(knobs := full(params), space.changed(knobs)),
        costly={key: space.reference[key] for _, key, _ in space.costly()},
        gains={key: gains for key, one in knobs.items() if (gains := _usual_gains(one, session))},
        running=running,
        limits=session.runner.goal.limited_metrics,
        is_held=space.held is not None,
        spreads={key: _usual_spread(one, session) / USUAL_SPREAD for key, one in knobs.items()},
        ladders={
            key: (one.choices, one.step_spread / one.usual_spread) for key, one in knobs.items() if one.step_spread is not None
        },
    )
    sampler.options = SamplerOptions(
        decomposition=search.decomposition, memory=search.memory_model, cost=search.cost_aware, stop=search.stop
    )


def _usual_spread(knob: Knob, session: Session) -> float:
    here = session.host_context
    is_idle = knob.key == THREADS and here is not None and here.has_cuda
    return knob.usual_spread * (GPU_THREADS_FRAC if is_idle else 1.0)


def _usual_gains(knob: Knob, session: Session) -> dict[KnobValue, float]:
    """Returns {value: usual gain over the knob's default}, as logarithm of a ratio of rates."""
    space, here = session.resolved, session.host_context
    if not knob.usual_gain or here is None:
        return {}
    values = space.domains[knob.key].values
    wanted = [value for value in values if value != knob.default] if knob.expert is no_seed else [knob.expert(here)]
    return {value: knob.usual_gain for value in values if value in wanted}
