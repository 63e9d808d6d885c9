"""Figures on what was gained: rates before and after, and the effect of each change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from autotune.knobs.base import earlier_text, value_text
from autotune.quantities import ratio_with_interval_text
from autotune.records import Summary
from autotune.report.changes import basis_lines, dropped_lines, entries_of, tried_text
from autotune.report.drawing import TRACK_PX, Bars, Row, Scale, bar, dot, interval, line
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ROLES, sentence, tick_text
from autotune.report.study import Study
from autotune.report.verdict import no_interval_text, origin_text
from autotune.report.verification_rows import compared_rows
from autotune.wording import changes_phrase, effect_doubt, effect_number, effect_text, gain_words, knob_phrase, side_texts

MIDDLE = TRACK_PX / 2
FACTOR_TICKS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0)
CHANGE_KINDS = {"faster": "best", "slower": "bad", "ambiguous": "unsure"}  # verdict on a change -> class of its bar
INTERVALS = "The line is the 95 % interval: if the study were repeated, 19 of 20 such intervals would contain the true value."


def rates(study: Study) -> Figure:
    """Returns the rates of baseline and best, and their ratio, with intervals."""
    return rates_of([study])


def rates_of(studies: Sequence[Study]) -> Figure:
    """Returns the speed-ups of studies, and for a single study also the two rates."""
    alone = studies[0] if len(studies) == 1 else None
    ratios = [row for study in studies if (row := _ratio_row(study, is_alone=alone is not None))]
    drawing = (_rate_bars(alone) if alone else Markup("")) + _ratio_bars(ratios)
    title = "How sure is it?"
    if not drawing:
        return Figure(key="rates", title=title, absent=_why_no_ratio(studies[0]))
    said = [("" if alone else f"{study.label}: ") + note for study in studies for note in _ratio_notes(study)]
    notes = [*(_origins(alone) if alone else []), *said]
    return Figure(
        key="rates", title=title, says=INTERVALS, drawing=drawing, grid=_claimed(alone) if alone else None,
        notes=list(dict.fromkeys(notes)),
    )  # fmt: skip


def _claimed(study: Study) -> Grid | None:
    """Returns a verified file's claimed values next to the measured ones; None for a study that searches."""
    found = study.summary.get("verification")
    if not found:
        return None
    return Grid(columns=[f"{study.unit}/s", "claimed ", "here and now ", "now / claimed "], rows=compared_rows(found))


def _rate_bars(study: Study) -> Markup:
    sides = [(name, study.summary[name]) for name in study.sides if (study.summary.get(name) or {}).get("value")]
    if not sides:
        return Markup("")
    top = max(side["ci"][1] if side.get("ci") else side["value"] for _, side in sides)
    scale = Scale(0.0, 1.02 * top)
    rows = [_rate_row(study.summary, name, side, scale) for name, side in sides]
    axis = [(scale(tick), tick_text(tick)) for tick in scale.ticks()]
    return Bars(rows=rows, axis=axis).html()


def _rate_row(summary: Summary, name: str, side: Mapping[str, Any], scale: Scale) -> Row:
    value, words = side_texts(summary, dict(side))
    marks = [bar(0, scale(side["value"]), name)]
    if ci := side.get("ci"):
        marks.append(interval(scale(ci[0]), scale(ci[1])))
    note = "" if words else no_interval_text(dict(side))
    return Row(label=ROLES[name], value=f"{value} {words}".strip(), marks=marks, note=note)


def _speedup(summary: Summary) -> tuple[float, list[float] | None] | None:
    """Returns a ratio and its interval: a verification's, or in other studies that of best to baseline; None if unknown."""
    found = (summary.get("verification") or {}).get("now") or summary.get("speedup") or {}
    return (float(found["ratio"]), found.get("ci")) if found.get("ratio") else None


def _ratio_row(study: Study, *, is_alone: bool) -> tuple[str, float, list[float] | None] | None:
    found = _speedup(study.summary)
    if found is None:
        return None
    what = gain_words(study.summary, "") or "speed-up"
    return (what if is_alone else study.label, *found)


def _ratio_bars(rows: Sequence[tuple[str, float, list[float] | None]]) -> Markup:
    if not rows:
        return Markup("")
    ends = [1.0, *(end for _, ratio, ci in rows for end in (ci or [ratio]))]
    scale = Scale(min(0.97, *ends) - 0.01, max(ends) + 0.05)
    axis = [(scale(tick), f"{tick:g}x") for tick in scale.ticks()]
    if not any(said == "1x" for _, said in axis):
        axis = [(scale(1.0), "1x"), *axis]
    drawn = [
        Row(
            label=label,
            value=ratio_with_interval_text(ratio, ci),
            marks=[
                line(scale(1.0), scale(1.0), "one", 0, TRACK_PX),
                *([interval(scale(ci[0]), scale(ci[1]))] if ci else []),
                dot(scale(ratio), MIDDLE, "best"),
            ],
        )
        for label, ratio, ci in rows
    ]
    return Bars(rows=drawn, axis=axis).html()


