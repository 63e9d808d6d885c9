"""Proposes the best trial so far with one knob changed, as experts do. A short study has no time for random trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import knob
from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.search.rates.coding import levels_of
from autotune.space import IntInterval, ResolvedSpace

WAITING_FRAC = 0.2  # fraction of time waiting for input above which a trial is input-bound


class SingleChanges:
    """The changes of a single knob to try, and how often each knob was changed."""

    def __init__(self, space: ResolvedSpace, keys: list[str], host_context: HostContext | None) -> None:
        self._space, self._keys = space, keys
        self._expert = {key: knob(key).expert(host_context) for key in keys} if host_context else {}
        self._turns: Counter[str] = Counter()

    def of(self, best: TrialRecord) -> Iterator[tuple[str, Knobs]]:
        """Yields (key, full configuration) in the order in which to try them.

        Knobs that were changed least often come first. Among equally often changed knobs, categorical knobs that the best trial
        has changed come last, since another value would undo that change. Among the remaining ties, knobs on the limiting side
        (input or device) come first.
        """
        is_waiting = (best.data_wait_frac or 0.0) > WAITING_FRAC

        def rank(key: str) -> tuple[int, bool, bool]:
            is_taking_back = key in best.changed and not self._is_ordered(key)
            return (self._turns[key], is_taking_back, key.startswith("loader.") != is_waiting)

        for key in sorted(self._keys, key=rank):
            for value in self._neighbours(key, best):
                yield key, self._space.active({**self._space.reference, **best.knobs, key: value})

    def taken(self, key: str) -> None:
        """Records that a change of this knob is being tried."""
        self._turns[key] += 1

    def _is_ordered(self, key: str) -> bool:
        values = self._space.domains[key].values
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)

    def _neighbours(self, key: str, best: TrialRecord) -> list[KnobValue]:
        """Returns the values to try: the expert's, then the neighbours of the current value, larger first.

        If the knob's values have no order, or the current value is not among them, returns all except the current one.
        """
        domain, own = self._space.domains[key], best.knobs.get(key, self._space.reference[key])
        values: list[KnobValue] = levels_of(domain.distribution())
        if isinstance(domain, IntInterval) and own is not None and domain.contains(own):
            values = sorted({*values, own})
        if own not in values or not self._is_ordered(key):
            return [value for value in values if value != own]
        place = values.index(own)
        near = [values[n] for n in (place + 1, place - 1) if 0 <= n < len(values)]
        expert = self._expert.get(key)
        # The expert's value comes first: the only neighbour of 0 workers is 1, which gains almost nothing.
        return [expert, *near] if expert in values and expert != own else near
