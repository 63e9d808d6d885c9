"""Splits the time of a step into categories.

The categories are ordered. If several apply at the same instant, only the first counts, so the seconds of all categories add up
to the step.

If a program uses a GPU, the device's categories come first, so the host's work counts only while the device is idle. On the
CPU, the innermost operator of the training thread counts. While the training thread only waits for autograd's threads, the
operators of autograd's threads count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.errors import Unreadable
from autotune.explain.host import Host
from autotune.explain.intervals import NOTHING, Floats, Ints, Mask, gaps, joined, seconds_in, union
from autotune.explain.kernel_names import (
    BITS_16,
    BITS_32,
    BITS_UNKNOWN,
    COLLECTIVE,
    COMPILE,
    LAUNCH,
    OPERATOR_KINDS,
    PYTHON,
    RANGE,
    SYNCHRONISE,
    copy_kind,
    operator_kind,
    phase_of_range,
    width_of,
)
from autotune.explain.trace import ANNOTATION, COPY, DEVICE, HOST, KERNEL, OPERATOR, RUNTIME, SET, STEP, Trace
from autotune.harness.explain.documents import INPUT, OPTIMIZER, STEP_PHASES

COLLECTIVES, D2H, D2D, H2D = "exposed_collective", "d2h", "d2d", "h2d"
INPUT_WAIT, KERNEL_LAUNCH, SYNC, COMPILING, HOST_WORK, OTHER = (
    "input_wait", "kernel_launch", "synchronise", "compile", "host", "other",
)  # fmt: skip
ON_DEVICE = (BITS_16, BITS_32, BITS_UNKNOWN, COLLECTIVES, D2H, D2D, H2D)
GPU_CATEGORIES = (*ON_DEVICE, INPUT_WAIT, KERNEL_LAUNCH, SYNC, COMPILING, HOST_WORK, OTHER)
CPU_CATEGORIES = (INPUT_WAIT, COMPILING, *OPERATOR_KINDS, COLLECTIVES, PYTHON, OTHER)
MAX_OTHER_FRAC = 0.05  # share of a step; if "other" takes more, its parts are listed
MAX_OTHER_PARTS = 5
MIN_PART_FRAC = 0.005  # share of a step; parts of "other" that take less are not listed

Layer = tuple[str, Floats]  # a category, and the intervals in which it applies (a union, see `intervals`)


@dataclass(kw_only=True)
class Breakdown:
    """Seconds of a step by category.

    Attributes:
        is_gpu: whether the trace has events of a GPU; the categories are then GPU_CATEGORIES, otherwise CPU_CATEGORIES.
        seconds: category -> mean seconds per step, in order of priority.
        by_step: seconds by step and category, shape (steps, categories).
        step_s: mean seconds of a step.
        other_parts: parts of "other", such as ("between forward and backward", seconds per step); [] if "other" is at most
            MAX_OTHER_FRAC of the step.
        collective_s: seconds per step in which a collective ran, including the time in which the device also computed.
    """

    is_gpu: bool
    seconds: dict[str, float]
    by_step: Floats
    step_s: float
    other_parts: list[tuple[str, float]] = field(default_factory=list)
    collective_s: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Category -> fraction of the step."""
        return {name: value / self.step_s if self.step_s else 0.0 for name, value in self.seconds.items()}


def breakdown(trace: Trace, host: Host) -> Breakdown:
    """Returns where the time of a step goes.

    Raises:
        Unreadable: the trace has no steps.
    """
    windows = trace.steps()
    if not len(windows) or not (windows[:, 1] > windows[:, 0]).all():
        raise Unreadable(f"the trace has no ranges {STEP}")
    is_gpu = trace.has_device
    categories = GPU_CATEGORIES if is_gpu else CPU_CATEGORIES
    layers = layers_of(trace, host)
    by_step = swept(layers, windows, categories)
    seconds = dict(zip(categories, by_step.mean(axis=0).tolist(), strict=True))
    step_s = float((windows[:, 1] - windows[:, 0]).mean())
    found = Breakdown(is_gpu=is_gpu, seconds=seconds, by_step=by_step, step_s=step_s)
    if found.shares[OTHER] > MAX_OTHER_FRAC:
        found.other_parts = _other_parts(trace, joined([when for _, when in layers]), windows)
    found.collective_s = float(seconds_in(_union(trace, _collectives(trace)), windows).mean())
    return found


