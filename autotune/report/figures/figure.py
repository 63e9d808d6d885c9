"""Defines a figure of a report: a title, a text, a drawing, and the numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autotune.report.drawing import NOTHING
from autotune.report.study import Study

MAX_ROWS = 1500  # rows of a table in the file; `autotune show` prints all


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of texts.

    Attributes:
        columns: headings of the columns. A heading that ends with a space marks a column of numbers, which is aligned right.
        rows: cells.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """The rows that are in the file."""
        return self.rows[:MAX_ROWS]

    @property
    def num_left_out(self) -> int:
        """Number of rows that are not in the file."""
        return max(0, len(self.rows) - MAX_ROWS)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        key: its anchor in the page, a single word.
        title: title in a few words.
        says: what it shows, in one or two sentences.
        drawing: the chart; empty if the figure is absent or has only a table.
        grid: the numbers; None if the chart's texts contain all of them.
        is_open: whether the table is expanded at first.
        notes: sentences below it.
        quoted: the program's text below it, such as the end of its log.
        absent: why the figure is absent, with the command that adds it; "" if it is not absent.
        width: "wide" or "half"; "" to choose the width by the contents.
    """

    key: str
    title: str
    says: str = ""
    drawing: Markup = NOTHING
    grid: Grid | None = None
    is_open: bool = False
    notes: Sequence[str] = ()
    quoted: str = ""
    absent: str = ""
    width: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the figure contains nothing but the reason why it is absent."""
        return bool(self.absent) and not (self.notes or self.grid or self.quoted)


Maker = Callable[[Study], Figure]


def made(make: Maker, study: Study) -> Figure:
    """Returns a figure, or one that says why it cannot be drawn: a damaged file must not prevent the rest of the report."""
    try:
        return make(study)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        name = make.__name__
        why = f"It cannot be drawn from the files of this study ({type(error).__name__}: {error})."
        return Figure(key=name, title=name.replace("_", " ").capitalize(), absent=why)
