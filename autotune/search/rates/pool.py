"""Collects candidate configurations: all of a small space, otherwise those near the best and some random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.search.rates.coding import Codes, Coding
from autotune.search.rates.rules import Params

MAX_LISTED = 3000  # size of the largest space whose configurations are all considered
NUM_BEST = 5  # configurations whose neighbours are considered
NUM_PAIRS, NUM_MIXED, NUM_RANDOM = 800, 400, 400


def pool(
    coding: Coding, best: Sequence[Params], *, active: Callable[[Params], Params], rng: np.random.Generator
) -> list[Params]:
    """Returns distinct configurations without inactive knobs.

    Args:
        coding: the levels.
        best: tried configurations, the best first.
        active: removes inactive knobs from a configuration.
        rng: for spaces too large to list.
    """
    codes = coding.all_codes() if coding.size <= MAX_LISTED else _near(coding, best, rng)
    found = {configuration_key(params): params for params in (active(coding.decode(row)) for row in codes.tolist())}
    return list(found.values())


def configuration_key(params: Params) -> frozenset[Any]:
    """Returns the identity of a configuration."""
    return frozenset((key, isinstance(value, bool), value) for key, value in params.items())


def _near(coding: Coding, best: Sequence[Params], rng: np.random.Generator) -> Codes:
    """Returns neighbours of the best, two-knob changes of the very best, mixtures of the best, and random configurations."""
    counts = np.array([len(knob.values) for knob in coding.knobs])
    random = rng.integers(0, counts, size=(NUM_RANDOM, len(counts)))
    if not best:
        return random
    # An absent knob gets its first level, in case a change to another knob makes it active.
    tops = np.maximum(coding.encode(best[:NUM_BEST]), 0)
    single = [_with(top, column, level) for top in tops for column, count in enumerate(counts) for level in range(count)]
    mixed = tops[rng.integers(0, len(tops), size=(NUM_MIXED, len(counts))), np.arange(len(counts))]
    ones = np.array([_with(tops[0], column, level) for column, count in enumerate(counts) for level in range(count)])
    changed = rng.integers(0, len(ones), size=(NUM_PAIRS, 2))
    first, second = ones[changed[:, 0]], ones[changed[:, 1]]
    pairs = np.where(first != tops[0], first, second)
    return np.vstack([np.array(single), pairs, _mutated(mixed, counts, rng), random])


def _mutated(codes: Codes, counts: Codes, rng: np.random.Generator) -> Codes:
    """Returns the configurations, each with one random knob set to a random level."""
    column = rng.integers(0, len(counts), size=len(codes))
    codes = codes.copy()
    codes[np.arange(len(codes)), column] = rng.integers(0, counts[column])
    return codes


def _with(row: Codes, column: int, level: int) -> Codes:
    changed = row.copy()
    changed[column] = level
    return changed
