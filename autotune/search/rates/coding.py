"""Encodes configurations as numbers: the levels of each knob, and the columns for linear models of rates.

A knob's levels are its listed values, or a few values along its range, with more of them around the best value. All columns of
an absent (inactive) knob are 0. Numeric levels are coded cumulatively: each column is the step from one level to the next. So
neighbouring levels get similar effects, and the curve can have any shape. A ladder such as compile.mode, in which each mode
includes the previous one, is coded in the same way. Other knobs have one column for each value except the first. Each pair of
knobs also has the products of their columns, so that the model can learn which values help or hinder each other. There are
thousands of such columns, but a model needs only the inner products of configurations, which `Features` computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Array = NDArray[np.float64]
Codes = NDArray[np.int64]  # [configuration, knob]: the index of the knob's level, -1 if it is absent

NUM_RANGE_LEVELS = 9  # number of levels for a knob whose values are a range instead of a list
BATCH = "loader.batch_size"
# If a step of b samples takes t0 + t1 b seconds, the rate is b / (t0 + t1 b). It reaches half of its limit at b = t0 / t1. For
# each of these values of t0 / t1, BATCH has a column with the logarithm of this rate. Values above 256 are used only up to the
# largest batch size: beyond it, they would make small batches too uncertain.
HALF_BATCHES = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
# Prior variance of the effect of doubling a number, relative to that of changing an unordered value. So three doublings may
# have as large an effect as one change of an unordered value.
STEP_VARIANCE = 1 / 3
BATCH_STEP_VARIANCE = 0.05  # for doubling the batch; less, since the curves of HALF_BATCHES explain most of its effect
# Besides pairs, the model has a joint effect of all knobs. TOGETHER_VARIANCE is its prior variance, relative to that of a pair.
# TOGETHER_LENGTH is the length scale of its kernel: how far apart two rows of `Features.knobs` must be for the effect to
# differ. Without this effect, forecasts for configurations far from all trials are much too certain.
TOGETHER_VARIANCE, TOGETHER_LENGTH = 16.0, 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Features:
    """The features of configurations for a linear model, with a row for each configuration.

    Attributes:
        effects: columns of single knobs, each multiplied by the prior spread of its weight.
        knobs: the columns from which products of two knobs are made.
        squares: products of two columns of the same knob, or other columns with the same inner products. The inner products of
            `squares` are subtracted from the squared ones of `knobs`, so that only products of two different knobs are left.
    """

    effects: Array
    knobs: Array
    squares: Array
    _latest: dict[str, tuple[Features | None, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, rows: Any) -> Features:
        """Returns some of the rows."""
        return Features(self.effects[rows], self.knobs[rows], self.squares[rows])

    def plus(self, other: Features) -> Features:
        """Returns the rows of both."""
        return self._once("plus", other, lambda: Features(*map(np.vstack, zip(self._arrays, other._arrays, strict=True))))

    def products(self, other: Features) -> tuple[Array, Array]:
        """Returns `of_effects` and `of_interactions`."""
        return self._once("products", other, lambda: (self.of_effects(other), self.of_interactions(other)))

    @property
    def _arrays(self) -> tuple[Array, Array, Array]:
        return self.effects, self.knobs, self.squares

    def _once(self, name: str, other: Features, made: Callable[[], T]) -> T:
        """Returns the latest result if it was made with the same `other`, because several models ask for it; else a new one."""
        name = f"{name} of one" if len(other.effects) == 1 else name  # so that a single row does not displace the many rows
        key = None if other is self else other  # None stands for `self`: an object that refers to itself is freed late
        features, value = self._latest.get(name, (self, None))
        if features is not key:
            self._latest[name] = key, (value := made())
        return value  # type: ignore[no-any-return]

    def with_effect(self, column: Array) -> Features:
        """Returns the features with one more column of effects."""
        return Features(np.hstack([self.effects, column[:, None]]), self.knobs, self.squares)

    def of_effects(self, other: Features) -> Array:
        """Returns the inner products over the columns of single knobs, as [row of self, row of other]."""
        return self.effects @ other.effects.T

    def of_interactions(self, other: Features) -> Array:
        """Returns the inner products over all products of two knobs' columns, ((sum over knobs)^2 - sum of squares) / 2.

        Adds the covariance of joint effects of more than two knobs, which falls with the distance.
        """
        inner = self.knobs @ other.knobs.T
        together = 2 * inner  # in place from here on: these are the largest arrays of a proposal
        together -= self._lengths[:, None]
        together -= other._lengths
        np.minimum(together, 0.0, out=together)  # the negative squared distance
        together /= 2 * TOGETHER_LENGTH**2
        np.exp(together, out=together)
        together *= TOGETHER_VARIANCE
        inner *= inner
        inner -= self.squares @ other.squares.T
        inner /= 2
        inner += together
        return inner

    def norms(self) -> tuple[Array, Array]:
        """Returns the diagonals of `of_effects(self)` and `of_interactions(self)`."""
        pairs = (self._lengths**2 - (self.squares**2).sum(axis=1)) / 2
        return (self.effects**2).sum(axis=1), pairs + TOGETHER_VARIANCE

    @cached_property
    def _lengths(self) -> Array:
        """The squared length of each row of `knobs`."""
        return np.asarray((self.knobs**2).sum(axis=1))


@dataclass(frozen=True)
class Levelled:
    """One knob with its levels.

    Attributes:
        key: its name.
        values: its levels, ascending if they are numbers.
        is_ordered: whether the levels are numbers.
        step: for a ladder, the prior spread of each later step relative to the first step; None for other knobs. In a ladder,
            each value includes the previous one.
    """

    key: str
    values: tuple[Any, ...]
    is_ordered: bool
    step: float | None = None

    def columns(self) -> tuple[Array, Array]:
        """Returns a table [level, column], with a last row for absence, and the prior variance of each column's weight."""
        count = len(self.values)
        if self.step is not None:
            return _steps(count), np.array([1.0, *[self.step**2] * (count - 2)])[: count - 1]
        if not self.is_ordered:
            return np.vstack([np.eye(count)[:, 1:], np.zeros((1, count - 1))]), np.ones(count - 1)
        at, steps = self._places(), _steps(count)
        if self.key != BATCH:
            return steps, STEP_VARIANCE * np.diff(at)
        sizes = np.array([max(float(value), 1.0) for value in self.values])
        halves = [half for half in HALF_BATCHES if half <= max(256.0, sizes[-1])]
        curves = np.stack([np.log(sizes / (sizes + half)) for half in halves], axis=1)
        curves = np.vstack([curves - curves[0], np.zeros((1, len(halves)))])
        return np.hstack([curves, steps]), np.concatenate([np.ones(len(halves)), BATCH_STEP_VARIANCE * np.diff(at)])

    def pair_columns(self) -> Array:
        """Returns the table [level, column] for products with other knobs. The row of the largest number has length 1.

        For the batch, the length grows with its doublings, because over many doublings the effect of another knob may change
        much: with 32 times the batch, a program may be 30 times as fast, but hardly faster if CUDA graphs launch its kernels.
        """
        if not self.is_ordered:
            return self.columns()[0]
        at = self._places()
        whole = 1.0 if self.key == BATCH else max(at[-1] - at[0], 1e-9)
        return np.asarray(_steps(len(at)) * np.sqrt(np.diff(at) / whole))

    def _places(self) -> Array:
        """Returns the positions of the numbers on a logarithmic scale, in doublings.

        A step from 0 is no longer than a change of an unordered value. Often 0 leaves the choice to a library, and the library
        chooses a value near those that are listed. Without this limit, a buffer of 16 MiB was 24 doublings away from the
        default 0, and was expected to gain 30 %.
        """
        at = np.array([_place(value) for value in self.values])
        if len(at) > 1 and self.values[0] == 0:
            at[0] = max(at[0], at[1] - 1 / STEP_VARIANCE)
        return at


