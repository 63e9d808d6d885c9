"""Implements Bayesian linear regression of a logarithm on the columns of `coding`: posterior means and samples."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autotune.search.rates.coding import Array, Columns

USUAL = (0.3, 0.1, 0.03)  # usual spread of a logarithm by single knobs, pairs of knobs, and noise
FACTORS = ((0.4, 1.0, 2.5, 6.0), (0.4, 1.0, 2.5), (0.4, 1.0, 2.5, 6.0))  # of each spread to try; the most likely are used
DOUBT = 1.0  # prior spread of the factors' natural logarithms: without evidence, the usual spreads hold
BIAS = 2.0  # prior spread of the level, which is almost unknown


class LinearModel:
    """A conjugate linear model y = level + effects + pairs + noise; weights have a normal prior of spread 1 times a factor.

    Columns stay unscaled and weights are scaled instead, because thousands of candidates have over a thousand columns each.

    Args:
        columns: of the measured configurations.
        y: the measurements, in logarithms.
        scale: one row of factors for all columns; None for 1.
        noise: relative spread of each measurement, 1 for an ordinary one.
        usual: expected spreads of effects, of pairs and of measurements.
        level_spread: prior spread of the level round `prior_level`.
        prior_level: prior mean of the level; None for the mean of y.
    """

    def __init__(
        self,
        columns: Columns,
        y: Array,
        *,
        scale: Columns | None = None,
        noise: Array | None = None,
        usual: tuple[float, float, float] = USUAL,
        level_spread: float = BIAS,
        prior_level: float | None = None,
    ) -> None:
        self._level = float(np.mean(y)) if prior_level is None else prior_level
        self._y, relative = y - self._level, np.ones(len(y)) if noise is None else noise
        scale = scale or Columns(np.ones((1, columns.effects.shape[1])), np.ones((1, columns.pairs.shape[1])))
        own = columns * scale
        of_effects, of_pairs = own.effects @ own.effects.T, own.pairs @ own.pairs.T
        tried = [[factor * one for factor in factors] for factors, one in zip(FACTORS, usual, strict=True)]
        noises = np.outer(tried[2], relative)
        best = -np.inf
        for effects, pairs in itertools.product(*tried[:2]):  # all spreads of the noise at once
            covariance = level_spread**2 + effects**2 * of_effects + pairs**2 * of_pairs + _diagonals(noises**2)
            lowers = np.linalg.cholesky(covariance)
            solved = np.linalg.solve(lowers, np.broadcast_to(self._y[:, None], (len(noises), len(y), 1)))[:, :, 0]
            scales = [(effects, pairs, one) for one in tried[2]]
            doubt = [sum((math.log(one / own) / DOUBT) ** 2 for one, own in zip(s, usual, strict=True)) for s in scales]
            determinants = np.log(np.diagonal(lowers, axis1=1, axis2=2)).sum(axis=1)
            likelihoods = -0.5 * ((solved**2).sum(axis=1) + np.array(doubt)) - determinants
            top = int(np.argmax(likelihoods))
            if likelihoods[top] > best:
                best, self.scales = likelihoods[top], scales[top]
                self._noises, self._lower = noises[top], lowers[top]
        spread = [[level_spread], self.scales[0] * scale.effects[0], self.scales[1] * scale.pairs[0]]
        self._spread = np.concatenate(spread)
        self._columns = np.hstack([np.ones((len(y), 1)), columns.effects, columns.pairs]) * self._spread

    def mean(self, columns: Columns) -> Array:
        """Returns the posterior means of configurations."""
        return self._worth(columns, self._columns.T @ self._solve(self._y))

    def left_out_errors(self) -> Array:
        """Returns the leave-one-out error of each measurement, in closed form."""
        inverse = self._solve(np.eye(len(self._y)))
        return np.asarray(inverse @ self._y / np.diag(inverse))

    def draws(self, columns: Columns, *, num: int, rng: np.random.Generator) -> Array:
        """Returns `num` posterior samples for configurations, a column each.

        Each is a prior sample corrected by its errors on the measurements (Matheron's rule), so that no system larger than
        the number of measurements is solved.
        """
        prior = rng.standard_normal((self._columns.shape[1], num))
        errors = self._noises[:, None] * rng.standard_normal((len(self._y), num))
        weights = prior + self._columns.T @ self._solve(self._y[:, None] - self._columns @ prior - errors)
        return self._worth(columns, weights)

    def _worth(self, columns: Columns, weights: Array) -> Array:
        level, effects, pairs = np.split((weights.T * self._spread).T, [1, 1 + columns.effects.shape[1]])
        return np.asarray(self._level + level[0] + columns.effects @ effects + columns.pairs @ pairs)

    def _solve(self, right: Array) -> Array:
        return np.asarray(np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, right)))


def _diagonals(rows: Array) -> Array:
    """Returns a diagonal matrix for each row."""
    return np.asarray(rows[:, :, None] * np.eye(rows.shape[1]))
