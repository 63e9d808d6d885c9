"""Makes a report: one HTML file on one or several studies. The file loads nothing and runs no script."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import autotune
from autotune.export.claims import day
from autotune.plain_text import visible
from autotune.report.code import Code, codes
from autotune.report.comparison import compared
from autotune.report.drawing import breakable, inline_code, tied
from autotune.report.figures import configurations, findings, gain, machine, memory, operators, spent, step, trials, use
from autotune.report.figures.figure import Figure, Maker, made
from autotune.report.first_lines import FirstLine, first_lines
from autotune.report.study import Study
from autotune.wording import machine_text

TEMPLATES = Path(__file__).parent / "templates"
CODE = "part-code"  # anchor of the section with the settings to paste, in several formats
SECTIONS: dict[str, tuple[str, tuple[Maker, ...]]] = {
    "part-gain": ("What was gained", (gain.rates, gain.changes)),
    "part-time": (
        "Where the time goes",
        (
            findings.findings,
            findings.baseline_findings,
            use.use,
            step.breakdown,
            step.categories,
            step.stages,
            operators.operators,
            operators.kernels,
            step.timeline,
        ),
    ),
    "part-tried": ("What was tried", (configurations.fastest, trials.rates_by_trial, configurations.settings, trials.failures)),
    "part-memory": ("Memory", (memory.memory_by_batch, memory.memory, memory.memory_timeline)),
    "part-measured": (
        "How it was measured",
        (machine.method, machine.quiet, machine.ranks, spent.study_timeline, machine.environment),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a study's report.

    Attributes:
        key: its anchor in the page.
        title: its heading.
        figures: what it shows.
        absent: (reason, figures that are absent for this reason).
    """

    key: str
    title: str
    figures: Sequence[Figure]
    absent: Sequence[tuple[str, Sequence[Figure]]]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One study as a page shows it.

    Attributes:
        key: prefix of its anchors; "" if the page shows only this study.
        about: machine and day, in one line.
        study: the study.
        first: the three lines at the top.
        code: the best configuration in every format.
        sections: the sections below the three lines.
    """

    key: str
    about: str
    study: Study
    first: Sequence[FirstLine]
    code: Sequence[Code]
    sections: Sequence[Section]


def page(studies: Sequence[Study]) -> str:
    """Returns the report on studies as HTML, without control characters from the studies' texts."""
    studies = _labelled(studies)
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    shown = [_shown(study, "" if len(studies) == 1 else f"study-{number}-") for number, study in enumerate(studies, 1)]
    made = _environment().get_template("page.html").render(
        style=Markup(style),
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        shown=shown,
        compared=compared(studies) if len(studies) > 1 else None,
        parts=_parts(shown),
        version=autotune.__version__,
    )  # fmt: skip
    return visible(made)


def _labelled(studies: Sequence[Study]) -> list[Study]:
    """Returns the studies with distinct labels. If several studies have the same name, all labels are the studies' folders."""
    is_same = len({study.label for study in studies}) < len(studies)
    return [replace(study, label=str(study.folder.path)) if is_same else study for study in studies]


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"code": inline_code, "tied": tied, "breakable": breakable}
    return made


def _shown(study: Study, key: str) -> Shown:
    sections = [
        _section(key + name, title, [made(make, study) for make in makers]) for name, (title, makers) in SECTIONS.items()
    ]
    about = f"{machine_text(study.summary.get('machine') or {})}, {day(study.summary)}"
    return Shown(key=key, about=about, study=study, first=first_lines(study), code=codes(study), sections=sections)


def _parts(shown: Sequence[Shown]) -> list[tuple[str, str]]:
    """Returns (anchor, title) for the table of contents: the sections of a single study, or the studies."""
    if len(shown) > 1:
        return [("beside", "Comparison"), *((f"{one.key}title", one.study.label) for one in shown)]
    first, *others = [(section.key, section.title) for section in shown[0].sections]
    return [first, (CODE, "What to change"), *others]


def _section(key: str, title: str, figures: Sequence[Figure]) -> Section:
    """Returns a section. Figures without content are listed at its end, one line for each reason."""
    absent: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.is_empty:
            absent.setdefault(figure.absent, []).append(figure)
    there = [figure for figure in figures if not figure.is_empty]
    return Section(key=key, title=title, figures=there, absent=list(absent.items()))
