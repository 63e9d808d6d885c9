"""Collects candidates: all configurations of a small space, else configurations near the best and some random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.search.rates.coding import Codes, Coding
from autotune.search.rates.history import Seen
from autotune.search.rates.rules import Params

MAX_LISTED = 1500  # in spaces of at most this size, all configurations are considered
NUM_BEST = 5  # number of best configurations whose neighbours are considered
NUM_PAIRS, NUM_MIXED, NUM_RANDOM = 250, 100, 50


class Pool:
    """Candidates of a search space, as codes without inactive knobs, which `active` removes."""

    def __init__(self, coding: Coding, active: Callable[[Params], Params]) -> None:
        self._coding, self._active = coding, active
        self._known: dict[bytes, Codes] = {}
        self._tried: dict[tuple[tuple[str, Any], ...], bytes] = {}
        self._listed = self.distinct(coding.all_codes()) if coding.size <= MAX_LISTED else None

    def tried(self, known: Sequence[Seen]) -> set[bytes]:
        """Returns the bytes of the codes of trials. Each is encoded only once: every proposal needs those of all trials."""
        new = {one.items: one.params for one in known if one.items not in self._tried}
        rows = self._coding.encode(list(new.values()))
        self._tried.update(zip(new, (row.tobytes() for row in rows), strict=True))
        return {self._tried[one.items] for one in known}

    def candidates(self, best: Codes, rng: np.random.Generator) -> Codes:
        """Returns distinct configurations. In a space too large to list, they are drawn near those in `best`."""
        return self._listed if self._listed is not None else self.distinct(_near(self._coding, best, rng))

    def distinct(self, codes: Codes) -> Codes:
        """Returns the configurations that are still distinct without their inactive knobs."""
        found: dict[bytes, Codes] = {}
        for row in codes:
            key = row.tobytes()
            if key not in self._known:
                (own,) = self._coding.encode([self._active(self._coding.decode(row.tolist()))])
                self._known[key] = own
            own = self._known[key]
            found[own.tobytes()] = own
        return np.array(list(found.values()), dtype=np.int64).reshape(len(found), codes.shape[1])


def _near(coding: Coding, best: Codes, rng: np.random.Generator) -> Codes:
    """Returns neighbours and mixtures of the best configurations, two-knob changes of the single best, and random ones."""
    counts = np.array([len(knob.values) for knob in coding.knobs])
    random = rng.integers(0, counts, size=(NUM_RANDOM, len(counts)))
    if not len(best):
        return random
    # An absent knob gets its first level, in case a change to another knob makes it active.
    tops = np.maximum(best[:NUM_BEST], 0)
    single = np.array(
        [_with(top, column, level) for top in tops for column, count in enumerate(counts) for level in range(count)]
    )
    mixed = tops[rng.integers(0, len(tops), size=(NUM_MIXED, len(counts))), np.arange(len(counts))]
    changed = rng.integers(0, counts.sum(), size=(NUM_PAIRS, 2))  # the first changes in `single` are to the best
    first, second = single[changed[:, 0]], single[changed[:, 1]]
    pairs = np.where(first != tops[0], first, second)
    return np.vstack([single, pairs, _mutated(mixed, counts, rng), random])


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
