"""Which values are suspected of keeping programs from working, memory apart: each failure is somebody's fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Value = tuple[str, str]  # knob and value


class Suspects:
    """Blames failures on the values that no trial ever worked with.

    A failed trial blames all of them to equal parts; where only one is left it is the cause for certain.

    Args:
        worked: configurations that brought a number, or ran out of memory.
        failed: configurations that did not.
    """

    def __init__(self, worked: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> None:
        cleared = {value for params in worked for value in _values(params)}
        self._blame: dict[Value, float] = {}
        self._guilty: set[Value] = set()
        for params in failed:
            suspects = [value for value in _values(params) if value not in cleared]
            for value in suspects:
                self._blame[value] = self._blame.get(value, 0.0) + 1 / len(suspects)
            if len(suspects) == 1:
                self._guilty.update(suspects)

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns how probable it is that a configuration works; 0 where one of its values is known not to."""
        if not self._blame:
            return 1.0
        chance = 1.0
        for value in _values(params):
            chance *= 0.0 if value in self._guilty else 1 / (1 + self._blame.get(value, 0.0))
        return chance


def _values(params: Mapping[str, Any]) -> list[Value]:
    return [(key, repr(value)) for key, value in params.items()]