def layers_of(trace: Trace, host: Host) -> list[Layer]:
    """Returns the layers in order of priority. A category can have several layers; "other", the rest, has none."""
    return _gpu_layers(trace, host) if trace.has_device else _cpu_layers(trace, host)


def swept(layers: Sequence[Layer], windows: Floats, categories: Sequence[str]) -> Floats:
    """Returns the seconds of each window by category, shape (windows, categories).

    Each instant counts for the first layer that covers it, or for the last category if no layer does.
    """
    totals = {name: np.zeros(len(windows)) for name in categories}
    covered, before = NOTHING, np.zeros(len(windows))
    for name, when in layers:
        covered = joined([covered, when])
        now = seconds_in(covered, windows)
        totals[name] += now - before
        before = now
    totals[categories[-1]] += windows[:, 1] - windows[:, 0] - before
    return np.column_stack([totals[name] for name in categories])


# Layers --------------------------------------------------------------------------------------------------------------------


def _gpu_layers(trace: Trace, host: Host) -> list[Layer]:
    on_host = trace.is_of(*HOST) & np.isin(trace.threads, [trace.main_thread, *trace.autograd_threads()])
    calls = on_host & trace.is_of(RUNTIME)
    waits = calls & _waits_for_its_copy(trace)
    work = on_host & ~trace.is_named(lambda name: name.startswith(STEP))
    return [
        *_device_layers(trace, host),
        (INPUT_WAIT, _union(trace, _inputs(trace))),
        (KERNEL_LAUNCH, _union(trace, calls & trace.is_named(LAUNCH.search) & ~waits)),
        (SYNC, _union(trace, waits | (calls & trace.is_named(SYNCHRONISE.search)))),
        (COMPILING, _union(trace, on_host & trace.is_named(COMPILE.search))),
        (HOST_WORK, _union(trace, work)),
    ]


def _waits_for_its_copy(trace: Trace) -> Mask:
    """Returns which runtime calls end only after the copy that they started, as `cudaMemcpyAsync` does for pageable memory."""
    copies, calls = np.flatnonzero(trace.is_of(COPY)), np.flatnonzero(trace.is_of(RUNTIME))
    copied_s = np.append(trace.ends_s[copies], np.inf)[trace.partners(calls, copies)]
    found = np.zeros(len(trace), dtype=bool)
    found[calls] = trace.ends_s[calls] >= copied_s
    return found


def _device_layers(trace: Trace, host: Host) -> list[Layer]:
    kernels = trace.is_of(KERNEL)
    collectives = kernels & trace.is_named(COLLECTIVE.search)
    widths = kernel_widths(trace, host)
    copies = trace.is_of(COPY)
    found = [(width, _union(trace, kernels & ~collectives & (widths == number))) for number, width in enumerate(WIDTHS)]
    found.append((COLLECTIVES, _union(trace, collectives)))
    for kind in (D2H, D2D, H2D):
        chosen = copies & trace.is_named(lambda name, kind=kind: copy_kind(name) == kind)  # type: ignore[misc]
        found.append((kind, _union(trace, chosen | trace.is_of(SET) if kind == D2D else chosen)))
    return found


WIDTHS = (BITS_16, BITS_32, BITS_UNKNOWN)


def kernel_widths(trace: Trace, host: Host) -> Ints:
    """Returns, for each event, the width of the numbers it computes with, as an index in WIDTHS; valid only for kernels."""
    found = np.full(len(trace), WIDTHS.index(BITS_UNKNOWN))
    for event, launcher in zip(host.device.tolist(), host.launching_events().tolist(), strict=True):
        found[event] = WIDTHS.index(width_of(trace.texts[trace.names[event]], trace.types_of(launcher)))
    return found


