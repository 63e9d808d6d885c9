"""Compares loss curves: whether a configuration still trains what the baseline trains. Pure functions."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Curve = Sequence[float | None]  # mean loss of each of the first optimizer steps; None for a loss that is not finite

MIN_STEPS = 5  # fewer steps are not compared, because they say nothing about later ones
# Why parity.tolerance is 0.05 by default: a 3-layer transformer of 0.5 M parameters (Linear, attention, dropout; AdamW) was
# trained on text for 50 steps on two CPU cores. With bf16 autocast, with or without the fused optimizer, the loss stays within
# 0.02 % of float32 for 10 seeds, and the first loss within 0.01 %. The same seed repeats bit for bit. Another seed changes the
# loss by 0 to 3 %. The tolerance leaves room for losses over few samples, other dropout masks (on a GPU, they depend on the
# number format) and another summation order.
# Medians and a floor (FLOOR_FRAC) are needed because the losses of single batches jump. The loss of resnet18 on photos (batch
# 8, 30 steps) falls from 6.7 to under 0.02 in 12 steps. After that, single batches jump to 1 and more, in float32 and bf16
# alike, so means of the last quarter differ tenfold for no reason.
TAIL_FRAC = 0.25  # the median loss of the last quarter of the steps is compared, because losses of single batches are noisy
# Differences are relative to the baseline's level or to a floor, whichever is larger. The floor is FLOOR_FRAC of the baseline's
# largest loss. Without it, every difference from a loss near 0 would be large.
FLOOR_FRAC = 0.5
NEAR_FRAC = 0.9  # if the baseline's loss ends below this share of the floor, `Comparison.reason` explains the floor
FIRST_FACTOR = 3.0  # the first loss may differ by this many times the tolerance, because it is from a single batch
CHANCE_FACTOR = 2.0  # if two runs of the baseline differ by d, a difference of up to this many times d may be chance
# A loss above the tolerance passes if chance may explain the difference. But if chance may explain more than this, such a loss
# is inconclusive.
MAX_CHANCE_FRAC = 0.15
EXPLODED_FACTOR = 10.0  # no batch explains a loss that is this many times as large as any earlier loss
MIN_EXPLODING_STEPS = 8


class Verdict(enum.StrEnum):
    """The result of a comparison."""

    passed = "passed"
    failed = "failed"
    unknown = "not checked"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The losses of a configuration compared with the baseline's, with the same seed and batches.

    Attributes:
        verdict: whether they agree.
        reason: the numbers in one line, or why the comparison is inconclusive.
        num_steps: number of optimizer steps that both have made.
        loss, reference_loss: median over the last quarter of these steps; None if not finite.
        difference_frac: how much worse the loss is (negative: better), as a share of the baseline's level or of half its
            largest loss, whichever is larger; None when unknown.
        tolerance_frac: how much worse the loss may be.
    """

    verdict: Verdict
    reason: str
    num_steps: int = 0
    loss: float | None = None
    reference_loss: float | None = None
    difference_frac: float | None = None
    tolerance_frac: float | None = None

    @property
    def may_be_chance(self) -> bool:
        """Whether another run of the baseline could show that the difference is only noise."""
        return self.verdict is Verdict.failed and self.difference_frac is not None

    @property
    def is_unfinished(self) -> bool:
        """Whether losses differ, maybe by chance: a second baseline run is missing, failed, or differs too much itself."""
        return self.verdict is Verdict.unknown and self.difference_frac is not None


def compare(own: Curve, reference: Curve, *, tolerance_frac: float, chance: Curve = ()) -> Comparison:
    """Returns whether `own` is as good as `reference`.

    A loss that is worse by more than the tolerance fails. So does a loss that is not finite although the baseline's is finite.
    A better loss passes, unless the first losses differ: both programs compute the first loss from the same weights and batch,
    so a difference shows that they compute different things.

    Args:
        own: the configuration's curve.
        reference: the baseline's curve.
        tolerance_frac: tolerance, relative to the reference's level.
        chance: the baseline's curve under another seed; differences up to twice the difference between the two baseline runs
            are excused. Slow programs are compared for a limited time, so this curve may be shorter. () if there is none.
    """
    num_steps = min(len(own), len(reference))
    if None in reference[:num_steps]:
        return Comparison(verdict=Verdict.unknown, reason="the baseline's loss is not finite", num_steps=num_steps)
    if None in own[:num_steps]:
        step = list(own).index(None) + 1
        return Comparison(
            verdict=Verdict.failed,
            reason=f"the loss is not finite at step {step}, but the baseline's loss is",
            num_steps=num_steps,
        )
    if num_steps < MIN_STEPS:
        few = f"only {num_steps} steps can be compared, at least {MIN_STEPS} are needed"
        return Comparison(verdict=Verdict.unknown, reason=few, num_steps=num_steps)
    return _judge(_numbers(own, num_steps), _numbers(reference, num_steps), _numbers(chance, num_steps), tolerance_frac)


