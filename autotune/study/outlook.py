"""What the rest of a study will take: about how many trials, in how many minutes, as far as its trials so far tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autotune.records import Kind, Outcome, TrialRecord
from autotune.study.budget import Budget


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is left of a study before one of its trials.

    Attributes:
        left_s: time left for everything; None for unlimited.
        search_s: of that, time for search trials; None for unlimited, or once the search is over.
        num_trials: search trials that about fit, those that `study.budget.trials` leaves at most; None where nothing bounds
            them, or once the search is over.
        trial_s: what a search trial takes, typically.
        num_searched: search trials so far.
    """

    left_s: float | None = None
    search_s: float | None = None
    num_trials: int | None = None
    trial_s: float = 0.0
    num_searched: int = 0


def outlook(budget: Budget, records: Sequence[TrialRecord], *, warm_spares_s: float, is_searching: bool = True) -> Outlook:
    """Returns what is left of a study.

    Args:
        budget: of the study; what is kept for the finals is known once the baseline was measured.
        records: trials so far, the baseline first; at least that.
        warm_spares_s: what the baseline took that a search trial is spared by a warm start.
        is_searching: whether the next trial is one of the search.
    """
    left_s = None if budget.total_s is None else max(0.0, budget.left_s)
    if not is_searching:
        return Outlook(left_s=left_s)
    searched = [one for one in records if one.kind is Kind.search and one.outcome is not Outcome.interrupted]
    baseline_s = max(1.0, records[0].attempt_s - warm_spares_s)
    trial_s = median(record.seconds for record in searched) if searched else baseline_s
    search_s = None if budget.total_s is None else max(0.0, budget.search_left_s)
    fitting = math.inf if search_s is None else search_s / max(trial_s, 1e-9)
    allowed = math.inf if budget.max_trials is None else max(0, budget.max_trials - len(searched))
    num_trials = min(fitting, allowed)
    return Outlook(
        left_s=left_s,
        search_s=search_s,
        num_trials=None if math.isinf(num_trials) else round(num_trials),
        trial_s=trial_s,
        num_searched=len(searched),
    )
