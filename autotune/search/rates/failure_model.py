"""Models failures other than running out of memory. Each is assumed to be caused by one value, or by a pair of values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Value = tuple[str, type, Any]  # knob, type and value; the type distinguishes True from 1
# If one value of a numeric knob fails, most others fail, too. A program that expects batches of one size fails with every other
# size. A program whose data cannot be sent to workers fails with any number of workers. The odds that another value works are
# assumed to be 1 to ALIKE after one such failure, 1 to 2 * ALIKE after two.
ALIKE = 4


class Proven:
    """Values, and pairs of values, with which configurations have worked.

    Args:
        worked: measured configurations, the baseline first. If the others are given as changes to the baseline, it is {}.
    """

    def __init__(self, worked: Iterable[Mapping[str, Any]] = ()) -> None:
        self.usual: frozenset[Value] | None = None  # the baseline's values
        self.values: set[Value] = set()
        self.pairs: set[frozenset[Value]] = set()  # pairs of values that worked together, neither of them the baseline's
        self._latest: tuple[tuple[int, int, int], FailureModel] | None = None
        for params in worked:
            self.add(params)

    def add(self, params: Mapping[str, Any]) -> None:
        """Adds a configuration that worked."""
        values = frozenset(values_of(params))
        self.usual = values if self.usual is None else self.usual
        self.values |= values
        self.pairs |= _pairs_of(values - self.usual)

    def model(self, num_failed: int, failed: Callable[[], Sequence[Mapping[str, Any]]]) -> FailureModel:
        """Returns the model of all failures so far. Fits it again only after new failures, or if new values or pairs worked.

        Args:
            num_failed: number of failures.
            failed: returns the argument `failed` of `FailureModel`.
        """
        now = num_failed, len(self.values), len(self.pairs)
        if self._latest is None or self._latest[0] != now:
            self._latest = now, FailureModel(self, failed())
        return self._latest[1]


class FailureModel:
    """Attributes a failure to a value with which no trial has worked, or else to two values that never worked together.

    A value is proven once a trial with it has worked. A failed trial counts equally against all its unproven values. A value is
    known to fail if it is the only unproven value of a failed trial, and the failed trials with this value share no other value
    except the baseline's. (If they shared another value, perhaps only the two together fail.) Failures with a value that is
    known to fail do not count against other values.

    If all values of a failed trial are proven, it counts equally against all pairs of its values that have not worked together,
    leaving out the baseline's values. If there are several such failures, and exactly one pair occurs in all of them, this pair
    is known to fail.

    If values of a numeric knob are known to fail, and no value but the baseline's is proven, the knob's other values will
    probably fail, too (ALIKE).

    Args:
        worked: a `Proven`, or the configurations from which to make one.
        failed: configurations that failed, each reduced to the knobs that may be the cause, if these are known.
        failing: values that are assumed to fail.
    """

    def __init__(
        self,
        worked: Proven | Sequence[Mapping[str, Any]],
        failed: Sequence[Mapping[str, Any]],
        failing: Collection[Value] = (),
    ) -> None:
        proven = worked if isinstance(worked, Proven) else Proven(worked)
        left = [[value for value in values_of(params) if value not in proven.values] for params in failed]
        self._usual = usual = proven.usual or frozenset()
        sets = [frozenset(values_of(params)) - usual for params in failed]
        only = {values[0] for values in left if len(values) == 1}
        self._failing = {value for value in only if len(frozenset.intersection(*(one for one in sets if value in one))) == 1}
        self._failing.update(failing)
        changeable = {key for key, _, _ in proven.values - usual}
        numbers = Counter(key for key, kind, _ in self._failing if kind in (int, float) and key not in changeable)
        self._alike = {key: 1 / (1 + ALIKE * num) for key, num in numbers.items()}  # chance that another value works
        self._blame: dict[Value, float] = {}
        for values in left:
            for value in values if self._failing.isdisjoint(values) else ():
                self._blame[value] = self._blame.get(value, 0.0) + 1 / len(values)
        self._pairs: dict[frozenset[Value], float] = {}
        unexplained = [changed for changed, unproven in zip(sets, left, strict=True) if not unproven]
        suspected = [_pairs_of(changed) - proven.pairs for changed in unexplained]
        for pairs in suspected:
            for pair in pairs:
                self._pairs[pair] = self._pairs.get(pair, 0.0) + 1 / len(pairs)
        if len(suspected) > 1 and len(common := set.intersection(*suspected)) == 1:
            self._pairs = dict.fromkeys(common, math.inf)

    @property
    def pairs(self) -> Mapping[frozenset[Value], float]:
        """For each pair of values that might fail together, the probability that they work together."""
        return {pair: 1 / (1 + blame) for pair, blame in self._pairs.items()}

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns the probability that a configuration works, ignoring pairs; 0 if one of its values is known to fail."""
        chance = 1.0
        for value in values_of(params):
            chance *= 0.0 if value in self._failing else 1 / (1 + self._blame.get(value, 0.0))
            if value not in self._usual:
                chance *= self._alike.get(value[0], 1.0)
        return chance

    def failing(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs of a configuration whose values are known to fail."""
        return [key for key, value in params.items() if (key, type(value), value) in self._failing]

    def suspected(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs that may have made a configuration fail, most likely first; [] if a value is known to fail."""
        if self.failing(params):
            return []
        blame = {key: self._blame.get((key, type(value), value), 0.0) for key, value in params.items()}
        return sorted((key for key in blame if blame[key]), key=lambda key: -blame[key])


def values_of(params: Mapping[str, Any]) -> list[Value]:
    """Returns the values of a configuration."""
    return [(key, type(value), value) for key, value in params.items()]


def _pairs_of(values: frozenset[Value]) -> set[frozenset[Value]]:
    return {frozenset(pair) for pair in itertools.combinations(values, 2)}
