"""Figures on memory: which trials ran out of it, what uses it at the peak, and how it changes during a step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from autotune.config.checks import memory_limit_bytes
from autotune.errors import BadInput
from autotune.quantities import bytes_text, step_time_text
from autotune.records import Outcome
from autotune.report.drawing import (
    CROSS,
    TOP_PX,
    Bars,
    Plot,
    Row,
    Scale,
    at_height,
    dot,
    heights,
    line,
    mark,
    round_values,
    text,
)
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import keys, pair, table_notes
from autotune.report.study import BASELINE, Study
from autotune.report.trials import UNCOUNTED, phrases
from autotune.wording import listed

UNITS = (2**40, 2**30, 2**20, 2**10)
# The capacity is drawn if a trial ran out of memory or used more than this share. Otherwise, an axis up to the capacity would
# press all marks to the bottom.
NEAR_FRAC = 0.2
TEXT_FRAC = 0.07  # height of a text, as a share of a plot
MAX_NAMED = 5  # maximum number of trials in a sentence
OTHER = "other, such as gradients of activations"
MAX_MODULES = 40  # rows of the table of modules


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A study's trials with a known batch size.

    Attributes:
        measured: trials with a known peak that did not run out of memory.
        out: trials that ran out of memory.
        capacity_bytes: memory that trials may use; None if unknown.
    """

    measured: Sequence[dict[str, Any]]
    out: Sequence[dict[str, Any]]
    capacity_bytes: float | None

    @property
    def peak_bytes(self) -> float:
        """The highest peak of any trial."""
        return max(float(trial["peak_memory_bytes"]) for trial in self.measured)

    @property
    def is_near(self) -> bool:
        """Whether a trial came near the capacity."""
        return self.capacity_bytes is not None and (bool(self.out) or self.peak_bytes > NEAR_FRAC * self.capacity_bytes)


def memory_by_batch(study: Study) -> Figure:
    """Returns the peak memory of the trials by batch size, with the capacity and the trials that ran out of memory."""
    title, key = "What runs out of memory?", "memory-by-batch"
    out = [trial for trial in study.trials if Outcome(str(trial["outcome"])).is_memory and trial.get("kind") not in UNCOUNTED]
    found = _sized(study, out)
    says = _words(study, out)  # shown even if no batch size is known, as for a program without a loader
    if not found.measured:
        return Figure(key=key, title=title, absent=f"{says} The batch size or the memory of the trials is not known.")
    says += " Each mark is the peak of one process."
    notes = []
    if found.capacity_bytes and not found.is_near and not out:
        most = math.ceil(100 * found.peak_bytes / found.capacity_bytes)
        notes.append(f"No trial used more than {most} % of the capacity, {bytes_text(found.capacity_bytes)}.")
    rows = [
        [f"{trial['number']:04d}", f"{_batch(trial):g}", bytes_text(trial.get("peak_memory_bytes")), str(trial["outcome"])]
        for trial in (*found.measured, *found.out)
    ]
    grid = Grid(columns=["trial ", "batch ", "peak ", "outcome"], rows=rows)
    return Figure(key=key, title=title, says=says, drawing=_plot(study, found).html(), grid=grid, notes=notes)


def _sized(study: Study, out: Sequence[dict[str, Any]]) -> Sized:
    sized = [trial for trial in study.configurations if _batch(trial)]
    return Sized(
        measured=[trial for trial in sized if trial.get("peak_memory_bytes") and trial not in out],
        out=[trial for trial in out if _batch(trial)],
        capacity_bytes=_capacity_bytes(study),
    )


def _capacity_bytes(study: Study) -> float | None:
    """Returns the memory of the device (of the machine if trials run on the CPU), or the configured limit if that is less."""
    machine, identity = study.summary.get("machine") or {}, study.summary.get("identity") or {}
    known = machine.get("device_memory_bytes") or (machine.get("memory_bytes") if machine.get("device") != "cuda" else None)
    limit = None
    with contextlib.suppress(BadInput):  # the recorded limit is damaged
        limit = memory_limit_bytes(identity.get("device.memory_limit"), int(known) if known else None)
    return min(known, limit) if known and limit else known


def _batch(trial: dict[str, Any]) -> float:
    size = (trial.get("knobs") or {}).get("loader.batch_size")
    return float(size) if isinstance(size, int | float) and not isinstance(size, bool) and size > 0 else 0.0


def _words(study: Study, out: Sequence[dict[str, Any]]) -> str:
    taken = len((study.summary.get("warm_start") or {}).get("out_of_memory") or [])
    if not out:
        earlier = f" Configurations not tried, since they ran out of memory in earlier studies: {taken}." if taken else ""
        return f"No configuration ran out of memory.{earlier}"
    by_number = {trial["number"]: words for trial, words in zip(study.trials, phrases(study.summary), strict=True)}
    named = listed([f"trial {trial['number']} ({by_number[trial['number']]})" for trial in out], MAX_NAMED, "; ")
    return f"{len(out)} trial{'s' if len(out) > 1 else ''} ran out of memory: {named}."


