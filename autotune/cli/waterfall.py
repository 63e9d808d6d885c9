"""Renders the effect of each change of the winner, and of all changes together, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.knobs.base import earlier_text, value_text
from autotune.quantities import rate_text, ratio_interval_text, ratio_text, ratio_with_interval_text
from autotune.records import Summary
from autotune.report.changes import basis_lines, dropped_lines, entries_of
from autotune.wording import effect_doubt, effect_text, knob_phrase

BAR_WIDTH = 24
BAR_FROM = 96  # columns; narrower terminals show no bars
TABLE_FROM = 54  # columns; narrower terminals show a line for each change instead of a table
EFFECT_WIDTH = 35  # columns for a change's effect; if knob and values do not fit beside it, a phrase replaces them
PRODUCT_FROM = 84  # columns; narrower terminals do not show the running product of the factors
# If the logarithms of the measured ratio and of the product of the factors differ by less than this, the difference is noise.
LEAST_INTERACTION = 0.02
_COLUMNS = ("knob", "change", "factor", "interval", "product", "bar")
EFFECT_STYLES = {"faster": "win", "ambiguous": "unsure", "same": "quiet", "slower": "bad"}


@dataclass(frozen=True)
class Waterfall:
    """Table of the best configuration's changes: knob, values, factor, interval, running product, and bars if they fit."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        entries = entries_of(self.summary)
        is_attributed = any(entry.get("verdict") not in (None, "not measured") or entry.get("ratio") for entry in entries)
        is_narrow, is_table = not self._fits(entries, options.max_width), options.max_width >= TABLE_FROM
        shown = [
            True,
            not is_narrow,
            is_attributed,
            is_attributed,
            is_attributed and options.max_width >= PRODUCT_FROM,
            is_attributed,
        ]
        yield Text.assemble("what changed", ("  and the effect of each change", "quiet") if is_attributed else "")
        made = Table.grid(padding=(0, 2, 0, 0))
        for name, is_shown in zip(_COLUMNS, shown, strict=True):
            if is_shown:
                is_rigid = name != "bar"
                justify: JustifyMethod = "right" if name in ("factor", "product") else "left"
                made.add_column(justify=justify, no_wrap=is_rigid, overflow="fold")
        has_bars = options.max_width >= BAR_FROM
        for cells in self._rows(entries, is_attributed=is_attributed, has_bars=has_bars, is_narrow=is_narrow):
            made.add_row(*(cell for cell, is_shown in zip(cells, shown, strict=True) if is_shown))
        yield made if is_table else Group(*self._lines(entries))
        for line in [*basis_lines(self.summary), *dropped_lines(self.summary)]:
            yield Padding(Text(line, style="quiet"), (0, 0, 0, 2))

    def _rate(self, side: str) -> str:
        """Returns the rate of "baseline" or "best"."""
        return rate_text((self.summary.get(side) or {}).get("value"), str(self.summary.get("unit") or "samples"))

    def _fits(self, entries: list[dict[str, Any]], width: int) -> bool:
        """Whether each change's knob, values and effect, and both rates, fit on a line of `width` columns."""
        knobs = max((len(str(entry["knob"])) for entry in entries), default=0)
        changes = [f"{earlier_text(entry.get('from'))} → {value_text(entry.get('to'))}" for entry in entries]
        return knobs + max(map(len, [*changes, self._rate("baseline"), self._rate("best")])) + EFFECT_WIDTH + 2 <= width

    def _lines(self, entries: list[dict[str, Any]]) -> Iterator[Padding]:
        """Yields a line for each change, and one for all together, for terminals that are too narrow for a table."""
        speedup = self.summary.get("speedup") or {}
        lines = [f"{knob_phrase(entry['knob'], entry['to'])}  {effect_text(entry)}" for entry in entries]
        if len(entries) > 1 and speedup.get("ratio"):
            lines.append(f"together  {ratio_with_interval_text(speedup['ratio'], speedup.get('ci'))}")
        yield from (Padding(Text(line.rstrip(), overflow="fold"), (0, 0, 0, 2)) for line in lines)

    def _rows(
        self, entries: list[dict[str, Any]], *, is_attributed: bool, has_bars: bool, is_narrow: bool
    ) -> list[tuple[Text, ...]]:
        speedup = self.summary.get("speedup") or {}
        whole = speedup.get("ratio") if is_attributed else None
        top = _top(entries, whole) if has_bars else 1.0
        rows: list[tuple[Text, ...]] = []
        if is_attributed:
            rows.append(
                (Text("  baseline"), Text(self._rate("baseline")), Text(), Text(), Text("1.00x", style="quiet"), Text())
            )
        reached = 1.0
        for entry in entries:
            begun, reached = reached, reached * (entry.get("ratio") or 1.0)
            words = "" if entry.get("verdict") == "not measured" else effect_doubt(entry)
            doubt = Text(words, style="unsure" if entry.get("verdict") == "ambiguous" else "quiet")
            rows.append(
                (
                    Text(f"  {knob_phrase(entry['knob'], entry['to']) if is_narrow else entry['knob']}", style="key"),
                    Text.assemble((earlier_text(entry.get("from")), "quiet"), " → ", (value_text(entry.get("to")), "name")),
                    Text(ratio_text(entry.get("ratio")), style=_style(entry)),
                    Text(ratio_interval_text(entry.get("ci")), style="quiet"),
                    Text(ratio_text(reached) if entry.get("ratio") else "", style="quiet"),
                    doubt if words or not entry.get("ratio") else _bar(begun, reached, top, _style(entry)),
                )
            )
        return rows + self._last_rows(entries, whole, reached, top)

    def _last_rows(
        self, entries: list[dict[str, Any]], whole: float | None, product: float, top: float
    ) -> list[tuple[Text, ...]]:
        """Returns a row for what the factors do not explain (if it exceeds noise), and a row for all changes together."""
        if not whole or len(entries) < 2:
            return []
        speedup = self.summary.get("speedup") or {}
        rows: list[tuple[Text, ...]] = []
        if all(entry.get("ratio") for entry in entries) and abs(math.log(whole / product)) > LEAST_INTERACTION:
            words = "help each other" if whole > product else "overlap"
            factor, reached = (Text(ratio_text(ratio), style="quiet") for ratio in (whole / product, whole))
            rows.append(
                (Text("  interaction"), Text(words, style="quiet"), factor, Text(), reached, _bar(product, whole, top, "quiet"))
            )
        style = EFFECT_STYLES.get(str(speedup.get("verdict")), "name")
        interval = Text(ratio_interval_text(speedup.get("ci")), style="quiet")
        total = (Text("  together"), Text(self._rate("best")), Text(ratio_text(whole), style=style), interval, Text())
        return [*rows, (*total, _bar(1.0, whole, top, style))]


def _style(entry: dict[str, Any]) -> str:
    return EFFECT_STYLES.get(str(entry.get("verdict")), "name")


def _top(entries: list[dict[str, Any]], whole: float | None) -> float:
    """Returns the largest factor that any bar reaches."""
    reached, top = 1.0, max(1.0, whole or 1.0)
    for entry in entries:
        reached *= entry.get("ratio") or 1.0
        top = max(top, reached)
    return top


def _bar(begun: float, reached: float, top: float, style: str) -> Text:
    """Returns a bar from one factor to another. The scale is logarithmic, so that equal factors give bars of equal length."""
    if top <= 1.0:
        return Text()
    low, high = sorted(min(max(math.log(x) / math.log(top), 0.0), 1.0) for x in (begun, reached))
    start, end = round(low * BAR_WIDTH), round(high * BAR_WIDTH)
    return Text(f"{' ' * start}{'█' * (end - start) or '▏'}"[:BAR_WIDTH], style=style)
