"""Figures on one step: where its time goes, whether its input keeps up, and a timeline."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from autotune.explain.breakdown import ON_DEVICE
from autotune.explain.kernel_names import BITS_16, BITS_32
from autotune.explain.tables import MAX_DISTORTION
from autotune.explain.timeline import PHASES, Rectangle
from autotune.harness.explain.documents import INPUT
from autotune.quantities import DASH, number_text, percent_text, step_time_text
from autotune.records import Kind
from autotune.report.drawing import TOP_PX, Bars, Plot, Row, Scale, box, round_values, text
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ROLES, keys, ms_text, named, pair, sentence, table_notes, tick_text
from autotune.report.finals import finals_of
from autotune.report.study import Study

LANE_PX, PITCH_PX = 18, 36  # height of a lane, and distance from the top of one lane to the next
LABEL_FRAC = 0.05  # rectangles that take a larger share of the step have a label
# Classes of the timeline's rectangles. Colours only separate neighbours; labels and titles say what the rectangles are.
KINDS = {
    **dict.fromkeys(("convolution", "matmul", "attention", "compiled", BITS_16, "forward"), "k1"),
    **dict.fromkeys(("backward", BITS_32, "autograd", "normalisation"), "k2"),
    "optimizer": "k3",
    **dict.fromkeys(("input", "h2d", "d2h", "transfer"), "k4"),
    **dict.fromkeys(("exposed_collective", "collective"), "k5"),
}
BY_TRACE = "From torch.profiler, which makes a step longer. Each instant counts for one part only."
BY_GPU = (
    "What the GPU does, from torch.profiler, which slows only the host. Idle time is the duration of a step "
    "without the profiler, less the time that the GPU is busy."
)
BY_PHASE = "By phase, without a profiler: timed on the GPU or, if there is none, in the training thread."
RATES = {"device_rate": "D, the step alone", "loader_rate": "L, the loader alone", "value": "both together"}
Seconds = Mapping[str, Mapping[str, float]]  # role -> {category: seconds a step}


def breakdown(study: Study) -> Figure:
    """Returns the seconds of a step by phase, with a bar each for baseline and best."""
    seconds = {role: phases for role, number in study.sides.items() if (phases := study.explained(number).get("phases_s"))}
    return _parts(study, seconds, "breakdown", "Where does the time of a step go?", BY_PHASE, "phases")


def categories(study: Study) -> Figure:
    """Returns the seconds of a profiled step by what is computed, with a bar each for baseline and best.

    If the profiler slowed the step of baseline or best too much, both bars show only what the GPU does. The profiler does not
    slow the GPU, so the bars can still be compared.
    """
    traced = {role: rows for role, number in study.sides.items() if (rows := study.rows("breakdown", number))}
    slowed = [role for role in traced if study.tables[study.sides[role]].distortion.get(0, 1.0) > MAX_DISTORTION]
    on_gpu = {role: found for role, rows in traced.items() if slowed and (found := _on_gpu(study, role, rows))}
    seconds = on_gpu or {
        role: {row["category"]: float(row["seconds"]) for row in rows} for role, rows in traced.items() if role not in slowed
    }
    key, title = "categories", "What is a step made of?"
    if traced and not seconds:
        return Figure(key=key, title=title, absent=" ".join(table_notes(study, "breakdown")))
    return _parts(study, seconds, key, title, BY_GPU if on_gpu else BY_TRACE, "breakdown")


def _on_gpu(study: Study, role: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the GPU's part of a breakdown. "idle" is the duration of a step without the profiler, less all other parts.

    Returns {} if there is no GPU, or if the duration of a step without the profiler is unknown.
    """
    found = {str(row["category"]): float(row["seconds"]) for row in rows if row["category"] in ON_DEVICE}
    roofline = next(iter(study.rows("roofline", study.sides[role])), {})
    idle_s = (roofline.get("step_s") or 0.0) - math.fsum(found.values())
    return {**found, "idle": idle_s} if found and idle_s > 0 else {}


