"""Describes the processes that measured a configuration in the finals, and what each was used for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autotune.plain_text import one_line
from autotune.records import CHOOSING, REPORTED, Kind
from autotune.report.verdict import WHEN

PAIRED, CHOSEN, ALONE = "in pairs", "to choose", "without a partner"  # what a process of the finals was used for
MAX_REASON = 200  # characters
Trials = Sequence[dict[str, Any]]


def finals_of(trials: Trials, number: int) -> list[dict[str, Any]]:
    """Returns the trials of the finals that measured a configuration, including those without a result."""
    return [trial for trial in trials if trial.get("kind") == Kind.final and trial.get("repeats") == number]


def processes_text(trials: Trials, first: dict[str, Any]) -> str:
    """Returns how often a configuration was measured: "5 in the finals: 4 in pairs, 1 to choose", "1 in the search"."""
    finals = finals_of(trials, first["number"])
    uses = Counter(_use(trials, trial) for trial in finals if trial.get("value"))
    lost = Counter(str(trial["outcome"]) for trial in finals if not trial.get("value"))
    said = f"{uses.total()} in the finals" if uses else f"1 {WHEN.get(str(first.get('kind')), 'in the search')}"
    if len(uses) > 1:
        said += f": {', '.join(f'{uses[use]} {use}' for use in (PAIRED, CHOSEN, ALONE) if uses[use])}"
    return "; ".join([said, *(f"{num} in the finals, {outcome}" for outcome, num in lost.items())])


def finals_notes(trials: Trials) -> list[str]:
    """Returns sentences on the processes of the finals that do not count towards the ratio, and why."""
    finals = [trial for trial in trials if trial.get("kind") == Kind.final]
    notes = []
    if any(trial.get("why") == CHOOSING for trial in finals):
        notes.append(
            "Some processes of the finals served to choose the best of the finalists. The ratio comes only from the pairs of "
            "best and baseline that were measured after that: the best of several noisy rates would overstate the ratio."
        )
    return [*notes, *(_lost_text(trials, trial) for trial in finals if not trial.get("value") or _use(trials, trial) == ALONE)]


def _lost_text(trials: Trials, trial: dict[str, Any]) -> str:
    """Returns a sentence on why a trial of the finals does not count."""
    again = trial.get("repeats") or 0
    what = f"{trial['number']:04d}, which measured {again:04d} again in the finals,"
    if trial.get("value"):
        return f"{what} does not count, because the other trial of its round gave no result."
    reason = one_line(str(trial.get("reason") or ""), MAX_REASON)
    because = f" ({reason})" if reason else ""
    is_measured = any(each.get("value") for each in finals_of(trials, again))
    then = "" if is_measured else f", so the rate of {again:04d} is that of its first measurement"
    return f"{what} gave no result: {trial['outcome']}{because}{then}."


def _use(trials: Trials, trial: dict[str, Any]) -> str:
    """Returns what a trial of the finals was used for; "" if it neither chose the winner nor counts towards the ratio."""
    if trial.get("why") == CHOOSING:
        return CHOSEN
    if trial.get("why") != REPORTED:
        return ""
    partners = [
        each for each in trials
        if each.get("why") == REPORTED and each.get("round") == trial.get("round") and each["number"] != trial["number"]
    ]  # fmt: skip
    return PAIRED if any(each.get("value") for each in partners) else ALONE
