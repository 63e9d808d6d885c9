"""Collects candidates: all configurations of a small space, else configurations near the best and some random ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.search.rates.coding import Codes, Coding
from autotune.search.rates.failure_model import FailureModel, Proven, Value
from autotune.search.rates.history import Known, Seen
from autotune.search.rates.rules import Params

MAX_LISTED = 1500  # in spaces of at most this size, all configurations are considered
NUM_BEST = 5  # number of best configurations whose neighbours are considered
NUM_PAIRS, NUM_MIXED, NUM_RANDOM = 250, 100, 50  # numbers of two-knob changes, mixtures and random configurations, see `_near`
MAX_KNOWN = 20_000  # largest number of configurations for which `distinct` keeps its results; a proposal looks up hundreds


class Pool:
    """Candidate configurations of a search space, as codes from which `active` has removed the inactive knobs."""

    def __init__(self, coding: Coding, active: Callable[[Params], Params]) -> None:
        self._coding, self._active = coding, active
        self._known: dict[bytes, bytes] = {}  # {a configuration: the same without its inactive knobs}, both as codes
        self._codes_running = set[bytes]()
        self._begin(None)
        self._listed = self.distinct(coding.all_codes()) if coding.size <= MAX_LISTED else None

    def _begin(self, first: Seen | None) -> None:
        self._earliest = first
        # Number of `known.first.trials` that were read, and ids of the other trials that were read.
        self._num_read, self._read = 0, set[int]()
        self._tried, self._proven = set[bytes](), Proven()
        self._running: dict[int, tuple[Seen, bytes]] = {}

    def read(self, known: Known) -> None:
        """Reads the trials so far. Encodes only those that earlier calls have not read, since every proposal reads all trials.

        Trials are recognised by identity: for a trial that the last call has read, `known` must contain the same object.
        """
        if known.earliest is not self._earliest:  # trials of another study
            self._begin(known.earliest)
        first = known.first.trials
        others = [one for one in known.rest if not one.is_running]
        new = [one for one in (*first[min(self._num_read, len(first)) :], *others) if id(one) not in self._read]
        self._num_read, self._read = len(first), set(map(id, others))
        self._tried.update(self._bytes(new))
        for one in new:
            if one.rate is not None:
                self._proven.add(one.params)
        self._running = {id(one): self._running.get(id(one)) or (one, self._bytes([one])[0]) for one in known.running}
        self._codes_running = {code for _, code in self._running.values()}

    @property
    def proven(self) -> Proven:
        """Values, and pairs of values, that worked in the trials read so far."""
        return self._proven

    def failure_model(self, known: Known, failing: Collection[Value] = ()) -> FailureModel:
        """Returns the model of the failures in `known`, which `read` must have read; `failing`: values assumed to fail."""
        if failing:
            return FailureModel(self._proven, [one.suspected for one in known.failed], failing)
        return self._proven.model(len(known.failed), lambda: [one.suspected for one in known.failed])

    def are_new(self, codes: Codes) -> NDArray[np.bool_]:
        """Returns, for each configuration, whether it is new: neither tried nor running."""
        keys = [row.tobytes() for row in codes]
        return np.array([key not in self._tried and key not in self._codes_running for key in keys], dtype=bool)

    def _bytes(self, trials: Sequence[Seen]) -> list[bytes]:
        return [row.tobytes() for row in self._coding.encode([one.params for one in trials])]

    def candidates(self, best: Codes, failed: Codes, rng: np.random.Generator) -> Codes:
        """Returns distinct configurations: all of a small space, else those `_near` the best and `_next_to` the failed."""
        if self._listed is not None:
            return self._listed
        return self.distinct(np.vstack([_near(self._coding, best, rng), _next_to(self._coding, failed)]))

    def distinct(self, codes: Codes) -> Codes:
        """Returns the configurations without their inactive knobs, each only once."""
        if len(self._known) > MAX_KNOWN:
            self._known = {}
        found = dict.fromkeys(map(self._without_inactive, codes))
        return np.frombuffer(b"".join(found), dtype=np.int64).reshape(len(found), codes.shape[1])

    def _without_inactive(self, row: Codes) -> bytes:
        key = row.tobytes()
        if key not in self._known:
            params = self._coding.decode(row.tolist())
            active = self._active(params)
            self._known[key] = key if len(active) == len(params) else self._coding.encode([active]).tobytes()
        return self._known[key]


def _near(coding: Coding, best: Codes, rng: np.random.Generator) -> Codes:
    """Returns neighbours and mixtures of the best configurations, two-knob changes of the single best, and random ones.

    A mixture has each knob's level from a random one of the best. Then one of its knobs is set to a random level.
    """
    counts = np.array([len(knob.values) for knob in coding.knobs])
    random = rng.integers(0, counts, size=(NUM_RANDOM, len(counts)))
    if not len(best):
        return random
    tops, single = np.maximum(best[:NUM_BEST], 0), _next_to(coding, best[:NUM_BEST])
    mixed = tops[rng.integers(0, len(tops), size=(NUM_MIXED, len(counts))), np.arange(len(counts))]
    changed = rng.integers(0, counts.sum(), size=(NUM_PAIRS, 2))  # the first counts.sum() rows of `single` belong to the best
    first, second = single[changed[:, 0]], single[changed[:, 1]]
    pairs = np.where(first != tops[0], first, second)
    return np.vstack([single, pairs, _mutated(mixed, counts, rng), random])


def _next_to(coding: Coding, codes: Codes) -> Codes:
    """Returns the given configurations, and all those that differ from one of them in a single knob.

    An absent knob gets its first level, in case a change to another knob makes it active.
    """
    single = [
        _with(row, column, level)
        for row in np.maximum(codes, 0)
        for column, knob in enumerate(coding.knobs)
        for level in range(len(knob.values))
    ]
    return np.array(single, dtype=np.int64).reshape(len(single), codes.shape[1])


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
