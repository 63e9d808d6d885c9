"""Makes one proposal: collects candidates, computes their expected gains, and chooses one by gain, risk and time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.search.rates import limits, reasons
from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import BATCH, Array, Codes, Coding
from autotune.search.rates.forecast import Means
from autotune.search.rates.history import MOST_TRIALS, Known
from autotune.search.rates.memory import HOST_KNOBS, LEAST_CHANCE, MEMORY_KNOBS, MemoryModel
from autotune.search.rates.pool import Pool
from autotune.search.rates.rules import Params, Rules, SamplerOptions
from autotune.search.rates.supposition import Supposition
from autotune.search.rates.views import ALL, DEVICE, LOADER, scale

NUM_DRAWS = 128  # joint posterior samples of the candidates with the largest expected gains
# Number of candidates that are examined closely: of those that may be tried ("open", see `Rules.is_open`), the ones with the
# largest expected gains.
NUM_OPEN = 60
NUM_BEST_TO_COMPILE = 3  # a candidate that needs a compilation must resemble one of this many best, see `_is_worth_compiling`
# Of the candidates with at least this share of the largest gain per cost, the one with the fewest changes is chosen.
NEAR_FRAC = 0.5
# The neighbours of some failed configurations are candidates, too: of the MOST_FAILED latest, the NUM_FAILED with the highest
# forecasts.
NUM_FAILED, MOST_FAILED = 2, 30
MOST_WINNERS = 30  # the best so far is the trial with the highest forecast among this many of the fastest
SURE_CHANCE = 0.9  # a candidate with a smaller chance to fit needs an expected gain of at least RISK_GAIN
RISK_GAIN = 0.02
# A proposal with a smaller expected improvement is unpromising; several in a row end the search. Next to the best, the expected
# improvement is several times too high, because the forecasts are too uncertain there.
STOP_IMPROVEMENT = 0.02
FIT_POWER = 2.0  # a gain is multiplied by this power of the chance to fit: running out of memory yields no rate
# On a GPU, larger batches are rarely slower. So if only uncertainty makes a smaller batch promising, its gain is multiplied by
# this factor, see `_are_needlessly_small`. The factor also applies to its part in the improvement that decides when to stop.
SMALL_BATCH = 0.1
SMALL_BATCH_GAIN = 0.01  # a smaller batch that is expected to be faster by this, in logarithms, is not needless
COST_POWER = 0.5  # a gain is divided by this power of a trial's seconds; with 1, compilations come too late for the budget
POSSIBLE_Z = 1.2816  # "up to" shows the forecast's 90 % quantile: the mean gain plus this many standard deviations
# For a configuration that differs from the nearest trial in 0, 1, 2, ... knobs: true spread of its rate, relative to the
# model's. Near the trials, the model is too uncertain, because most knobs have small effects; far from them, it is too certain,
# because the errors for many knobs add up. Fitted so that 90 % intervals hold the truth in nine of ten cases on 49 simulated
# machines (`python -m tests.benchmarks.search --calibration`, seeds 12 to 60).
CALIBRATION = np.array([0.6, 0.6, 0.8, 0.9, 1.0, 1.2, 1.3, 1.35])
# The slower of loader and device limits the rate. The other side also counts as limiting if the log rate would be higher by at
# least this much without that side's cost.
RELIEF = 0.1
BELONGS = 0.3  # a knob belongs to a side if its `scale` for the side is at least this


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A proposal of the sampler.

    Attributes:
        params: the configuration; {} if the fallback chooses it.
        why: one line on why it is proposed.
        expected_improvement: by how much the rate of the best open candidate is expected to exceed that of the best trial so
            far, a fraction; None when unknown. If many candidates may each be a little better, the expected improvement is
            larger than the expected gain of any one of them.
        is_fallback: whether another sampler proposes.
    """

    params: Params
    why: str
    expected_improvement: float | None = None
    is_fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """The best configuration so far.

    Attributes:
        codes: its codes, in one row.
        mean: its expected rate, in logarithms.
        sides: the sides (device, loader) whose cost slows the configuration down noticeably, the bottleneck first.
    """

    codes: Codes
    mean: float
    sides: Sequence[str]


