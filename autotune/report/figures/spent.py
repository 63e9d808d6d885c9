"""Draws the figure about a study's time: when each trial ran, and how the time was spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune.quantities import seconds_text
from autotune.records import Kind, TrialRecord
from autotune.report.drawing import MAX_TITLED, TOP_PX, Plot, Scale, box, text
from autotune.report.figures.figure import Figure, Grid
from autotune.report.study import Study

LANES = {
    Kind.baseline: "baseline", Kind.search: "search", Kind.final: "finals", Kind.attribution: "effects of changes",
    Kind.parity: "losses", Kind.explain: "explain", Kind.check: "checks of findings",
}  # fmt: skip
SPENT = {
    "measuring": "measuring steps", "starting": "starting processes", "compiling": "compiling", "lost": "trials without result",
}  # fmt: skip
REST = "warm-up, comparing losses, measuring step and loader alone, ending processes"
PITCH_PX, HEIGHT_PX = 30, 12  # distance from one lane to the next, and height of a trial's box
LONGEST_PAUSE_S = 60.0  # longer pauses, such as those before a study is resumed or explained, are cut out
NUM_TICKS = 5


def study_timeline(study: Study) -> Figure:
    """Returns the figure: when each trial ran, with a lane for each kind of trial, and how the study's time was spent."""
    title = "How was the study's time spent?"
    placed = _placed(study.records.values())
    if not placed:
        return Figure(key="study-timeline", title=title, absent="It is not known when the trials ran.")
    end_s = max(start_s + record.seconds for start_s, record in placed)
    across, lanes = Scale(0.0, end_s), [kind for kind in LANES if any(record.kind is kind for _, record in placed)]
    marks = [text(0, TOP_PX + number * PITCH_PX, LANES[kind]) for number, kind in enumerate(lanes)]
    for start_s, record in placed:
        words = f"{record.number:04d} {record.outcome}, {seconds_text(record.seconds)}" if len(placed) <= MAX_TITLED else ""
        shape = "k1" if record.outcome.has_value else "failed-box"
        top = TOP_PX + lanes.index(record.kind) * PITCH_PX + 4
        marks.append(box(across(start_s), across(start_s + record.seconds), shape, top, HEIGHT_PX, title=words))
    is_any_lost = any(not record.outcome.has_value for _, record in placed)
    plot = Plot(
        title=f"{len(placed)} trials in {seconds_text(end_s)}.", marks=marks, height=TOP_PX + len(lanes) * PITCH_PX + 16,
        x=[(across(tick), seconds_text(tick) if tick else "0") for tick in _ticks(end_s)],
        key=[("k1", "measured"), ("failed-box", "no result")] if is_any_lost else [],
    )  # fmt: skip
    grid = _grid([record for _, record in placed], lanes)
    return Figure(key="study-timeline", title=title, says=_spent(study), drawing=plot.html(), grid=grid)


def _placed(records: Iterable[TrialRecord]) -> list[tuple[float, TrialRecord]]:
    """Returns (start, record) in order of time; starts are seconds since the first trial began, without long pauses."""
    known = sorted((each for each in records if each.started_at and each.seconds), key=lambda each: each.started_at)
    first = known[0].started_at if known else 0.0
    placed, cut_s, ended = list[tuple[float, TrialRecord]](), first, first
    for record in known:
        pause_s = record.started_at - ended
        cut_s += pause_s if pause_s > LONGEST_PAUSE_S else 0.0
        placed.append((record.started_at - cut_s, record))
        ended = max(ended, record.started_at + record.seconds)  # on another slot, an earlier trial may still run
    return placed


def _ticks(whole_s: float) -> list[float]:
    """Returns a few round times: multiples of 1, 2, 5, 10, 15 or 30 seconds, minutes or hours."""
    steps = [unit * factor for unit in (1, 60, 3600) for factor in (1, 2, 5, 10, 15, 30)]
    step = next((step for step in steps if whole_s / step <= NUM_TICKS), whole_s / NUM_TICKS)
    return [step * number for number in range(math.floor(whole_s / step) + 1)]


def _spent(study: Study) -> str:
    seconds = study.summary.get("seconds") or {}
    parts = [f"{words} {seconds_text(seconds[name])}" for name, words in SPENT.items() if seconds.get(name)]
    rest_s = (seconds.get("total") or 0.0) - sum(seconds.get(name) or 0.0 for name in SPENT)
    parts += [f"the rest {seconds_text(rest_s)} ({REST})"] if parts and rest_s >= 1 else []
    return f"{seconds_text(seconds.get('total'))} in all: {', '.join(parts) or 'nothing measured'}."


def _grid(records: Sequence[TrialRecord], lanes: Sequence[Kind]) -> Grid:
    rows = []
    for kind in lanes:
        those = [record for record in records if record.kind is kind]
        lost = sum(not record.outcome.has_value for record in those)
        rows.append([LANES[kind], str(len(those)), str(lost), seconds_text(sum(record.seconds for record in those))])
    return Grid(columns=["kind", "trials ", "no result ", "time "], rows=rows)
