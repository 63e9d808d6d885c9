"""One change at a time on the best so far: what an expert does by hand, and what a short study can afford."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.space import ResolvedSpace

WAITING_FRAC = 0.2  # share of time waiting for input from which the loader is what binds


class SingleChanges:
    """Proposes neighbours of a configuration; remembers which knobs had their turn."""

    def __init__(self, space: ResolvedSpace, keys: list[str]) -> None:
        self._space, self._keys = space, keys
        self._turns: Counter[str] = Counter()

    def of(self, best: TrialRecord) -> Iterator[tuple[str, Knobs]]:
        """Yields (key, full configuration), the most promising first: knobs with fewest turns, then the side that binds.

        Args:
            best: the trial to start from.
        """
        is_waiting = (best.data_wait_frac or 0.0) > WAITING_FRAC
        order = sorted(self._keys, key=lambda key: (self._turns[key], key.startswith("loader.") != is_waiting))
        for key in order:
            for value in self._neighbours(key, best):
                yield key, self._space.active({**self._space.reference, **best.knobs, key: value})

    def taken(self, key: str) -> None:
        """Notes that a change of this knob is being tried."""
        self._turns[key] += 1

    def _neighbours(self, key: str, best: TrialRecord) -> list[KnobValue]:
        """Returns the values next to the best's own, the larger first; all others where there is no order."""
        values = list(self._space.domains[key].values)
        own = best.knobs.get(key, self._space.reference[key])
        if own not in values or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return [value for value in values if value != own]
        place = values.index(own)
        return [values[n] for n in (place + 1, place - 1) if 0 <= n < len(values)]
