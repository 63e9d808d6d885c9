"""Defines a figure of a report: a title, what it says, a drawing, and the numbers as a table."""

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
        columns: heads of the columns. Columns of numbers, which are aligned at the right, end with a space.
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
        """Number of rows that are not."""
        return max(0, len(self.rows) - MAX_ROWS)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        key: its place in the page, a word.
        title: title in a few words.
        says: what it shows, in one or two sentences.
        drawing: the chart; empty if it is absent, or if the table is all there is.
        grid: the numbers; None if the chart's texts have them all.
        is_open: whether the table is shown without a click.
        notes: sentences below it.
        quoted: text of the program below it, such as the end of its log.
        absent: why it is absent, with the command that adds it; "" if it is there.
        width: "wide" or "half" for another width than its contents suggest.
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
        """Whether there is nothing but the reason why it is absent."""
        return bool(self.absent) and not (self.notes or self.grid or self.quoted)


Maker = Callable[[Study], Figure]


def made(make: Maker, study: Study) -> Figure:
    """Returns a figure, or says why it cannot be drawn: a damaged file must not cost the rest of the report."""
    try:
        return make(study)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        name = make.__name__
        why = f"It cannot be drawn from the files of this study ({type(error).__name__}: {error})."
        return Figure(key=name, title=name.replace("_", " ").capitalize(), absent=why)
