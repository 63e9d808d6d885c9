"""Whether a window's step time keeps changing (a sequence that grows, a machine that slows down). Pure."""

from __future__ import annotations

import math
from typing import List

CHUNKS = 10  # a trend is looked for in so many equal parts of the window: longer ones are less correlated
# F statistic of the slope from which it is no chance. Simulated: steady windows with independent, autocorrelated (AR(1), 0.7)
# and bursty steps reach it in at most 2 of 100 cases (7 when six steps of a second are all there is), and two windows in a row
# have to: 0.3 in 100 at worst.
CERTAIN_F = 30.0


def trend_frac(rates: List[float]) -> float:
    """Returns how much longer steps are at the end of a row of blocks than at its start; 0.0 when that may be chance.

    The slope of the step time's logarithm over up to CHUNKS equal parts, by least squares, tested by F.

    Args:
        rates: rate of each block, in order.
    """
    size = max(1, len(rates) // CHUNKS)
    chunks = [sum(rates[i : i + size]) / size for i in range(0, len(rates) - size + 1, size)]
    y = [-math.log(rate) for rate in chunks if rate > 0]
    n = len(y)
    if n < 5:
        return 0.0
    mid, mean = (n - 1) / 2, sum(y) / n
    slope = sum((i - mid) * v for i, v in enumerate(y)) / sum((i - mid) ** 2 for i in range(n))
    total = sum((v - mean) ** 2 for v in y)
    explained = slope**2 * sum((i - mid) ** 2 for i in range(n))
    is_chance = explained * (n - 2) < CERTAIN_F * max(total - explained, 0.0)
    return 0.0 if is_chance else math.expm1(slope * n)
