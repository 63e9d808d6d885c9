"""Which values are suspected of keeping programs from working, memory apart: each failure has one of its values for a cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Value = tuple[str, str]  # knob and value


class FailureModel:
    """Blames failures on the values that no trial ever worked with.

    A failed trial blames all of them to equal parts. Where only one is left, and no other was there each time it failed, it is
    the cause, and what failed with it blames no other; else the two may just not go together.

    Args:
        worked: configurations that brought a number, the baseline first where all knobs are given.
        failed: configurations that did not; of one whose cause is known, that alone.
    """

    def __init__(self, worked: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> None:
        self._cleared = {value for params in worked for value in _values(params)}
        left = [[value for value in _values(params) if value not in self._cleared] for params in failed]
        sets = [frozenset(_values(params)).difference(_values(worked[0]) if worked else ()) for params in failed]
        only = {values[0] for values in left if len(values) == 1}
        self._failing = {value for value in only if len(frozenset.intersection(*(one for one in sets if value in one))) == 1}
        self._blame: dict[Value, float] = {}
        for values in left:
            for value in values if self._failing.isdisjoint(values) else ():
                self._blame[value] = self._blame.get(value, 0.0) + 1 / len(values)

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns how probable it is that a configuration works; 0 where one of its values is known not to."""
        chance = 1.0
        for value in _values(params):
            chance *= 0.0 if value in self._failing else 1 / (1 + self._blame.get(value, 0.0))
        return chance

    def failing(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs of a configuration whose values are known not to work."""
        return [key for key, value in params.items() if (key, repr(value)) in self._failing]

    def suspected(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the knobs that a failed configuration may owe it to, the most blamed first; [] once one is known to."""
        if self.failing(params):
            return []
        blame = {key: self._blame.get((key, repr(value)), 0.0) for key, value in params.items()}
        return sorted((key for key in blame if blame[key]), key=lambda key: -blame[key])


def _values(params: Mapping[str, Any]) -> list[Value]:
    return [(key, repr(value)) for key, value in params.items()]
