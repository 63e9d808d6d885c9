"""Completes the effects of the best trial's changes for the summary.

Effects that were not measured are estimated, one by one or together. The budget that would suffice to measure them is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune import stats
from autotune.clock import Clock
from autotune.compare.ablation import judged
from autotune.compare.effects import estimated, estimated_together
from autotune.compare.noise import from_json, known_noise
from autotune.records import Kind, StudyRecord, TrialRecord
from autotune.trials.budget import Budget

NOT_MEASURED = "not measured"
MAX_JOINT_FACTOR = 1.5  # a joint effect is reported if its interval's upper end is at most this many times the lower end
MOST_FACTOR = 10  # budgets up to this many times the study's own are considered


def with_estimates(
    entries: Sequence[dict[str, Any]], winner: TrialRecord, about: StudyRecord, records: Sequence[TrialRecord]
) -> list[dict[str, Any]]:
    """Returns the entries of an attribution. Effects that were not measured are replaced by estimates if the trials allow it.

    The attribution does not use these estimates for its decisions, because they may be vague.

    Args:
        entries: `Change.as_json` of the winner's changes.
        winner: the trial that has these changes.
        about: study.json, with the spread known from earlier studies.
        records: all trials of the study.
    """
    if not any(entry["verdict"] == NOT_MEASURED for entry in entries):
        return list(entries)
    noise = known_noise(records, from_json(about.noise))
    lost = {entry["knob"]: entry["with"] for entry in entries}
    found = estimated(winner.changed, lost, records, noise, is_any=True)
    margin = max(stats.MARGIN_FRAC, noise.spread if noise else 0.0)
    return [
        {**entry, "ratio": effect.ratio, "ci": effect.ci, "verdict": judged(effect, margin), "basis": "estimated", "reason": ""}
        if entry["verdict"] == NOT_MEASURED and (effect := found.get(entry["knob"]))
        else entry
        for entry in entries
    ]


def together(
    entries: Sequence[dict[str, Any]], best: TrialRecord, about: StudyRecord, records: Sequence[TrialRecord]
) -> dict[str, Any] | None:
    """Returns the joint effect of the changes whose single effects are unknown; None if it is vague or is the whole speed-up.

    For example {"knobs": ["precision.amp", "precision.matmul"], "ratio": 2.9, "ci": [2.8, 3.0]}. The arguments are those of
    `with_estimates`, with the exported configuration and its entries.
    """
    unknown = sorted(entry["knob"] for entry in entries if entry["verdict"] == NOT_MEASURED)
    if len(unknown) < 2 or len(unknown) == len(best.changed):
        return None
    found = estimated_together(unknown, best.changed, records, known_noise(records, from_json(about.noise)))
    is_known = found and found.ci and found.ci[1] <= MAX_JOINT_FACTOR * found.ci[0]
    return {"knobs": unknown, "ratio": found.ratio, "ci": found.ci} if found and is_known else None


def needed(entries: Sequence[dict[str, Any]], about: StudyRecord, records: Sequence[TrialRecord]) -> dict[str, float] | None:
    """Returns the budget that a study needs to measure each missing effect once.

    {"minutes": 30, "more_minutes": 10} means a budget of 30 minutes instead of 20.

    Returns None if no effect is missing, if the study has no time budget, or if MOST_FACTOR times that budget is not enough.
    """
    num = sum(entry["verdict"] == NOT_MEASURED for entry in entries)
    if not num or not about.budget_s:
        return None
    again = [record.attempt_s for record in records if record.kind is Kind.final]
    each_s = max(again, default=records[0].fresh_s)  # a trial of the attribution takes about as long as one of the finals
    begin = math.floor(about.budget_s / 60) + 1
    for minutes in range(begin, math.ceil(MOST_FACTOR * about.budget_s / 60) + 1):
        budget = Budget(clock=Clock(), total_s=60.0 * minutes)
        budget.reserve(records[0])
        if budget.attribution_s >= num * each_s:
            return {"minutes": minutes, "more_minutes": minutes - about.budget_s / 60}
    return None
