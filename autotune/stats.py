"""Computes confidence intervals and verdicts from measured rates. Pure functions over numpy and scipy.

Sources: batch means and their correlation, Law & Kelton, Simulation Modeling and Analysis, 4.4 and 9.5.3; paired comparison
on the log scale, because ratios are compared and machine noise is multiplicative; equivalence margins as in bioequivalence
testing; several looks at a growing sample, Pocock, Biometrika 64 (1977); moderated variances, Smyth, Statistical Applications
in Genetics and Molecular Biology 3 (2004). tests/stats checks the coverage by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, TypeVar

import numpy as np

from autotune.harness.interval import mean_half_width_frac

MIN_PAIRS = 2  # a paired interval needs a spread, and a single pair has none
FASTER_FRAC = 0.005  # the verdict is "faster" if a ratio's whole interval lies above 1 + FASTER_FRAC
# A look is an interval computed while the sample still grows. Number of looks -> confidence of each look with which all looks
# together have 95 % (Pocock).
LOOK_CONFIDENCE = {1: 0.95, 2: 0.9706}
# The verdict is "same" if a ratio's whole interval lies within 1 plus or minus this share, or plus or minus the spread between
# repeats of the baseline if that is larger.
MARGIN_FRAC = 0.01

Interval = tuple[float, float]
Judgement = Literal["faster", "same", "ambiguous"]
Arm = TypeVar("Arm", bound=Hashable)  # names a configuration in a comparison of several


@lru_cache(maxsize=4096)
def _t_quantile(degrees: float, probability: float) -> float:
    from scipy import special  # scipy.special takes 1/3 s to import, scipy.stats 1 s; most commands need neither

    return float(special.ndtri(probability) if math.isinf(degrees) else special.stdtrit(degrees, probability))


def half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Returns the half-width of the t interval of the mean, in the unit of the values; None for fewer than two values."""
    if len(values) < 2:
        return None
    array = np.asarray(values, dtype=float)
    return _t_quantile(len(array) - 1, 0.5 + confidence / 2) * float(array.std(ddof=1)) / math.sqrt(len(array))


def block_half_width_frac(rates_per_s: Sequence[float], seconds: Sequence[float] = ()) -> tuple[float | None, str]:
    """Returns (relative 95 % half-width of a window's rate, ""), or (None, why there is none).

    A block is a part of the window. The method is the harness's (harness/interval.py), with exact quantiles of Student's t.

    Args:
        rates_per_s: rate of each block of the steady window, in order.
        seconds: length of each block; empty if all are equally long.
    """
    return mean_half_width_frac(rates_per_s, seconds or [1.0] * len(rates_per_s), lambda degrees: _t_quantile(degrees, 0.975))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """An estimate of how much measurements of one configuration vary from process to process.

    Attributes:
        spread: standard deviation of one measurement on the log scale, without what varies from round to round.
        freedom: degrees of freedom of the estimate.
    """

    spread: float
    freedom: float

    def capped(self, freedom: float) -> Noise:
        """Returns an estimate with the same spread and at most this many degrees of freedom."""
        return Noise(spread=self.spread, freedom=min(self.freedom, freedom))


def pooled(noises: Iterable[Noise | None]) -> Noise | None:
    """Returns one estimate of the spread from several, with variances weighted by degrees of freedom; None if none is known."""
    known = [noise for noise in noises if noise is not None and noise.freedom > 0]
    freedom = sum(noise.freedom for noise in known)
    if not freedom:
        return None
    variance = sum(noise.freedom * noise.spread**2 for noise in known) / freedom
    return Noise(spread=math.sqrt(variance), freedom=freedom)


