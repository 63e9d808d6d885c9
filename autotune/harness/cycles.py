"""Finds cycles: steps that alternate with something else, such as rollouts, a validation or logging.

A window with one and a half cycles has a biased rate. For cycles of 200 steps of 10 ms and a pause of 1 s, the rate was between
5 % too low and 15 % too high. The spread between the window's blocks did not show this error. A pause shows as a gap: a step
that took many times as long as the others. Recurring gaps make cycles. The window is then cut to whole cycles, from the end of
one gap to the end of another gap.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

GAP_TIMES = 8.0  # a gap takes at least this many times the mean of the steps before it
LEAST_STEPS = 3  # the mean for GAP_TIMES must be taken over at least this many steps
# The next gap is awaited for at most 1 / NOTICEABLE_FRAC times the longest gap's length: rarer gaps hardly affect the rate.
NOTICEABLE_FRAC = 0.02
# A gap differs in kind from the longest gap (logging, not validation) if the longest is more than this many times as long.
SAME_KIND = 3.0
FREQUENT = 10.0  # if the shortest window holds this many gaps, they average out: no cycles (loader bursts, short epochs)
# How long to wait for the next gap: PATIENCE_S seconds, or PATIENCE_TIMES times the longest time between gaps so far, whichever
# is longer.
PATIENCE_S, PATIENCE_TIMES = 10.0, 4.0
# Gaps make cycles only if at least LIKE_FRAC of the distances between them, in steps, are within a factor of LIKE of the median
# distance. A loader's stalls come at random, so the distances between them differ more.
LIKE, LIKE_FRAC = 1.5, 0.6
# A gap like the baseline's is awaited until BASELINE_TIMES times the seconds and BASELINE_STEPS_TIMES times the steps of the
# baseline's cycle have passed. After that, this trial is assumed to have no cycles, or shorter cycles.
BASELINE_TIMES, BASELINE_STEPS_TIMES = 3.0, 1.5
MAX_GAPS = 64  # number of most recent gaps that are kept


class Gap(NamedTuple):
    """A step, or several in a row, that took many times as long as the others.

    Attributes:
        steps, end_s: number of steps and seconds from the first step to the gap's end.
        samples: samples from the window's opening to the gap's end.
        size_s: how long the gap took.
        since_s: seconds from the end of the previous gap to the end of this gap. For the first gap, seconds from the beginning
            of the steps with which the gap is compared.
        is_evaluation: whether the model was called in evaluation mode, for rollouts or a validation.
    """

    steps: int
    end_s: float
    samples: float
    size_s: float
    since_s: float
    is_evaluation: bool


class Cycles:
    """Finds the gaps between steps and decides which of them make cycles.

    Args:
        width: number of the loader's workers, or 1; gaps every `width` steps are the loader's bursts.
        frequent_s: gaps that are at most this many seconds apart on average make no cycles.
        baseline: the baseline's cycle, `Spec.cycle`; None if unknown. If it is {} (no cycles), gaps with evaluations are left
            out.
    """

    def __init__(self, width: int, frequent_s: float, *, baseline: Optional[Dict[str, float]] = None) -> None:
        self._width, self._frequent_s = width, frequent_s
        self._baseline_has_none = baseline == {}
        self._baseline_s, self._baseline_steps = (baseline["seconds"], baseline["steps"]) if baseline else (0.0, 0.0)
        self._gaps: List[Gap] = []
        self._from_steps, self._from_s = 0, 0.0  # beginning of the steps over which the mean is taken
        self._typical_s: Optional[float] = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look for: no gap was seen, and none is expected from the baseline."""
        return not self._gaps and not self._baseline_s

    def begin_after(self, steps: int, end_s: float) -> None:
        """Restarts the mean of normal steps after a step that must not be part of it, for example because it compiled code."""
        self._from_steps, self._from_s = steps, end_s

    def note(self, step_s: float, *, steps: int, end_s: float, samples: float, is_evaluation: bool = False) -> bool:
        """Adds a step and returns whether it is a gap. Need not be called for short steps.

        Args:
            step_s: how long it took.
            steps: number of steps at its end, counted as in `Gap`.
            end_s: seconds at its end, counted as in `Gap`.
            samples: samples at its end, counted as in `Gap`.
            is_evaluation: as in `Gap`.
        """
        before = steps - 1 - self._from_steps
        if before >= LEAST_STEPS:
            self._typical_s = (end_s - step_s - self._from_s) / before
        if self._typical_s is None or step_s < GAP_TIMES * self._typical_s:
            return False
        if is_evaluation and self._baseline_has_none:
            self.begin_after(steps, end_s)
            return True
        gap = Gap(steps, end_s, samples, step_s, end_s - self._from_s, is_evaluation)
        if self._gaps and not before:  # consecutive gaps count as one
            last = self._gaps.pop()
            gap = gap._replace(size_s=last.size_s + step_s, since_s=last.since_s + step_s)
        self._gaps = [*self._gaps[1 - MAX_GAPS :], gap]
        self._from_steps, self._from_s = steps, end_s
        return True

    def gaps(self, now_s: float) -> List[Gap]:
        """Returns the longest gaps that make cycles, or may make cycles once the next gap comes; [] if there are none.

        Gaps are grouped by length (SAME_KIND): if gaps of about 10 s make no cycles, gaps of about 1 s still may.
        """
        left = self._gaps
        while left:
            least_s = max(gap.size_s for gap in left) / SAME_KIND
            kind = [gap for gap in left if gap.size_s >= least_s]
            if self._may_recur(kind, now_s):
                return kind
            left = [gap for gap in left if gap.size_s < least_s]
        return []

    def _may_recur(self, kind: List[Gap], now_s: float) -> bool:
        longest_s, patience_s = max(gap.size_s for gap in kind), max(PATIENCE_S, BASELINE_TIMES * self._baseline_s)
        steps, seconds = _distances(kind)
        if len(kind) > 1:
            is_frequent = sum(steps) <= 2 * self._width * len(steps) or sum(seconds) <= self._frequent_s * len(steps)
            if is_frequent or not _are_alike(steps):
                return False
        if len(kind) > 1 or not kind[0].is_evaluation:  # after a single gap with an evaluation, the shorter patience applies
            patience_s = max(patience_s, PATIENCE_TIMES * max([kind[0].since_s, *seconds]))
        return now_s - kind[-1].end_s <= min(patience_s, longest_s / NOTICEABLE_FRAC)

    def is_awaited(self, steps: int, seconds: float) -> bool:
        """Whether a gap like the baseline's may still come after `steps` steps and `seconds` seconds of the window."""
        return seconds < BASELINE_TIMES * self._baseline_s or steps < BASELINE_STEPS_TIMES * self._baseline_steps


