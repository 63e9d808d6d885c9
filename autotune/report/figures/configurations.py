"""Figures on the configurations that were tried: the fastest few with their resources, and the values of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from autotune.knobs.base import value_text
from autotune.quantities import (
    DASH,
    bytes_text,
    number_text,
    rate_text,
    ratio_text,
    ratio_with_interval_text,
    share_text,
    step_time_text,
)
from autotune.records import KnobValue, Outcome
from autotune.report.drawing import CROSS, MAX_TITLED, TRACK_PX, Bars, Row, Scale, dot, interval, line, mark
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import tick_text
from autotune.report.finals import finals_notes, finals_of, processes_text
from autotune.report.study import BASELINE, Study
from autotune.wording import changes_phrase, knob_phrase, score_of, side_texts

NUM_FASTEST = 5
MAX_VALUES = 8  # a setting with at most this many values is listed with all of them, tried or not
MIDDLE = TRACK_PX / 2
BUSY = "gpu.utilisation_frac"  # share of the time in which a kernel runs
Trials = Sequence[dict[str, Any]]


def fastest(study: Study) -> Figure:
    """Returns the fastest configurations and the baseline: their rates, memory and step times."""
    title = "Which configurations were the fastest?"
    able = [trial for trial in study.configurations if Outcome(str(trial["outcome"])).may_win and _score(study, trial)]
    ranked = sorted(able, key=lambda trial: -(_score(study, trial) or 0.0))
    shown = [trial for trial in ranked if trial["number"] != BASELINE][:NUM_FASTEST]
    if not shown:
        return Figure(key="fastest", title=title, absent="No configuration but the program's own has a rate.")
    shown += [trial for trial in ranked if trial["number"] == BASELINE]
    columns = ["trial ", "configuration", "rate ", "ratio ", "processes", "memory ", "step ", "step p95 "]
    busy = [_metrics(study, trial["number"]).get(BUSY) for trial in shown]
    rows = [_cells(study, trial) for trial in shown]
    if any(busy):
        columns, rows = [*columns, "GPU in use "], [[*row, share_text(found)] for row, found in zip(rows, busy, strict=True)]
    grid = Grid(columns=columns, rows=rows)
    says = (
        "The search measures each configuration in one process, so this order is uncertain; the finals measure up to three of "
        "them again. Memory and step times come from one process each. "
        "A slower configuration may be the better choice if it takes less memory or changes less."
    )
    return Figure(key="fastest", title=title, says=says, grid=grid, is_open=True, notes=finals_notes(study.trials))


def _side(study: Study, number: int) -> dict[str, Any]:
    """Returns the summary's entry "best" or "baseline", with the reported rate, if it is about this trial; else {}."""
    sides = [study.summary.get(role) or {} for role in ("best", "baseline")]
    return next((side for side in sides if side.get("trial") == number and side.get("value")), {})


def _score(study: Study, trial: dict[str, Any]) -> float | None:
    """Returns the score of a configuration: from the finals if it was measured there, else from the search."""
    if side := _side(study, trial["number"]):
        return score_of(study.summary, side)
    finals = [score for each in finals_of(study.finals, trial["number"]) if (score := score_of(study.summary, each))]
    return statistics.geometric_mean(finals) if finals else score_of(study.summary, trial)


def _cells(study: Study, trial: dict[str, Any]) -> list[str]:
    number = trial["number"]
    finals = [each["value"] for each in finals_of(study.finals, number) if each.get("value")]
    rate = rate_text(statistics.geometric_mean(finals) if finals else trial.get("value"), study.unit)
    if side := _side(study, number):
        rate = side_texts(study.summary, side)[0]
    metrics = _metrics(study, number)
    steps = [step_time_text(value) if (value := metrics.get(key)) else DASH for key in ("step_p50_s", "step_p95_s")]
    best = ", best" if number == study.best else ""
    return [
        f"{number:04d}{best}", changes_phrase(trial.get("changed") or {}, none="unchanged"), rate, _ratio(study, trial),
        processes_text(study.trials, trial),
        bytes_text(trial.get("peak_memory_bytes")), *steps,
    ]  # fmt: skip


def _metrics(study: Study, number: int) -> dict[str, float]:
    return study.records[number].metrics if number in study.records else {}


def _ratio(study: Study, trial: dict[str, Any]) -> str:
    speedup = study.summary.get("speedup") or {}
    if speedup.get("ratio") and speedup.get("trial", study.best) == trial["number"]:
        return ratio_with_interval_text(speedup["ratio"], speedup.get("ci"))
    base, score = score_of(study.summary, study.summary.get("baseline") or {}), _score(study, trial)
    return ratio_text(score / base) if base and score else DASH


# Settings ---------------------------------------------------------------------------------------------------------------