def sum_known(values: Iterable[float | None]) -> float | None:
    """Returns the sum; None if a value is unknown."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def log_mean_interval(values: Sequence[float], noise: Noise | None = None) -> tuple[float, Interval | None]:
    """Returns the geometric mean of positive values and its 95 % interval, from their logs; no interval for a single value."""
    centre, half, _ = _log_mean(values, 0.95, noise)
    interval = None if half is None else (math.exp(centre - half), math.exp(centre + half))
    return math.exp(centre), interval


def spread_of(values: Sequence[float]) -> Noise | None:
    """Returns the spread of repeated measurements of one quantity, on the log scale; None for fewer than two."""
    if len(values) < 2:
        return None
    return Noise(spread=float(np.log(np.asarray(values, dtype=float)).std(ddof=1)), freedom=len(values) - 1)


def _log_mean(values: Sequence[float], confidence: float, noise: Noise | None) -> tuple[float, float | None, float]:
    """Returns the mean of the logs, the half-width of its interval (None for fewer than two) and the degrees of freedom."""
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 2:
        return float(logs.mean()), None, 0.0
    known = pooled([spread_of(values), noise]) or Noise(spread=0.0, freedom=len(logs) - 1)
    half = _t_quantile(known.freedom, 0.5 + confidence / 2) * known.spread / math.sqrt(len(logs))
    return float(logs.mean()), half, known.freedom


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How much faster one configuration is than another: rate over rate.

    Attributes:
        ratio: exp(mean(log a - log b)).
        ci: 95 % interval; None for fewer than MIN_PAIRS rounds. It is wider if it holds jointly with other intervals, or for
            several looks.
        num_rounds: rounds in which both were measured.
        freedom: degrees of freedom of the interval if its noise estimate also uses other rounds; None otherwise.
        error: standard error of the log ratio; None if unknown, as in files of earlier versions. An unknown error is recovered
            from `ci`, as if `ci` were a 95 % interval for one look. If `ci` holds for several looks, the result is too large.
    """

    ratio: float
    ci: Interval | None
    num_rounds: int
    freedom: float | None = None
    error: float | None = None


def paired_ratio(
    rates: Sequence[float], others: Sequence[float], confidence: float = 0.95, noise: Noise | None = None
) -> Ratio:
    """Returns the ratio of two configurations measured side by side, round by round.

    Uses a paired t interval on log ratios: with 8 rounds it covers 95 %, while a BCa bootstrap covers 87 %. With two
    pairs there is one degree of freedom, and the interval extends to 12.7 standard errors. `noise` adds degrees of freedom.

    Args:
        rates: one rate a round, per second.
        others: the other configuration's rates in the same rounds.
        confidence: probability that the interval holds the true ratio.
        noise: the spread of one measurement, estimated from other rounds.

    Raises:
        ValueError: the lengths differ, or there is no round.
    """
    if len(rates) != len(others) or not rates:
        raise ValueError(f"rounds do not pair up: {len(rates)} against {len(others)}")
    ratios = [a / b for a, b in zip(rates, others, strict=True)]
    # The log of a ratio is the difference of two measurements, so its spread is larger by the square root of 2.
    of_difference = noise and Noise(spread=math.sqrt(2) * noise.spread, freedom=noise.freedom)
    centre, half, freedom = _log_mean(ratios, confidence, of_difference)
    if half is None:
        return Ratio(ratio=math.exp(centre), ci=None, num_rounds=1)
    interval, error = (math.exp(centre - half), math.exp(centre + half)), half / _t_quantile(freedom, 0.5 + confidence / 2)
    return Ratio(ratio=math.exp(centre), ci=interval, num_rounds=len(ratios), freedom=freedom if noise else None, error=error)


def quotient(now: Ratio, then: Ratio) -> Ratio:
    """Returns how much of an earlier speed-up remains: one ratio divided by another that was measured independently.

    Both are means of log ratios over rounds, so their difference has Welch's t interval (Welch 1947). Standard errors that are
    unknown are recovered from the intervals. If `then` has no interval, it counts as one round with today's spread.

    Args:
        now: the ratio measured now. The quotient has an interval only if this ratio has one.
        then: the ratio measured earlier. If the number of its rounds is unknown, its interval is read as a normal
            distribution's, which gives a larger standard error.
    """
    ratio = now.ratio / then.ratio
    if now.ci is None:
        return Ratio(ratio=ratio, ci=None, num_rounds=now.num_rounds)
    own, own_df = _standard_error(now, now.ci)
    if then.ci is None:
        other, other_df = own * math.sqrt(now.num_rounds), own_df
    else:
        other, other_df = _standard_error(then, then.ci)
    variance = own**2 + other**2
    weight = own**4 / own_df + other**4 / other_df
    freedom = variance**2 / weight if weight else math.inf  # weight 0: each error is 0 or has unlimited degrees of freedom
    half = _t_quantile(freedom, 0.975) * math.sqrt(variance)
    return Ratio(ratio=ratio, ci=(ratio * math.exp(-half), ratio * math.exp(half)), num_rounds=now.num_rounds)


