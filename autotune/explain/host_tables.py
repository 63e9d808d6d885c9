"""Makes tables from the documents of the passes "lines" and "memory": lines, stages of the input, waits, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.explain.table import Row, Table
from autotune.harness.explain.documents import WORKER, Lines, Memory
from autotune.plain_text import one_line

WORKER_MARGIN = 1.1  # service times vary, so more workers are needed than the mean service time asks for, by this factor
MAX_TEXT_CHARS = 200
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "input", "other")

_PLACE = {"file": "path of the file", "line": "line number", "function": "qualified name"}
LINE_COLUMNS = {
    "rank": "rank of the process", **_PLACE, "text": "the line", "phase": "phase of the step",
    "where": "main, worker or thread", "is_own": "whether the file belongs to the program",
    "self_s": "seconds a step in the line and the libraries that it calls; of workers summed over all",
    "total_s": "seconds a step with the line anywhere on the stack", "share_frac": "self_s relative to the step",
    "callee": "library function that it mostly waits in",
}  # fmt: skip
STAGE_COLUMNS = {
    "rank": "rank of the process", "stage": "stage of the input pipeline", "where": "main or worker",
    "seconds": "wall seconds a sample", "cpu_s": "CPU seconds a sample",
    "blocked_s": "seconds a sample neither on a CPU nor waiting for one", "share_frac": "part of all stages' seconds there",
    "count": "samples timed",
    "workers_needed": "ceil(1.1 x D x seconds), where D is the demand: samples a second without waits",
    "num_workers": "workers that the loader has", **_PLACE,
}  # fmt: skip
SYNC_COLUMNS = {
    "rank": "rank of the process", "kind": "what waits or copies", **_PLACE, "text": "the line", "phase": "phase of the step",
    "count": "calls a step", "seconds": "seconds a step in these calls", "share_frac": "seconds relative to the step",
}  # fmt: skip
PHASE_COLUMNS = {
    "rank": "rank of the process", "phase": "phase of the step", "host_s": "host seconds a step",
    "device_s": "device seconds a step, by CUDA events", "share_frac": "host_s relative to the step",
}  # fmt: skip
COMPILE_COLUMNS = {
    "rank": "rank of the process", "kind": "recompilation or graph break", **_PLACE, "reason": "as torch gives it",
    "seconds": "spent compiling", "count": "how often",
}  # fmt: skip
MEMORY_COLUMNS = {
    "rank": "rank of the process", "category": "what holds it, or total",
    "bytes": "at the peak", "share_frac": "part of the peak",
}  # fmt: skip
MODULE_COLUMNS = {
    "rank": "rank of the process", "module": "name in the model", "class": "its class",
    "activations_bytes": "saved for backward", "parameters_bytes": "its parameters",
    "flops": "of a step", "share_frac": "part of all activations",
}  # fmt: skip
ALLOCATION_COLUMNS = {"rank": "rank of the process", **_PLACE, "bytes": "held at the peak", "count": "allocations"}
TIMELINE_COLUMNS = {
    "rank": "rank of the process", "time_s": "since the step's begin", "allocated_bytes": "by tensors",
    "reserved_bytes": "by the allocator",
}  # fmt: skip


def step_s(lines: Lines) -> float:
    """Returns the seconds of a step without a profiler."""
    return lines.seconds / lines.steps if lines.steps else 0.0


def demand_per_s(lines: Lines) -> float | None:
    """Returns D, the samples a second that the program would take if the loader never made it wait; None if unknown.

    A sample is an item of the loader's batch if the batch size is known, even if the rate is counted in another unit, such as
    tokens.
    """
    busy_s = step_s(lines) - (lines.wait_s or 0.0)
    samples = float(lines.batch_size) if lines.batch_size else (lines.samples / lines.steps if lines.steps else 0.0)
    return samples / busy_s if samples and busy_s > 0 else None


def workers_needed(demand: float | None, service_s: float) -> int | None:
    """Returns the number of workers that a demand needs, at least one: ceil(1.1 x D x service_s). None without a demand.

    Args:
        demand: D, samples a second.
        service_s: seconds that a worker needs for a sample.
    """
    return None if demand is None else max(1, math.ceil(WORKER_MARGIN * demand * service_s - 1e-9))


def lines_table(found: Mapping[int, Lines]) -> Table:
    """Returns host time by line of code, of all ranks."""
    rows = [
        {
            "rank": rank, **_place(line), "text": one_line(line.text, MAX_TEXT_CHARS), "phase": line.phase, "where": line.where,
            "is_own": line.is_own, "self_s": line.self_s, "total_s": line.total_s,
            "share_frac": _part(line.self_s, step_s(document)), "callee": line.callee,
        }
        for rank, document in sorted(found.items())
        for line in document.lines
    ]  # fmt: skip
    return Table(name="lines", title="Host time by line of code", columns=LINE_COLUMNS, rows=rows, notes=_notes(found))


def phases_table(found: Mapping[int, Lines]) -> Table:
    """Returns the seconds of a step by phase, without a profiler, of all ranks."""
    rows = [
        {
            "rank": rank, "phase": phase, "host_s": seconds, "device_s": (document.device_phases_s or {}).get(phase),
            "share_frac": _part(seconds, step_s(document)),
        }
        for rank, document in sorted(found.items())
        for phase, seconds in document.phases_s.items()
    ]  # fmt: skip
    return Table(
        name="phases", title="A step by phase, without a profiler", columns=PHASE_COLUMNS, rows=rows, notes=_notes(found)
    )


def compile_table(found: Mapping[int, Lines]) -> Table:
    """Returns what torch.compile compiled again and where it broke the graph, of all ranks."""
    rows = []
    for rank, document in sorted(found.items()):
        compiled = document.compiled
        for kind, items in (
            ("recompilation", compiled.recompilations if compiled else []),
            ("graph break", compiled.graph_breaks if compiled else []),
        ):
            rows += [
                {"rank": rank, "kind": kind, **{name: item.get(name) for name in list(COMPILE_COLUMNS)[2:]}} for item in items
            ]
    return Table(name="compile", title="Recompilations and graph breaks", columns=COMPILE_COLUMNS, rows=rows)


def stages_table(found: Mapping[int, Lines]) -> Table:
    """Returns the stages of the input pipeline of all ranks. Stage "all" is the sum of a rank's stages."""
    rows = [row for rank, document in sorted(found.items()) for row in _stage_rows(rank, document)]
    return Table(name="stages", title="Stages of the input pipeline", columns=STAGE_COLUMNS, rows=rows, notes=_notes(found))


