"""Determines how events of a thread are nested: parents, self times, and the innermost event at each moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.explain.intervals import Floats, Ints
from autotune.explain.trace import Trace

RESOLUTION_S = 1e-9  # Kineto rounds times to this; events that overlap by less count as one after the other


@dataclass(kw_only=True)
class Nesting:
    """Containment among some events of a trace.

    Attributes:
        chosen: indices of these events in the trace, ascending, shape (n,).
        parents: for each event, the position in `chosen` of the event that directly contains it; -1 at the top. A parent
            precedes its children.
        self_s: seconds of each event that are not in its children.
        pieces: intervals in which a thread's innermost event stays the same: columns (start, end) in seconds, shape (m, 2).
        owners: position in `chosen` of the innermost event during each piece, shape (m,).
    """

    chosen: Ints
    parents: Ints
    self_s: Floats
    pieces: Floats
    owners: Ints

    def spread_down(self, values: Ints) -> Ints:
        """Returns each event's value. An event without a value (-1) gets the value of its nearest ancestor with one."""
        found = values.tolist()
        for at, parent in enumerate(self.parents.tolist()):  # a parent comes first
            if found[at] < 0 and parent >= 0:
                found[at] = found[parent]
        return np.array(found, dtype=np.int64)

    def summed_up(self, values: Floats) -> Floats:
        """Returns, for each event, the sum of its own value and the values of all events inside it."""
        found, parents = values.tolist(), self.parents.tolist()
        for at in range(len(found) - 1, -1, -1):
            if parents[at] >= 0:
                found[parents[at]] += found[at]
        return np.array(found, dtype=np.float64)


def nested(trace: Trace, chosen: Ints) -> Nesting:
    """Returns the nesting of some events, given by ascending indices, within each thread.

    Because times are rounded, an event may begin inside another event and end after it. Such an event is cut off at the end of
    the event in which it began.
    """
    starts, ends = trace.starts_s[chosen].tolist(), trace.ends_s[chosen].tolist()
    parents = [-1] * len(starts)
    open_events: dict[int, list[int]] = {}  # thread -> stack of positions
    pieces: list[tuple[float, float, int]] = []
    since: dict[int, float] = {}  # thread -> when its current innermost event became innermost

    def close_until(thread: int, now: float) -> list[int]:
        stack = open_events.setdefault(thread, [])
        while stack and ends[stack[-1]] <= now + RESOLUTION_S:
            last = stack.pop()
            pieces.append((since[thread], ends[last], last))
            since[thread] = ends[last]
        return stack

    for at, (start, thread) in enumerate(zip(starts, trace.threads[chosen].tolist(), strict=True)):
        stack = close_until(thread, start)
        if stack:
            parents[at] = stack[-1]
            ends[at] = min(ends[at], ends[stack[-1]])
            pieces.append((since[thread], start, stack[-1]))
        since[thread] = start
        stack.append(at)
    for thread in open_events:
        close_until(thread, np.inf)
    columns = np.array([piece for piece in pieces if piece[1] > piece[0]]).reshape(-1, 3)
    owners = columns[:, 2].astype(np.int64)
    return Nesting(
        chosen=chosen,
        parents=np.array(parents, dtype=np.int64),
        self_s=np.bincount(owners, weights=columns[:, 1] - columns[:, 0], minlength=len(starts)).astype(np.float64),
        pieces=columns[:, :2],
        owners=owners,
    )
