"""Detects whether the machine became slower or faster while configurations were compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune import stats
from autotune.quantities import percent_text
from autotune.records import Kind, TrialRecord

LEVEL = 0.01  # significance level of the test for a trend
LEAST_FRAC = 0.03  # a smaller change of the rate over the whole comparison is not mentioned


def trend(records: Sequence[TrialRecord]) -> str:
    """Returns a sentence on how much slower or faster the machine became during the finals; "" if there is no clear trend.

    A trend is reported only if the rates of all configurations changed in the same direction and their common slope is
    significant at LEVEL. tests/compare/test_trend.py simulates how often a trend is reported when there is none.
    """
    finals = [one for one in records if one.kind is Kind.final and one.value and one.outcome.may_win]
    rates: dict[int, list[tuple[float, float]]] = {}
    for at, final in enumerate(finals):
        rates.setdefault(final.repeats or 0, []).append((float(at), final.value or 1.0))
    rates = {number: pairs for number, pairs in rates.items() if len(pairs) > 1}
    slope = stats.common_slope(list(rates.values()), LEVEL) if len(rates) > 1 else None
    if slope is None or not all(_change(pairs) * slope > 0 for pairs in rates.values()):
        return ""
    factor = math.exp(slope * (len(finals) - 1))
    return _sentence(sorted(rates), factor) if abs(factor - 1) >= LEAST_FRAC else ""


def _change(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the covariance of time and log rate, times the number of pairs. Only its sign is used."""
    mean = math.fsum(at for at, _ in pairs) / len(pairs)
    return math.fsum((at - mean) * math.log(rate) for at, rate in pairs)


def _sentence(numbers: Sequence[int], factor: float) -> str:
    others = [str(number) for number in numbers if number]
    who = f"{'the baseline and ' if 0 in numbers else ''}trial{'s' if len(others) > 1 else ''} {', '.join(others)}"
    became, went = ("slower", "fell") if factor < 1 else ("faster", "rose")
    return (
        f"the machine became {became} by {percent_text(abs(factor - 1))} during the comparison: the rates of {who} {went} "
        f"together (trend clear at the {percent_text(LEVEL)} level). The ratio is still valid: it compares only runs that were "
        "measured right after each other"
    )
