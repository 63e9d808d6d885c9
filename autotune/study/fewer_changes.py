"""Proposes the best trial so far with fewer changes: without its ineffective changes, or only with changes of lower tiers."""

from __future__ import annotations

from collections.abc import Iterator

from autotune import stats
from autotune.compare.ablation import part_of
from autotune.compare.effects import estimated
from autotune.records import Tier, TrialRecord
from autotune.space import ResolvedSpace
from autotune.study.initial import LATE, Proposal
from autotune.trials.session import Session

UNKNOWN_MARGIN_FRAC = 0.02  # effect below which a change counts as ineffective if the machine's spread is unknown


def without_ineffective(session: Session, best: TrialRecord) -> Proposal | None:
    """Returns the best so far without its ineffective changes; None if every change has an effect."""
    space = session.resolved
    lost = {key: part_of(space, best, [key]).also for key in best.changed}
    margin = max(stats.MARGIN_FRAC, session.earlier_noise.spread if session.earlier_noise else UNKNOWN_MARGIN_FRAC)
    found = estimated(best.changed, lost, session.searched, session.earlier_noise)
    idle = [key for key in best.changed if key in found and found[key].ratio <= 1 + margin]
    if not idle:
        return None
    why = f"trial {best.number} without the changes that show no effect: {', '.join(idle)}"
    return Proposal(knobs=part_of(space, best, idle).knobs, why=why, origin=LATE)


def of_lower_tiers(space: ResolvedSpace, best: TrialRecord) -> Iterator[Proposal]:
    """Yields the best so far with only its changes of tiers `numerics` and `exact`, then with only those of tier `exact`."""
    for tier in (Tier.numerics, Tier.exact):
        kept = {key: value for key, value in best.changed.items() if space.tier({key: value}).rank <= tier.rank}
        if kept:
            knobs = space.active({**space.reference, **kept})
            why = f"the best so far (trial {best.number}) as far as tier {tier} allows"
            yield Proposal(knobs=knobs, why=why, origin=LATE)