class Step:
    """Computes one proposal.

    Args:
        coding: the levels of the knobs.
        pool: the candidates.
        forecast: forecasts the rates.
        memory: predicts whether configurations fit the memory; None to ignore memory.
        known: past and running trials.
        supposed: how the running trials are assumed to end; None if none runs.
        rules: what the study knows about configurations.
        options: which parts of the sampler to use.
        rng: random source of candidates and samples.
        is_on_gpu: whether the step computes on a GPU.
    """

    def __init__(
        self,
        *,
        coding: Coding,
        pool: Pool,
        forecast: AveragedForecast,
        memory: MemoryModel | None,
        known: Known,
        supposed: Supposition | None = None,
        rules: Rules,
        options: SamplerOptions,
        rng: np.random.Generator,
        is_on_gpu: bool = False,
    ) -> None:
        self._is_on_gpu = is_on_gpu
        self._coding, self._pool, self._forecast, self._memory = coding, pool, forecast, memory
        self._rules, self._options, self._rng = rules, options, rng
        able = (one for one in known.fastest() if one.may_win and rules.may_win(one.params))
        winners = list(itertools.islice(able, MOST_WINNERS)) or list(itertools.islice(known.fastest(), MOST_WINNERS))
        running = list(filter(rules.may_win, supposed.working)) if supposed else []
        self._winners = np.unique(coding.encode([*(one.params for one in winners), *running]), axis=0)
        self._rated = known.measured(most=MOST_TRIALS) if rules.limits else []
        self._tried = coding.encode([one.params for one in known.measured(most=MOST_TRIALS)])
        self._failed = coding.encode([one.params for one in known.failed[-MOST_FAILED:]])
        pool.read(known)
        self._failure_model = pool.failure_model(known, supposed.failing if supposed else ())
        self._is_provisional = supposed is not None
        self.is_held_back = False  # whether candidates were left out because of memory

    def propose(self) -> Proposed | None:
        """Returns the proposal; None if no considered configuration is open."""
        tried = self._forecast.means(self._winners)
        order = np.argsort(-tried.mean)
        best, first = self._winners[order], int(order[0])
        codes, works = self._wanted(best)
        if not len(codes):
            return None
        reference = _Reference(codes=best[:1], mean=float(tried.mean[first]), sides=self._sides(tried, first))
        fits = self._chances_to_fit(codes)
        is_likely = fits >= LEAST_CHANCE
        self.is_held_back = not is_likely.all()
        found = self._best_of(codes[is_likely], works[is_likely], fits[is_likely], reference)
        if self._is_provisional or (found is not None and (found.expected_improvement or 0.0) >= STOP_IMPROVEMENT):
            return found
        # The memory forecast may be wrong. So before a search ends, a large possible gain justifies a trial that may not fit.
        is_unlikely = ~is_likely & (fits > 0)
        return self._best_of(codes[is_unlikely], works[is_unlikely], fits[is_unlikely], reference) or found

    def _best_of(self, codes: Codes, works: Array, fits: Array, reference: _Reference) -> Proposed | None:
        """Returns the most promising of some candidates; None if none of them is open and worth the risk."""
        if not len(codes):
            return None
        expected = self._forecast.expected(codes, reference.codes)
        means = expected.mean - reference.mean
        if_fitting = _expected_gains(means, expected.spread) * works
        is_worth_the_risk = (fits >= SURE_CHANCE) | (if_fitting * fits >= RISK_GAIN)
        self.is_held_back |= not is_worth_the_risk.all()
        weights = np.where(self._are_needlessly_small(codes, expected.mean, reference), SMALL_BATCH, 1.0)
        gains = np.where(is_worth_the_risk, if_fitting * fits**FIT_POWER * weights, -1.0)
        places = self._open(codes, gains)
        if not places:
            return None
        params = {place: self._coding.decode(codes[place].tolist()) for place in places}
        cost = {place: self._rules.expected_s(params[place]) ** COST_POWER if self._options.cost else 1.0 for place in places}
        worth = {place: gains[place] / cost[place] for place in places}
        # Of the candidates that are about as promising as the best, the one with the fewest changes is most informative.
        near = [place for place in places if worth[place] >= NEAR_FRAC * max(worth.values())]
        num_changes = {place: int((codes[place] != reference.codes[0]).sum()) for place in near}
        chosen = min(near, key=lambda place: (num_changes[place], -worth[place], -means[place]))
        if self._options.cost:
            # Of candidates that differ only in their compilation, the one that gains most per second comes first: a cheap
            # compilation shows how much an expensive one can still add.
            others, columns = [place for place in near if num_changes[place] == num_changes[chosen]], self._plain_columns
            alike = [place for place in others if (codes[place][columns] == codes[chosen][columns]).all()]
            chosen = max(alike, key=lambda place: gains[place] / cost[place] ** (1 / COST_POWER))
        current = self._coding.decode(reference.codes[0].tolist())
        spread = float(expected.spread[chosen] * calibration(codes[[chosen]], self._tried)[0])
        possible = math.expm1(float(means[chosen]) + POSSIBLE_Z * spread)
        gain = reasons.gain(math.expm1(float(means[chosen])), possible)
        risk = reasons.risk(float(fits[chosen])) if fits[chosen] < LEAST_CHANCE else ""
        return Proposed(
            params=params[chosen],
            why=f"{_lead(params[chosen], current, reference.sides)}: {reasons.changes(current, params[chosen])}, {gain}{risk}",
            expected_improvement=self._improvement(reference.codes, codes[places], (works * fits * weights)[places]),
        )

    def _are_needlessly_small(self, codes: Codes, means: Array, reference: _Reference) -> NDArray[np.bool_]:
        """Whether each configuration has a smaller batch than the best so far, on a GPU, without a reason.

        It is a reason if the configuration is expected to be faster with the smaller batch, or if the larger one may not fit.
        """
        found = np.zeros(len(codes), dtype=bool)
        place = next((place for place, knob in enumerate(self._coding.knobs) if knob.key == BATCH and knob.is_ordered), None)
        if not self._is_on_gpu or place is None:
            return found
        smaller = np.flatnonzero((codes[:, place] >= 0) & (codes[:, place] < reference.codes[0, place]))
        if len(smaller):
            raised = codes[smaller].copy()
            raised[:, place] = reference.codes[0, place]
            is_faster = means[smaller] >= self._forecast.means(raised).mean + SMALL_BATCH_GAIN
            found[smaller] = ~is_faster & (self._chances_to_fit(raised) >= SURE_CHANCE)
        return found

    def _wanted(self, best: Codes) -> tuple[Codes, Array]:
        """Returns the new candidates that may work, and the probability that each one works and keeps within the limits.

        Candidates that need a compilation are included only if they are worth it.
        """
        codes = self._pool.candidates(best, self._promising_failures(best), self._rng)
        works = self._chances_to_work(codes)
        given = (self._rules.limits, self._rated, self._forecast, self._coding, codes)
        works = works * limits.chances(*given, is_held=self._rules.is_held)
        is_wanted = self._pool.are_new(codes) & self._is_worth_compiling(codes, best) & (works > 0)
        return codes[is_wanted], works[is_wanted]

    def _promising_failures(self, best: Codes) -> Codes:
        """Returns up to NUM_FAILED failed configurations: those with the highest forecasts, if higher than the best's.

        Often two values fail only together. Then a configuration with only one of them may work, and be as fast as was forecast
        for both. It differs from the best so far in several knobs, so it is not among the neighbours of the best.
        """
        if not len(self._failed):
            return self._failed
        means = self._forecast.means(np.vstack([best[:1], self._failed])).mean
        order = np.argsort(-means[1:], kind="stable")[:NUM_FAILED]
        return np.asarray(self._failed[order][means[1:][order] > means[0]])

    def _open(self, codes: Codes, gains: Array) -> list[int]:
        """Returns the places of the open candidates with the largest expected gains."""
        found: list[int] = []
        for place in np.argsort(-gains).tolist():
            if gains[place] < 0:
                break
            if self._rules.is_open(self._coding.decode(codes[place].tolist())):
                found.append(place)
                if len(found) >= NUM_OPEN:
                    break
        return found

    def _improvement(self, reference: Codes, codes: Codes, works: Array) -> float:
        """Returns by how much the best of some candidates is expected to exceed the best so far."""
        draws = self._forecast.draws(np.vstack([reference, codes]), num=NUM_DRAWS, rng=self._rng)
        does_work = self._rng.random((len(codes), NUM_DRAWS)) < works[:, None]
        return float(np.maximum(np.where(does_work, np.expm1(draws[1:] - draws[0]), 0.0).max(axis=0), 0.0).mean())

    def _chances_to_work(self, codes: Codes) -> Array:
        """Returns the probability that each configuration works, if it fits the memory."""
        chances = np.ones(len(codes))
        for place, knob in enumerate(self._coding.knobs):
            of_values = [self._failure_model.chance({knob.key: value}) for value in knob.values]
            chances *= np.array([*of_values, 1.0])[codes[:, place]]
        for pair, chance in self._failure_model.pairs.items():
            chances[np.all([self._coding.has(key, value, codes) for key, _, value in pair], axis=0)] *= chance
        return chances

    def _chances_to_fit(self, codes: Codes) -> Array:
        """Returns the probability that each configuration fits the memory; computed once for equal values of memory knobs."""
        if self._memory is None:
            return np.ones(len(codes))
        kinds = [row.tobytes() for row in codes[:, [knob.key in (*MEMORY_KNOBS, *HOST_KNOBS) for knob in self._coding.knobs]]]
        rows = dict(zip(kinds, codes.tolist(), strict=True))  # one configuration of each kind
        chances = dict(zip(rows, self._memory.chances(list(map(self._coding.decode, rows.values()))), strict=True))
        return np.array([chances[kind] for kind in kinds], dtype=float)

    def _is_worth_compiling(self, codes: Codes, best: Codes) -> NDArray[np.bool_]:
        """Whether each configuration is worth a compilation, or needs none.

        A configuration without costly values needs no compilation. A configuration is worth a compilation if it equals one of
        the best configurations either in all costly knobs or in all other knobs.
        """
        others, costly = self._plain_columns, [place for place in range(codes.shape[1]) if place not in self._plain_columns]
        plain = self._coding.encode([dict(self._rules.costly)])[0]
        is_plain = np.all([(codes[:, place] == plain[place]) | (codes[:, place] < 0) for place in costly] or [[True]], axis=0)
        top = best[:NUM_BEST_TO_COMPILE]
        return np.asarray(is_plain | _are_among(codes, top, costly) | _are_among(codes, top, others))

    @property
    def _plain_columns(self) -> list[int]:
        """The columns of knobs that need no compilation."""
        return [place for place, knob in enumerate(self._coding.knobs) if knob.key not in self._rules.costly]

    def _sides(self, expected: Means, place: int) -> list[str]:
        """Returns the sides whose cost slows a configuration down noticeably, the bottleneck first."""
        if not self._forecast.is_decomposed:
            return [ALL]
        relief = {LOADER: expected.device[place] - expected.mean[place], DEVICE: expected.loader[place] - expected.mean[place]}
        most = max(relief, key=lambda side: relief[side])
        return [most, *(side for side in relief if side != most and relief[side] >= RELIEF)]


