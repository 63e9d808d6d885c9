"""Measures two configurations alternately, each time in a fresh process, as finals and verification do."""

from __future__ import annotations

import random
from collections.abc import Callable

from autotune.records import TrialRecord

Pair = tuple[float, float]  # scores of one round: the first configuration's and the second's


class Interleaving:
    """Rounds that measure one configuration against another.

    Every two rounds run as ABBA or BAAB: the order of the first round is drawn at random, and the second round reverses it. So
    a steady drift of the machine affects both configurations alike.

    Attributes:
        pairs: the scores of each complete round so far, without rounds in which one of the two failed.

    Args:
        one, other: first measurements of the two configurations.
        measure: measures a configuration again and returns the record.
        order: random source that decides which of the two goes first.
        pairs: complete rounds measured before; new ones are appended to this list.
        was_one_first: whether `one` was measured first in the last round of `pairs`.
    """

    def __init__(
        self,
        one: TrialRecord,
        other: TrialRecord,
        *,
        measure: Callable[[TrialRecord], TrialRecord],
        order: random.Random,
        pairs: list[Pair] | None = None,
        was_one_first: bool = False,
    ) -> None:
        self.pairs: list[Pair] = pairs if pairs is not None else []
        self._one, self._other, self._measure, self._order = one, other, measure, order
        self._index, self._is_one_first = len(self.pairs), was_one_first

    def round(self) -> Pair | None:
        """Measures both once and returns their scores; None if one fails. If the first run fails, the second is not made."""
        self._is_one_first = not self._is_one_first if self._index % 2 else bool(self._order.getrandbits(1))
        self._index += 1
        first, second = (self._one, self._other) if self._is_one_first else (self._other, self._one)
        if (first_score := self._measure(first).score) is None or (second_score := self._measure(second).score) is None:
            return None
        self.pairs.append((first_score, second_score) if self._is_one_first else (second_score, first_score))
        return self.pairs[-1]
