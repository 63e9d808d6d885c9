"""Implements a sampler that proposes likely improvements.

From trials, it learns the device rate D, the loader's capacity L (both in samples per second) and the memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.plain_json import from_json
from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import Coding
from autotune.search.rates.forecast import MIN_DEVICE_RATES, MIN_DEVICE_RATES_RUNNING
from autotune.search.rates.history import MOST_TRIALS, History, Known, Seen
from autotune.search.rates.memory import MemoryModel, Peak
from autotune.search.rates.model import Scales
from autotune.search.rates.pool import Pool
from autotune.search.rates.regime import Machine
from autotune.search.rates.rules import Params, Rules, SamplerOptions
from autotune.search.rates.step import STOP_IMPROVEMENT, Proposed, Step
from autotune.search.rates.supposition import Supposition, supposition

MACHINE = "machine"  # user attribute of the study: `vars` of a Machine
MAX_SPREAD = 0.15  # if the forecast from D and L has a larger error, a model of the rates alone is tried
MIN_SPREAD_TRIALS = 8  # with fewer rates, a forecast's error says little
RESCALE_TIMES = 1.1  # the models' spreads are fitted again whenever the number of trials has grown by this factor
REFIT_TIMES = 1.01  # the memory model is fitted again once the number of trials has grown by this factor; see `_Recent`
# At most this many of the running trials are assumed to have ended: the time this takes grows with the square of their number.
MOST_SUPPOSED = 100
STOP_AFTER = 5  # the search ends after this many unpromising proposals in a row
DOUBTED = 3.0  # a rate this many standard deviations below its forecast is doubted: something else may have slowed the trial
MIN_DOUBTED = 0.1  # a doubted rate is at least this far below its forecast, in logarithms
MOST_EXAMINED = 5  # number of trials, those furthest below their forecast, that are forecast again from the other trials
KEPT = 100  # number of proposals that are kept
T = TypeVar("T")


class _Recent(Generic[T]):
    """A model that is fitted again after each trial; from 200 trials on, once their number has grown by REFIT_TIMES."""

    def __init__(self) -> None:
        self._model: T | None = None
        self._key: tuple[Any, ...] = ()
        self._num = 0

    def get(self, known: Known, fit: Callable[[], T], **key: Any) -> T:
        """Returns the model. Also fits it again if a trial has run out of memory since, or if anything in `key` has changed."""
        num, now = known.num_finished, (known.num_out, known.earliest, key)
        if self._model is None or now != self._key or not self._num <= num < max(self._num + 1, REFIT_TIMES * self._num - 1):
            self._model, self._num, self._key = fit(), num, now
        return self._model


class RatesSampler(optuna.samplers.BaseSampler):
    """Proposes configurations by their predicted device rate, loader capacity and memory; see `Forecast` and `MemoryModel`.

    Each proposal is the configuration with the largest expected gain over the best so far, weighed against the seconds that its
    trial takes and the chance that it runs out of memory. The prior is the usual gain of each knob. All trials are read from
    the journal, including running trials and trials that this sampler did not propose.

    If there are several objectives, no rates, or an objective that does not follow the rate, the fallback proposes, and its
    proposals say why. If D and L do not explain the rates, a model of the rates alone is used.

    Attributes:
        rules: what the study knows about configurations.
        options: which parts to use.
        is_exhausted: whether the last proposal found no configuration that may still be tried.
        is_held_back: whether the last proposal left out configurations because they may run out of memory.
        is_provisional: whether the last proposal was based on assumed results, because trials were running.

    Args:
        fallback: sampler that proposes when this one cannot.
        seed: makes proposals repeatable.
        distributions: the search space; None for the knobs that all finished trials have in common.
    """

    def __init__(
        self,
        fallback: optuna.samplers.BaseSampler,
        *,
        seed: int | None = None,
        distributions: Mapping[str, BaseDistribution] | None = None,
    ) -> None:
        self.rules, self.options = Rules(), SamplerOptions()
        self._fallback = fallback
        self._rng = np.random.default_rng(seed)
        self._distributions = distributions
        self._shared_space = IntersectionSearchSpace()
        self._proposed: dict[int, Proposed] = {}
        self._num_unpromising = 0
        self._num_over = 0  # number of finished trials at the last proposal
        self._history = History()
        self._levels: tuple[Any, ...] = ()
        # Spreads of the models, fitted when the study had `_num_scaled` trials.
        self._scales: dict[float, Mapping[str, Scales]] = {}
        self._num_scaled = 0
        self._pool: Pool | None = None
        self._last_coding: Coding | None = None
        self._memory_model: _Recent[MemoryModel] = _Recent()
        self._latest_forecast: _Recent[AveragedForecast] = _Recent()
        self._why_alone = self._told_alone = ""
        self._asked: tuple[int, str, Known] = -1, "", Known([])  # what `_read` returned for the last trial
        self.is_exhausted = self.is_held_back = self.is_provisional = False

    @property
    def has_nothing_more(self) -> bool:
        """Whether none of the last STOP_AFTER proposals had an expected improvement worth a trial."""
        return self.options.stop and self._num_unpromising >= STOP_AFTER

    def reconsider(self) -> None:
        """Resets the count of unpromising proposals, because the trial they were compared with was ruled out."""
        self._num_unpromising = 0

    def ask_again(self) -> None:
        """Allows one more proposal: earlier ones had to assume the results of running trials, and some of these have ended."""
        self._num_unpromising = min(self._num_unpromising, STOP_AFTER - 1)

    def proposed(self, number: int) -> Proposed | None:
        """Returns one of the last KEPT proposals, by Optuna's number of the trial; None if there is none."""
        return self._proposed.get(number)

    def may_fit(self, study: optuna.Study, params: Params) -> bool:
        """Whether a configuration is likely enough to fit the memory, judging by the study's trials."""
        return not self.options.memory or self._memory(self._history.seen(study), self._machine(study)).fits(params)

    def filling_batch(self, study: optuna.Study, params: Params, larger: Sequence[int]) -> int | None:
        """Returns the largest of some batch sizes that safely fits, see `MemoryModel.fills`; None without the memory model."""
        if not self.options.memory:
            return None
        return self._memory(self._history.seen(study), self._machine(study)).fills(params, larger)

    def log_rates(self, study: optuna.Study, configurations: Sequence[Params]) -> list[float] | None:
        """Returns the expected rates of configurations, in logarithms; None if not even the baseline's is known."""
        space = self._shared(study)
        known = self._history.seen(study).within(space.keys())
        if self._why_not(study) or not known.rated:
            return None
        coding = self._coding(space, known)
        forecast = AveragedForecast(
            coding,
            known.measured(most=MOST_TRIALS),
            self._machine(study),
            may_decompose=self.options.decomposition,
            min_device_rates=MIN_DEVICE_RATES_RUNNING,
            gains=self.rules.gains,
            spreads=self.rules.spreads,
        )
        means: list[float] = forecast.means(coding.encode([self.rules.active(one) for one in configurations])).mean.tolist()
        return means

    # Interface to Optuna --------------------------------------------------------------------------------------------------

    def reseed_rng(self) -> None:
        """Draws from a new random stream."""
        self._rng = np.random.default_rng()
        self._fallback.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Returns the search space, or the fallback's if the fallback proposes."""
        self._asked = self._read(study, trial)
        self.is_exhausted = self.is_held_back = False
        if why := self._asked[1]:
            self._keep(trial.number, Proposed(params={}, why=f"TPE proposes: {why}", is_fallback=True))
            return self._fallback.infer_relative_search_space(study, trial)
        return self._shared(study)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Returns the proposal's knobs."""
        _, why, known = self._asked if self._asked[0] == trial.number else self._read(study, trial)
        if not why and search_space:
            found = self._keep(trial.number, self._propose(study, known, search_space))
            if not found.is_fallback:
                return dict(found.params)
        return self._fallback.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Returns a value for a knob that is not in the proposal."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Forwards to the fallback."""
        self._fallback.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Forwards to the fallback."""
        self._fallback.after_trial(study, trial, state, values)

    # How it proposes ------------------------------------------------------------------------------------------------------

    def _keep(self, number: int, found: Proposed) -> Proposed:
        """Keeps a proposal until KEPT further proposals have been made."""
        self._proposed[number] = found
        if len(self._proposed) > KEPT:
            del self._proposed[next(iter(self._proposed))]
        return found

    def _read(self, study: optuna.Study, trial: FrozenTrial) -> tuple[int, str, Known]:
        """Returns a trial's number, why this sampler cannot propose it ("" if it can), and the other trials."""
        known = self._history.seen(study, without=trial.number)
        return trial.number, self._why_not(study), known

    def _why_not(self, study: optuna.Study) -> str:
        """Returns why this sampler cannot propose, judging by the trials that were read last; "" if it can."""
        if len(study.directions) > 1:
            return "several objectives"
        if not self._history.num_rates or study.direction is not StudyDirection.MAXIMIZE:
            return "no rates are known"
        ratios = self._history.ratios
        if ratios is None or ratios[1] > ratios[0] * 1.001:
            return "the objective is not the rate"
        return ""

    def _propose(self, study: optuna.Study, known: Known, distributions: Mapping[str, BaseDistribution]) -> Proposed:
        unseen = [Seen(params=params, is_running=True) for params in self.rules.running()]
        known, machine = known.plus(unseen).within(distributions.keys()), self._machine(study)
        if not known.rated:  # each rated trial has a knob that is not searched now
            return Proposed(params={}, why="TPE proposes: no rates are known for these knobs", is_fallback=True)
        coding = self._coding(distributions, known)
        memory = self._memory(known, machine) if self.options.memory else None
        supposed, forecast = self._supposed(coding, known, machine, memory)
        if memory and supposed and supposed.out:
            memory = _memory_model([*known.peaks, *(one.peak for one in supposed.out)], machine)
        step = Step(
            coding=coding,
            pool=self._pool_of(coding),
            forecast=forecast,
            memory=memory,
            known=known,
            supposed=supposed,
            rules=self.rules,
            options=self.options,
            rng=self._rng,
            is_on_gpu=not machine.is_cpu,
        )
        found = step.propose()
        self.is_exhausted, self.is_held_back = found is None, step.is_held_back
        if found is None:
            return Proposed(params={}, why="no configuration is left to try", is_fallback=True)
        if self._why_alone != self._told_alone:
            self._told_alone = self._why_alone
            basis = f"by the rates alone: {self._why_alone}" if self._why_alone else "by device and loader"
            found = replace(found, why=f"{found.why} (from now on {basis})")
        self._count(found, num_over=known.num_finished, is_provisional=supposed is not None)
        return found

    def _count(self, found: Proposed, *, num_over: int, is_provisional: bool) -> None:
        """Counts unpromising proposals in a row. While trials run, only the first proposal after a result counts."""
        if found.expected_improvement is None or found.expected_improvement >= STOP_IMPROVEMENT:
            self._num_unpromising = 0
        elif not is_provisional or num_over > self._num_over:
            self._num_unpromising += 1
        self._num_over, self.is_provisional = num_over, is_provisional

    def doubted(self, study: optuna.Study) -> Params | None:
        """Returns a configuration, measured once, that is far slower than the other trials suggest, and that may be the best.

        Load from a neighbour on a shared host can halve a rate unnoticed. Of several such configurations, the one with the
        highest forecast is returned; None if there is none.
        """
        space = self._shared(study)
        known = self._history.seen(study).within(space.keys()).rated
        if self._why_not(study) or len(known) < MIN_SPREAD_TRIALS:
            return None
        machine, coding = self._machine(study), self._coding(space, Known(known))
        codes = coding.encode([one.params for one in known])
        rates = np.log([one.rate or 1.0 for one in known])
        winners = [place for place, one in enumerate(known) if one.may_win and self.rules.may_win(one.params)]
        if not winners:
            return None
        means = self._fitting(coding, Known(known), machine).means(codes).mean
        times = Counter(map(bytes, codes))
        suspects = [place for place in winners if times[bytes(codes[place])] == 1 and rates[place] < max(rates[winners])]
        found: tuple[float, Params] | None = None
        for place in sorted(suspects, key=lambda place: rates[place] - means[place])[:MOST_EXAMINED]:
            others = self._fitting(coding, Known([*known[:place], *known[place + 1 :]]), machine)
            expected = others.expected(codes[[place]], codes[[place]])
            mean, spread = float(expected.mean[0]), math.hypot(float(expected.own_spread[0]), others.spread)
            is_far = mean - rates[place] > max(MIN_DOUBTED, DOUBTED * spread)
            if is_far and mean >= max(rates[winners]) and (found is None or mean > found[0]):
                found = mean, known[place].params
        return None if found is None else found[1]

    def _shared(self, study: optuna.Study) -> dict[str, BaseDistribution]:
        return dict(self._distributions or self._shared_space.calculate(study))

    def _coding(self, distributions: Mapping[str, BaseDistribution], known: Known) -> Coding:
        best = next((one.params for one in known.fastest() if one.may_win), None)
        coding = Coding(distributions, known.values, self.rules.ladders, best)
        if self._last_coding is None or coding.levels != self._last_coding.levels:  # else reuse the last one with its tables
            self._last_coding = coding
        return self._last_coding

    def _pool_of(self, coding: Coding) -> Pool:
        """Returns the pool of candidates of a space. Reuses the last pool and its caches unless the levels have changed."""
        if coding.levels != self._levels:
            self._levels, self._pool = coding.levels, Pool(coding, self.rules.active)
        assert self._pool is not None
        return self._pool

    def _machine(self, study: optuna.Study) -> Machine:
        return from_json(study.user_attrs.get(MACHINE) or {}, Machine)

    def _memory(self, known: Known, machine: Machine) -> MemoryModel:
        return self._memory_model.get(known, lambda: _memory_model(known.peaks, machine), machine=machine)

    def _supposed(
        self, coding: Coding, known: Known, machine: Machine, memory: MemoryModel | None
    ) -> tuple[Supposition | None, AveragedForecast]:
        """Returns how running trials are assumed to end (None if none runs), and the forecast from all trials."""
        if not known.running:
            return None, self._fitting(coding, known, machine)
        # Until another trial finishes, all proposals share the forecast from the finished trials.
        finished = self._latest_forecast.get(
            known,
            lambda: self._fitting(coding, known, machine),
            levels=coding.levels,
            machine=machine,
            num_finished=known.num_finished,
            num_scaled=self._num_scaled,
        )
        pool = self._pool_of(coding)
        pool.read(known)
        found = supposition([one.params for one in known.running], coding, memory, pool.proven, self._rng)
        if not found.working:
            return found, finished
        working = _spaced(found.working, MOST_SUPPOSED)
        found, codes = replace(found, working=working), coding.encode(working)
        if self._is_due(len(known) + len(working)):  # fits the models' spreads again, to the assumed results as well
            more, is_decomposed = finished.supposed(working, codes), finished.is_decomposed
            return found, self._fitted(coding, known, machine, supposed=more, may_decompose=is_decomposed)
        return found, finished.conditioned(codes)

    def _is_due(self, num: int) -> bool:
        """Whether the spreads of the models have to be found again, for this number of trials."""
        return num >= RESCALE_TIMES * self._num_scaled

    def _fitting(self, coding: Coding, known: Known, machine: Machine) -> AveragedForecast:
        """Returns the forecast from D and L, or from the rates alone if too little is known of D and L.

        If the forecast from D and L has a large error, it is replaced by one from the rates alone that has a smaller error.
        """
        forecast = self._fitted(coding, known, machine, may_decompose=self.options.decomposition)
        if not forecast.is_decomposed:
            is_wanted = self.options.decomposition
            self._why_alone = "too little is known of device and loader" if is_wanted else "search.decomposition=false"
            return forecast
        self._why_alone = ""
        if len(known.rated) < MIN_SPREAD_TRIALS or forecast.spread <= MAX_SPREAD:
            return forecast
        alone = self._fitted(coding, known, machine, may_decompose=False)
        if alone.spread >= forecast.spread:
            return forecast
        self._why_alone = "device and loader do not explain them"
        return alone

    def _fitted(
        self, coding: Coding, known: Known, machine: Machine, *, may_decompose: bool, supposed: Sequence[Seen] = ()
    ) -> AveragedForecast:
        num = len(known) + len(supposed)
        is_due = self._is_due(num)
        fitted = AveragedForecast(
            coding,
            known.measured(supposed, most=MOST_TRIALS),
            machine,
            may_decompose=may_decompose,
            min_device_rates=MIN_DEVICE_RATES_RUNNING if known.running else MIN_DEVICE_RATES,
            gains=self.rules.gains,
            spreads=self.rules.spreads,
            scales=None if is_due else self._scales,
        )
        if is_due:
            self._num_scaled, self._scales = num, {}
        for waiting, found in fitted.scales.items():
            self._scales[waiting] = {**self._scales.get(waiting, {}), **found}
        return fitted


def _spaced(some: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` items of a sequence, evenly spaced."""
    return [some[place * len(some) // most] for place in range(most)] if len(some) > most else list(some)


def _memory_model(peaks: Sequence[Peak], machine: Machine) -> MemoryModel:
    return MemoryModel(peaks, capacity_bytes=machine.memory_bytes, is_cpu=machine.is_cpu)