def _cpu_layers(trace: Trace, host: Host) -> list[Layer]:
    threads = trace.threads[host.nesting.chosen[host.nesting.owners]]
    kinds = _owner_kinds(trace, host)
    layers = [
        (INPUT_WAIT, _union(trace, _inputs(trace))),
        (COMPILING, _union(trace, trace.is_of(*HOST) & trace.is_named(COMPILE.search))),
    ]
    for is_there in (threads == trace.main_thread, np.isin(threads, trace.autograd_threads())):
        for number, kind in enumerate(OPERATOR_KINDS):
            pieces = host.nesting.pieces[is_there & (kinds == number)]
            layers.append((kind, union(pieces[:, 0], pieces[:, 1])))
    ranges = _ranges(trace)
    return [*layers, (COLLECTIVES, _union(trace, _collectives(trace))), (PYTHON, _union(trace, ranges))]


def _owner_kinds(trace: Trace, host: Host) -> Ints:
    """Returns the kind of the innermost operator for each piece of host time, as an index in OPERATOR_KINDS.

    A piece outside operators has -1.
    """
    by_name = np.array([OPERATOR_KINDS.index(operator_kind(text)) for text in trace.texts], dtype=np.int64)
    events = host.nesting.chosen[host.nesting.owners]
    kinds = by_name[trace.names[events]]
    is_operator = trace.categories[events] == OPERATOR
    in_optimizer = is_operator & (host.phases[host.nesting.owners] == STEP_PHASES.index(OPTIMIZER))
    is_compiled = kinds == OPERATOR_KINDS.index("compiled")
    kinds = np.where(in_optimizer, OPERATOR_KINDS.index("optimizer"), kinds)
    return np.where(is_operator | is_compiled, kinds, -1)


def _ranges(trace: Trace) -> Mask:
    """Returns which events are ranges of the training thread, except the ranges of steps."""
    found: Mask = trace.is_of(ANNOTATION) & (trace.threads == trace.main_thread)
    return found & ~trace.is_named(lambda name: name.startswith(STEP))


def _inputs(trace: Trace) -> Mask:
    found: Mask = _ranges(trace) & trace.is_named(lambda name: phase_of_range(name) == STEP_PHASES.index(INPUT))
    return found


def _collectives(trace: Trace) -> Mask:
    return trace.is_of(*DEVICE if trace.has_device else (OPERATOR, ANNOTATION)) & trace.is_named(COLLECTIVE.search)


def _union(trace: Trace, chosen: Mask) -> Floats:
    return union(trace.starts_s[chosen], trace.ends_s[chosen])


# The rest ------------------------------------------------------------------------------------------------------------------


def _other_parts(trace: Trace, covered: Floats, windows: Floats) -> list[tuple[str, float]]:
    """Returns the parts of "other", such as ("between forward and backward", seconds per step), longest first."""
    ranges = _ranges(trace)
    starts, ends = trace.starts_s[ranges], trace.ends_s[ranges]
    texts = [trace.texts[name].removeprefix(RANGE) for name in trace.names[ranges]]
    by_end = np.argsort(ends, kind="stable")
    totals: dict[str, float] = {}
    for window in windows:
        for start, end in gaps(covered, window[None]).tolist():
            before = np.searchsorted(ends[by_end], start, side="right") - 1
            after = np.searchsorted(starts, end, side="left")
            first = texts[by_end[before]] if before >= 0 and ends[by_end[before]] >= window[0] else "the start of the step"
            last = texts[after] if after < len(starts) and starts[after] < window[1] else "the end of the step"
            where = f"between {first} and {last}"
            totals[where] = totals.get(where, 0.0) + (end - start) / len(windows)
    least_s = MIN_PART_FRAC * float((windows[:, 1] - windows[:, 0]).mean())
    return sorted(((where, s) for where, s in totals.items() if s >= least_s), key=lambda pair: -pair[1])[:MAX_OTHER_PARTS]
