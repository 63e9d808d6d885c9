"""Assumes how running trials will end, so that the next proposal complements them.

Without assumed results, proposals for several free slots would be small changes of one configuration. So each running trial is
assumed to end as forecast, and the best configuration so far may be one that is still running. An assumed result leaves the
expected rates as they are, and only makes them more certain. So nothing has to be fitted again (see `LinearModel.conditioned`).

One wrong forecast must not spoil a whole batch. So a trial that may run out of memory is assumed to run out of it. And for each
proposal, a few values with which no trial has worked yet are drawn at random, and assumed to make programs fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.rates.coding import Coding
from autotune.search.rates.failure_model import Proven, Value, values_of
from autotune.search.rates.history import Seen
from autotune.search.rates.memory import MemoryModel
from autotune.search.rates.rules import Params

# Chance that a value makes programs fail if no finished trial has worked with it. With 0.1, most proposals would assume a
# failing value, and too few would combine all changes that are expected to help.
FAILS_CHANCE = 0.03


@dataclass(frozen=True, kw_only=True)
class Supposition:
    """How the running trials are assumed to end.

    Attributes:
        working: configurations that are assumed to work, at the rates that are forecast for them.
        out: trials that are assumed to run out of memory.
        failing: values that are assumed to make programs fail.
    """

    working: Sequence[Params]
    out: Sequence[Seen]
    failing: frozenset[Value]


def supposition(
    running: Sequence[Params],
    coding: Coding,
    memory: MemoryModel | None,
    proven: Proven,
    rng: np.random.Generator,
) -> Supposition:
    """Returns how running trials are assumed to end.

    Args:
        running: configurations of the running trials.
        coding: the levels of the knobs.
        memory: predicts whether they fit the memory; None to ignore memory.
        proven: values that worked.
        rng: draws the values that are assumed to fail.
    """
    failing = _failing(running, coding, proven, rng)
    do_fit = [True] * len(running) if memory is None else memory.fitting(running)
    fitting = list(itertools.compress(running, do_fit))
    return Supposition(
        working=[one for one in fitting if failing.isdisjoint(values_of(one))] if failing else fitting,
        out=[Seen(params=params, is_out=True) for params, fits in zip(running, do_fit, strict=True) if not fits],
        failing=failing,
    )


def _failing(running: Sequence[Params], coding: Coding, proven: Proven, rng: np.random.Generator) -> frozenset[Value]:
    """Draws values that are assumed to fail, from the running trials' values with which no trial has worked yet.

    Values of numeric knobs are never drawn: they are assumed to fail only by running out of memory.
    """
    numbers = {knob.key for knob in coding.knobs if knob.is_ordered}
    met = {value for params in running for value in values_of(params) if value[0] not in numbers}
    return frozenset(value for value in sorted(met - proven.values, key=repr) if rng.random() < FAILS_CHANCE)
