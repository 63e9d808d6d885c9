"""Figures on the operators and kernels that take the most time in the best trial."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autotune.quantities import number_text
from autotune.report.drawing import Bars, Row, Scale, bar
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ms_text, share_text, table_notes
from autotune.report.study import Study

MAX_SHOWN = 12  # rows of a chart; the table has more
MAX_LISTED = 40  # rows of a table; the CSV beside the trace has all

_Ranked = list[tuple[dict[str, Any], float]]


def operators(study: Study) -> Figure:
    """Returns the operators that take the most time."""
    title = "Which operators take the most time?"
    rows = _ranked(study.rows("operators", study.best), "device_self_s", "host_self_s")
    if not rows:
        return Figure(key="operators", title=title, absent=study.why_absent("operators"))
    columns = ["operator", "shapes", "phase", "calls a step ", "a step ", "share ", "bound by"]
    cells = [
        [
            row["operator"], row["shapes"], row["phase"], number_text(row["count"]), ms_text(seconds),
            share_text(row["share_frac"]), row["bound"],
        ]
        for row, seconds in rows[:MAX_LISTED]
    ]  # fmt: skip
    return Figure(
        key="operators", title=title, says="Time in each operator itself, without those that it calls, in the best trial.",
        drawing=_chart(rows, "operator").html(), grid=Grid(columns=columns, rows=cells), notes=table_notes(study, "operators"),
    )  # fmt: skip


def kernels(study: Study) -> Figure:
    """Returns the kernels that take the most time."""
    title = "Which kernels take the most time?"
    rows = _ranked(study.rows("kernels", study.best), "total_s")
    if not rows:
        return Figure(key="kernels", title=title, absent=study.why_absent("kernels"))
    columns = ["kernel", "operator", "launches a step ", "a step ", "share ", "Tensor Cores", "could use them"]
    cells = [
        [
            row["kernel"], row["operator"], number_text(row["count"]), ms_text(seconds), share_text(row["share_frac"]),
            row["tensor_core_used"], row["tensor_core_eligible"],
        ]
        for row, seconds in rows[:MAX_LISTED]
    ]  # fmt: skip
    return Figure(
        key="kernels", title=title, says="Time on the device, in the best trial.", drawing=_chart(rows, "kernel").html(),
        grid=Grid(columns=columns, rows=cells), notes=table_notes(study, "kernels"),
    )  # fmt: skip


def _ranked(rows: Sequence[dict[str, Any]], *names: str) -> _Ranked:
    """Returns rows with their seconds, the most first, by the first column that has any."""
    name = next((name for name in names if any(row.get(name) for row in rows)), names[-1])
    return sorted(((row, float(row[name] or 0.0)) for row in rows), key=lambda pair: -pair[1])


def _chart(rows: _Ranked, name: str) -> Bars:
    """Returns the chart of rows with the same name together, whatever their shapes."""
    seconds, shares = defaultdict[str, float](float), defaultdict[str, float](float)
    for row, row_s in rows:
        seconds[str(row[name])] += row_s
        shares[str(row[name])] += float(row["share_frac"] or 0.0)
    shown = sorted(seconds.items(), key=lambda pair: -pair[1])[:MAX_SHOWN]
    scale = Scale(0.0, 1.02 * shown[0][1] or 1.0)
    return Bars(rows=[
        Row(label=each, value=f"{ms_text(each_s)}, {share_text(shares[each])}", marks=[bar(0, scale(each_s), "best")])
        for each, each_s in shown
    ])  # fmt: skip