def settings(study: Study) -> Figure:
    """Returns the rates of the search trials by the value of each setting. Notes name settings with one value in all trials."""
    title, trials = "What was tried of each setting?", study.configurations
    rates = [float(trial["value"]) for trial in trials if trial.get("value")]
    by_knob = {key: _by_value(study, key, trials) for key in study.space}
    tried = {key: found for key, found in by_knob.items() if sum(bool(those) for those in found.values()) > 1}
    if not tried or not rates:
        return Figure(key="settings", title=title, absent="No setting was tried with more than one value.")
    scale = Scale(0.0, 1.02 * max(rates))
    rows = [row for key, found in tried.items() for row in _rows(study, key, found, scale)]
    axis = [(scale(tick), tick_text(tick)) for tick in scale.ticks()]
    kinds = [("dot:searched", "a trial"), ("dot:best", "best")]
    if any(not trial.get("value") for trial in trials):
        kinds.append(("cross:failed", "no result"))
    says = (
        f"Each mark is the first trial of a configuration, in {study.unit}/s. Trials of a row differ in other settings, too, "
        'so compare the fastest of each value. The effect of each change alone is under "What was gained".'
    )
    return Figure(
        key="settings", title=title, says=says, drawing=Bars(rows=rows, axis=axis, key=kinds).html(), grid=_values(tried),
        notes=_unchanged([key for key in study.space if key not in tried], by_knob), width="wide",
    )  # fmt: skip


def _by_value(study: Study, key: str, trials: Trials) -> dict[KnobValue, Trials]:
    """Returns value -> trials with it. Values that were not tried are included if the setting has at most MAX_VALUES values."""
    with_it = [trial for trial in trials if key in (trial.get("knobs") or {})]
    seen = dict.fromkeys(trial["knobs"][key] for trial in with_it)
    values = study.space[key] if len(study.space[key]) <= MAX_VALUES else [v for v in study.space[key] if v in seen]
    others = sorted(value for value in seen if value not in values)  # can be sorted, since a knob's values have one type
    return {value: [trial for trial in with_it if trial["knobs"][key] == value] for value in (*values, *others)}


def _rows(study: Study, key: str, found: dict[KnobValue, Trials], scale: Scale) -> list[Row]:
    return [
        Row(label=knob_phrase(key, value), note="" if n else key, value=_tried_text(those), marks=_marks(study, those, scale))
        for n, (value, those) in enumerate(found.items())
    ]


def _values(tried: dict[str, dict[KnobValue, Trials]]) -> Grid:
    cells = []
    for key, found in tried.items():
        for value, those in found.items():
            rates = [float(trial["value"]) for trial in those if trial.get("value")]
            ends = [number_text(end) for end in (min(rates), max(rates))] if rates else [DASH, DASH]
            cells.append([key, value_text(value), str(len(those)), str(len(those) - len(rates)), *ends])
    return Grid(columns=["setting", "value", "trials ", "no result ", "slowest ", "fastest "], rows=cells)


def _tried_text(trials: Trials) -> str:
    rates = [float(trial["value"]) for trial in trials if trial.get("value")]
    if not trials:
        return "not tried"
    if not rates:
        return f"no result in {len(trials)}"
    return number_text(rates[0]) if len(trials) == 1 else f"{number_text(max(rates))}, fastest of {len(trials)}"


def _marks(study: Study, trials: Trials, scale: Scale) -> list[Markup]:
    """Returns a mark for each trial; for very many trials, only their range."""
    rates = [float(trial["value"]) for trial in trials if trial.get("value")]
    failed = [mark(0, MIDDLE, CROSS, "failed")] if len(rates) < len(trials) else []
    ours = [trial for trial in trials if trial["number"] == study.best and trial.get("value")]
    best = [dot(scale(trial["value"]), MIDDLE, "best") for trial in ours]
    if len(study.trials) > MAX_TITLED and rates:
        return [*failed, interval(scale(min(rates)), scale(max(rates))), *best]
    places = {round(scale(rate), 3) for rate in rates}
    ground = [line(0, 1, "grid", MIDDLE, MIDDLE)]
    return [*ground, *failed, *(dot(x, MIDDLE, "searched") for x in sorted(places)), *best]


def _unchanged(keys: Sequence[str], by_knob: dict[str, dict[KnobValue, Trials]]) -> list[str]:
    """Returns a sentence on the settings of the search space that were tried with only one value."""
    words = []
    for key in keys:
        kept = [value_text(value) for value, trials in by_knob[key].items() if trials]
        words.append(f"{key} ({kept[0]})" if kept else f"{key} (has no effect in these trials)")
    return [f"In the search space, but tried with one value only: {', '.join(words)}."] if words else []
