"""Groups steps into blocks, whose rates show how precise a window's rate is, and whether the step time keeps changing."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Sequence

from .protocol import MeasureRules


class Blocks:
    """Groups steps into blocks of at least `min_s` seconds.

    The number of steps in a block is a multiple of `width`, the number of loader workers (1 if there are none).
    """

    def __init__(self, width: int, min_s: float) -> None:
        self.width, self.min_s = max(1, width), min_s
        self.rates_per_s: List[float] = []  # rate of each closed block
        self.block_s: List[float] = []  # length of each closed block
        self.step_s: List[List[float]] = []  # seconds of each step of the last two closed blocks
        self._open: List[float] = []  # seconds of each step of the block that is not closed yet
        self._open_s = self._open_samples = 0.0
        self.num_steps, self.seconds, self.samples = 0, 0.0, 0.0  # of all closed blocks together

    def add(self, step_s: float, samples: float) -> bool:
        """Adds a step; returns whether it closed a block."""
        num_before = len(self.rates_per_s)
        self.add_until_closed((step_s,), (samples,))
        return len(self.rates_per_s) > num_before

    def add_until_closed(self, steps_s: Sequence[float], samples: Sequence[float]) -> int:
        """Adds steps until a step closes a block, or a single step takes at least `min_s`; returns the number of added steps.

        One call for many short steps costs far less than a call for each.
        """
        steps, width, min_s = self._open, self.width, self.min_s
        num_steps, seconds, num_samples, num_added = len(steps), self._open_s, self._open_samples, 0
        for num_added, (step_s, step_samples) in enumerate(zip(steps_s, samples), 1):  # noqa: B905 (Python 3.9)
            seconds += step_s
            num_samples += step_samples
            if seconds >= min_s and ((num_steps + num_added) % width == 0 or step_s >= min_s):
                break
        steps += steps_s[:num_added]
        self._open_s, self._open_samples = seconds, num_samples
        if len(steps) % width == 0 and seconds >= min_s:
            self._close()
        return num_added

    def _close(self) -> None:
        self.rates_per_s.append(self._open_samples / self._open_s)
        self.block_s.append(self._open_s)
        self.step_s = [*self.step_s[-1:], self._open]
        self.num_steps += len(self._open)
        self.seconds += self._open_s
        self.samples += self._open_samples
        self._open, self._open_s, self._open_samples = [], 0.0, 0.0

    def __len__(self) -> int:
        return len(self.rates_per_s)


def agree(blocks: Blocks, rules: MeasureRules) -> bool:
    """Whether the last two blocks agree in their rates and in the quartiles of their step times."""
    earlier, later = blocks.rates_per_s[-2:]
    if not _close(earlier, later, rules.warmup_mean_frac):
        return False
    before, after = sorted(blocks.step_s[-2]), sorted(blocks.step_s[-1])
    if blocks.width > 1 or min(len(before), len(after)) < 8:
        return True  # quartiles say nothing if several workers deliver batches in bursts, or if there are few steps
    quarters = (0.25, 0.5, 0.75)
    return all(_close(_quantile(before, q), _quantile(after, q), rules.warmup_quartile_frac) for q in quarters)


def _close(a: float, b: float, frac: float) -> bool:
    return abs(a - b) <= frac * max(abs(a), abs(b))


def _quantile(ordered: List[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


# --- a step time that keeps changing (a sequence that grows, a machine that slows down) ---

# Blocks are merged into 10 to 19 parts, because long neighbouring parts are less correlated with each other than short ones.
CHUNKS = 10
# If a window is suspicious (SUSPECT_FRAC, SUSPECT_F), a second window is measured. CERTAIN_F then decides over both windows and
# the steps between them. In a simulation of 4,800 steady programs, with independent, autocorrelated (AR(1), 0.7) or bursty
# steps of 0.02 to 1.2 s, no program was found to keep changing, and 4 % needed a second window. Of the programs with
# autocorrelated steps of 1 s, a fifth needed it, because their windows have only six steps.
SUSPECT_FRAC, SUSPECT_F = 0.03, 8.0
CERTAIN_F = 30.0


class Trend(NamedTuple):
    """The change of the step time over a sequence of blocks.

    Attributes:
        moved_frac: step time at the end divided by the step time at the start, minus 1.
        f: F statistic of the slope. The larger it is, the less likely the change is due to chance.
    """

    moved_frac: float
    f: float

    @property
    def is_suspect(self) -> bool:
        """Whether a second window is needed to decide."""
        return abs(self.moved_frac) > SUSPECT_FRAC and self.f > SUSPECT_F


def trend(rates: List[float]) -> Trend:
    """Fits a line to the logarithm of the step time over equal parts (CHUNKS). For fewer than five parts, the trend is zero."""
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
        whole: trend from the beginning of the first suspicious window to the end of the last window.
        last: trend of the last window alone. If the step time no longer changes there, it is steady.
        least_frac: smallest change over the whole time that matters, as a share of the step time.
    """
    is_still = last.moved_frac * whole.moved_frac > 0 and abs(last.moved_frac) > least_frac / 2
    return abs(whole.moved_frac) > least_frac and whole.f > CERTAIN_F and is_still
