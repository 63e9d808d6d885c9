"""Figures on what costs time in a trial: predicted and measured gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.explained import (
    accuracy_text,
    check_name,
    diagnosis_lines,
    gain_text,
    nothing_text,
    other_checks,
    remedy_text,
    signed,
    size_text,
)
from autotune.report.drawing import TRACK_PX, Bars, Row, Scale, bar, interval, line
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import sentence
from autotune.report.study import BASELINE, Study

KINDS = {"measured": "best"}  # kind of a gain -> CSS class of its bar; bars of all other kinds have the class PREDICTED
PREDICTED = "predicted"


def findings(study: Study) -> Figure:
    """Returns what still costs time in the best trial."""
    title = "What still costs time?" if study.best != BASELINE else "What costs time?"
    return _findings(study, study.best, "findings", title)


def baseline_findings(study: Study) -> Figure:
    """Returns what costs time in the unchanged program."""
    key, title = "baseline-findings", "What costs time in the unchanged program?"
    if study.best == BASELINE:
        return Figure(key=key, title=title, absent='The best is the unchanged program: see "What costs time?".')
    return _findings(study, BASELINE, key, title)


def _findings(study: Study, number: int, key: str, title: str) -> Figure:
    entry, document = study.explained(number), study.summary.get("explanation") or {}
    if not entry:
        notes = [f"{sentence(line)}." for line in diagnosis_lines(study.summary)] if number == study.best else []
        return Figure(key=key, title=title, absent=_why_absent(study, number, document), notes=notes)
    found = entry.get("findings") or []
    accuracy = accuracy_text(document)
    notes = [
        *(f"Also tried: {line}." for line in other_checks(document, [entry])),
        *([f"Explanations so far: {accuracy}."] if accuracy else []),
    ]
    notes += [sentence(note) for note in entry.get("notes") or []]
    if not found and not entry.get("phases_s"):
        absent = f"Not known, because no pass timed the steps. `{_command(study, number)}` runs the passes again."
        return Figure(key=key, title=title, absent=absent, notes=notes)
    if not found:
        return Figure(key=key, title=title, says=f"{sentence(nothing_text(entry, _command(study, number)))}.", notes=notes)
    says = "The gain of a finding is how much the rate would rise if its cost alone were removed. The gains cannot be summed."
    drawing, grid = _chart(found).html(), _grid(found)
    return Figure(key=key, title=title, says=says, drawing=drawing, grid=grid, is_open=True, notes=notes)


def _why_absent(study: Study, number: int, document: Mapping[str, Any]) -> str:
    skipped = str(document.get("skipped") or "").partition(";")[0]
    why = f" The study skipped this: {skipped}." if skipped else ""
    return f"This study did not examine where the time goes.{why} `{_command(study, number)}` does this."


def _command(study: Study, number: int) -> str:
    return f"autotune explain {study.name}" + (" --trial 0" if number == BASELINE else "")


def _chart(found: Sequence[Mapping[str, Any]]) -> Bars:
    gains = [gain for finding in found for gain in _gains(finding)]
    scale = Scale(min(0.0, *(gain["low"] for gain in gains)), 1.05 * max(gain["high"] for gain in gains))
    rows = [row for number, finding in enumerate(found, 1) for row in _rows(number, finding, scale)]
    axis = [(scale(tick), signed(tick) if tick else "0") for tick in scale.ticks()]
    return Bars(rows=rows, axis=axis, key=[(PREDICTED, "predicted"), ("best", "measured"), ("line:ci", "interval")])


def _gains(finding: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the gains of a finding: predicted and, if its remedy was tried, measured."""
    check = finding.get("check")
    if not check:
        return [finding["gain"]]
    predicted = finding["gain"] if check_name(check) else check["predicted"]
    return [{**predicted, "kind": PREDICTED}, check["measured"]]


def _rows(number: int, finding: Mapping[str, Any], scale: Scale) -> list[Row]:
    rows: list[Row] = []
    for gain in _gains(finding):
        marks = [
            bar(scale(0.0), scale(gain["mid"]), KINDS.get(str(gain["kind"]), PREDICTED)),
            interval(scale(gain["low"]), scale(gain["high"])),
            line(scale(0.0), scale(0.0), "one", 0, TRACK_PX),
        ]
        label, note = ("", "") if rows else (f"{number}  {finding['cause']}", str(finding["where"]))
        what = check_name(finding.get("check") or {}) if rows else ""
        value = f"{f'{what}, ' if what else ''}{gain_text(gain)}"
        rows.append(Row(label=label, note=note, value=value, marks=marks))
    return rows


def _grid(found: Sequence[Mapping[str, Any]]) -> Grid:
    rows = [
        [f"{number}  {one['cause']}", one["where"], one["evidence"], remedy_text(one), size_text(one), one["basis"]]
        for number, one in enumerate(found, 1)
    ]
    return Grid(columns=["finding", "where", "seen", "what to do", "gain", "sized by"], rows=rows)