def _plot(study: Study, found: Sized) -> Plot:
    height = heights(found.capacity_bytes if found.is_near and found.capacity_bytes else found.peak_bytes)
    sizes = [_batch(trial) for trial in (*found.measured, *found.out)]
    across = Scale(min(sizes) / 1.3, max(sizes) * 1.3, is_log=True)
    capacity_bytes = found.capacity_bytes if found.is_near else None
    marks = [_capacity(capacity_bytes, height)] if capacity_bytes else []
    above = height(capacity_bytes or height.high) - TEXT_FRAC  # an axis label above this would overlap the capacity's line
    places: dict[tuple[str, float, int], Markup] = {}  # trials at the same place are drawn once
    for trial in found.measured:
        x, y = across(_batch(trial)), at_height(height(float(trial["peak_memory_bytes"])))
        kind = "best" if trial["number"] == study.best else "baseline" if trial["number"] == BASELINE else "searched"
        title = f"{trial['number']:04d}: batch {_batch(trial):g}, {bytes_text(trial['peak_memory_bytes'])}"
        places.setdefault((kind, round(x, 3), round(y)), dot(x, y, kind, title))
    crosses = {
        _batch(trial): mark(across(_batch(trial)), TOP_PX + 8, CROSS, "failed", f"{trial['number']:04d}: {trial['outcome']}")
        for trial in reversed(found.out)
    }
    kinds = [("dot:baseline", "baseline"), ("dot:searched", "search"), ("dot:best", "best"), ("cross:failed", "out of memory")]
    return Plot(
        title="Peak memory by batch size.", marks=[*marks, *places.values(), *crosses.values()],
        x=[(across(tick), f"batch {tick:g}") for tick in (across.ticks() if len(set(sizes)) > 1 else sizes[:1])],
        y=[tick for tick in _byte_axis(height) if tick[0] > at_height(above)], key=kinds if found.out else kinds[:-1],
    )  # fmt: skip


def _capacity(capacity_bytes: float, height: Scale) -> Markup:
    y = at_height(height(capacity_bytes))
    return line(0, 1, "capacity", y, y) + text(1, y + 14, f"capacity {bytes_text(capacity_bytes)}", "over")


def _byte_axis(height: Scale) -> list[tuple[float, str]]:
    unit = next((unit for unit in UNITS if height.high >= unit), 1)
    ticks = [tick * unit for tick in round_values(height.high / unit)]
    return [(at_height(height(tick)), bytes_text(tick)) for tick in ticks if tick]


# At the peak, and during a step -----------------------------------------------------------------------------------------


def memory(study: Study) -> Figure:
    """Returns what uses the memory at the peak, with a bar each for baseline and best."""
    title = "What uses the memory at its peak?"
    amounts = {
        role: {str(row["category"]): float(row["bytes"]) for row in found}
        for role, number in study.sides.items()
        if (found := study.rows("memory", number))
    }
    if not amounts:
        return Figure(key="memory", title=title, absent=study.why_absent("memory"))
    names = dict.fromkeys(name for found in amounts.values() for name, value in found.items() if value)
    scale = Scale(0.0, 1.02 * max(value for found in amounts.values() for value in found.values()))
    rows = [
        Row(
            label=OTHER if name == "other" and _is_on_gpu(study) else name.replace("_", " "),
            value=" → ".join(bytes_text(found.get(name)) for found in amounts.values()),
            marks=pair({role: found.get(name) for role, found in amounts.items()}, scale),
        )
        for name in names
    ]  # fmt: skip
    return Figure(
        key="memory", title=title, says="Bytes of the program's tensors, by what they are for.",
        drawing=Bars(rows=rows, key=keys(amounts)).html(), grid=_modules(study), notes=table_notes(study, "memory"),
    )  # fmt: skip


def _is_on_gpu(study: Study) -> bool:
    return (study.summary.get("machine") or {}).get("device") == "cuda"


def _modules(study: Study) -> Grid | None:
    columns = ("activations_bytes", "parameters_bytes")
    rows = [
        [row["module"] or "(the model)", row["class"], *(bytes_text(row[key]) for key in columns)]
        for row in study.rows("memory_modules", study.best)[:MAX_MODULES]
    ]
    return Grid(columns=["module of the best trial", "class", "activations ", "parameters "], rows=rows) if rows else None


def memory_timeline(study: Study) -> Figure:
    """Returns the memory over two steps of the best trial."""
    title = "How does memory change during a step?"
    rows = study.rows("memory_timeline", study.best)
    if len(rows) < 2:
        absent = "Only the CUDA allocator records this, in the pass `memory`."
        absent = study.why_absent("memory_timeline") if _is_on_gpu(study) else absent
        return Figure(key="memory-timeline", title=title, absent=absent)
    span = Scale(0.0, max(float(row["time_s"]) for row in rows))
    height = heights(max(float(row["reserved_bytes"]) for row in rows))
    marks = []
    for key, kind in (("reserved_bytes", "baseline-line"), ("allocated_bytes", "best-line")):
        points = [(span(row["time_s"]), at_height(height(float(row[key])))) for row in rows]
        marks += [line(one[0], two[0], kind, one[1], two[1]) for one, two in itertools.pairwise(points)]
    plot = Plot(
        title=title, marks=marks, x=[(0.0, "0"), (1.0, step_time_text(span.high))], y=_byte_axis(height),
        key=[("line:baseline-line", "reserved by the allocator"), ("line:best-line", "allocated by tensors")],
    )  # fmt: skip
    says = "Two steps of the best trial. The times are those at which the host allocates and frees memory."
    return Figure(key="memory-timeline", title=title, says=says, drawing=plot.html())
