"""Makes one proposal: collects candidates, computes their expected gains, and chooses one for this turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.search.rates import explain
from autotune.search.rates.coding import Array, Coding
from autotune.search.rates.failure_model import FailureModel
from autotune.search.rates.forecast import ALL, DEVICE, LOADER, Expected, Forecast, scale
from autotune.search.rates.history import Seen
from autotune.search.rates.memory import LEAST_CHANCE, MemoryModel
from autotune.search.rates.pool import configuration_key, pool
from autotune.search.rates.rules import Params, Rules, SamplerOptions

NUM_DRAWS = 64  # posterior samples: enough for the mean gain to a tenth of its spread
NUM_RANKED = 200  # open candidates with the largest expected gains, from which cost decides
NUM_BEST_TO_COMPILE = 3  # best configurations, costly knobs aside, to which a costly value may be added
NUM_GREEDY = 20  # open candidates with the highest expected rates, besides those
SURE_CHANCE = 0.9  # chance to fit from which any gain is worth trying; below it, a small gain is not worth the risk
RISK_GAIN = 0.1  # expected gain required of what may run out of memory ...
SAFE_GAIN_TIMES = 3.0  # ... or this many times the best safe gain, if it is expected to be faster ...
LIKELY_CHANCE = 0.5  # ... and has this chance to fit
IDLE_GAIN = 0.01  # gain below which memory is never risked, and a single change gives way to the most promising configuration
COST_POWER = 0.5  # exponent of the seconds that divide a gain; with 1, compilations come too late for the budget
POSSIBLE = 0.9  # quantile of the possible gain that is shown as "up to"
RELIEF = 0.1  # gain if a side cost nothing, from which that side is worth a change
BELONGS = 0.3  # importance to a side from which a knob belongs to it


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A proposal of the sampler.

    Attributes:
        params: the configuration; {} to leave it to the fallback.
        why: one line on why it is proposed.
        expected_improvement: expected gain of the best open candidate over the best so far, a fraction; None when unknown. If
            many may each be a little better, it exceeds the expected gain of any single one.
        is_fallback: whether another sampler proposes.
    """

    params: Params
    why: str
    expected_improvement: float | None = None
    is_fallback: bool = False


