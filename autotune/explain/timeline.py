"""Reduces the events of one step to a few hundred rectangles in lanes, for a drawing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autotune.explain.breakdown import COLLECTIVES, WIDTHS, kernel_widths
from autotune.explain.host import Host
from autotune.explain.kernel_names import COLLECTIVE, RANGE, copy_kind, operator_kind, phase_of_range
from autotune.explain.trace import ANNOTATION, COPY, DEVICE, KERNEL, OPERATOR, Trace
from autotune.plain_text import one_line

MAX_RECTANGLES = 400
MERGED_FRAC = 0.001  # neighbours of one category are merged if the gap between them is at most this share of the step
MAX_NAME_CHARS = 100
PHASES, TRAINING, AUTOGRAD, STREAM = "phases", "training thread", "autograd thread", "stream"


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """One rectangle.

    Attributes:
        lane: "phases", "training thread", "autograd thread 1", "stream 7" (with several GPUs, "GPU 1 stream 7"), ...
        name: name of the event that it shows, or of the longest if it shows several events.
        start_s: seconds from the start of the step.
        seconds: its length.
        category: on the device, a category of the breakdown; on the host, the kind of operator or the phase.
        count: number of events that it shows.
    """

    lane: str
    name: str
    start_s: float
    seconds: float
    category: str
    count: int = 1


def timeline(trace: Trace, host: Host) -> list[Rectangle]:
    """Returns the longest rectangles of the step of median length, sorted by lane and start; [] if there are no steps."""
    windows = trace.steps()
    if not len(windows):
        return []
    lengths = windows[:, 1] - windows[:, 0]
    start, end = windows[np.argsort(lengths, kind="stable")[len(lengths) // 2]].tolist()
    lanes: dict[str, list[Rectangle]] = {}
    for each in (*_phases(trace), *_operators(trace, host), *_device(trace, host)):
        cut_start, cut_end = max(each.start_s, start), min(each.start_s + each.seconds, end)
        if cut_end > cut_start:
            shown = replace(each, start_s=cut_start - start, seconds=cut_end - cut_start)
            lanes.setdefault(each.lane, []).append(shown)
    merged = [each for lane in lanes.values() for each in _merged(lane, MERGED_FRAC * (end - start))]
    merged.sort(key=lambda each: -each.seconds)
    order = list(lanes)
    return sorted(merged[:MAX_RECTANGLES], key=lambda each: (order.index(each.lane), each.start_s))


def _phases(trace: Trace) -> Iterator[Rectangle]:
    chosen = (
        trace.is_of(ANNOTATION) & (trace.threads == trace.main_thread) & trace.is_named(lambda name: phase_of_range(name) >= 0)
    )
    for event in np.flatnonzero(chosen).tolist():
        name = trace.texts[trace.names[event]]
        if name.startswith(RANGE):
            yield _rectangle(trace, event, PHASES, name.removeprefix(RANGE))


def _operators(trace: Trace, host: Host) -> Iterator[Rectangle]:
    """Yields the outermost operators of the training thread and of autograd's threads."""
    events, parents = host.nesting.chosen, host.nesting.parents
    is_operator = trace.categories[events] == OPERATOR
    is_outermost = is_operator & ((parents < 0) | ~is_operator[parents])
    threads = {trace.main_thread: TRAINING}
    threads |= {thread: f"{AUTOGRAD} {number}" for number, thread in enumerate(trace.autograd_threads(), start=1)}
    for event in events[is_outermost & np.isin(trace.threads[events], list(threads))].tolist():
        yield _rectangle(trace, event, threads[int(trace.threads[event])], operator_kind(trace.texts[trace.names[event]]))


def _device(trace: Trace, host: Host) -> Iterator[Rectangle]:
    widths = kernel_widths(trace, host)
    events = np.flatnonzero(trace.is_of(*DEVICE)).tolist()
    gpus = {trace.lanes[trace.threads[event]][0] for event in events}
    for event in events:
        name = trace.texts[trace.names[event]]
        if trace.categories[event] == KERNEL:
            category = COLLECTIVES if COLLECTIVE.search(name) else WIDTHS[int(widths[event])]
        else:
            category = copy_kind(name) if trace.categories[event] == COPY else "d2d"
        gpu, stream = trace.lanes[trace.threads[event]]
        yield _rectangle(trace, event, f"{f'GPU {gpu} ' if len(gpus) > 1 else ''}{STREAM} {stream}", category)


def _rectangle(trace: Trace, event: int, lane: str, category: str) -> Rectangle:
    start, end = float(trace.starts_s[event]), float(trace.ends_s[event])
    name = one_line(trace.texts[trace.names[event]].removeprefix(RANGE), MAX_NAME_CHARS)
    return Rectangle(lane=lane, name=name, start_s=start, seconds=end - start, category=category)


def _merged(lane: Iterable[Rectangle], gap_s: float) -> Iterator[Rectangle]:
    """Yields a lane's rectangles. Close neighbours of one category are merged and named after the longest of them."""
    group: list[Rectangle] = []
    for each in sorted(lane, key=lambda rectangle: rectangle.start_s):
        if group and (each.category != group[0].category or each.start_s > _end(group) + gap_s):
            yield _merged_rectangle(group)
            group = []
        group.append(each)
    if group:
        yield _merged_rectangle(group)


def _end(group: list[Rectangle]) -> float:
    return group[-1].start_s + group[-1].seconds


def _merged_rectangle(group: list[Rectangle]) -> Rectangle:
    start_s = group[0].start_s
    longest = max(group, key=lambda each: each.seconds)
    seconds = max(each.start_s + each.seconds for each in group) - start_s
    return replace(longest, start_s=start_s, seconds=seconds, count=len(group))