class Coding:
    """The levels of all knobs of a search.

    Args:
        distributions: the search space, by knob.
        seen: configurations whose values also become levels, if they lie inside a range.
        best: the fastest of them. In a range, levels are added halfway between its value and the next higher and lower levels,
            if those levels were seen.
        ladders: {knob: (its values, its `Levelled.step`)}. Values are ordered so that each includes the previous one.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        seen: Iterable[Mapping[str, Any]] = (),
        ladders: Mapping[str, tuple[Sequence[Any], float]] | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        ranges = [key for key, found in distributions.items() if not isinstance(found, CategoricalDistribution)]
        met: dict[str, set[Any]] = {key: set() for key in ranges}
        for params in seen if ranges else ():
            for key in params.keys() & met.keys():
                met[key].add(params[key])
        top, listed = best or {}, ladders or {}
        self.knobs = [
            _within(key, found, met[key], top.get(key)) if key in met else _listed(key, found, listed.get(key))
            for key, found in distributions.items()
        ]
        self._places = {knob.key: {_same(value): n for n, value in enumerate(knob.values)} for knob in self.knobs}

    @cached_property
    def levels(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """Each knob with its values. Codings with equal levels give equal codes."""
        return tuple((knob.key, knob.values) for knob in self.knobs)

    @cached_property
    def size(self) -> int:
        """Number of configurations, ignoring conditions between knobs."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def encode(self, configurations: Sequence[Mapping[str, Any]]) -> Codes:
        """Returns the codes of configurations; a value that is not a level counts as absent."""
        rows = [
            [places.get((isinstance(value := one.get(key), bool), value), -1) for key, places in self._places.items()]
            for one in configurations
        ]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self.knobs))

    def decode(self, row: Sequence[int]) -> dict[str, Any]:
        """Returns the configuration of a row of codes."""
        return {knob.key: knob.values[level] for knob, level in zip(self.knobs, row, strict=True) if level >= 0}

    def all_codes(self) -> Codes:
        """Returns the codes of every combination of levels."""
        return np.array(list(itertools.product(*(range(len(knob.values)) for knob in self.knobs))), dtype=np.int64)

    def numbers(self, key: str, codes: Codes, *, otherwise: float) -> Array:
        """Returns a knob's values as numbers; `otherwise` if it is absent or not searched."""
        for column, knob in enumerate(self.knobs):
            if knob.key == key and knob.is_ordered:
                return np.array([*map(float, knob.values), otherwise])[codes[:, column]]
        return np.full(len(codes), otherwise)

    def has(self, key: str, value: Any, codes: Codes) -> Array:
        """Returns 1 for each configuration in which a knob has the value, else 0."""
        for column, knob in enumerate(self.knobs):
            if knob.key == key:
                return np.asarray(codes[:, column] == self._places[key].get(_same(value), -2), dtype=float)
        return np.zeros(len(codes))

    def features(self, codes: Codes, weights: Mapping[str, float] | None = None) -> Features:
        """Returns the features of configurations, one row each. A knob's columns are multiplied by its weight (default 1)."""
        plain = Features(*(_looked_up(tables, codes) for tables in self._tables))
        return self.weighted(plain, weights) if weights else plain

    def weighted(self, plain: Features, weights: Mapping[str, float]) -> Features:
        """Returns the features `plain` with each knob's columns multiplied by the knob's weight (default 1)."""
        given = np.array([weights.get(knob.key, 1.0) for knob in self.knobs])
        each = [
            np.repeat(power, [table.shape[1] for table in tables])
            for power, tables in zip((given, given, given**2), self._tables, strict=True)
        ]
        return Features(plain.effects * each[0], plain.knobs * each[1], plain.squares * each[2])

    @cached_property
    def _tables(self) -> tuple[list[Array], list[Array], list[Array]]:
        """One table per knob for each of the three parts of `Features`, with rows for levels and absence."""
        columns, pairs = [knob.columns() for knob in self.knobs], [knob.pair_columns() for knob in self.knobs]
        return [effects * np.sqrt(variances) for effects, variances in columns], pairs, list(map(_squares, pairs))


