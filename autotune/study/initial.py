"""The first configurations of a search: the best of earlier studies, then what an expert would try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna

from autotune.quantities import ratio_text
from autotune.records import Knobs, TrialRecord
from autotune.search.rates.coding import levels_of
from autotune.space import ResolvedSpace
from autotune.trials.configurations import configuration_key
from autotune.trials.session import Session

# In replays of two recordings, trying three configurations of earlier studies was compared with trying one. With three, the
# results of short studies were 1 % faster, and those of long studies no slower.
NUM_EARLIER_SEEDS = 3
# This many of the expert's configurations are tried before RatesSampler proposes trials. These configurations differ in batch
# size, so they show RatesSampler the memory per sample. From then on, its models choose better than the expert.
NUM_LED_SEEDS = 2
DISPROVED_FRAC = 0.85  # noise alone does not explain a value below this share of the baseline's value
# A configuration of an earlier study is tried only if the memory that it used there is at most this share of the memory here.
FITS_FRAC = 0.97
# On a GPU, an expert leaves the number of workers unchanged if the loader is fast enough for a step that is FASTER_TIMES times
# as fast as now. A loader with workers is fast enough if it is BESIDE_TIMES times as fast as such a step. A loader without
# workers must be ALONE_TIMES times as fast as such a step, since step and loader take turns.
FASTER_TIMES, ALONE_TIMES, BESIDE_TIMES = 4.0, 25.0, 2.0
# On a CPU, a configuration with loader workers is tried before one without only if the natural logarithm of its rate is
# predicted to be higher by at least this.
WORKERS_GAIN = 0.03
BATCH, WORKERS = "loader.batch_size", "loader.num_workers"
EXPERT, EARLIER, LATE = "expert", "earlier", "late"  # origins of proposals; see TrialRecord.origin


@dataclass(kw_only=True)
class Proposal:
    """A configuration to try.

    Attributes:
        knobs: full configuration.
        why: one line.
        origin: as in TrialRecord.
        trial: Optuna's trial, if the sampler proposed it.
    """

    knobs: Knobs
    why: str
    origin: str
    trial: optuna.trial.Trial | None = None


def earlier_seeds(session: Session, hold: Knobs, is_known: Callable[[Knobs], bool]) -> Iterator[Proposal]:
    """Yields the best configurations of earlier studies, translated to this search space, each once.

    Args:
        session: the study.
        hold: values of the knobs that are not varied yet.
        is_known: whether a configuration needs no trial, see settled.py.
    """
    space = session.resolved
    # Configurations of earlier studies that were tried before the study was resumed count, too.
    num = len({configuration_key(record.changed) for record in session.searched if record.origin == EARLIER})
    for seed in session.about.warm_start.get("seeds", []):
        if num >= NUM_EARLIER_SEEDS:
            return
        knobs = space.active({**translated(space, seed["knobs"]), **hold})
        if not space.changed(knobs) or is_known(knobs) or not _fits(session, seed):
            continue
        num += 1
        why = f"{'the best' if seed['is_proven'] else 'among the best'} of {seed['study']}, trial {seed['trial']} there"
        yield Proposal(knobs=knobs, why=f"{why}: {ratio_text(seed['ratio'])} of its baseline", origin=EARLIER)


def translated(space: ResolvedSpace, knobs: Knobs) -> Knobs:
    """Translates a configuration of another study. Searched knobs keep their values; others get this baseline's values.

    A number outside this space becomes the nearest number inside. Any other value that this space lacks is replaced with the
    baseline's value.
    """
    found = {key: domain.nearest(knobs[key]) for key, domain in space.domains.items() if key in knobs}
    return {**space.reference, **{key: value for key, value in found.items() if value is not None}}


def _fits(session: Session, seed: dict[str, Any]) -> bool:
    """Whether the memory that a configuration used in the earlier study is available here; True if unknown."""
    peak, capacity = seed.get("peak_memory_bytes"), session.memory_capacity_bytes
    return not peak or not capacity or peak <= FITS_FRAC * capacity


def expert_seeds(
    session: Session,
    hold: Knobs,
    may_fit: Callable[[Knobs], bool],
    *,
    is_led: bool,
    log_rates: Callable[[list[Knobs]], list[float] | None],
) -> Iterator[Proposal]:
    """Yields an expert's first choices, except those whose changes have proved slower than the baseline.

    Args:
        session: the study.
        hold: values of the knobs that are not varied yet.
        may_fit: whether a configuration is expected to fit into memory.
        is_led: whether RatesSampler proposes the later trials; it needs fewer initial configurations.
        log_rates: returns the expected rates of configurations, in logarithms; None if there is no forecast.
    """
    space, host_context = session.resolved, session.host_context
    if not session.inputs.config.search.seeds or host_context is None:
        return
    tried = {configuration_key(record.changed) for record in session.searched if record.origin == EXPERT}
    if is_led and len(tried) >= NUM_LED_SEEDS:  # tried before the study was resumed
        return
    seeds = space.seeds(host_context, kept=[WORKERS] if _is_loader_idle(session) else [])
    if is_led and not host_context.has_cuda:
        seeds = _with_better_workers_first(session, seeds, log_rates)
    for why, seed in seeds[:NUM_LED_SEEDS] if is_led else seeds:
        knobs = space.active({**seed, **hold})
        if _is_disproved(session, knobs):
            continue
        if may_fit(knobs):
            yield Proposal(knobs=knobs, why=why, origin=EXPERT)
        elif host_context.has_cuda and (smaller := space.with_smaller_batch(knobs)):
            # Only on a GPU: on a CPU, most of the memory belongs to the process itself, at any batch size.
            why = "an expert's choice at a smaller batch, to measure the memory per sample"
            yield Proposal(knobs=smaller, why=why, origin=EXPERT)


def filling_seed(
    session: Session, best: TrialRecord, filling_batch: Callable[[Knobs, list[int]], int | None]
) -> Iterator[Proposal]:
    """Yields the best configuration so far, with its batch raised to the largest that is expected to fit into memory.

    Yields nothing unless the best so far already has a larger batch than the program.
    """
    space = session.resolved
    own, batch = space.reference.get(BATCH), best.knobs.get(BATCH)
    if not session.inputs.config.search.seeds or session.host_context is None or BATCH not in space.domains:
        return
    if not isinstance(own, int) or not isinstance(batch, int) or batch <= own:
        return
    larger = [value for value in levels_of(space.domains[BATCH].distribution()) if isinstance(value, int) and value > batch]
    filling = filling_batch(best.knobs, larger)
    if filling is not None:
        why = f"the best so far (trial {best.number}) with the largest batch that is expected to fit the memory"
        yield Proposal(knobs=space.active({**best.knobs, BATCH: filling}), why=why, origin=EXPERT)


def _is_loader_idle(session: Session) -> bool:
    """Whether the loader could feed a step on a GPU that is FASTER_TIMES times as fast; False if unknown or on a CPU."""
    here, baseline = session.host_context, session.baseline
    supply, demand = baseline.loader_rate, baseline.device_rate
    if here is None or not here.has_cuda or not supply or not demand:
        return False
    has_workers = bool(session.resolved.reference.get(WORKERS))
    return supply >= demand * FASTER_TIMES * (BESIDE_TIMES if has_workers else ALONE_TIMES)


def _with_better_workers_first(
    session: Session, seeds: list[tuple[str, Knobs]], log_rates: Callable[[list[Knobs]], list[float] | None]
) -> list[tuple[str, Knobs]]:
    """Returns the seeds, sorted by the rates expected at the program's batch size, highest first.

    WORKERS_GAIN is subtracted from the log rate of a seed with loader workers.
    """
    own = session.resolved.reference.get(BATCH)
    found = log_rates([{**knobs, **({BATCH: own} if BATCH in knobs and own is not None else {})} for _, knobs in seeds])
    if found is None:
        return seeds
    worth = [rate - WORKERS_GAIN * bool(knobs.get(WORKERS)) for rate, (_, knobs) in zip(found, seeds, strict=True)]
    return [seeds[place] for place in sorted(range(len(seeds)), key=lambda place: -round(worth[place], 6))]


def _is_disproved(session: Session, knobs: Knobs) -> bool:
    """Whether a trial with the same changes, loader knobs aside, was clearly slower than the baseline.

    For example, bf16 is clearly slower where the device emulates it.
    """
    floor = DISPROVED_FRAC * (session.baseline.score or 0.0)
    part = _without_loader_knobs(session.resolved.changed(knobs))
    slower = [record for record in session.searched[1:] if record.score is not None and record.score < floor]
    return any(part and _without_loader_knobs(record.changed) == part for record in slower)


def _without_loader_knobs(changed: Knobs) -> Knobs:
    return {key: value for key, value in changed.items() if not key.startswith("loader.")}