def pairs_to_tell(half: float, noise: Noise, *, at_most: int) -> int:
    """Returns how many pairs with this noise bring the half-width of a ratio's log interval to `half`, at most `at_most`."""
    for num in range(1, at_most):
        error = math.sqrt(2 / num) * noise.spread
        if _t_quantile(noise.freedom + num - 1, 0.975) * error <= half:
            return num
    return at_most


def at_confidence(of: Ratio, confidence: float) -> Interval | None:
    """Returns the interval of this ratio alone at any confidence; None if the ratio has no interval."""
    if of.ci is None:
        return None
    error, freedom = _standard_error(of, of.ci)
    half = _t_quantile(freedom, 0.5 + confidence / 2) * error
    return (of.ratio * math.exp(-half), of.ratio * math.exp(half))


def _standard_error(of: Ratio, ci: Interval) -> tuple[float, float]:
    """Returns (standard error of a mean log ratio, degrees of freedom). An unknown error is computed from the 95 % interval."""
    freedom = of.freedom or (of.num_rounds - 1 if of.num_rounds >= MIN_PAIRS else math.inf)
    if of.error is not None:
        return of.error, freedom
    half = math.log(ci[1] / ci[0]) / 2
    return half / _t_quantile(freedom, 0.975), freedom


def spread_frac(repeats: Sequence[float]) -> float:
    """Returns this machine's A/A spread: how far two measurements of the same thing typically lie apart.

    This is the standard deviation, not the half-width of an interval. From few repeats, an interval would be so wide that all
    configurations would count as the same. The spread is computed from the differences of successive repeats (von Neumann), so
    slow drift does not count as noise: a comparison in pairs compensates for drift.

    Args:
        repeats: rates of fresh processes of the same configuration, per second, in the order they were measured.

    Returns:
        Relative standard deviation on the log scale; 0 for fewer than three repeats.
    """
    if len(repeats) < 3:
        return 0.0
    steps = np.diff(np.log(np.asarray(repeats, dtype=float)))
    return float(np.sqrt(np.mean(steps**2) / 2))


def margin_frac(baseline_repeats: Sequence[float]) -> float:
    """Returns the equivalence margin: 1 %, or the spread of the baseline's repeats (`spread_frac`) when that is wider."""
    return max(MARGIN_FRAC, spread_frac(baseline_repeats))


