"""Detects a step time that keeps changing (a sequence that grows, a machine that slows down). Pure."""

from __future__ import annotations

import math
from typing import List, NamedTuple

CHUNKS = 10  # blocks are merged until fewer than twice this number of parts are left; longer parts are less correlated
# If one window is suspicious (SUSPECT_FRAC, SUSPECT_F), a second one decides, together with the first and the steps between
# (CERTAIN_F). In simulations with independent, autocorrelated (AR(1), 0.7) and bursty steps of 0.02 to 1.2 s, none of 4,800
# steady programs was flagged, and 4 % needed a second window. Of the programs with autocorrelated steps of 1 s, whose window
# has only six steps, a fifth needed it.
SUSPECT_FRAC, SUSPECT_F = 0.03, 8.0
CERTAIN_F = 30.0


class Trend(NamedTuple):
    """The change of the step time over a sequence of blocks.

    Attributes:
        moved_frac: step time at the end divided by that at the start, minus 1.
        f: F statistic of the slope; the higher, the less likely it is chance.
    """

    moved_frac: float
    f: float

    @property
    def is_suspect(self) -> bool:
        """Whether a second window is needed to decide."""
        return abs(self.moved_frac) > SUSPECT_FRAC and self.f > SUSPECT_F


def trend(rates: List[float]) -> Trend:
    """Returns the least-squares trend of the step time's logarithm over equal parts (CHUNKS); no trend for fewer than five."""
    size = max(1, len(rates) // CHUNKS)
    chunks = [sum(rates[i : i + size]) / size for i in range(0, len(rates) - size + 1, size)]
    y = [-math.log(rate) for rate in chunks if rate > 0]
    n = len(y)
    if n < 5:
        return Trend(0.0, 0.0)
    mid, mean = (n - 1) / 2, sum(y) / n
    spread = sum((i - mid) ** 2 for i in range(n))
    slope = sum((i - mid) * v for i, v in enumerate(y)) / spread
    explained = slope**2 * spread
    rest = sum((v - mean) ** 2 for v in y) - explained
    f = explained * (n - 2) / rest if rest > 1e-12 else math.inf
    return Trend(math.expm1(slope * n), f if explained > 1e-12 else 0.0)


def keeps_changing(whole: Trend, last: Trend, least_frac: float) -> bool:
    """Returns whether the step time has certainly changed by more than `least_frac`, and was still changing at the end.

    Args:
        whole: trend from the beginning of the first suspicious window to the end.
        last: trend of the last window alone; a step time that has settled by then is steady.
        least_frac: smallest change over the whole that matters.
    """
    is_still = last.moved_frac * whole.moved_frac > 0 and abs(last.moved_frac) > least_frac / 2
    return abs(whole.moved_frac) > least_frac and whole.f > CERTAIN_F and is_still