class Whole(NamedTuple):
    """Whole cycles, from one gap's end to another's.

    Attributes:
        begin: the gap before the first cycle.
        steps, seconds, samples: of all cycles together.
        rates_per_s, block_s: rate and length of each cycle.
    """

    begin: Gap
    steps: int
    seconds: float
    samples: float
    rates_per_s: List[float]
    block_s: List[float]

    def __str__(self) -> str:
        num = len(self.block_s)
        return in_words(self.steps / num, self.seconds / num) + f"; the window holds {num} of them"


def whole(gaps: List[Gap]) -> Optional[Whole]:
    """Returns the cycles between gaps; None for fewer than two gaps."""
    if len(gaps) < 2:
        return None
    first, last = gaps[0], gaps[-1]
    block_s = _distances(gaps)[1]
    samples = [b.samples - a.samples for a, b in zip(gaps, gaps[1:])]  # noqa: B905, RUF007 (Python 3.9)
    rates = [each / seconds for each, seconds in zip(samples, block_s)]  # noqa: B905
    return Whole(first, last.steps - first.steps, last.end_s - first.end_s, last.samples - first.samples, rates, block_s)


def in_words(steps: float, seconds: float) -> str:
    """Describes cycles by their steps and seconds."""
    return f"steps come in cycles of {steps:.0f} steps in {seconds:.3g} s"


def _distances(gaps: List[Gap]) -> Tuple[List[int], List[float]]:
    """Returns steps and seconds from each gap to the next."""
    pairs = list(zip(gaps, gaps[1:]))  # noqa: B905, RUF007 (Python 3.9)
    return [b.steps - a.steps for a, b in pairs], [b.end_s - a.end_s for a, b in pairs]


def _are_alike(steps: List[int]) -> bool:
    if len(steps) < 3:
        return True
    middle = sorted(steps)[len(steps) // 2]
    return sum(middle / LIKE <= each <= middle * LIKE for each in steps) >= LIKE_FRAC * len(steps)
