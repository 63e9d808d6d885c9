"""Models failures other than out of memory: each failure is assumed to be caused by one of the configuration's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Value = tuple[str, type, Any]  # knob and value; True is not 1


class FailureModel:
    """Blames failures on values that no trial ever worked with.

    A failed trial blames all its unproven values equally. If only one is left, and no other value was present in every failure
    with it, it is the cause, and those failures blame no other value; otherwise the two may just not work together.

    Args:
        worked: configurations with a measurement, the baseline first if all knobs are given.
        failed: configurations without one; if the cause is known, only the knobs that caused it.
    """

    def __init__(self, worked: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> None:
        self._cleared = {value for params in worked for value in _values(params)} if failed else set()
        left = [[value for value in _values(params) if value not in self._cleared] for params in failed]
        sets = [frozenset(_values(params)).difference(_values(worked[0]) if worked else ()) for params in failed]
        only = {values[0] for values in left if len(values) == 1}
        self._failing = {value for value in only if len(frozenset.intersection(*(one for one in sets if value in one))) == 1}
        self._blame: dict[Value, float] = {}
        for values in left:
            for value in values if self._failing.isdisjoint(values) else ():
                self._blame[value] = self._blame.get(value, 0.0) + 1 / len(values)

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns the probability that a configuration works; 0 if one of its values is known to fail."""
        chance = 1.0
        for value in _values(params):
            chance *= 0.0 if value in self._failing else 1 / (1 + self._blame.get(value, 0.0))
        return chance

    def failing(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs of a configuration whose values are known to fail."""
        return [key for key, value in params.items() if (key, type(value), value) in self._failing]

    def suspected(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs that may have made a configuration fail, the most blamed first; [] once the cause is known."""
        if self.failing(params):
            return []
        blame = {key: self._blame.get((key, type(value), value), 0.0) for key, value in params.items()}
        return sorted((key for key in blame if blame[key]), key=lambda key: -blame[key])


def _values(params: Mapping[str, Any]) -> list[Value]:
    return [(key, type(value), value) for key, value in params.items()]
