"""The sampler that learns device rate, loader capacity and memory from every trial, and proposes where the rate may rise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.search.rates import explain
from autotune.search.rates.coding import Coding
from autotune.search.rates.forecast import ALL, DEVICE, LOADER, Expected, Forecast, scale
from autotune.search.rates.history import Seen, seen
from autotune.search.rates.memory import MemoryModel
from autotune.search.rates.pool import Params, configuration_key, pool
from autotune.search.rates.regime import Machine
from autotune.search.rates.working import Suspects

MACHINE = "machine"  # user attribute of the study: `vars` of a Machine
NUM_DRAWS = 64  # functions drawn from what is known: their mean gain is good to a tenth of its own spread
MAX_SPREAD = 0.15  # of the rates round what D and L make together: beyond it the rates may say more by themselves
MIN_SPREAD_TRIALS = 8  # rates before the spread says anything
STOP_PROMISE = 0.01  # expected gain below which a proposal promises nothing ...
STOP_AFTER = 5  # ... and so many in a row end the search
NUM_RANKED = 200  # candidates that are asked whether they are open, and what they cost
NUM_BEST_TO_COMPILE = 3  # of the configurations without a costly value, those that one may be added to
NUM_GREEDY = 20  # candidates expected to be the best that are asked the same
COST_POWER = 1.0  # of the seconds that a gain is divided by
RELIEF = 0.1  # gain with a side that costs nothing, from which on that side is worth a change
BELONGS = 0.3  # of what a knob may matter to a side: from there on it is a knob of that side


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the sampler makes use of; each can be left out, to see what it buys."""

    decomposition: bool = True
    memory: bool = True
    cost: bool = True
    stop: bool = True


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the study knows of configurations beside their trials.

    Attributes:
        active: takes the knobs that mean nothing beside the others out of a configuration.
        is_open: whether a configuration is new and fits what is left of the budget.
        may_win: whether nothing was found against a configuration since it was measured.
        expected_s: what a trial of it costs, seconds.
        costly: knobs whose values cost a compilation, with the value that does not.
        favoured: values that an expert would start with.
    """

    active: Callable[[Params], Params] = lambda params: params
    is_open: Callable[[Params], bool] = lambda _: True
    may_win: Callable[[Params], bool] = lambda _: True
    expected_s: Callable[[Params], float] = lambda _: 1.0
    costly: Mapping[str, Any] = field(default_factory=dict)
    favoured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A proposal of the sampler.

    Attributes:
        params: the configuration; {} leaves it to the fallback.
        why: one line.
        promise: gain over the best that is expected of the best candidate, a fraction; None unknown.
        is_fallback: whether another sampler proposes.
    """

    params: Params
    why: str
    promise: float | None = None
    is_fallback: bool = False