def _ratio_notes(study: Study) -> list[str]:
    found = study.summary.get("speedup") or {}
    notes = []
    if found.get("overrides") and not (study.summary.get("best") or {}).get("overrides"):
        notes.append(f"The baseline was kept. It was compared with: {changes_phrase(found['overrides'])}.")
    # Whether the best other configuration was slower in the finals. If so, the ratio compares the baseline with itself.
    is_kept = found.get("num_rounds") and "trial" not in found
    if found.get("ratio") and not found.get("ci") and not is_kept:
        notes.append("There is no interval, so the uncertainty of the ratio is unknown.")
    return notes


def _origins(study: Study) -> list[str]:
    """Returns sentences on which measurement each rate comes from; [] for a verification, whose origins are shown elsewhere."""
    sides = [] if study.summary.get("verification") else [(name, study.summary.get(name) or {}) for name in study.sides]
    return [f"{sentence(ROLES[name])}: {origin_text(study.summary, side)}." for name, side in sides if side.get("value")]


def _why_no_ratio(study: Study) -> str:
    status = study.summary.get("status")
    if status == "interrupted":
        return f"Nothing was compared before the study ended. `autotune resume {study.name}` continues it."
    return "Nothing was compared with the baseline."


# Effects of the changes -------------------------------------------------------------------------------------------------


def changes(study: Study) -> Figure:
    """Returns the effect of each change of the best configuration, and of all changes together.

    The bar of a change begins where the bar of the change above ends.
    """
    summary = study.summary
    entries = entries_of(summary)
    title = "What did each change gain?"
    reverted = [*dropped_lines(summary), *(f"tried, not kept: {tried}" for tried in [tried_text(summary)] if tried)]
    if not entries:
        absent = "Nothing changes, so there is no effect to show."
        return Figure(key="changes", title=title, absent=absent, notes=reverted)
    ratio, ci = _speedup(summary) or (None, None)
    scale = _factors(entries, ratio, ci)
    unmeasured = [entry for entry in entries if not entry.get("ratio") and effect_text(entry) in ("", "not measured")]
    is_grouped = len(unmeasured) > 1
    rows, reached = [], 1.0
    for entry in entries:
        begun, reached = reached, reached * (entry.get("ratio") or 1.0)
        if not (is_grouped and entry in unmeasured):
            rows.append(_change_row(entry, begun, reached, scale))
    if is_grouped:
        label = changes_phrase({entry["knob"]: entry["to"] for entry in unmeasured})
        rows.append(Row(label=label, value="not measured", marks=[line(scale(1.0), scale(1.0), "one", 0, TRACK_PX)]))
    if ratio and len(entries) > 1:
        rows.append(Row(label="all together", value=ratio_with_interval_text(ratio, ci), marks=[
            bar(scale(1.0), scale(ratio), "best"),
            *([interval(scale(ci[0]), scale(ci[1]))] if ci else []),
        ]))  # fmt: skip
    axis = [(scale(tick), f"{tick:g}x") for tick in FACTOR_TICKS if scale.low <= tick <= scale.high]
    grid = Grid(columns=["setting", "was", "is", "factor ", "how sure"], rows=[
        [entry["knob"], earlier_text(entry.get("from")), value_text(entry.get("to")), effect_number(entry),
         effect_doubt(entry) or ("measured" if entry.get("ratio") else "not measured")]
        for entry in entries
    ])  # fmt: skip
    says = "Each bar begins where the one above ends. A factor says how many times as fast the change makes the training."
    drawing = Bars(rows=rows, axis=axis).html()
    notes = [f"{sentence(note)}." for note in [*basis_lines(summary), *reverted]]
    return Figure(key="changes", title=title, says=says, drawing=drawing, grid=grid, notes=notes)


def _factors(entries: Sequence[Mapping[str, Any]], ratio: float | None, ci: Sequence[float] | None) -> Scale:
    reached, seen = 1.0, [1.0, ratio or 1.0, *(ci or ())]
    for entry in entries:
        low, high = entry.get("ci") or (1.0, 1.0)
        seen += [reached * low, reached * high, reached * (entry.get("ratio") or 1.0)]
        reached *= entry.get("ratio") or 1.0
    positive = [value for value in seen if value > 0]
    return Scale(min(positive) / 1.02, max(positive) * 1.02, is_log=True)


def _change_row(entry: Mapping[str, Any], begun: float, reached: float, scale: Scale) -> Row:
    marks = [line(scale(1.0), scale(1.0), "one", 0, TRACK_PX)]
    if entry.get("ratio"):
        marks.append(bar(scale(begun), scale(reached), CHANGE_KINDS.get(str(entry.get("verdict")), "same")))
        if ci := entry.get("ci"):
            marks.append(interval(scale(begun * max(ci[0], 1e-9)), scale(begun * ci[1])))
    note = f"{entry['knob']}: {earlier_text(entry.get('from'))} → {value_text(entry.get('to'))}"
    return Row(label=knob_phrase(entry["knob"], entry["to"]), note=note, value=effect_text(entry), marks=marks)