def _parts(study: Study, seconds: Seconds, key: str, title: str, source: str, table: str) -> Figure:
    """Returns the chart of a step's parts.

    Args:
        study: the study.
        seconds: role -> {part: seconds of a step}.
        key: the figure's anchor in the page.
        title: its title.
        source: a sentence on how the seconds were measured.
        table: name of the table that contains them; the figure shows its notes, or why it is absent.
    """
    if not seconds:
        return Figure(key=key, title=title, absent=study.why_absent(table))
    names = dict.fromkeys(name for found in seconds.values() for name, value in found.items() if value)
    parts = sorted(names, key=lambda name: -max(found.get(name, 0.0) for found in seconds.values()))
    scale = Scale(0.0, 1.02 * max(value for found in seconds.values() for value in found.values()))
    rows = [
        Row(
            label=named(name), value=" → ".join(ms_text(found.get(name)) for found in seconds.values()),
            marks=pair({role: found.get(name) for role, found in seconds.items()}, scale),
        )
        for name in parts
    ]  # fmt: skip
    axis = [(scale(tick), step_time_text(tick).replace(".0 ", " ")) for tick in scale.ticks()[1:]]
    whole = ", ".join(f"{ROLES[role]}: {step_time_text(math.fsum(found.values()))}" for role, found in seconds.items())
    return Figure(
        key=key, title=title, says=f"A whole step, {whole}. {source}",
        drawing=Bars(rows=rows, axis=axis, key=keys(seconds)).html(), grid=_breakdown_grid(seconds, parts),
        notes=[*_batch_notes(study, seconds), *table_notes(study, table)],
    )  # fmt: skip


def _breakdown_grid(seconds: Seconds, categories: Sequence[str]) -> Grid:
    totals = {role: math.fsum(found.values()) for role, found in seconds.items()}
    columns = ["", *(f"{ROLES[role]}, seconds " for role in seconds), *(f"{ROLES[role]}, of a step " for role in seconds)]
    rows = [
        [
            named(name),
            *(f"{found.get(name, 0.0):.6f}" for found in seconds.values()),
            *(percent_text(found.get(name, 0.0) / (totals[role] or 1.0)) for role, found in seconds.items()),
        ]
        for name in categories
    ]
    return Grid(columns=columns, rows=rows)


def _batch_notes(study: Study, seconds: Seconds) -> list[str]:
    sizes = {study.trial(study.sides[role]).get("knobs", {}).get("loader.batch_size") for role in seconds}
    if len(sizes) < 2:
        return []
    return ["The batch sizes differ, so the two steps do different amounts of work: compare rates, not seconds."]


# Input ------------------------------------------------------------------------------------------------------------------


def stages(study: Study) -> Figure:
    """Returns the rates of step and loader, alone and together, for baseline and best, and a sample's cost at each stage."""
    title = "Does the input keep up?"
    measured = {role: _measured(study, number) for role, number in study.sides.items()}
    known = {role: rates for role, trials in measured.items() if (rates := _medians(trials))["loader_rate"]}
    if not known:
        return Figure(key="stages", title=title, absent="The program has no DataLoader whose rate could be measured.")
    scale = Scale(0.0, 1.02 * max(rates[key] or 0.0 for rates in known.values() for key in RATES))
    rows = [_rate_row(study, key, {role: rates[key] for role, rates in known.items()}, scale) for key in RATES]
    chart = Bars(rows=rows, axis=[(scale(tick), tick_text(tick)) for tick in scale.ticks()], key=keys(known))
    says = (
        "D is the rate of the training if the loader cost nothing, L the rate that the loader can deliver. "
        "If L is not well above D, the step waits for its input."
    )
    notes = [f"{sentence(ROLES[role])}: {_source(measured[role])}." for role in known]
    notes += [
        f"{sentence(ROLES[role])}: input takes {percent_text(share)} of a step."
        for role in known
        if (share := _input_frac(study, study.sides[role])) is not None
    ]
    grid = _stage_grid(study)
    if grid is None:
        notes.append(study.why_absent("stages", "What a sample costs at each stage of the loader"))
    return Figure(key="stages", title=title, says=says, drawing=chart.html(), grid=grid, notes=notes)


def _measured(study: Study, number: int) -> list[dict[str, Any]]:
    """Returns a configuration's measurements in the finals, where the machine is warm; its first measurement if none exist."""
    return [trial for trial in finals_of(study.trials, number) if trial.get("loader_rate")] or [study.trial(number)]


