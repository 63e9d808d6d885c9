"""Defines a table: rows and columns with units, written as CSV and JSON. Numbers stay in SI units; None is unknown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | bool | None
Row = dict[str, Any]  # column -> Cell

# First characters that make a spreadsheet read a cell as a formula (OWASP, "CSV Injection"). The program chooses the names of
# operators and files, so they cannot be trusted.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(kw_only=True)
class Table:
    """One table of an explanation.

    Attributes:
        name: name of its files, without the ending.
        title: title in a few words.
        columns: column -> its meaning, with its unit, in order.
        rows: the rows, each column -> value; every row has every column.
        notes: what is left out, or how something was determined.
    """

    name: str
    title: str
    columns: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_rank(self, rank: int) -> list[Row]:
        """Returns the rows of one rank."""
        return [row for row in self.rows if row["rank"] == rank]

    def as_csv(self) -> str:
        """Returns the table as CSV with a header. Unknown values are empty, and no text is read as a formula."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(list(self._cells(row)) for row in self.rows)
        return out.getvalue()

    def _cells(self, row: Row) -> Iterator[Cell]:
        for column in self.columns:
            value = row[column]
            yield "'" + value if isinstance(value, str) and value.startswith(_FORMULA) else value


def quotient(value: float | None, by: float | None) -> float | None:
    """Returns a quotient; None if a number is unknown or the divisor is 0."""
    return value / by if value is not None and by else None