def round_means(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Returns {entrant: mean rate over its rounds}, corrected for how fast each round was.

    Fits the model log rate = entrant + round by least squares, so an entrant gains nothing from missing a round in which the
    machine was slow.

    Args:
        rounds: for each round, a dict from entrant (the number of a configuration in the finals) to rate per second, all
            positive. A round with a single entrant compares nothing.
    """
    entrants = sorted({entrant for measured in rounds for entrant in measured})
    if not entrants:
        return {}
    fit = np.linalg.lstsq(*_additive(rounds, entrants), rcond=None)[0]
    level = float(fit[len(entrants) :].mean())
    return {entrant: math.exp(float(fit[i]) + level) for i, entrant in enumerate(entrants)}


def _additive(rounds: Sequence[Mapping[Arm, float]], arms: Sequence[Arm]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the design matrix of log rate = arm + round, with a row for each measurement, and the logs of the rates."""
    cells = [(arms.index(arm), number) for number, measured in enumerate(rounds) for arm in measured]
    design = np.zeros((len(cells), len(arms) + len(rounds)))
    for row, (arm, number) in enumerate(cells):
        design[row, arm] = design[row, len(arms) + number] = 1.0
    return design, np.asarray([math.log(rate) for measured in rounds for rate in measured.values()])


def common_slope(series: Sequence[Sequence[tuple[float, float]]], level: float) -> float | None:
    """Returns the common slope over time of the log rates of several configurations; None if it is not significant.

    Fits log rate = configuration + slope * time by least squares, and tests the slope with Student's t.

    Args:
        series: for each configuration, pairs of time and rate per second, all positive.
        level: probability of finding a slope where there is none, two-sided.

    Returns:
        The slope in log units per unit of time.
    """
    pairs = [np.asarray(each, dtype=float) for each in series]
    times = np.concatenate([each[:, 0] - each[:, 0].mean() for each in pairs])
    logs = np.concatenate([np.log(each[:, 1]) - np.log(each[:, 1]).mean() for each in pairs])
    freedom, squares = len(times) - len(pairs) - 1, float(times @ times)
    if freedom < 1 or not squares:
        return None
    slope = float(times @ logs) / squares
    error = math.sqrt(float(np.sum((logs - slope * times) ** 2)) / freedom / squares)
    return slope if abs(slope) > _t_quantile(freedom, 1 - level / 2) * error else None


def is_slower(ratio: Ratio) -> bool:
    """Whether the whole interval of the ratio lies below 1 / (1 + FASTER_FRAC)."""
    return ratio.ci is not None and ratio.ci[1] < 1 / (1 + FASTER_FRAC)


def verdict(ratio: Ratio, margin: float = MARGIN_FRAC) -> Judgement:
    """Returns the verdict on a ratio to the baseline; `margin` is `margin_frac` of the baseline's repeats.

    Returns:
        "faster" when the interval's low end lies above 1 + FASTER_FRAC; "same" when the whole interval lies within the
        margin; "ambiguous" otherwise, and whenever there is no interval.
    """
    if ratio.ci is None:
        return "ambiguous"
    low, high = ratio.ci
    if low > 1 + FASTER_FRAC:
        return "faster"
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same"
    return "ambiguous"


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Arm]):
    """Several configurations compared with one of them, in rounds that measure each configuration at most once.

    Attributes:
        ratios: configuration -> ratio of the reference's rate to the configuration's, with simultaneous intervals.
        noise: spread of one measurement within a round, estimated from these rounds alone; None without degrees of freedom.
    """

    ratios: dict[Arm, Ratio]
    noise: Noise | None


def compare_rounds(
    rounds: Sequence[Mapping[Arm, float]], reference: Arm, confidence: float = 0.95, noise: Noise | None = None
) -> Comparison[Arm]:
    """Returns how much faster a reference is than each of several configurations, from rounds that need not be complete.

    Uses a randomised block design (Montgomery, Design and Analysis of Experiments, 4.1): log rate = configuration + round +
    noise, fitted by least squares. All configurations share one noise estimate, so three rounds of six configurations have 10
    degrees of freedom, while three rounds of a single pair have 2. Bonferroni's correction widens the intervals, so all of them
    together hold with `confidence`. They therefore also hold for a configuration that is picked after looking at them.

    Args:
        rounds: for each round, a dict from configuration to rate per second, all positive.
        reference: the configuration to compare with the others.
        confidence: probability that all intervals hold.
        noise: the spread of one measurement, estimated from other rounds.
    """
    used = [measured for measured in rounds if len(measured) > 1]
    arms = list(dict.fromkeys([reference, *(arm for measured in used for arm in measured)]))
    design, logs = _additive(used, arms)
    inverse = np.linalg.pinv(design.T @ design)
    effects = inverse @ design.T @ logs
    freedom = len(logs) - (int(np.linalg.matrix_rank(design)) if len(logs) else 0)
    residual = float(np.sum((logs - design @ effects) ** 2))
    own = Noise(spread=math.sqrt(residual / freedom), freedom=freedom) if freedom > 0 else None
    known = pooled([own, noise])
    compared = [arm for arm in arms[1:] if any(reference in measured and arm in measured for measured in used)]
    quantile = _t_quantile(known.freedom, 1 - (1 - confidence) / 2 / max(1, len(compared))) if known else 0.0
    ratios = {}
    for arm in compared:
        contrast = np.zeros(design.shape[1])
        contrast[0], contrast[arms.index(arm)] = 1.0, -1.0
        log = float(contrast @ effects)
        error = None if known is None else known.spread * math.sqrt(float(contrast @ inverse @ contrast))
        ratios[arm] = Ratio(
            ratio=math.exp(log),
            ci=None if error is None else (math.exp(log - quantile * error), math.exp(log + quantile * error)),
            num_rounds=sum(reference in measured and arm in measured for measured in used),
            freedom=known.freedom if known else None,
            error=error,
        )
    return Comparison(ratios=ratios, noise=own)
