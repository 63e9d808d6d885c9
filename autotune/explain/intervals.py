"""Computes with intervals of time: unions, the seconds of a window that a union covers, and the gaps.

A union is an array of shape (n, 2): start and end seconds, sorted, disjoint, none empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOTHING: Floats = np.empty((0, 2))


def union(starts_s: Floats, ends_s: Floats) -> Floats:
    """Returns the union of intervals, given as seconds in any order, shape (n,)."""
    kept = ends_s > starts_s
    starts_s, ends_s = starts_s[kept], ends_s[kept]
    if not len(starts_s):
        return NOTHING
    order = np.argsort(starts_s, kind="stable")
    starts_s, ends_s = starts_s[order], np.maximum.accumulate(ends_s[order])
    is_first = np.concatenate(([True], starts_s[1:] > ends_s[:-1]))
    lasts = np.concatenate((np.flatnonzero(is_first)[1:] - 1, [len(starts_s) - 1]))
    return np.column_stack((starts_s[is_first], ends_s[lasts]))


def joined(unions: Sequence[Floats]) -> Floats:
    """Returns the union of unions."""
    parts = np.concatenate([NOTHING, *unions])
    return union(parts[:, 0], parts[:, 1])


def seconds_in(covered: Floats, windows: Floats) -> Floats:
    """Returns the seconds of each window that a union covers, shape (n,). Windows have shape (n, 2) and may overlap."""
    if not len(covered):
        return np.zeros(len(windows))
    before = np.concatenate(([0.0], np.cumsum(covered[:, 1] - covered[:, 0])))
    times = np.column_stack((covered[:, 0], covered[:, 1])).ravel()
    sums = np.column_stack((before[:-1], before[1:])).ravel()
    found: Floats = np.interp(windows[:, 1], times, sums) - np.interp(windows[:, 0], times, sums)
    return found


def within(times_s: Floats, windows: Floats) -> Mask:
    """Returns which times lie in a window. The windows must be disjoint and sorted."""
    if not len(windows):
        return np.zeros(len(times_s), dtype=bool)
    found = np.searchsorted(windows[:, 0], times_s, side="right") - 1
    inside: Mask = (found >= 0) & (times_s < windows[found.clip(min=0), 1])
    return inside


def gaps(covered: Floats, windows: Floats) -> Floats:
    """Returns the parts of disjoint, sorted windows that a union does not cover, as a union."""
    found = []
    for start, end in windows:
        inside = covered[(covered[:, 1] > start) & (covered[:, 0] < end)]
        edges = np.concatenate(([start], inside.clip(start, end).ravel(), [end])).reshape(-1, 2)
        found.append(edges[edges[:, 1] > edges[:, 0]])
    return np.concatenate([NOTHING, *found])
