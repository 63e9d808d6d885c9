"""Makes samplers by name. The study loop only knows `optuna.samplers.BaseSampler`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.errors import BadInput, one_of
from autotune.search.rates import RatesSampler
from autotune.search.rates.coding import doublings

NUM_STARTUP_TRIALS = 6  # Optuna's default is 10; fewer random trials are needed here, because the study adds trials of its own
MAX_GRID_POINTS = 100_000
# Number of seeds that NumPy accepts. A study adds its number of trials to `study.seed`, so the sum may be too large.
SEEDS = 2**32
Distributions = Mapping[str, BaseDistribution]


class CompleteGrid(optuna.samplers.GridSampler):
    """Adapts Optuna's grid sampler to ask and tell: the original calls `Study.stop`, which raises outside `optimize`."""

    def after_trial(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        state: optuna.trial.TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Does nothing: the study loop checks `is_exhausted` instead."""


def make_sampler(name: str, *, seed: int, distributions: Distributions) -> optuna.samplers.BaseSampler:
    """Returns the sampler of SAMPLERS with a given name, for the search space `distributions`.

    Raises:
        BadInput: no such sampler, or a grid too large to list.
    """
    if name not in SAMPLERS:
        raise BadInput(f"search.sampler: no such sampler, got {name!r}. {one_of(name, SAMPLERS)}")
    return SAMPLERS[name](seed % SEEDS, distributions)


def _tpe(seed: int, _: Distributions) -> optuna.samplers.BaseSampler:
    # `multivariate` and `constant_liar` are Optuna 5's defaults for one objective. They are set explicitly because the search
    # relies on them. `group` is off: it is experimental and meant for conditional knobs, and here only one or two knobs are
    # conditional. TPE samples conditional knobs independently and logs a line about it, which `begin_study` silences.
    return optuna.samplers.TPESampler(
        seed=seed,
        n_startup_trials=NUM_STARTUP_TRIALS,
        multivariate=True,
        constant_liar=True,
    )


def _rates(seed: int, distributions: Distributions) -> optuna.samplers.BaseSampler:
    return RatesSampler(_tpe(seed, distributions), seed=seed, distributions=distributions)


def _gp(seed: int, _: Distributions) -> optuna.samplers.BaseSampler:
    if importlib.util.find_spec("torch") is None:  # find_spec does not import torch, which would be slow
        raise BadInput(
            "search.sampler: needs torch, which is missing in autotune's environment, got 'gp'. "
            "Install it (pip install torch), or use search.sampler=rates."
        )
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=NUM_STARTUP_TRIALS, deterministic_objective=False)


def _grid(seed: int, distributions: Distributions) -> optuna.samplers.BaseSampler:
    return CompleteGrid(checked_grid(distributions), seed=seed)


def checked_grid(distributions: Distributions) -> dict[str, list[Any]]:
    """Returns knob key -> values that a grid visits.

    Raises:
        BadInput: the grid is too large to list.
    """
    levels = {key: grid_levels(distribution) for key, distribution in distributions.items()}
    if (size := math.prod(map(len, levels.values()))) > MAX_GRID_POINTS:
        raise BadInput(
            f"search.sampler: a grid over this search space has {size:,} points, got 'grid'. At most {MAX_GRID_POINTS:,}. "
            "Pin knobs, narrow their domains, or use search.sampler=tpe."
        )
    return levels


SAMPLERS: dict[str, Callable[[int, Distributions], optuna.samplers.BaseSampler]] = {
    "rates": _rates,
    "tpe": _tpe,
    "gp": _gp,
    "random": lambda seed, _: optuna.samplers.RandomSampler(seed=seed),
    "grid": _grid,
}


def grid_levels(distribution: BaseDistribution) -> list[Any]:
    """Returns the values that a grid visits: every choice or integer; on a log scale from 1 to 12: 1, 2, 4, 8 and 12."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution)  # domains are choices and intervals of whole numbers
    if distribution.log:
        return doublings(distribution.low, distribution.high)
    return list(range(distribution.low, distribution.high + 1, distribution.step))