def _stage_rows(rank: int, document: Lines) -> list[Row]:
    if not document.stages:
        return []
    demand, totals = demand_per_s(document), dict[str, float]()
    for stage in document.stages:
        totals[stage.where] = totals.get(stage.where, 0.0) + stage.seconds
    rows: list[Row] = [
        {
            "rank": rank, "stage": stage.name, "where": stage.where, "seconds": stage.seconds, "cpu_s": stage.cpu_s,
            "blocked_s": stage.blocked_s, "share_frac": _part(stage.seconds, totals[stage.where]), "count": stage.count,
            "workers_needed": workers_needed(demand, stage.seconds) if stage.where == WORKER else None,
            "num_workers": document.num_workers, **_place(stage),
        }
        for stage in document.stages
    ]  # fmt: skip
    for where, seconds in totals.items():
        inside = [stage for stage in document.stages if stage.where == where]
        rows.append({
            "rank": rank, "stage": "all", "where": where, "seconds": seconds, "cpu_s": _sum(each.cpu_s for each in inside),
            "blocked_s": _sum(each.blocked_s for each in inside), "share_frac": 1.0,
            "count": max(each.count for each in inside), "workers_needed": workers_needed(demand, seconds),
            "num_workers": document.num_workers, "file": "", "line": 0, "function": "",
        })  # fmt: skip
    return rows


