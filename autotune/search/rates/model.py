"""Bayesian linear regression of a logarithm on the columns of `coding`: what is expected, how surely, and draws of it."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autotune.search.rates.coding import Array, Columns

USUAL = (0.3, 0.1, 0.03)  # spread that single knobs, pairs of them and noise give to a logarithm
FACTORS = ((0.4, 1.0, 2.5, 6.0), (0.4, 1.0, 2.5), (0.4, 1.0, 2.5, 6.0))  # of each that are tried: the most likely decide
DOUBT = 1.0  # how far from 1 the factors are expected to be, in natural logarithms: where the data do not tell, the usual holds
BIAS = 2.0  # spread of the level itself: next to unknown


class LinearModel:
    """A conjugate linear model y = level + effects + pairs + noise; weights have a normal prior of spread 1 times a factor.

    Args:
        columns: of what was measured, scaled by the prior spread of their weights.
        y: what was measured, logarithms.
        noise: each measurement's spread beside the others', 1 for an ordinary one.
        usual: expected spread of effects, of pairs and of measurements.
        level_spread: prior spread of the level round `prior_level`.
        prior_level: what y is about; None for the mean of what was measured.
    """

    def __init__(
        self,
        columns: Columns,
        y: Array,
        *,
        noise: Array | None = None,
        usual: tuple[float, float, float] = USUAL,
        level_spread: float = BIAS,
        prior_level: float | None = None,
    ) -> None:
        self._level = float(np.mean(y)) if prior_level is None else prior_level
        self._level_spread = level_spread
        self._y, relative = y - self._level, np.ones(len(y)) if noise is None else noise
        of_effects, of_pairs = columns.effects @ columns.effects.T, columns.pairs @ columns.pairs.T
        best = -np.inf
        tried = [[factor * own for factor in factors] for factors, own in zip(FACTORS, usual, strict=True)]
        for scales in itertools.product(*tried):
            noises = scales[2] * relative
            covariance = level_spread**2 + scales[0] ** 2 * of_effects + scales[1] ** 2 * of_pairs + np.diag(noises**2)
            lower = np.linalg.cholesky(covariance)
            solved = np.linalg.solve(lower, self._y)
            doubt = sum((math.log(scale / own) / DOUBT) ** 2 for scale, own in zip(scales, usual, strict=True))
            likelihood = -0.5 * (float(solved @ solved) + doubt) - float(np.log(np.diag(lower)).sum())
            if likelihood > best:
                best, self.scales, self._noises, self._lower = likelihood, scales, noises, lower
        self._columns = self._scaled(columns)

    def mean(self, columns: Columns) -> Array:
        """Returns what is expected of configurations."""
        return self._level + self._scaled(columns) @ (self._columns.T @ self._solve(self._y))

    def left_out_errors(self) -> Array:
        """Returns by how much each measurement misses what the others say of it (closed form of leaving one out)."""
        inverse = self._solve(np.eye(len(self._y)))
        return np.asarray(inverse @ self._y / np.diag(inverse))

    def draws(self, columns: Columns, *, num: int, rng: np.random.Generator) -> Array:
        """Returns what configurations may be worth: `num` functions drawn from what is known, a column each.

        A draw of the prior, corrected by what it gets wrong of the measurements (Matheron's rule): nothing larger than their
        number is ever solved for.
        """
        prior = rng.standard_normal((self._columns.shape[1], num))
        errors = self._noises[:, None] * rng.standard_normal((len(self._y), num))
        weights = prior + self._columns.T @ self._solve(self._y[:, None] - self._columns @ prior - errors)
        return self._level + self._scaled(columns) @ weights

    def _scaled(self, columns: Columns) -> Array:
        level = np.full((len(columns.effects), 1), self._level_spread)
        return np.hstack([level, columns.effects * self.scales[0], columns.pairs * self.scales[1]])

    def _solve(self, right: Array) -> Array:
        return np.asarray(np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, right)))
