"""Figures on the trials of a study: their rates in order, and those without a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from autotune.plain_text import one_line
from autotune.quantities import DASH, compact_text, interval_text, number_text, ratio_text
from autotune.records import Kind, Outcome
from autotune.report.drawing import (
    BOTTOM_PX,
    CROSS,
    DIAMOND,
    MAX_TITLED,
    PLOT_PX,
    PLUS,
    SQUARE,
    Plot,
    Scale,
    at_height,
    dot,
    heights,
    line,
    mark,
    round_values,
)
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import tick_text
from autotune.report.study import BASELINE, Study
from autotune.report.trials import is_better, memory_text, outcomes_text, phrases
from autotune.wording import log_lines, score_of

MAX_REASON = 400  # characters of a reason, which may quote a program's message
LABELS_FRAC = 0.08  # width for the labels of the vertical axis, relative to the width of all trials
FAILED_PX = PLOT_PX - BOTTOM_PX - 6  # vertical position of trials without a rate


def rates_by_trial(study: Study) -> Figure:
    """Returns the rate of each trial in order, with intervals, the best so far, and trials without a rate."""
    title = "How fast was each trial?"
    said = phrases(study.summary)
    uncounted = (Kind.explain, Kind.check)  # the counts of outcomes leave these out, too
    trials = [pair for pair in zip(study.trials, said, strict=True) if str(pair[0].get("kind")) not in uncounted]
    valued = [trial for trial, _ in trials if trial.get("value")]
    if not valued:
        return Figure(key="trials", title=title, absent="No trial has a rate.", grid=_trial_grid(study, said) if said else None)
    height = heights(max(float(end) for trial in valued for end in (trial["value"], *(trial.get("ci") or []))))
    across = Scale(-0.5 - LABELS_FRAC * len(trials), len(trials) - 0.5)  # leaves room for the labels of the vertical axis
    marks = _best_so_far(study, [trial for trial, _ in trials], across, height)
    for place, (trial, words) in enumerate(trials):
        marks += _trial_marks(study, trial, words, across(place), height, is_titled=len(trials) <= MAX_TITLED)
    ticks = [int(tick) for tick in round_values(len(trials) - 1) if tick == int(tick)]
    plot = Plot(
        title=f"{title} The rates of {len(valued)} of {len(trials)} trials, in order.",
        marks=marks,
        x=[(across(tick), f"{trials[tick][0]['number']:04d}") for tick in ticks],
        y=[(at_height(height(tick)), f"{tick_text(tick)} {study.unit}/s") for tick in round_values(height.high) if tick],
        key=_trial_key(trials),
    )
    says = f"Each mark is one process, in order. The stepped line is the best so far. Outcomes: {outcomes_text(study.summary)}."
    return Figure(key="trials", title=title, says=says, drawing=plot.html(), grid=_trial_grid(study, said))


def _trial_marks(study: Study, trial: dict[str, Any], words: str, x: float, height: Scale, *, is_titled: bool) -> list[Markup]:
    outcome, value = Outcome(str(trial["outcome"])), trial.get("value")
    reason = f" ({one_line(str(trial['reason']), 80)})" if trial.get("reason") else ""
    rate = f"{number_text(value)} {study.unit}/s" if value else f"{outcome}{reason}"
    title = f"{trial['number']:04d}  {words}: {rate}" if is_titled else ""
    if not value:
        return [mark(x, FAILED_PX, *((SQUARE, "attribution") if outcome.has_value else (CROSS, "failed")), title)]
    y = at_height(height(value))
    made = [line(x, x, "ci", *(at_height(height(end)) for end in trial["ci"]))] if trial.get("ci") else []
    if trial["number"] == BASELINE:
        return [*made, mark(x, y, PLUS, "baseline-mark", title)]
    if str(trial["kind"]) in (Kind.final, Kind.attribution) and trial["number"] != study.best:
        return [*made, mark(x, y, DIAMOND, "final" if trial["kind"] == Kind.final else "attribution", title)]
    kind = "best" if trial["number"] == study.best else "searched" if outcome is Outcome.ok else "hollow"
    return [*made, dot(x, y, kind, title)]


def _best_so_far(study: Study, trials: Sequence[dict[str, Any]], across: Scale, height: Scale) -> list[Markup]:
    marks: list[Markup] = []
    before: dict[str, Any] | None = None
    begun = 0.0
    for place, trial in enumerate(trials):
        if not is_better(study.summary, trial, before):
            continue
        x, y = across(place), at_height(height(float(trial["value"])))
        if before is not None:
            level = at_height(height(float(before["value"])))
            marks += [line(begun, x, "so-far", level, level), line(x, x, "so-far", level, y)]
        before, begun = trial, x
    if before is not None:
        level = at_height(height(float(before["value"])))
        marks.append(line(begun, 1.0, "so-far", level, level))
    return marks


def _trial_key(trials: Sequence[tuple[dict[str, Any], str]]) -> list[tuple[str, str]]:
    there = [trial for trial, _ in trials]
    kinds = {str(trial["kind"]) for trial in there}
    key = [("plus:baseline-mark", "baseline"), ("dot:searched", "search"), ("dot:best", "best")]
    if any(trial.get("value") and trial["outcome"] != Outcome.ok for trial in there):
        key.append(("dot:hollow", "stopped early or unsteady"))
    if Kind.final in kinds:
        key.append(("diamond:final", "finals"))
    if Kind.attribution in kinds:
        key.append(("diamond:attribution", "effects of changes"))
    without = {Outcome(str(trial["outcome"])).has_value for trial in there if not trial.get("value")}
    names = {True: ("square:attribution", "losses compared"), False: ("cross:failed", "no result")}
    return [*key, *(named for has_ended_well, named in names.items() if has_ended_well in without)]


def _trial_grid(study: Study, said: Sequence[str]) -> Grid:
    base = score_of(study.summary, study.summary.get("baseline") or {})
    rates = [f"{study.unit}/s ", "interval", "ratio ", "D ", "L "]
    columns = ["trial ", "outcome", *rates, "memory ", "what was measured", "reason"]
    return Grid(columns=columns, rows=[
        [f"{trial['number']:04d}", str(trial["outcome"]), number_text(trial.get("value")), interval_text(trial.get("ci")),
         ratio_text(score / base) if base and (score := score_of(study.summary, trial)) else DASH,
         compact_text(trial.get("device_rate")), compact_text(trial.get("loader_rate")),
         memory_text(trial),
         words, one_line(str(trial.get("reason") or ""), MAX_REASON)]
        for trial, words in zip(study.trials, said, strict=True)
    ])  # fmt: skip


# Failures ---------------------------------------------------------------------------------------------------------------


def failures(study: Study) -> Figure:
    """Returns the trials that gave no result, with the reason and, for the baseline, the end of its log."""
    title = "Which trials gave no result, and why?"
    said = dict(zip((trial["number"] for trial in study.trials), phrases(study.summary), strict=True))
    failed = [trial for trial in study.trials if not Outcome(str(trial["outcome"])).has_value]
    if not failed:
        return Figure(key="failures", title=title, absent="Every trial gave a result.")
    grid = Grid(columns=["trial ", "outcome", "what was measured", "reason"], rows=[
        [f"{trial['number']:04d}", str(trial["outcome"]), said[trial["number"]],
         one_line(str(trial.get("reason") or ""), MAX_REASON)]
        for trial in failed
    ])  # fmt: skip
    log = log_lines(study.records[BASELINE].evidence) if failed[0]["number"] == BASELINE and BASELINE in study.records else []
    notes = [f"`autotune show {study.name} --trial {failed[0]['number']}` shows the end of its log."]
    return Figure(key="failures", title=title, grid=grid, is_open=True, notes=notes, quoted="\n".join(log))