def syncs_table(found: Mapping[int, Lines]) -> Table:
    """Returns the lines of all ranks in which the host waits for the device or turns tensors into Python numbers."""
    rows = [
        {
            "rank": rank, "kind": site.kind, **_place(site), "text": one_line(site.text, MAX_TEXT_CHARS), "phase": site.phase,
            "count": site.count, "seconds": site.seconds, "share_frac": _part(site.seconds, step_s(document)),
        }
        for rank, document in sorted(found.items())
        for site in document.syncs
    ]  # fmt: skip
    return Table(name="syncs", title="Waits for the device", columns=SYNC_COLUMNS, rows=rows, notes=_notes(found))


def memory_tables(found: Mapping[int, Memory]) -> list[Table]:
    """Returns what holds memory at the peak by category, by module and by place, and its course over a step."""
    notes = [*_notes(found), *(note for rank, document in sorted(found.items()) for note in _capacity_notes(rank, document))]
    categories, modules, places, points = list[Row](), list[Row](), list[Row](), list[Row]()
    for rank, document in sorted(found.items()):
        peak = document.peak_bytes
        amounts = {name: getattr(document, name) for name in MEMORY_CATEGORIES} | {"total": peak}
        categories += [
            {"rank": rank, "category": name, "bytes": amount, "share_frac": _part(amount, peak)}
            for name, amount in amounts.items()
        ]
        modules += _module_rows(rank, document)
        places += [
            {"rank": rank, **{name: each.get(name) for name in list(ALLOCATION_COLUMNS)[1:]}} for each in document.at_peak
        ]
        points += [
            {"rank": rank, "time_s": time_s, "allocated_bytes": int(allocated), "reserved_bytes": int(reserved)}
            for time_s, allocated, reserved in (point for point in document.timeline if len(point) == 3)
        ]
    made = (
        ("memory", "Memory at the peak", MEMORY_COLUMNS, categories),
        ("memory_modules", "Memory and FLOPs by module", MODULE_COLUMNS, modules),
        ("memory_places", "Largest allocations at the peak", ALLOCATION_COLUMNS, places),
        ("memory_timeline", "Memory during a step", TIMELINE_COLUMNS, points),
    )
    return [
        Table(name=name, title=title, columns=columns, rows=rows, notes=notes if name == "memory" else [])
        for name, title, columns, rows in made
        if rows or name == "memory"
    ]


def _module_rows(rank: int, document: Memory) -> list[Row]:
    total = sum(_number(each.get("activations")) for each in document.by_module)
    return [
        {
            "rank": rank, "module": str(each.get("module", "")), "class": str(each.get("class", "")),
            "activations_bytes": each.get("activations"), "parameters_bytes": each.get("parameters"),
            "flops": each.get("flops"),
            "share_frac": _part(_number(each.get("activations")), total),
        }
        for each in document.by_module
    ]  # fmt: skip


def _capacity_notes(rank: int, document: Memory) -> list[str]:
    notes = []
    if document.fragmentation_frac is not None:
        notes.append(f"rank {rank}: {document.fragmentation_frac:.1%} of the reserved memory is not allocated at the peak")
    if document.alloc_retries:
        notes.append(f"rank {rank}: the allocator had to free its cache and retry {document.alloc_retries} times")
    if document.capacity_bytes:
        notes.append(f"rank {rank}: the peak is {document.peak_bytes / document.capacity_bytes:.1%} of the capacity")
    return notes


def _place(of: Any) -> Row:
    return {"file": of.file, "line": of.line, "function": of.function}


def _part(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _sum(values: Any) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def _notes(found: Mapping[int, Lines] | Mapping[int, Memory]) -> list[str]:
    several: Sequence[tuple[int, Any]] = sorted(found.items())
    return list(
        dict.fromkeys(
            f"rank {rank}: {note}" if len(found) > 1 else note for rank, document in several for note in document.notes
        )
    )
