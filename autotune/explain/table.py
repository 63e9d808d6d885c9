"""Defines a table: rows and columns with units, written as CSV and JSON. Numbers stay in SI units; None is unknown."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.shapes import ANY, check, flag, number, text, whole_number

Cell = str | int | float | bool | None
Row = dict[str, Any]  # column -> Cell

# First characters that make a spreadsheet read a cell as a formula (OWASP, "CSV Injection"). The program chooses the names of
# operators and files, so they cannot be trusted.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

_SHAPE: dict[str, Any] = {"name": text, "title": text, "columns": {ANY: text}, "rows": [{}], "notes": [text]}
# Types of the cells by column. If a column is not listed, its cells are numbers or None.
_CELLS: dict[str, Any] = {
    "rank": whole_number, "line": whole_number, "is_own": flag, "is_slowest": flag,
    **dict.fromkeys(("dtype", "grid", "block"), (None, text)),
    **dict.fromkeys(
        ("file", "function", "text", "phase", "where", "callee", "stage", "kind", "reason", "category", "module", "class",
         "kernel", "operator", "shapes", "precision", "tensor_core_used", "tensor_core_eligible",
         "device", "flops_from", "peak_source", "bound", "measured_by"),
        text,
    ),
}  # fmt: skip


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

    @classmethod
    def from_json(cls, raw: Any, columns: Mapping[str, str], never_null: Collection[str] = ()) -> Table:
        """Returns a table, given the document that `dataclasses.asdict` made of it.

        Args:
            raw: the document, which may come from an untrusted source.
            columns: columns that the table must have.
            never_null: columns whose numbers are always known.

        Raises:
            ValueError: the document is not a table, a column is missing, or a cell has the wrong type.
        """
        check(raw, _SHAPE)
        shape = {column: _CELLS.get(column, (None, number)) for column in (*raw["columns"], *columns)}
        check(raw["rows"], [{**shape, **dict.fromkeys(never_null, number)}], "rows")
        return cls(**{name: raw[name] for name in _SHAPE})

    def of_rank(self, rank: int) -> list[Row]:
        """Returns the rows of one rank."""
        return [row for row in self.rows if row["rank"] == rank]

    def as_csv(self) -> str:
        """Returns the table as CSV with a header. Unknown values are empty, and spreadsheets read no text as a formula."""
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
