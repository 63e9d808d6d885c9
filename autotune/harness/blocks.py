"""Groups steps into blocks, whose rates show how precise a window's rate is. Pure."""

from __future__ import annotations

from typing import List

from .protocol import MeasureRules


class Blocks:
    """Groups steps into blocks of at least `min_s` seconds and of a multiple of `width` steps: the loader's workers, or 1."""

    def __init__(self, width: int, min_s: float) -> None:
        self.width, self.min_s = max(1, width), min_s
        self.rates_per_s: List[float] = []  # rate of each closed block
        self.block_s: List[float] = []  # length of each closed block
        self.step_s: List[List[float]] = []  # seconds of each step of the last two closed blocks
        self._open: List[float] = []
        self._open_s = self._open_samples = 0.0
        self.num_steps, self.seconds, self.samples = 0, 0.0, 0.0  # of the closed blocks

    def add(self, step_s: float, samples: float) -> bool:
        """Adds a step; returns whether it closed a block."""
        self._open.append(step_s)
        self._open_s += step_s
        self._open_samples += samples
        if len(self._open) % self.width or self._open_s < self.min_s:
            return False
        self.rates_per_s.append(self._open_samples / self._open_s)
        self.block_s.append(self._open_s)
        self.step_s = [*self.step_s[-1:], self._open]
        self.num_steps += len(self._open)
        self.seconds += self._open_s
        self.samples += self._open_samples
        self._open, self._open_s, self._open_samples = [], 0.0, 0.0
        return True

    def __len__(self) -> int:
        return len(self.rates_per_s)


def agree(blocks: Blocks, rules: MeasureRules) -> bool:
    """Whether the last two blocks agree in their rates and in the quartiles of their step times."""
    earlier, later = blocks.rates_per_s[-2:]
    if not _close(earlier, later, rules.warmup_mean_frac):
        return False
    before, after = sorted(blocks.step_s[-2]), sorted(blocks.step_s[-1])
    if blocks.width > 1 or min(len(before), len(after)) < 8:
        return True  # several workers deliver in bursts, or there are few steps, so quartiles mean nothing
    quarters = (0.25, 0.5, 0.75)
    return all(_close(_quantile(before, q), _quantile(after, q), rules.warmup_quartile_frac) for q in quarters)


def _close(a: float, b: float, frac: float) -> bool:
    return abs(a - b) <= frac * max(abs(a), abs(b))


def _quantile(ordered: List[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