def _medians(trials: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    known = {key: [float(trial[key]) for trial in trials if trial.get(key)] for key in RATES}
    return {key: statistics.median(values) if values else None for key, values in known.items()}


def _source(trials: Sequence[Mapping[str, Any]]) -> str:
    """Returns the source of rates: "medians of 4 processes of the finals", "rates of trial 0000 alone"."""
    if len(trials) > 1:
        return f"medians of {len(trials)} processes of the finals"
    where = " in the finals" if trials[0].get("kind") == Kind.final else ""
    return f"rates of trial {trials[0]['number']:04d} alone{where}"


def _input_frac(study: Study, number: int) -> float | None:
    """Returns the input's share of a step: from the breakdown or, if there is none, from the trial's window."""
    if phases := study.explained(number).get("phases_s"):
        return float(phases.get(INPUT, 0.0)) / (math.fsum(phases.values()) or 1.0)
    return study.trial(number).get("data_wait_frac")


def _rate_row(study: Study, key: str, rates: Mapping[str, float | None], scale: Scale) -> Row:
    value = f"{' → '.join(number_text(rate) for rate in rates.values())} {study.unit}/s"
    return Row(label=RATES[key], value=value, marks=pair(rates, scale))


def _stage_grid(study: Study) -> Grid | None:
    rows = [(role, row) for role, number in study.sides.items() for row in study.rows("stages", number)]
    if not rows:
        return None
    columns = ["", "stage", "in", "a sample takes ", "of it on a CPU ", "of it blocked ", "workers needed ", "workers there "]
    cells = [
        [
            ROLES[role], row["stage"], row["where"], *(ms_text(row[key]) for key in ("seconds", "cpu_s", "blocked_s")),
            *(DASH if row[key] is None else str(row[key]) for key in ("workers_needed", "num_workers")),
        ]
        for role, row in rows
    ]  # fmt: skip
    return Grid(columns=columns, rows=cells)


# One step ---------------------------------------------------------------------------------------------------------------


def timeline(study: Study) -> Figure:
    """Returns what happens in one step of the best trial, in lanes."""
    title = "What happens during one step?"
    tables = study.tables.get(study.best)
    if tables is None or not tables.timeline:
        return Figure(key="timeline", title=title, absent=study.why_absent("breakdown"))
    end_s = max(each.start_s + each.seconds for each in tables.timeline)
    lanes = list(dict.fromkeys(each.lane for each in tables.timeline))
    marks = [text(0, TOP_PX + number * PITCH_PX, lane) for number, lane in enumerate(lanes)]
    marks += [_box(each, end_s, TOP_PX + lanes.index(each.lane) * PITCH_PX + 4) for each in tables.timeline]
    plot = Plot(
        title=f"{title} {len(lanes)} lanes over {step_time_text(end_s)}.", marks=marks,
        height=TOP_PX + len(lanes) * PITCH_PX + 16,
        x=[(tick / end_s, step_time_text(tick).replace(".0 ", " ") if tick else "0") for tick in round_values(end_s)],
    )  # fmt: skip
    path = tables.traces.get(tables.timeline_rank)
    return Figure(
        key="timeline", title=title, says=f"The step of median length under torch.profiler, rank {tables.timeline_rank}.",
        drawing=plot.html(), grid=_timeline_grid(tables.timeline),
        notes=[f"The whole trace opens in https://ui.perfetto.dev: {path}"] if path and os.path.exists(path) else [],
    )  # fmt: skip


def _box(each: Rectangle, end_s: float, top: float) -> Markup:
    start, end = each.start_s / end_s, (each.start_s + each.seconds) / end_s
    what = each.name if each.lane == PHASES else each.category
    several = f" and {each.count - 1} more" if each.count > 1 else ""
    title = f"{each.name}{several}: {step_time_text(each.seconds)} ({named(each.category)})"
    return box(
        start, end, KINDS.get(what, "k0"), top, LANE_PX, title=title, label=named(what) if end - start > LABEL_FRAC else ""
    )


def _timeline_grid(rectangles: Sequence[Rectangle]) -> Grid:
    found: dict[tuple[str, str], list[float]] = {}
    for each in rectangles:
        found.setdefault((each.lane, named(each.category)), []).append(each.seconds)
    rows = [[lane, kind, f"{math.fsum(seconds):.6f}", str(len(seconds))] for (lane, kind), seconds in found.items()]
    return Grid(columns=["lane", "what", "seconds ", "rectangles "], rows=rows)