class RatesSampler(optuna.samplers.BaseSampler):
    """Proposes by what device rate, loader capacity and memory will be; see `Forecast` and `MemoryModel`.

    In turn: the change of one knob on the side that binds, a configuration drawn by its chance to be the best (Thompson), the
    change of one knob again, and the one expected to be the best. Gains count per second that a trial costs. Everything is read
    from the journal: trials that others added, that ran before or that run beside count as those it proposed itself.

    Where that cannot help (several objectives, no rates, another objective than the rate) TPE proposes, and that is said.

    Attributes:
        rules: what the study knows of configurations.
        parts: what it makes use of.
        is_exhausted: whether it found no configuration that may still be tried, the last time it was asked.

    Args:
        fallback: proposes where it cannot help.
        seed: makes proposals repeatable.
        distributions: what is searched; None for what the finished trials have in common.
        rules: what the study knows of configurations.
        parts: what to make use of.
    """

    def __init__(
        self,
        fallback: optuna.samplers.BaseSampler,
        *,
        seed: int | None = None,
        distributions: Mapping[str, BaseDistribution] | None = None,
        rules: Rules | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.rules, self.parts = rules or Rules(), parts or Parts()
        self._fallback = fallback
        self._rng = np.random.default_rng(seed)
        self._distributions = distributions
        self._shared_space = IntersectionSearchSpace()
        self._proposed: dict[int, Proposed] = {}
        self._num_unpromising = 0
        self.is_exhausted = False

    @property
    def has_nothing_more(self) -> bool:
        """Whether the last proposals promised nothing."""
        return self.parts.stop and self._num_unpromising >= STOP_AFTER

    def hope_again(self) -> None:
        """Forgets that the last proposals promised little: what they were compared with is out."""
        self._num_unpromising = 0

    def proposed(self, number: int) -> Proposed | None:
        """Returns what was proposed for a trial, by Optuna's number."""
        return self._proposed.get(number)

    # What Optuna calls ----------------------------------------------------------------------------------------------------

    def reseed_rng(self) -> None:
        """Draws otherwise from now on."""
        self._rng = np.random.default_rng()
        self._fallback.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Returns what is searched; where another sampler proposes, what it asks for."""
        if why := self._why_not(study):
            self._proposed[trial.number] = Proposed(params={}, why=f"TPE proposes: {why}", is_fallback=True)
            return self._fallback.infer_relative_search_space(study, trial)
        return dict(self._distributions or self._shared_space.calculate(study))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Returns the proposal's knobs."""
        if not self._why_not(study) and search_space:
            found = self._proposed[trial.number] = self._propose(study, trial, search_space)
            if not found.is_fallback:
                return dict(found.params)
        return self._fallback.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Returns a value for a knob that no proposal holds."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Tells the fallback."""
        self._fallback.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Tells the fallback."""
        self._fallback.after_trial(study, trial, state, values)

    # How it proposes ------------------------------------------------------------------------------------------------------

    def _why_not(self, study: optuna.Study) -> str:
        """Returns why this sampler cannot help; "" when it can."""
        if len(study.directions) > 1:
            return "several objectives"
        trials = [one for one in seen(study.get_trials(deepcopy=False)) if one.rate is not None]
        if not trials or study.direction is not StudyDirection.MAXIMIZE:
            return "no rates are known"
        ratios = [one.score / one.rate for one in trials if one.score and one.rate]
        if not ratios or max(ratios) > min(ratios) * 1.001:
            return "the objective is not the rate"
        return ""

    def _propose(self, study: optuna.Study, trial: FrozenTrial, distributions: Mapping[str, BaseDistribution]) -> Proposed:
        known = seen(study.get_trials(deepcopy=False), without=trial.number)
        known = [one for one in known if one.params.keys() <= distributions.keys()]
        machine = Machine.from_json(study.user_attrs.get(MACHINE) or {})
        coding = Coding(distributions, [one.params for one in known])
        forecast = self._forecast(coding, known, machine)
        step = _Step(
            coding=coding,
            forecast=forecast,
            memory=MemoryModel([one.peak for one in known], capacity_bytes=machine.memory_bytes) if self.parts.memory else None,
            known=known,
            rules=self.rules,
            parts=self.parts,
            rng=self._rng,
        )
        found = step.propose(turn=sum(one.rate is not None for one in known))
        self.is_exhausted = found is None
        if found is None:
            return Proposed(params={}, why="every configuration that may be tried is known", is_fallback=True)
        is_promising = found.promise is None or found.promise >= STOP_PROMISE
        self._num_unpromising = 0 if is_promising else self._num_unpromising + 1
        return found

    def _forecast(self, coding: Coding, known: Sequence[Seen], machine: Machine) -> Forecast:
        """Returns the forecast; what is under way counts as if it had come out as expected, so that others are tried."""
        forecast = self._fitting(coding, known, machine)
        if running := [one for one in known if one.is_running]:
            supposed = forecast.supposed([one.params for one in running])
            return self._fitted(coding, [*known, *supposed], machine, may_decompose=forecast.is_decomposed)
        return forecast

    def _fitting(self, coding: Coding, known: Sequence[Seen], machine: Machine) -> Forecast:
        """Returns the forecast from D and L, or from the rates by themselves where those say more of each other."""
        forecast = self._fitted(coding, known, machine, may_decompose=self.parts.decomposition)
        num_rates = sum(one.rate is not None for one in known)
        if not forecast.is_decomposed or num_rates < MIN_SPREAD_TRIALS or forecast.spread <= MAX_SPREAD:
            return forecast
        alone = self._fitted(coding, known, machine, may_decompose=False)
        return alone if alone.spread < forecast.spread else forecast

    def _fitted(self, coding: Coding, known: Sequence[Seen], machine: Machine, *, may_decompose: bool) -> Forecast:
        return Forecast(coding, known, machine, may_decompose=may_decompose, favoured=self.rules.favoured)


class _Step:
    """One proposal in the making."""

    def __init__(
        self,
        *,
        coding: Coding,
        forecast: Forecast,
        memory: MemoryModel | None,
        known: Sequence[Seen],
        rules: Rules,
        parts: Parts,
        rng: np.random.Generator,
    ) -> None:
        self._coding, self._forecast, self._memory, self._known = coding, forecast, memory, known
        self._rules, self._parts, self._rng = rules, parts, rng
        winners = [one for one in known if one.may_win and rules.may_win(one.params)]
        self._winners = winners or [one for one in known if one.rate is not None]
        self._tried = {configuration_key(one.params) for one in known}
        over = [one for one in known if not one.is_running]
        worked = [one.params for one in over if one.rate is not None or one.is_out]
        self._suspects = Suspects(worked, [one.params for one in over if one.rate is None and not one.is_out])

    def propose(self, *, turn: int) -> Proposed | None:
        """Returns the proposal of this turn; None when nothing that is considered is open."""
        tried = self._expected([one.params for one in self._winners])
        order = np.argsort(-tried.mean)
        best, sides = [self._winners[place].params for place in order], self._sides(tried, int(order[0]))
        considered = pool(self._coding, best, active=self._rules.active, rng=self._rng)
        candidates = [params for params in considered if self._may_try(params, best)]
        if not candidates:
            return None
        expected = self._expected([best[0], *candidates])
        works = np.array([self._suspects.chance(params) for params in candidates])
        gains = (np.exp(expected.draws[1:] - expected.draws[0]) - 1) * works[:, None]
        means = (np.exp(expected.mean[1:] - expected.mean[0]) - 1) * works
        hopes = np.maximum(gains, 0.0).mean(axis=1)
        ranked = dict.fromkeys([*np.argsort(-hopes)[:NUM_RANKED].tolist(), *np.argsort(-means)[:NUM_GREEDY].tolist()])
        places = [place for place in ranked if self._rules.is_open(candidates[place])]
        if not places:
            return None
        cost = {place: self._rules.expected_s(candidates[place]) ** COST_POWER if self._parts.cost else 1.0 for place in places}
        single = [place for place in places if _side_of(candidates[place], best[0], sides)]
        if turn % 2 == 0 and single:
            chosen = max(single, key=lambda place: hopes[place] / cost[place])
            lead = _side_of(candidates[chosen], best[0], sides)
        elif turn % 4 == 1:
            draw = int(self._rng.integers(NUM_DRAWS))
            chosen = max(places, key=lambda place: (max(gains[place, draw], 0.0) / cost[place], gains[place, draw]))
            lead = "may be better"
        else:
            chosen = max(places, key=lambda place: (max(means[place], 0.0) / cost[place], means[place]))
            lead = "most promising"
        why = f"{lead}: {explain.changes(best[0], candidates[chosen])}, {explain.gain(float(means[chosen]))}"
        return Proposed(params=candidates[chosen], why=why, promise=float(max(hopes[places])))

    def _expected(self, configurations: Sequence[Params]) -> Expected:
        return self._forecast.expected(self._coding.encode(configurations), num_draws=NUM_DRAWS, rng=self._rng)

    def _sides(self, expected: Expected, place: int) -> list[str]:
        """Returns the sides that a configuration would gain from if they cost nothing, the one that binds most first."""
        if not self._forecast.is_decomposed:
            return [ALL]
        relief = {LOADER: expected.device[place] - expected.mean[place], DEVICE: expected.loader[place] - expected.mean[place]}
        most = max(relief, key=lambda side: relief[side])
        return [most, *(side for side in relief if side != most and relief[side] >= RELIEF)]

    def _may_try(self, params: Params, best: Sequence[Params]) -> bool:
        if configuration_key(params) in self._tried or not self._suspects.chance(params):
            return False
        if self._memory and not self._memory.fits(params):
            return False
        return self._is_worth_compiling(params, best)

    def _is_worth_compiling(self, params: Params, best: Sequence[Params]) -> bool:
        """Whether a configuration costs no compilation, or is one of the best so far but for what is compiled."""
        costly = self._rules.costly
        if all(params.get(key, plain) == plain for key, plain in costly.items()):
            return True
        rest = {key: value for key, value in params.items() if key not in costly}
        bests = [{key: value for key, value in one.items() if key not in costly} for one in best[:NUM_BEST_TO_COMPILE]]
        return rest in bests


def _side_of(params: Params, best: Params, sides: Sequence[str]) -> str:
    """Returns what a change of one knob of the best is for: "loader-bound", "device-bound"; "" when it is no such change.

    Knobs that come or go with the one that is changed do not count.
    """
    keys = [key for key in params if key in best and params[key] != best[key]]
    if len(keys) != 1:
        return ""
    side = next((side for side in sides if scale(keys[0], side) >= BELONGS), "")
    return ("one change" if side == ALL else f"{side}-bound") if side else ""