def _looked_up(tables: Sequence[Array], codes: Codes) -> Array:
    """Returns a row for each configuration: the rows of all knobs' tables, one after the other."""
    found, begin = np.empty((len(codes), sum(table.shape[1] for table in tables))), 0
    for place, table in enumerate(tables):
        end = begin + table.shape[1]
        found[:, begin:end] = table[codes[:, place]]
        begin = end
    return found


def _squares(own: Array) -> Array:
    """Returns the products of all pairs of columns, or fewer columns that have the same inner products."""
    if own.shape[1] ** 2 <= len(own):
        return (own[:, :, None] * own[:, None, :]).reshape(len(own), -1)
    values, vectors = np.linalg.eigh((own @ own.T) ** 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))


def _steps(count: int) -> Array:
    """Returns the cumulative coding of `count` levels: [1, 1, 0] for the third of four. The last row is for absence."""
    return np.vstack([np.tril(np.ones((count, count)))[:, 1:], np.zeros((1, count - 1))])


def _listed(key: str, found: BaseDistribution, ladder: tuple[Sequence[Any], float] | None) -> Levelled:
    """Returns a knob whose values are listed."""
    assert isinstance(found, CategoricalDistribution)
    is_ordered = all(isinstance(value, int | float) and not isinstance(value, bool) for value in found.choices)
    if ladder and set(found.choices) <= set(ladder[0]):
        return Levelled(key, tuple(value for value in ladder[0] if value in found.choices), False, step=ladder[1])
    return Levelled(key, tuple(sorted(found.choices) if is_ordered else found.choices), is_ordered)


