"""What a search begins with: the best of earlier studies, then what an expert would try first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna

from autotune.quantities import ratio_text
from autotune.records import Knobs, TrialRecord
from autotune.space import ResolvedSpace
from autotune.trials.session import Session, configuration_key

NUM_EARLIER_SEEDS = 3  # in replays of two tables better than one by 1 % after a short study, no worse after a long one
NUM_LED_SEEDS = 2  # an expert's choice at two batches tells what memory a sample takes; from then on the models know better
DISPROVED_FRAC = 0.85  # of the baseline's value: noise alone does not explain less
FITS_FRAC = 0.97  # of the memory, as for the sampler: what a configuration took elsewhere it takes here
BATCH = "loader.batch_size"
EXPERT, EARLIER = "expert", "earlier"  # where a proposal comes from; see TrialRecord.origin


@dataclass(kw_only=True)
class Proposal:
    """A configuration to try.

    Attributes:
        knobs: full configuration.
        why: one line.
        origin: as in TrialRecord.
        trial: Optuna's trial when its sampler proposed it.
    """

    knobs: Knobs
    why: str
    origin: str
    trial: optuna.trial.Trial | None = None


def earlier_seeds(session: Session, hold: Knobs, is_known: Callable[[Knobs], bool]) -> Iterator[Proposal]:
    """Yields the best configurations of earlier studies as far as this space has them, each once.

    Args:
        session: the study.
        hold: knobs that wait for their turn, with the values they have until then.
        is_known: whether a configuration needs no trial.
    """
    space = session.resolved
    num = len({configuration_key(record.changed) for record in session.searched if record.origin == EARLIER})  # when resumed
    for seed in session.about.warm_start.get("seeds", []):
        if num >= NUM_EARLIER_SEEDS:
            return
        knobs = space.active({**translated(space, seed["knobs"]), **hold})
        if not space.changed(knobs) or is_known(knobs) or not _fits(session, seed):
            continue
        num += 1
        why = f"{'the best' if seed['is_proven'] else 'among the best'} of {seed['study']}, trial {seed['trial']} there"
        yield Proposal(knobs=knobs, why=f"{why}: {ratio_text(seed['ratio'])} of its start", origin=EARLIER)


def translated(space: ResolvedSpace, knobs: Knobs) -> Knobs:
    """Returns a configuration of another study in this space: what is searched here as it was there, the rest as here.

    A number that may not be proposed here becomes the nearest that may; another value stays the baseline's.
    """
    found = {key: domain.nearest(knobs[key]) for key, domain in space.domains.items() if key in knobs}
    return {**space.reference, **{key: value for key, value in found.items() if value is not None}}


def _fits(session: Session, seed: dict[str, Any]) -> bool:
    """Whether what a configuration took of the memory elsewhere is there."""
    peak, capacity = seed.get("peak_memory_bytes"), session.memory_capacity_bytes
    return not peak or not capacity or peak <= FITS_FRAC * capacity


def expert_seeds(session: Session, hold: Knobs, may_fit: Callable[[Knobs], bool], *, is_led: bool) -> Iterator[Proposal]:
    """Yields an expert's first tries, but not again what was slower than the baseline.

    Args:
        session: the study.
        hold: knobs that wait for their turn, with the values they have until then.
        may_fit: whether a configuration is not expected to run out of memory.
        is_led: whether the sampler of rates proposes from then on, which needs fewer.
    """
    space, host_context = session.resolved, session.host_context
    if not session.inputs.config.search.seeds or host_context is None:
        return
    seeds = space.seeds(host_context)
    for why, seed in seeds[:NUM_LED_SEEDS] if is_led else seeds:
        knobs = space.active({**seed, **hold})
        if _is_disproved(session, knobs):
            continue
        if may_fit(knobs):
            yield Proposal(knobs=knobs, why=why, origin=EXPERT)
        elif host_context.has_cuda and (smaller := space.with_smaller_batch(knobs)):  # on a CPU the process takes most
            why = "expert's choice at a smaller batch: what memory a sample takes"
            yield Proposal(knobs=smaller, why=why, origin=EXPERT)


def filling_seed(
    session: Session, best: TrialRecord, filling_batch: Callable[[Knobs, list[int]], int | None]
) -> Iterator[Proposal]:
    """Yields the best so far with a batch that fills the memory, where a larger batch than the program's was the best.

    Args:
        session: the study.
        best: so far.
        filling_batch: the largest of some batch sizes that a configuration is expected to fit with; None unknown.
    """
    space = session.resolved
    own, batch = space.reference.get(BATCH), best.knobs.get(BATCH)
    if not session.inputs.config.search.seeds or session.host_context is None or BATCH not in space.domains:
        return
    if not isinstance(own, int) or not isinstance(batch, int) or batch <= own:
        return
    larger = [value for value in space.domains[BATCH].values if isinstance(value, int) and value > batch]
    filling = filling_batch(best.knobs, larger)
    if filling is not None:
        why = f"the largest batch that is expected to fit the memory, on the best so far (trial {best.number})"
        yield Proposal(knobs=space.active({**best.knobs, BATCH: filling}), why=why, origin=EXPERT)


def _is_disproved(session: Session, knobs: Knobs) -> bool:
    """Whether the same changes beside the loader's were slower than the baseline: bf16 emulated in software is."""
    floor = DISPROVED_FRAC * (session.baseline.score or 0.0)
    part = _beside_loader(session.resolved.changed(knobs))
    slower = [record for record in session.searched[1:] if record.score is not None and record.score < floor]
    return any(part and _beside_loader(record.changed) == part for record in slower)


def _beside_loader(changed: Knobs) -> Knobs:
    return {key: value for key, value in changed.items() if not key.startswith("loader.")}