class Step:
    """Computes one proposal."""

    def __init__(
        self,
        *,
        coding: Coding,
        forecast: Forecast,
        memory: MemoryModel | None,
        known: Sequence[Seen],
        rules: Rules,
        options: SamplerOptions,
        rng: np.random.Generator,
    ) -> None:
        self._coding, self._forecast, self._memory, self._known = coding, forecast, memory, known
        self._rules, self._options, self._rng = rules, options, rng
        winners = [one for one in known if one.may_win and rules.may_win(one.params)]
        self._winners = winners or [one for one in known if one.rate is not None]
        self._tried = {configuration_key(one.params) for one in known}
        over = [one for one in known if not one.is_running]
        worked = [one.params for one in over if one.rate is not None]
        self.is_held_back = False  # whether some were left out because of memory
        self._failure_model = FailureModel(worked, [one.suspected for one in over if one.rate is None and not one.is_out])

    def propose(self, *, turn: int) -> Proposed | None:
        """Returns the proposal of this turn; None if no considered configuration is open."""
        tried = self._expected([one.params for one in self._winners])
        order = np.argsort(-tried.mean)
        best, sides = [self._winners[place].params for place in order], self._sides(tried, int(order[0]))
        considered = pool(self._coding, best, active=self._rules.active, rng=self._rng)
        wanted = [params for params in considered if self._is_wanted(params, best)]
        candidates = [params for params in wanted if self._chance_to_fit(params) >= LEAST_CHANCE]
        self.is_held_back = len(candidates) < len(wanted)
        if not candidates:
            return None
        expected = self._expected([best[0], *candidates])
        fits = np.array([self._chance_to_fit(params) for params in candidates])
        works = np.array([self._failure_model.chance(params) for params in candidates]) * fits
        gains = (np.exp(expected.draws[1:] - expected.draws[0]) - 1) * works[:, None]
        means = (np.exp(expected.mean[1:] - expected.mean[0]) - 1) * works
        # The chance to fit counts twice when candidates are compared: running out of memory costs a trial and yields no rate.
        counted, ranks = gains * fits[:, None], means * fits
        expected_gains = np.maximum(counted, 0.0).mean(axis=1)
        by_expected_gain, is_safe = np.argsort(-expected_gains).tolist(), fits >= SURE_CHANCE
        is_new = functools.cache(lambda place: self._rules.is_open(candidates[place]))
        safe_gain = next((float(expected_gains[place]) for place in by_expected_gain if is_safe[place] and is_new(place)), 0.0)
        may_be_tried = is_safe | _is_worth_the_risk(expected_gains, means, fits, safe_gain)
        self.is_held_back |= not may_be_tried.all()
        is_open = functools.cache(lambda place: may_be_tried[place] and is_new(place))
        promising = itertools.islice(filter(is_open, by_expected_gain), NUM_RANKED)
        likely = itertools.islice(filter(is_open, np.argsort(-ranks).tolist()), NUM_GREEDY)
        places = list(dict.fromkeys([*promising, *likely]))
        if not places:
            return None
        cost = {
            place: self._rules.expected_s(candidates[place]) ** COST_POWER if self._options.cost else 1.0 for place in places
        }
        single = [place for place in places if is_safe[place] and _side_of(candidates[place], best[0], sides)]
        if turn % 2 == 0 and single and max(expected_gains[single]) >= IDLE_GAIN:
            chosen = max(single, key=lambda place: (expected_gains[place] / cost[place], means[place]))
            lead = lead_of(_side_of(candidates[chosen], best[0], sides), sides)
        elif turn % 4 == 1:
            draw = int(self._rng.integers(NUM_DRAWS))
            chosen = max(places, key=lambda place: (max(counted[place, draw], 0.0) / cost[place], counted[place, draw]))
            lead = "may be better"
        else:
            worth = ranks if max(ranks[places]) > 0 else expected_gains
            chosen = max(places, key=lambda place: (worth[place] / cost[place], means[place]))
            lead = "most promising"
        possible = float(np.quantile(gains[chosen], POSSIBLE))
        why = f"{lead}: {explain.changes(best[0], candidates[chosen])}, {explain.gain(float(means[chosen]), possible)}"
        expected_improvement = float(np.maximum(gains[places].max(axis=0), 0.0).mean())
        return Proposed(params=candidates[chosen], why=why, expected_improvement=expected_improvement)

    def _expected(self, configurations: Sequence[Params]) -> Expected:
        return self._forecast.expected(self._coding.encode(configurations), num_draws=NUM_DRAWS, rng=self._rng)

    def _sides(self, expected: Expected, place: int) -> list[str]:
        """Returns the sides that limit a configuration, the bottleneck first: it would gain if these cost nothing."""
        if not self._forecast.is_decomposed:
            return [ALL]
        relief = {LOADER: expected.device[place] - expected.mean[place], DEVICE: expected.loader[place] - expected.mean[place]}
        most = max(relief, key=lambda side: relief[side])
        return [most, *(side for side in relief if side != most and relief[side] >= RELIEF)]

    def _is_wanted(self, params: Params, best: Sequence[Params]) -> bool:
        is_new = configuration_key(params) not in self._tried
        return is_new and self._failure_model.chance(params) > 0 and self._is_worth_compiling(params, best)

    def _chance_to_fit(self, params: Params) -> float:
        return self._memory.chance(params) if self._memory else 1.0

    def _is_worth_compiling(self, params: Params, best: Sequence[Params]) -> bool:
        """Whether a configuration needs no compilation, or is one of the best so far apart from its costly knobs."""
        costly = self._rules.costly
        if all(params.get(key, plain) == plain for key, plain in costly.items()):
            return True
        rest = {key: value for key, value in params.items() if key not in costly}
        bests = [{key: value for key, value in one.items() if key not in costly} for one in best[:NUM_BEST_TO_COMPILE]]
        return rest in bests


def _is_worth_the_risk(expected_gains: Array, means: Array, fits: Array, safe_gain: float) -> NDArray[np.bool_]:
    """Returns which candidates may be tried although they may run out of memory.

    `safe_gain` is the largest expected gain of a candidate that is sure to fit.
    """
    is_likely = (fits >= LIKELY_CHANCE) & (means > 0)
    return (expected_gains >= RISK_GAIN) | (is_likely & (expected_gains >= max(SAFE_GAIN_TIMES * safe_gain, IDLE_GAIN)))


def _side_of(params: Params, best: Params, sides: Sequence[str]) -> str:
    """Returns the side that a change of one knob of the best belongs to; "" if it is no such change.

    Knobs that become active or inactive with the changed one do not count.
    """
    keys = [key for key in params if key in best and params[key] != best[key]]
    if len(keys) != 1:
        return ""
    return next((side for side in sides if scale(keys[0], side) >= BELONGS), "")


def lead_of(side: str, sides: Sequence[str]) -> str:
    """Returns what a change addresses, in words: the bottleneck side, or another limiting one."""
    if side == ALL:
        return "one change"
    return f"{side}-bound" if side == sides[0] else f"{side}-bound, too"