def _within(key: str, found: BaseDistribution, met: set[Any], best: Any) -> Levelled:
    """Returns a knob whose values are a range; see `Coding`."""
    assert isinstance(found, IntDistribution | FloatDistribution)
    inside = {value for value in met if found._contains(found.to_internal_repr(value))}
    levels = sorted({*levels_of(found), *inside})
    if best in levels:
        place = levels.index(best)
        beside = [levels[n] for n in (place - 1, place + 1) if 0 <= n < len(levels) and levels[n] in inside]
        levels = sorted({*levels, *_allowed(found, [(best + other) / 2 for other in beside])})
    return Levelled(key, tuple(levels), True)


def levels_of(found: BaseDistribution) -> list[Any]:
    """Returns the listed values, or a few along a range, with its ends: doublings, or equal steps between round numbers."""
    if isinstance(found, CategoricalDistribution):
        return list(found.choices)
    assert isinstance(found, IntDistribution | FloatDistribution)
    if isinstance(found, IntDistribution) and found.log:
        return doublings(found.low, found.high)
    shares = np.linspace(0.0, 1.0, NUM_RANGE_LEVELS)
    values = found.low * (found.high / found.low) ** shares if found.log else found.low + (found.high - found.low) * shares
    if isinstance(found, IntDistribution) and found.step == 1:  # batch sizes such as 71 would keep Tensor Cores idle
        each = 2 ** int(math.log2(max(1, (found.high - found.low) // NUM_RANGE_LEVELS)))
        values = np.array([found.low, *np.round(values[1:-1] / each) * each, found.high])
    return sorted({*_allowed(found, values.tolist())})


def _allowed(found: IntDistribution | FloatDistribution, values: Iterable[float]) -> list[Any]:
    """Returns, for each number, the nearest value that the range allows."""
    step = found.step or 0
    on_step = (found.low + round((value - found.low) / step) * step if step else value for value in values)
    kind = int if isinstance(found, IntDistribution) else float
    return [kind(min(max(value, found.low), found.high)) for value in on_step]


def doublings(low: int, high: int) -> list[int]:
    """Returns `low`, its doublings below `high`, and `high`."""
    return [*itertools.takewhile(lambda value: value < high, (low * 2**n for n in itertools.count())), high]


def _place(value: float) -> float:
    """Returns a number's position on a logarithmic scale, in doublings."""
    return math.copysign(math.log2(1 + abs(float(value))), float(value))


def _same(value: Any) -> tuple[bool, Any]:
    return isinstance(value, bool), value
