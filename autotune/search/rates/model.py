"""Implements Bayesian linear regression of a logarithm on single knobs and pairs of knobs, in its kernel form."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

from autotune.search.rates.coding import Array, Features

USUAL = (0.3, 0.1, 0.03)  # usual spreads (standard deviations) of a logarithm due to single knobs, pairs of knobs, and noise
# To find likely spreads, each spread in USUAL is multiplied by each factor in its row.
FACTORS = (
    (0.4, 1.0, 2.5, 6.0),
    (0.4, 1.0, 2.5),
    (0.4, 1.0, 2.5, 6.0),
)
DOUBT = 1.0  # prior spread of the factors' natural logarithms, whose prior mean is 0
BIAS = 2.0  # prior spread of the level, the model's constant; large, because the level is almost unknown
JITTER = 1e-9  # added to each variance, so that the Cholesky factor exists

Scales = tuple[float, float, float]  # spreads of effects, of pairs, and of measurements


class LinearModel:
    """A conjugate linear model y = level + effects + pairs + noise, in which weights are normal with mean 0.

    It computes only inner products of configurations, never the weights. So its cost grows with the number of measurements,
    not with the thousands of pairs (Rasmussen & Williams, Gaussian Processes, 2.1).

    Attributes:
        scales: the spreads in use.
        evidence: logarithm of the marginal likelihood of the measurements, up to a constant.

    Args:
        features: features of the measured configurations.
        y: the measurements, in logarithms.
        noise: relative spread of each measurement, 1 for an ordinary one.
        usual: expected spreads of effects, of pairs and of measurements.
        level_spread: prior spread of the level around `prior_level`.
        prior_level: prior mean of the level; None for the mean of y.
        scales: spreads to use; None to find likely ones.
    """

    def __init__(
        self,
        features: Features,
        y: Array,
        *,
        noise: Array | None = None,
        usual: Scales = USUAL,
        level_spread: float = BIAS,
        prior_level: float | None = None,
        scales: Scales | None = None,
    ) -> None:
        self._features, self._level_spread = features, level_spread
        self._latest_known: tuple[Features, Array] | None = None
        self._latest_spread: tuple[Features, Array] | None = None
        self._level = float(np.mean(y)) if prior_level is None else prior_level
        self._y, relative = y - self._level, np.ones(len(y)) if noise is None else noise
        own = features.products(features)
        self.scales = scales or self._likely(own, relative, usual)
        self._lower = self._factored(own, self.scales, relative)
        self._solved = cho_solve((self._lower, True), self._y, check_finite=False)
        self.evidence = -0.5 * float(self._y @ self._solved) - float(np.log(np.diag(self._lower)).sum())

    def _factored(self, own: tuple[Array, Array], scales: Scales, relative: Array) -> Array:
        """Returns the Cholesky factor of the measurements' covariance; `own` are the `products` of their features."""
        covariance = self._level_spread**2 + scales[0] ** 2 * own[0] + scales[1] ** 2 * own[1]
        return np.asarray(cholesky(covariance + np.diag((scales[2] * relative) ** 2 + JITTER), lower=True, check_finite=False))

    def _likely(self, own: tuple[Array, Array], relative: Array, usual: Scales) -> Scales:
        """Returns the posterior root mean squares of the spreads of effects and pairs, and the most likely spread of noise.

        After a few trials, the most likely spreads are too small: with them, only three in four 90 % intervals held the truth.
        """
        grid, weights = [], []
        for factors in itertools.product(*FACTORS):
            scales = (factors[0] * usual[0], factors[1] * usual[1], factors[2] * usual[2])
            lower = self._factored(own, scales, relative)
            solved = solve_triangular(lower, self._y, lower=True, check_finite=False)
            doubt = sum((math.log(factor) / DOUBT) ** 2 for factor in factors)
            weights.append(-0.5 * (float(solved @ solved) + doubt) - float(np.log(np.diag(lower)).sum()))
            grid.append(scales)
        shares = np.exp(np.array(weights) - max(weights))
        effects, pairs, _ = np.sqrt(shares @ np.square(grid) / shares.sum()).tolist()
        return effects, pairs, grid[int(np.argmax(weights))][2]

    def conditioned(self, features: Features, noise: Array) -> LinearModel:
        """Returns the model after more measurements that are all as expected: means stay, variances fall.

        This takes less time than a new fit, because the Cholesky factor only gets more rows.

        Args:
            features: features of the configurations.
            noise: relative spread of each measurement, 1 for an ordinary one.
        """
        if not len(noise):
            return self
        explained = self._spread(features)
        left = self._covariance(features, features) - explained.T @ explained
        corner = cholesky(left + np.diag((self.scales[2] * noise) ** 2 + JITTER), lower=True, check_finite=False)
        found = copy.copy(self)
        found._lower = np.block([[self._lower, np.zeros_like(explained)], [explained.T, corner]])
        found._y = np.concatenate([self._y, self.mean(features) - self._level])
        found._solved = np.concatenate([self._solved, np.zeros(len(noise))])
        found._features, found._latest_known, found._latest_spread = self._features.plus(features), None, None
        return found

    def mean(self, features: Features) -> Array:
        """Returns the posterior means of configurations."""
        return np.asarray(self._level + self._known(features).T @ self._solved)

    def variances(self, features: Features, beside: Features) -> tuple[Array, Array, float]:
        """Returns posterior variances, covariances with `beside` (a single row), and the variance of `beside`."""
        spread = self._spread(features)
        other = self._spread(beside)[:, 0]
        effects, interactions = features.norms()
        prior = self._level_spread**2 + self.scales[0] ** 2 * effects + self.scales[1] ** 2 * interactions
        covariances = self._covariance(features, beside)[:, 0] - spread.T @ other
        own = float(self._covariance(beside, beside)[0, 0] - other @ other)
        return np.maximum(prior - np.einsum("ij,ij->j", spread, spread), 0.0), covariances, max(own, 0.0)

    def draws(self, features: Features, *, num: int, rng: np.random.Generator) -> Array:
        """Returns `num` joint posterior samples, one per column. For at most a few hundred configurations."""
        spread = self._spread(features)
        covariance = self._covariance(features, features) - spread.T @ spread
        values, vectors = np.linalg.eigh(covariance)
        noise = vectors * np.sqrt(np.maximum(values, 0.0)) @ rng.standard_normal((len(values), num))
        return np.asarray(self.mean(features)[:, None] + noise)

    def left_out_errors(self) -> Array:
        """Returns each measurement minus its prediction from all other measurements, in closed form."""
        inverse = cho_solve((self._lower, True), np.eye(len(self._y)), check_finite=False)
        return np.asarray(self._solved / np.diag(inverse))

    def _covariance(self, one: Features, other: Features) -> Array:
        """Returns the prior covariances of configurations."""
        effects, interactions = one.products(other)
        found = self.scales[0] ** 2 * effects
        found += self._level_spread**2  # in place, as in `Features.of_interactions`
        found += self.scales[1] ** 2 * interactions
        return found

    def _spread(self, features: Features) -> Array:
        """Returns a column for each configuration. The column's sum of squares is the prior variance that measurements explain.

        Keeps the latest result if it is for more than one configuration, since forecasts share models.
        """
        if self._latest_spread and self._latest_spread[0] is features:
            return self._latest_spread[1]
        found = np.asarray(solve_triangular(self._lower, self._known(features), lower=True, check_finite=False))
        if len(features.effects) > 1:
            self._latest_spread = features, found
        return found

    def _known(self, features: Features) -> Array:
        """Returns the prior covariances of the measurements and configurations. Keeps the latest, as `_spread` does."""
        if self._latest_known and self._latest_known[0] is features:
            return self._latest_known[1]
        found = self._covariance(self._features, features)
        if len(features.effects) > 1:
            self._latest_known = features, found
        return found
