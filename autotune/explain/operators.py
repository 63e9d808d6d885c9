"""Makes the table of operators: calls, time on host and device, FLOPs, bytes, and what limits each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.explain.formulas import BACKEND, bytes_of, dtype_of, flops_of
from autotune.explain.host import Host
from autotune.explain.intervals import Floats, Ints, Mask, within
from autotune.explain.kernel_names import computes_in_tf32, operator_kind
from autotune.explain.roofline import TF32, WIDE, Peaks, roof
from autotune.explain.table import Row
from autotune.explain.trace import OPERATOR, Trace
from autotune.harness.explain.documents import STEP_PHASES
from autotune.plain_text import one_line
from autotune.quantities import percent_text

MAX_ROWS = 500  # maximum number of rows of a rank; those with the most seconds are kept
MAX_NAME_CHARS, MAX_SHAPES_CHARS = 200, 300
LAUNCH_BOUND = "launch"  # the host takes longer to launch an operator than the device takes to run it
LEAST_UNKNOWN_FRAC = 0.01  # there is a note if at least this share of the device's seconds belongs to no operator

COLUMNS = {
    "rank": "rank of the process",
    "operator": "name",
    "kind": "what it does",
    "phase": "phase of the step that it runs in most",
    "shapes": "shapes of its inputs",
    "dtype": "dtype of its first floating-point input",
    "count": "calls per step",
    "host_self_s": "host seconds per step in the operator itself",
    "host_total_s": "host seconds per step in the operator and all that it calls",
    "device_self_s": "seconds per step of the kernels that it launches itself",
    "device_total_s": "seconds per step of all kernels launched in it",
    "share_frac": "share of the device's seconds, or of the host's seconds in operators if there is no device",
    "cumulative_frac": "sum of share_frac over this row and all rows before it",
    "flops": "FLOPs per step",
    "bytes": "minimum bytes that it reads and writes per step",
    "flops_per_s": "FLOPs per second while it runs",
    "bound": "what bounds it: compute, memory or launch; empty if unknown",
    "roofline_frac": "minimum seconds that the device's peaks allow, divided by the measured seconds",
}


@dataclass(kw_only=True)
class Operators:
    """The operator calls within the steps, with their costs.

    Attributes:
        places: position of each call in `host.nesting.chosen`, shape (n,).
        groups: for each call, a number that it shares with the other calls in its row of the table, shape (n,).
        flops, num_bytes: FLOPs and bytes of each call; nan if unknown or counted for another call.
        device_self_s, device_total_s: seconds of the kernels that each call launched itself, and of all kernels launched in it.
        is_tf32: whether each call itself launched a kernel that computes in TF32.
        num_steps: number of steps in the trace.
        unknown_s: seconds of the kernels in the steps that no known operator launched, such as those of a CUDA graph.
    """

    places: Ints
    groups: Ints
    flops: Floats
    num_bytes: Floats
    device_self_s: Floats
    device_total_s: Floats
    is_tf32: Mask
    num_steps: int
    unknown_s: float = 0.0

    def a_step(self, work: Floats) -> float | None:
        """Returns the sum of `flops` or `num_bytes` over the calls of a step; None if all of them are unknown."""
        return float(np.nansum(work)) / self.num_steps if np.isfinite(work).any() else None


def operators_of(trace: Trace, host: Host) -> Operators:
    """Returns the calls of operators within the steps."""
    nesting = host.nesting
    device_self = np.zeros(len(nesting.chosen))
    known = host.launchers >= 0
    np.add.at(device_self, host.launchers[known], trace.seconds[host.device[known]])
    device_total = nesting.summed_up(device_self)
    is_tf32 = np.zeros(len(nesting.chosen), dtype=bool)
    is_tf32[host.launchers[known & trace.is_named(computes_in_tf32)[host.device]]] = True
    in_steps = within(trace.starts_s[nesting.chosen], trace.steps())
    places = np.flatnonzero((trace.categories[nesting.chosen] == OPERATOR) & in_steps)
    events = nesting.chosen[places]
    keys = np.column_stack((trace.names[events], trace.details[events]))
    groups = np.unique(keys, axis=0, return_inverse=True)[1].ravel() if len(keys) else np.zeros(0, dtype=np.int64)
    flops, num_bytes = _work(trace, host)
    return Operators(
        places=places,
        groups=groups,
        flops=flops[places],
        num_bytes=num_bytes[places],
        device_self_s=device_self[places],
        device_total_s=device_total[places],
        is_tf32=is_tf32[places],
        num_steps=max(1, len(trace.steps())),
        unknown_s=float(trace.seconds[host.device[~known & within(trace.starts_s[host.device], trace.steps())]].sum()),
    )


def operator_rows(
    trace: Trace, host: Host, found: Operators, *, rank: int = 0, peaks: Peaks | None = None
) -> tuple[list[Row], list[str]]:
    """Returns the rows of the table, sorted by seconds, longest first, and notes on what is left out."""
    if not len(found.places):
        return [], ["no operators were recorded in the steps"]
    nesting, steps = host.nesting, found.num_steps
    events = nesting.chosen[found.places]
    num_groups = int(found.groups.max()) + 1

    def a_step(values: Floats) -> Floats:
        return np.bincount(found.groups, weights=np.nan_to_num(values), minlength=num_groups) / steps

    is_outermost = ~_is_in_itself(trace, host, found)
    host_self, device_self = a_step(nesting.self_s[found.places]), a_step(found.device_self_s)
    columns = {
        "count": a_step(np.ones(len(events))),
        "host_self_s": host_self,
        "host_total_s": a_step(np.where(is_outermost, trace.seconds[events], 0)),
        "device_self_s": device_self,
        "device_total_s": a_step(np.where(is_outermost, found.device_total_s, 0)),
        "flops": a_step(found.flops),
        "bytes": a_step(found.num_bytes),
    }
    measured = device_self if trace.has_device else host_self
    phases = _main_phases(host, found, num_groups)
    firsts = np.full(num_groups, -1)
    firsts[found.groups[::-1]] = events[::-1]
    whole_s = float(measured.sum()) + found.unknown_s / steps
    shares, in_tf32 = measured / (whole_s or 1.0), a_step(found.is_tf32.astype(float))
    order = np.lexsort((-host_self, -measured))[:MAX_ROWS]
    rows = []
    for group, cumulative in zip(order.tolist(), np.cumsum(shares[order]).tolist(), strict=True):
        event = int(firsts[group])
        name, arguments = trace.texts[trace.names[event]], trace.arguments_of(event)
        row = {
            "rank": rank,
            "operator": one_line(name, MAX_NAME_CHARS),
            "kind": operator_kind(name),
            "shapes": one_line(shapes_text(arguments), MAX_SHAPES_CHARS),
            "dtype": dtype_of(arguments),
            "phase": STEP_PHASES[phases[group]] if phases[group] >= 0 else "",
            **{name: float(column[group]) for name, column in columns.items()},
            "share_frac": float(shares[group]),
            "cumulative_frac": cumulative,
        }
        rows.append(_with_bound(row, has_device=trace.has_device, peaks=peaks, is_tf32=in_tf32[group] > 0))
    return rows, _notes(num_groups - len(rows), found.unknown_s / steps / whole_s if whole_s else 0.0)


def _notes(num_left_out: int, unknown_frac: float) -> list[str]:
    notes = [f"{num_left_out:,} shorter operators are left out"] if num_left_out > 0 else []
    if unknown_frac >= LEAST_UNKNOWN_FRAC:
        notes.append(
            f"{percent_text(unknown_frac)} of the device's seconds were launched outside of operators, as by CUDA graphs or "
            "extensions"
        )
    return notes


def shapes_text(arguments: dict[str, Any]) -> str:
    """Returns shapes as "16x3x32x32, 16x3x3x3"; "" if there are none."""
    shapes = [shape for shape in arguments.get("dims") or [] if shape]
    return ", ".join(
        "x".join(map(str, shape)) if not isinstance(shape[0], list) else f"{len(shape)} tensors" for shape in shapes
    )


def _with_bound(row: Row, *, has_device: bool, peaks: Peaks | None, is_tf32: bool) -> Row:
    """Adds flops_per_s, bound and roofline_frac. FLOPs or bytes of 0 mean that nothing is known, so they become None."""
    seconds = row["device_self_s"] if has_device else row["host_self_s"]
    row["flops"], row["bytes"] = row["flops"] or None, row["bytes"] or None
    dtype = TF32 if is_tf32 and row["dtype"] == WIDE else row["dtype"]
    over = roof(row["flops"], row["bytes"], peaks.of(dtype) if peaks else None, peaks)
    is_launch_bound = has_device and 0 < row["device_self_s"] < row["host_self_s"]
    row["flops_per_s"] = row["flops"] / seconds if row["flops"] and seconds else None
    row["bound"] = LAUNCH_BOUND if is_launch_bound else over.bound
    row["roofline_frac"] = over.least_s / seconds if over.least_s and seconds else None
    return {name: row[name] for name in COLUMNS}


def _work(trace: Trace, host: Host) -> tuple[Floats, Floats]:
    """Returns FLOPs and bytes of each host event; nan if unknown, or if they are already counted for another event."""
    nesting = host.nesting
    events = nesting.chosen
    flops, num_bytes = np.full(len(events), np.nan), np.full(len(events), np.nan)
    is_operator = trace.categories[events] == OPERATOR
    keys = np.column_stack((trace.names[events], trace.details[events]))[is_operator]
    if not len(keys):
        return flops, num_bytes
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    known = np.array([_work_of(trace, int(name), int(detail)) for name, detail in unique], dtype=np.float64)
    flops[is_operator], num_bytes[is_operator] = known[inverse.ravel()].T
    repeated = _is_repeated(trace, nesting.chosen, nesting.parents, np.isfinite(flops))
    flops[repeated] = num_bytes[repeated] = np.nan
    has_formula = np.isfinite(flops)
    is_counted = nesting.spread_down(np.where(has_formula, 0, -1)) >= 0  # the event, or an event around it, has a formula
    inside = (nesting.parents >= 0) & is_counted[nesting.parents]
    flops[inside] = num_bytes[inside] = np.nan
    below = nesting.summed_up(np.nan_to_num(num_bytes)) - np.nan_to_num(num_bytes)
    num_bytes[~has_formula & (below > np.nan_to_num(num_bytes) / 2)] = np.nan  # already counted for the operators inside
    _move_into_backends(trace, host, flops, num_bytes)
    return flops, num_bytes


def _work_of(trace: Trace, name: int, detail: int) -> tuple[float, float]:
    arguments = trace.arguments[detail] if detail >= 0 else {}
    flops, num_bytes = flops_of(trace.texts[name], arguments), bytes_of(trace.texts[name], arguments)
    return (np.nan if flops is None else flops, np.nan if num_bytes is None else num_bytes)


def _is_repeated(trace: Trace, events: Ints, parents: Ints, has_formula: Mask) -> Mask:
    """Returns which calls only convert their arguments and call the same operator again, as autocast does.

    The inner call does the computation, in another dtype. So the work counts for the inner call.
    """
    found = np.zeros(len(events), dtype=bool)
    inside = np.flatnonzero(has_formula & (parents >= 0))
    above = parents[inside]
    found[above[has_formula[above] & (trace.names[events[above]] == trace.names[events[inside]])]] = True
    return found


def _move_into_backends(trace: Trace, host: Host, flops: Floats, num_bytes: Floats) -> None:
    """Moves the work of a convolution or attention to the backend's operator inside it, where the time is spent."""
    parents, events = host.nesting.parents, host.nesting.chosen
    backends = trace.is_named(BACKEND.search)[events] & (trace.categories[events] == OPERATOR)
    for place in np.flatnonzero(backends).tolist():
        above = int(parents[place])
        while above >= 0 and not np.isfinite(flops[above]):
            above = int(parents[above])
        if above >= 0:
            flops[place], num_bytes[place] = flops[above], num_bytes[above]
            flops[above] = num_bytes[above] = np.nan


def _is_in_itself(trace: Trace, host: Host, found: Operators) -> Mask:
    """Returns which calls are made directly by a call of the same operator and shapes, whose total already includes them."""
    events, parents = host.nesting.chosen, host.nesting.parents[found.places]
    own, above = events[found.places], events[parents]
    nested: Mask = (parents >= 0) & (trace.names[own] == trace.names[above]) & (trace.details[own] == trace.details[above])
    return nested


def _main_phases(host: Host, found: Operators, num_groups: int) -> Ints:
    """Returns, for each row of the table, the phase in which it spends the most time; -1 if that is outside all phases."""
    width = len(STEP_PHASES) + 1
    cells = found.groups * width + host.phases[found.places] + 1
    sums = np.bincount(cells, weights=host.nesting.self_s[found.places] + 1e-12, minlength=num_groups * width)
    phases: Ints = sums.reshape(num_groups, width).argmax(axis=1) - 1
    return phases
