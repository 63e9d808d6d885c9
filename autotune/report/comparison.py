"""Compares several studies: the same program before and after, on other machines, on other days."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.plain_text import one_line
from autotune.quantities import seconds_text
from autotune.report.changes import entries_of
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.gain import rates_of
from autotune.report.study import Study
from autotune.wording import changes_phrase, counts_text, effect_text, headline, machine_text, side_texts

MAX_DIFFERENCE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The comparison of several studies.

    Attributes:
        names: their names.
        facts: program, machine and result of each study.
        rates: their speed-ups.
        effects: the effect of each change in each study.
        differences: for each study but the first, ("From FIRST to OTHER", differences between these two).
    """

    names: Sequence[str]
    facts: Grid
    rates: Figure
    effects: Grid
    differences: Sequence[tuple[str, Sequence[str]]]


def compared(studies: Sequence[Study]) -> Compared:
    """Returns the comparison of studies, in the order given."""
    names = [study.label for study in studies]
    return Compared(
        names=names,
        facts=_facts(studies),
        rates=rates_of(studies),
        effects=_effects(studies),
        differences=_differences(studies),
    )


def _facts(studies: Sequence[Study]) -> Grid:
    facts = {
        "gained": [headline(study.summary) for study in studies],
        "unchanged": [" ".join(side_texts(study.summary, study.summary.get("baseline") or {})) for study in studies],
        "best": [" ".join(side_texts(study.summary, study.summary.get("best") or {})) for study in studies],
        "changes": [changes_phrase((study.summary.get("best") or {}).get("overrides") or {}) for study in studies],
        "program": [str(study.summary.get("title") or "") for study in studies],
        "machine": [machine_text(study.summary.get("machine") or {}) for study in studies],
        "started": [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(study.summary["started_at"])) for study in studies],
        "took": [seconds_text((study.summary.get("seconds") or {}).get("total")) for study in studies],
        "trials": [counts_text(study.summary.get("counts") or {}) for study in studies],
    }
    columns = ["", *(study.label for study in studies)]
    return Grid(columns=columns, rows=[[name, *values] for name, values in facts.items()])


def _effects(studies: Sequence[Study]) -> Grid:
    by_study = [{entry["knob"]: entry for entry in entries_of(study.summary)} for study in studies]
    knobs = list(dict.fromkeys(knob for entries in by_study for knob in entries))
    rows = [
        [knob, *(changes_phrase({knob: e["to"]}) + f": {effect_text(e)}" if (e := found.get(knob)) else "unchanged"
                 for found in by_study)]
        for knob in knobs
    ]  # fmt: skip
    return Grid(columns=["setting", *(study.label for study in studies)], rows=rows)


def _differences(studies: Sequence[Study]) -> list[tuple[str, list[str]]]:
    first, *others = studies
    return [(f"From {first.label} to {other.label}", _phrases(first, other)) for other in others]


def _phrases(first: Study, other: Study) -> list[str]:
    # Imported only for a comparison: the module imports Optuna, which takes longer than writing a report on one study.
    from autotune.trials.identity import differences

    found = differences(first.summary.get("identity") or {}, other.summary.get("identity") or {})
    return [one_line(words, MAX_DIFFERENCE) for words in found] or ["nothing: program, machine and search space are the same"]
