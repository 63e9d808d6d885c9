"""Figures on the operators and kernels that take the most time in the best trial."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.harness.explain.documents import OPTIMIZER
from autotune.quantities import DASH, number_text, share_text
from autotune.report.drawing import Bars, Row, Scale, bar
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ms_text, named, table_notes
from autotune.report.study import Study

MAX_SHOWN = 12  # rows of a chart; the table has more
SECONDS, SHARE = "seconds", "share"  # placeholders for the columns with a row's seconds, and with their share of a whole step
MAX_LABEL_CHARS = 90  # maximum length of a label in a chart; the table has the whole name
MAX_KINDS = 6  # the sentence names at most this many kinds of operators
MAX_LISTED = 40  # rows of a table; the CSV beside the trace has all
# Parts of a kernel's name that say little: C++ namespaces and casts, and the layout of cuDNN kernels.
_OMITTED = re.compile(
    r"^void |\(anonymous namespace\)::|\b(at::native|at|c10|std|cudnn::engines_precompiled|cudnn)::|\(\w+\)(?=\d)|"
    r"(?<=\d)_(warpgroupsize|warpsize|stage\d).*"
)

_Ranked = list[tuple[dict[str, Any], float]]


def operators(study: Study) -> Figure:
    """Returns the operators that take the most time."""
    columns = {
        "operator": "operator", "shapes": "shapes", "phase": "phase", "calls a step ": "count", "a step ": SECONDS,
        "of a step ": SHARE, "bound by": "bound",
    }  # fmt: skip
    says = "Time in each operator itself, without the operators that it calls, in the best trial."
    found = _figure(study, "operators", columns, says, "device_self_s", "host_self_s")
    return replace(found, says=f"{found.says} {_by_kind(study)}") if found.says else found


def _by_kind(study: Study) -> str:
    """Returns the seconds of the slowest kinds of operators: "By kind: convolution 13.4 ms (48.1 %), ..."."""
    rows = _ranked(study.rows("operators", study.best), "device_self_s", "host_self_s")
    step_s, _ = _step(study, is_on_device=any(row["device_self_s"] for row, _ in rows))
    seconds = defaultdict[str, float](float)
    for row, row_s in rows:
        seconds[OPTIMIZER if row["phase"] == OPTIMIZER else row["kind"]] += row_s
    most = sorted(seconds.items(), key=lambda pair: -pair[1])[:MAX_KINDS]
    listed = [f"{named(kind)} {ms_text(each_s)} ({_share_text(each_s, step_s)})" for kind, each_s in most if each_s]
    return f"By kind: {', '.join(listed)}." if listed else ""


def kernels(study: Study) -> Figure:
    """Returns the kernels that take the most time."""
    columns = {
        "kernel": "kernel", "operator": "operator", "launches a step ": "count", "a step ": SECONDS, "of a step ": SHARE,
        "Tensor Cores": "tensor_core_used", "could use them": "tensor_core_eligible",
    }  # fmt: skip
    return _figure(study, "kernels", columns, "Time on the device, in the best trial.", "total_s")


def _figure(study: Study, table: str, columns: Mapping[str, str], says: str, *seconds: str) -> Figure:
    title, rows = f"Which {table} take the most time?", _ranked(study.rows(table, study.best), *seconds)
    if not rows:
        return Figure(key=table, title=title, absent=study.why_absent(table))
    step_s, how = _step(study, is_on_device=any(row.get(seconds[0]) for row, _ in rows))
    cells = [[_cell(row, each_s, column, step_s) for column in columns.values()] for row, each_s in rows[:MAX_LISTED]]
    if not math.isnan(step_s):
        says += f" Shares are of a whole step, which takes {ms_text(step_s)} {how} the profiler."
    return Figure(
        key=table, title=title, says=says, drawing=_chart(rows, next(iter(columns)), step_s).html(),
        grid=Grid(columns=list(columns), rows=cells), notes=table_notes(study, table), width="wide",
    )  # fmt: skip


def _step(study: Study, *, is_on_device: bool) -> tuple[float, str]:
    """Returns the seconds of a step (nan if unknown), and "under" or "without": whether the profiler ran in that step."""
    plain = next((float(row["step_s"]) for row in study.rows("roofline", study.best) if row["step_s"]), 0.0)
    if is_on_device and plain:
        return plain, "without"
    return math.fsum(float(row["seconds"]) for row in study.rows("breakdown", study.best)) or math.nan, "under"


def _cell(row: Mapping[str, Any], seconds: float, column: str, step_s: float) -> str:
    if column == SECONDS:
        return ms_text(seconds)
    if column == SHARE:
        return _share_text(seconds, step_s)
    return number_text(row[column]) if column == "count" else str(row[column])


def _share_text(seconds: float, step_s: float) -> str:
    """Returns the share of a step as text; a dash if the length of a step is unknown."""
    return DASH if math.isnan(step_s) else share_text(seconds / step_s)


def _ranked(rows: Sequence[dict[str, Any]], *names: str) -> _Ranked:
    """Returns rows with their seconds, longest first. The seconds are from the first of the named columns that has values."""
    name = next((name for name in names if any(row.get(name) for row in rows)), names[-1])
    return sorted(((row, float(row[name] or 0.0)) for row in rows), key=lambda pair: -pair[1])


def _chart(rows: _Ranked, name: str, step_s: float) -> Bars:
    """Returns the chart. Rows that differ only in shapes are combined. The note of a kernel names its operator."""
    seconds = defaultdict[str, float](float)
    launchers = {str(row[name]): str(row["operator"]) for row, _ in reversed(rows)} if name == "kernel" else {}
    for row, row_s in rows:
        seconds[str(row[name])] += row_s
    shown = sorted(seconds.items(), key=lambda pair: -pair[1])[:MAX_SHOWN]
    scale = Scale(0.0, 1.02 * shown[0][1] or 1.0)
    return Bars(rows=[
        Row(
            label=kernel_label(each) if name == "kernel" else each, note=launchers.get(each, ""),
            value=f"{ms_text(each_s)}, {_share_text(each_s, step_s)}", marks=[bar(0, scale(each_s), "best")],
        )
        for each, each_s in shown
    ])  # fmt: skip


def kernel_label(name: str) -> str:
    """Returns a kernel's name without namespaces and parameters, cut to MAX_LABEL_CHARS."""
    short = _OMITTED.sub("", name)
    depth = 0
    for at, letter in enumerate(short):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth and at:
            short = short[:at]
            break
    return short if len(short) <= MAX_LABEL_CHARS else f"{short[: MAX_LABEL_CHARS - 1]}…"
