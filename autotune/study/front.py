"""The Pareto front of a study with several objectives: what cannot be had better at one without losing at another."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records import TrialRecord
from autotune.stats import MARGIN_FRAC


def front(records: Sequence[TrialRecord], names: Sequence[str]) -> list[TrialRecord]:
    """Returns the first measurements on the front, best at the deciding objective first.

    One measurement each: what is better by less than the margin at everything is noise and not shown beside the other.

    Args:
        records: trials, by number.
        names: objectives, the deciding one first.
    """
    able = [r for r in records if r.repeats is None and r.outcome.may_win and all(r.scores.get(name) for name in names)]
    found: list[TrialRecord] = []
    for record in sorted(able, key=lambda r: (-(r.score or 0.0), len(r.changed))):
        if all(_is_better_somewhere(record, other, names) for other in found):
            found.append(record)
    return found


def _is_better_somewhere(record: TrialRecord, other: TrialRecord, names: Sequence[str]) -> bool:
    return any((record.scores[name] or 0.0) > (other.scores[name] or 0.0) * (1 + MARGIN_FRAC) for name in names)