def _judge(own: list[float], reference: list[float], chance: list[float], tolerance_frac: float) -> Comparison:
    largest = max(map(abs, reference))
    floor = FLOOR_FRAC * largest

    def apart(one: float, other: float) -> float:
        scale = max(abs(other), floor)
        return (one - other) / scale if scale else (0.0 if one == other else math.copysign(math.inf, one - other))

    loss, level = _level(own), _level(reference)
    by_chance = CHANCE_FACTOR * abs(apart(_level(chance), _level(reference[: len(chance)])))
    first_by_chance = CHANCE_FACTOR * abs(apart(chance[0], reference[0])) if chance else 0.0
    difference, first = apart(loss, level), apart(own[0], reference[0])
    allowed, first_allowed = max(tolerance_frac, by_chance), max(FIRST_FACTOR * tolerance_frac, first_by_chance)
    of_half = f" ({loss:.3g} against {level:.3g} at the end, relative to half of {largest:.3g}, the baseline's largest loss)"
    half = "" if abs(level) >= NEAR_FRAC * floor else of_half
    levels = f"loss {loss:.4g} against {level:.4g} after {len(own)} steps"
    verdict = Verdict.passed
    if difference > allowed:
        excused = f" (two runs of the baseline differ by {percent(by_chance / CHANCE_FACTOR)})" if chance else ""
        verdict, reason = Verdict.failed, f"{levels}: {percent(difference)} worse, tolerance {percent(allowed)}{excused}"
    elif abs(first) > first_allowed:
        verdict = Verdict.failed
        reason = f"weights and batch are the same, but the first loss is {own[0]:.4g} against {reference[0]:.4g}"
    elif difference > tolerance_frac and by_chance > MAX_CHANCE_FRAC:
        verdict = Verdict.unknown
        reason = f"two runs of the baseline differ by {percent(by_chance / CHANCE_FACTOR)}, too much to judge: {levels}"
    elif difference < -tolerance_frac:
        reason = f"{percent(-difference)} below the baseline's loss over {len(own)} steps{half}"
    elif difference > tolerance_frac:
        above = f"{percent(difference)} above the baseline's loss over {len(own)} steps{half}"
        reason = f"{above}, which is at most twice the difference between two runs of the baseline"
    else:
        reason = f"within {percent(abs(difference))} of the baseline's loss over {len(own)} steps{half}"
    return Comparison(
        verdict=verdict,
        reason=reason,
        num_steps=len(own),
        loss=loss,
        reference_loss=level,
        difference_frac=difference if math.isfinite(difference) else None,
        tolerance_frac=allowed,
    )


def exploded(own: Curve, baseline: Curve) -> str:
    """Returns a sentence if a trial's loss exploded during its first steps; "" if it did not or that is unknown.

    This is a cheap check of search trials. Their batches differ from the baseline's, so a loss counts as exploded only if no
    batch can explain it. That is, the loss still grows, and exceeds ten times the largest loss among the trial's first steps
    and the baseline's steps.
    """
    if len(own) < MIN_EXPLODING_STEPS or not baseline or None in own or None in baseline:
        return ""
    losses, size = _numbers(own, len(own)), len(own) // 4
    begun = max(abs(loss) for loss in [*losses[:size], *_numbers(baseline, len(baseline))])
    end, before = statistics.fmean(losses[-size:]), statistics.fmean(losses[-2 * size : -size])
    if end <= EXPLODED_FACTOR * begun or end <= before:
        return ""
    return f"the loss exploded: {losses[0]:.4g} at first, {end:.4g} after {len(losses)} steps; the baseline's did not"


def percent(frac: float) -> str:
    """Returns a share in words: "0.4 %", "5 %", "158 %"; the smallest is "0.1 %"."""
    if frac >= 100:
        return "far more than 100 %"
    return f"{max(0.1, round(100 * frac, 1 if frac < 0.1 else 0)):g} %"


def _level(losses: list[float]) -> float:
    return statistics.median(losses[-max(MIN_STEPS // 2, round(TAIL_FRAC * len(losses))) :]) if losses else 0.0


def _numbers(curve: Curve, num_steps: int) -> list[float]:
    return [loss for loss in curve[:num_steps] if loss is not None]
