"""Makes the table of kernels: how often and how long each runs, how it is launched, and whether it uses Tensor Cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.explain.host import Host
from autotune.explain.intervals import within
from autotune.explain.kernel_names import tensor_core_eligible, tensor_core_used, width_of
from autotune.explain.table import Row
from autotune.explain.trace import KERNEL, Trace
from autotune.plain_text import one_line

MAX_ROWS = 500  # maximum number of rows of a rank; those with the most seconds are kept
MAX_NAME_CHARS = 300
MOST_SHARED_BYTES = 48 << 10  # for a kernel whose blocks have more shared memory, Kineto estimates occupancy 0

COLUMNS = {
    "rank": "rank of the process",
    "kernel": "name",
    "operator": "operator that launches it; empty if unknown",
    "count": "launches per step",
    "total_s": "seconds per step",
    "mean_s": "mean seconds of a launch",
    "min_s": "seconds of the shortest launch",
    "max_s": "seconds of the longest launch",
    "share_frac": "share of all kernels' seconds",
    "cumulative_frac": "sum of share_frac over this row and all rows before it",
    "registers": "registers of a thread",
    "shared_bytes": "shared memory of a block",
    "grid": "blocks",
    "block": "threads of a block",
    "occupancy_frac": "occupancy as Kineto estimates it; empty above 48 KiB of shared memory, where Kineto always estimates 0",
    "precision": "compute_16bit (16 bits or fewer), compute_32bit (32 bits or more, and TF32) or compute_unknown",
    "tensor_core_used": "yes, no or unknown, by the kernel's name",
    "tensor_core_eligible": "whether Tensor Cores could do its work: yes, no or unknown",
}


def kernel_rows(trace: Trace, host: Host, *, rank: int = 0) -> tuple[list[Row], list[str]]:
    """Returns the rows of the table, sorted by seconds, longest first, and notes on what is left out.

    Launches with the same name, launch configuration and operator share a row.
    """
    steps = trace.steps()
    start, end = (steps[0, 0], steps[-1, 1]) if len(steps) else (-np.inf, np.inf)
    times = trace.starts_s[host.device]
    is_in_steps = (times >= start) & (times < end) & ~within(times, trace.steps(are_left_out=True))
    chosen = np.flatnonzero((trace.categories[host.device] == KERNEL) & is_in_steps)
    if not len(chosen):
        return [], ["no kernels were recorded in the steps"]
    events, launchers = host.device[chosen], host.launching_events()[chosen]
    operators = np.where(launchers >= 0, trace.names[launchers], -1)
    keys = np.column_stack((trace.names[events], trace.details[events], operators))
    unique, groups = np.unique(keys, axis=0, return_inverse=True)
    groups, seconds = groups.ravel(), trace.seconds[events]
    counts, totals = np.bincount(groups), np.bincount(groups, weights=seconds)
    least, most = np.full(len(unique), np.inf), np.zeros(len(unique))
    np.minimum.at(least, groups, seconds)
    np.maximum.at(most, groups, seconds)
    firsts = np.full(len(unique), -1)
    firsts[groups[::-1]] = launchers[::-1]
    num_steps, shares = max(1, len(steps)), totals / (float(totals.sum()) or 1.0)
    order = np.argsort(-totals, kind="stable")[:MAX_ROWS]
    rows = []
    for group, cumulative in zip(order.tolist(), np.cumsum(shares[order]).tolist(), strict=True):
        name, detail, operator = unique[group].tolist()
        text, launcher = trace.texts[name], int(firsts[group])  # -1: the operator that launched it is unknown
        rows.append({
            "rank": rank,
            "kernel": one_line(text, MAX_NAME_CHARS),
            "operator": one_line(trace.texts[operator], MAX_NAME_CHARS) if operator >= 0 else "",
            "count": float(counts[group]) / num_steps,
            "total_s": float(totals[group]) / num_steps,
            "mean_s": float(totals[group] / counts[group]),
            "min_s": float(least[group]),
            "max_s": float(most[group]),
            "share_frac": float(shares[group]),
            "cumulative_frac": cumulative,
            **_launch(trace.arguments[detail] if detail >= 0 else {}),
            "precision": width_of(text, trace.types_of(launcher)),
            "tensor_core_used": tensor_core_used(text),
            "tensor_core_eligible": tensor_core_eligible(text, trace.texts[trace.names[launcher]] if launcher >= 0 else ""),
        })  # fmt: skip
    left_out = len(unique) - len(rows)
    return rows, [f"{left_out:,} shorter kernels are left out"] if left_out > 0 else []


def _launch(arguments: dict[str, Any]) -> Row:
    occupancy, shared_bytes = arguments.get("occupancy_percent"), arguments.get("shared_bytes")
    is_left_out = occupancy == 0 and isinstance(shared_bytes, int | float) and shared_bytes > MOST_SHARED_BYTES
    return {
        "registers": arguments.get("registers"),
        "shared_bytes": shared_bytes,
        "grid": _sizes(arguments.get("grid")),
        "block": _sizes(arguments.get("block")),
        "occupancy_frac": occupancy / 100 if isinstance(occupancy, int | float) and not is_left_out else None,
    }


def _sizes(value: Any) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, list) else None