def _are_among(codes: Codes, others: Codes, columns: Sequence[int]) -> NDArray[np.bool_]:
    """Returns whether each configuration equals one of the others in the given columns."""
    known = {row.tobytes() for row in others[:, columns]}
    return np.array([row.tobytes() in known for row in codes[:, columns]], dtype=bool)


def calibration(codes: Codes, tried: Codes) -> Array:
    """Returns a factor for the model's spread of each configuration's rate; `tried` are the configurations of the trials."""
    num_changes = (codes[:, None, :] != tried).sum(axis=2).min(axis=1)
    return np.asarray(CALIBRATION[np.minimum(num_changes, len(CALIBRATION) - 1)])


def _expected_gains(means: Array, spreads: Array) -> Array:
    """Returns the expected gain over the best so far, E[max(exp(x) - 1, 0)] for normal x."""
    spreads = np.maximum(spreads, 1e-6)
    above = ndtr(means / spreads)
    return np.asarray(np.maximum(np.exp(means + spreads**2 / 2) * ndtr(means / spreads + spreads) - above, 0.0))


def _lead(params: Params, best: Params, sides: Sequence[str]) -> str:
    """Returns the beginning of the line on a proposal: what the proposal addresses."""
    side = _side_of(params, best, sides)
    return lead_of(side, sides) if side else "most promising"


def _side_of(params: Params, best: Params, sides: Sequence[str]) -> str:
    """Returns the side that the only changed knob belongs to; "" unless exactly one knob differs from the best.

    Knobs that become active or inactive with the changed one do not count.
    """
    keys = [key for key in params if key in best and params[key] != best[key]]
    if len(keys) != 1:
        return ""
    return next((side for side in sides if scale(keys[0], side) >= BELONGS), "")


def lead_of(side: str, sides: Sequence[str]) -> str:
    """Returns what a change addresses. For LOADER: "loader-bound"; if the device is the bottleneck, "loader-bound, too"."""
    if side == ALL:
        return "one change"
    return f"{side}-bound" if side == sides[0] else f"{side}-bound, too"
