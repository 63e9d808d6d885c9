"""Makes tables from the documents of the passes "lines" and "memory": lines, stages of the input, waits, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from autotune.explain.table import Row, Table, quotient
from autotune.harness.explain.documents import WORKER, Compiled, Lines, Memory, Stage
from autotune.plain_text import one_line
from autotune.quantities import percent_text
from autotune.stats import sum_known

# The number of workers computed from the mean service time is multiplied by this, because service times vary.
WORKER_MARGIN = 1.1
MAX_TEXT_CHARS = 200
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "input", "other")
_Document = TypeVar("_Document", Lines, Memory)

_PLACE = {"file": "path of the file", "line": "line number", "function": "qualified name"}
LINE_COLUMNS = {
    "rank": "rank of the process", **_PLACE, "text": "the line", "phase": "phase of the step",
    "where": "main, worker or thread", "is_own": "whether the file belongs to the program",
    "self_s": "seconds per step spent in the line and in the libraries that it calls; for workers, summed over them",
    "total_s": "seconds per step with the line anywhere on the stack", "share_frac": "self_s relative to the step",
    "callee": "library function in which most of self_s is spent",
}  # fmt: skip
STAGE_COLUMNS = {
    "rank": "rank of the process", "stage": "stage of the input pipeline", "where": "main or worker",
    "seconds": "wall seconds per sample", "cpu_s": "CPU seconds per sample",
    "blocked_s": "seconds per sample spent blocked: neither running on a CPU nor waiting for one",
    "share_frac": "share of the seconds of all stages with the same `where`",
    "count": "calls that were timed; in the stages item and collate, one call makes a whole batch",
    "workers_needed": "ceil(1.1 x D x seconds), where D is the demand: samples per second without waits",
    "num_workers": "workers that the loader has", **_PLACE,
}  # fmt: skip
SYNC_COLUMNS = {
    "rank": "rank of the process", "kind": "what waits or copies", **_PLACE, "text": "the line", "phase": "phase of the step",
    "count": "calls per step", "seconds": "seconds per step in these calls", "share_frac": "seconds relative to the step",
}  # fmt: skip
PHASE_COLUMNS = {
    "rank": "rank of the process", "phase": "phase of the step", "host_s": "host seconds per step",
    "device_s": "device seconds per step, by CUDA events",
    "share_frac": "device_s, or host_s if there is no device_s, relative to the step",
}  # fmt: skip
COMPILE_COLUMNS = {
    "rank": "rank of the process", "kind": "recompilation or graph break", **_PLACE, "reason": "as torch gives it",
    "seconds": "seconds spent compiling", "count": "how often it happened",
}  # fmt: skip
MEMORY_COLUMNS = {
    "rank": "rank of the process", "category": "what holds the memory, or total",
    "bytes": "bytes at the peak", "share_frac": "share of the peak",
}  # fmt: skip
MODULE_COLUMNS = {
    "rank": "rank of the process", "module": "name in the model", "class": "its class",
    "activations_bytes": "bytes saved for the backward pass", "parameters_bytes": "bytes of its parameters",
    "flops": "FLOPs of a step", "share_frac": "share of all activations",
}  # fmt: skip
ALLOCATION_COLUMNS = {"rank": "rank of the process", **_PLACE, "bytes": "bytes held at the peak", "count": "allocations"}
TIMELINE_COLUMNS = {
    "rank": "rank of the process", "time_s": "seconds since the first of the two steps began",
    "allocated_bytes": "bytes in tensors", "reserved_bytes": "bytes reserved by the allocator",
}  # fmt: skip
COLUMNS = {
    "phases": PHASE_COLUMNS, "lines": LINE_COLUMNS, "stages": STAGE_COLUMNS, "syncs": SYNC_COLUMNS, "compile": COMPILE_COLUMNS,
    "memory": MEMORY_COLUMNS, "memory_modules": MODULE_COLUMNS, "memory_places": ALLOCATION_COLUMNS,
    "memory_timeline": TIMELINE_COLUMNS,
}  # fmt: skip


def step_s(lines: Lines) -> float:
    """Returns the seconds of a step without a profiler."""
    return lines.seconds / lines.steps if lines.steps else 0.0


def demand_per_s(lines: Lines) -> float | None:
    """Returns D, the samples per second that the program would use if it never waited for the loader; None if unknown."""
    busy_s, samples = step_s(lines) - (lines.wait_s or 0.0), made(lines)
    return samples / busy_s if samples and busy_s > 0 else None


def made(lines: Lines) -> float:
    """Returns the samples that a rank's loader makes for a step: several batches if the program accumulates gradients.

    If the loader's samples are not counted, because the unit is tokens or steps, a step is assumed to take one batch.
    """
    counted = lines.samples / max(1, lines.steps)
    return counted if counted and lines.unit == "samples" else float(lines.batch_size or counted)


def workers_needed(demand: float | None, service_s: float) -> int | None:
    """Returns how many workers make `demand` samples per second: ceil(1.1 x demand x service_s), at least 1.

    Returns None if `demand` is None.
    """
    return None if demand is None else max(1, math.ceil(WORKER_MARGIN * demand * service_s - 1e-9))


def lines_tables(found: Mapping[int, Lines]) -> list[Table]:
    """Returns the tables of the pass "lines", of all ranks; a table may be empty."""
    return [
        _table(found, "phases", "A step by phase, without a profiler", PHASE_COLUMNS, _phase_rows),
        _table(found, "lines", "Host time by line of code", LINE_COLUMNS, _line_rows),
        _table(found, "stages", "Stages of the input pipeline", STAGE_COLUMNS, _stage_rows),
        _table(found, "syncs", "Waits for the device", SYNC_COLUMNS, _sync_rows),
        _table(found, "compile", "Recompilations and graph breaks", COMPILE_COLUMNS, _compile_rows),
    ]


def memory_tables(found: Mapping[int, Memory]) -> list[Table]:
    """Returns the memory at the peak by category, by module and by place, and the memory during two steps."""
    made = [
        _table(found, "memory", "Memory at the peak", MEMORY_COLUMNS, _memory_rows),
        _table(found, "memory_modules", "Memory and FLOPs by module", MODULE_COLUMNS, _module_rows),
        _table(found, "memory_places", "Largest allocations at the peak", ALLOCATION_COLUMNS, _allocation_rows),
        _table(found, "memory_timeline", "Memory during two steps", TIMELINE_COLUMNS, _timeline_rows),
    ]
    for rank, document in sorted(found.items()):
        made[0].notes += [f"rank {rank}: {note}" if len(found) > 1 else note for note in _capacity_notes(document)]
    return [table for table in made if table.rows or table.name == "memory"]


def _table(
    found: Mapping[int, _Document],
    name: str,
    title: str,
    columns: dict[str, str],
    rows_of: Callable[[_Document], Iterable[Row]],
) -> Table:
    rows = [{"rank": rank, **row} for rank, document in sorted(found.items()) for row in rows_of(document)]
    notes = [
        f"rank {rank}: {note}" if len(found) > 1 else note
        for rank, document in sorted(found.items())
        for note in document.notes
    ]
    return Table(name=name, title=title, columns=columns, rows=rows, notes=list(dict.fromkeys(notes)))


def _row(of: Any, columns: Mapping[str, str], **more: Any) -> Row:
    """Returns a row without its rank. Values that are not given are taken from the attributes of `of`."""
    return {name: more[name] if name in more else getattr(of, name) for name in columns if name != "rank"}


def _line_rows(document: Lines) -> Iterable[Row]:
    for line in document.lines:
        share_frac, text = quotient(line.self_s, step_s(document)), one_line(line.text, MAX_TEXT_CHARS)
        yield _row(line, LINE_COLUMNS, text=text, share_frac=share_frac)


def _phase_rows(document: Lines) -> Iterable[Row]:
    for phase, seconds in document.phases_s.items():
        device_s = (document.device_phases_s or {}).get(phase)
        share_frac = quotient(seconds if device_s is None else device_s, step_s(document))
        yield {"phase": phase, "host_s": seconds, "device_s": device_s, "share_frac": share_frac}


def _sync_rows(document: Lines) -> Iterable[Row]:
    for site in document.syncs:
        share_frac, text = quotient(site.seconds, step_s(document)), one_line(site.text, MAX_TEXT_CHARS)
        yield _row(site, SYNC_COLUMNS, text=text, share_frac=share_frac)


def _compile_rows(document: Lines) -> Iterable[Row]:
    compiled = document.compiled or Compiled()
    for kind, items in (("recompilation", compiled.recompilations), ("graph break", compiled.graph_breaks)):
        names = list(COMPILE_COLUMNS)[2:]
        for item in items:  # a graph break has no function
            yield {"kind": kind, **{name: item.get(name) for name in names}, "function": item.get("function") or ""}


def _stage_rows(document: Lines) -> Iterable[Row]:
    """Yields the stages, then for each kind of process (main, worker) a stage "all" with the sums over its stages.

    If there are workers, the training process only receives batches. More workers would not take over that work, so its
    `workers_needed` is None.
    """
    demand, by_where = demand_per_s(document), dict[str, list[Stage]]()
    for stage in document.stages:
        by_where.setdefault(stage.where, []).append(stage)
    totals = {where: math.fsum(stage.seconds for stage in stages) for where, stages in by_where.items()}
    for stage in document.stages:
        yield _row(
            stage, STAGE_COLUMNS, stage=stage.name, share_frac=quotient(stage.seconds, totals[stage.where]),
            workers_needed=workers_needed(demand, stage.seconds) if stage.where == WORKER else None,
            num_workers=document.num_workers,
        )  # fmt: skip
    for where, inside in by_where.items():
        by_workers = where == WORKER or not document.num_workers
        yield {
            "stage": "all", "where": where, "seconds": totals[where], "cpu_s": sum_known(each.cpu_s for each in inside),
            "blocked_s": sum_known(each.blocked_s for each in inside), "share_frac": 1.0,
            "count": max(each.count for each in inside),
            "workers_needed": workers_needed(demand, totals[where]) if by_workers else None,
            "num_workers": document.num_workers, "file": "", "line": 0, "function": "",
        }  # fmt: skip


def _memory_rows(document: Memory) -> Iterable[Row]:
    amounts = {name: getattr(document, name) for name in MEMORY_CATEGORIES} | {"total": document.peak_bytes}
    for name, amount in amounts.items():
        yield {"category": name, "bytes": amount, "share_frac": quotient(amount, document.peak_bytes)}


def _module_rows(document: Memory) -> Iterable[Row]:
    total = math.fsum(each.get("activations") or 0 for each in document.by_module)
    for each in document.by_module:
        yield {
            "module": str(each.get("module", "")), "class": str(each.get("class", "")),
            "activations_bytes": each.get("activations"), "parameters_bytes": each.get("parameters"),
            "flops": each.get("flops"), "share_frac": quotient(each.get("activations") or 0, total),
        }  # fmt: skip


def _allocation_rows(document: Memory) -> Iterable[Row]:
    return ({name: each.get(name) for name in list(ALLOCATION_COLUMNS)[1:]} for each in document.at_peak)


def _timeline_rows(document: Memory) -> Iterable[Row]:
    for time_s, allocated, reserved in (point for point in document.timeline if len(point) == 3):
        yield {"time_s": time_s, "allocated_bytes": int(allocated), "reserved_bytes": int(reserved)}


def _capacity_notes(document: Memory) -> list[str]:
    notes = []
    if document.fragmentation_frac is not None:
        share = percent_text(document.fragmentation_frac, digits=1)
        notes.append(f"{share} of the reserved memory is not allocated at the peak")
    if document.alloc_retries:
        notes.append(f"the allocator had to free its cache and retry {document.alloc_retries} times")
    if document.capacity_bytes:
        share = percent_text(document.peak_bytes / document.capacity_bytes, digits=1)
        notes.append(f"the peak is {share} of the capacity")
    return notes
