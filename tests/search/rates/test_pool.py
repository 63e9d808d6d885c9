"""The candidates of a space that is too large to list."""

import numpy as np
from optuna.distributions import CategoricalDistribution

from autotune.search.rates.coding import Coding
from autotune.search.rates.pool import MAX_LISTED, Pool

SPACE = {f"k{number}": CategoricalDistribution([0, 1, 2, 3]) for number in range(7)}


def rows(codes):
    return {tuple(row) for row in codes.tolist()}


def test_all_neighbours_of_a_failed_configuration_are_candidates():
    coding = Coding(SPACE)
    assert coding.size > MAX_LISTED
    best, failed = np.zeros((1, 7), dtype=np.int64), np.full((1, 7), 3, dtype=np.int64)
    pool = Pool(coding, lambda params: params)
    without = rows(pool.candidates(best, failed[:0], np.random.default_rng(0)))
    beside = rows(pool.candidates(best, failed, np.random.default_rng(0)))
    neighbours = {tuple(3 if other != place else level for other in range(7)) for place in range(7) for level in range(4)}
    assert beside == without | neighbours
    assert not neighbours <= without
