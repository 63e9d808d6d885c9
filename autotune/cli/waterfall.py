"""What each knob of the best is worth, from the baseline to the whole: for the verdict, on a terminal and as plain lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autotune.records import Summary
from autotune.wording import knob_phrase, rate_text, ratio_interval_text, ratio_text, value_text

BAR_WIDTH = 24
BAR_FROM = 96  # columns from which on there is room for the bars
NARROW = 66  # columns below which the product of the rows so far gives way
TOLD_APART = 0.02  # on the log scale: less than that lies between any product of factors and the whole
WORTH_STYLES = {"faster": "win", "ambiguous": "unsure", "same": "quiet", "slower": "bad"}


@dataclass(frozen=True)
class Waterfall:
    """The changes of the best as a table: knob, from -> to, factor with interval, product so far; bars where there is room."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        entries = entries_of(self.summary)
        has_bars = options.max_width >= BAR_FROM and any(entry.get("ratio") for entry in entries)
        is_attributed = any(entry.get("verdict") for entry in entries)
        yield Text.assemble("what changed", ("  and what each change is worth in the whole", "quiet") if is_attributed else "")
        made = Table.grid(padding=(0, 2, 0, 0))
        made.add_column(no_wrap=True)
        made.add_column(overflow="fold")
        made.add_column(justify="right", no_wrap=True)
        made.add_column(no_wrap=True)
        if is_attributed and options.max_width >= NARROW:
            made.add_column(justify="right", no_wrap=True, style="quiet")
        if has_bars:
            made.add_column(width=BAR_WIDTH, no_wrap=True)
        width = len(made.columns)
        for cells in self._rows(entries, is_attributed=is_attributed):
            made.add_row(*cells[: width - has_bars], *(cells[5:] if has_bars else []))
        yield made
        yield from (Text(f"  {line}", style="quiet") for line in dropped_lines(self.summary))

    def _rows(self, entries: list[dict[str, Any]], *, is_attributed: bool) -> list[tuple[Text, ...]]:
        speedup, unit = self.summary.get("speedup") or {}, str(self.summary.get("unit") or "samples")
        whole = speedup.get("ratio") if is_attributed else None
        rows: list[tuple[Text, ...]] = []
        base, top = (self.summary.get("baseline") or {}).get("value"), _top(entries, whole)
        if is_attributed:
            rows.append((Text("  baseline"), Text(rate_text(base, unit)), Text(), Text(), Text("1.00x"), Text()))
        reached = 1.0
        for entry in entries:
            begun, reached = reached, reached * (entry.get("ratio") or 1.0)
            is_known = is_attributed and entry.get("cumulative") is not None
            rows.append(
                (
                    Text(f"  {entry['knob']}", style="key"),
                    Text.assemble((value_text(entry.get("from")), "quiet"), " → ", (value_text(entry.get("to")), "name")),
                    _factor(entry),
                    _certainty(entry),
                    Text(ratio_text(reached) if is_known else ""),
                    _bar(begun, reached, top, _style(entry)) if entry.get("ratio") else Text(),
                )
            )
        if whole and any(entry.get("ratio") for entry in entries):
            if all(entry.get("ratio") for entry in entries) and abs(math.log(whole / reached)) > TOLD_APART:
                words = "they help each other" if whole > reached else "they overlap"
                factor = Text(ratio_text(whole / reached), style="quiet")
                bar = _bar(reached, whole, top, "quiet")
                rows.append((Text("  interplay"), Text(words, style="quiet"), factor, Text(), Text(ratio_text(whole)), bar))
            interval = Text(ratio_interval_text(speedup.get("ci")), style="quiet")
            value = (self.summary.get("best") or {}).get("value")
            name = Text(ratio_text(whole), style=WORTH_STYLES.get(str(speedup.get("verdict")), "name"))
            style = WORTH_STYLES.get(str(speedup.get("verdict")), "name")
            rows.append(
                (Text("  together"), Text(rate_text(value, unit)), name, interval, Text(), _bar(1.0, whole, top, style))
            )
        return rows


def entries_of(summary: Summary) -> list[dict[str, Any]]:
    """Returns the best's changes as the summary's attribution has them, the most useful first; bare where it has none."""
    overrides = (summary.get("best") or {}).get("overrides") or {}
    before = (summary.get("baseline") or {}).get("knobs") or {}
    known = [entry for entry in summary.get("attribution") or [] if entry.get("knob") in overrides]
    rest = sorted(set(overrides) - {entry["knob"] for entry in known})
    return known + [{"knob": key, "from": before.get(key), "to": overrides[key]} for key in rest]


def dropped_lines(summary: Summary) -> list[str]:
    """Returns what of the winner bought nothing and was put back, in a line or two; none when nothing was."""
    found = summary.get("minimality") or {}
    dropped = found.get("dropped") or []
    if not dropped:
        return []
    words = ", ".join(f"{knob_phrase(e['knob'], e['to'])} ({_worth_text(e)})" for e in dropped)
    whole = f"{ratio_text(found.get('ratio'))} {ratio_interval_text(found.get('ci'))}".strip()
    kept = "it keeps its value" if len(dropped) == 1 else "they keep their values"
    lines = [f"bought nothing: {words}; {kept}"]
    return [*lines, f"all of them together: {whole}"] if len(dropped) > 1 and found.get("ratio") else lines


def change_lines(summary: Summary) -> list[str]:
    """Returns the same as plain lines, one a change: "precision.amp: off -> bf16  1.62x [1.58, 1.66]"."""
    lines = []
    for entry in entries_of(summary):
        words = [f"{entry['knob']}: {value_text(entry.get('from'))} -> {value_text(entry.get('to'))}"]
        words += [_worth_text(entry)] if entry.get("verdict") or entry.get("ratio") else []
        lines.append("  ".join(words))
    return lines


def _worth_text(entry: dict[str, Any]) -> str:
    parts = [f"{ratio_text(entry['ratio'])} {ratio_interval_text(entry.get('ci'))}".strip()] if entry.get("ratio") else []
    return " ".join([*parts, _doubt(entry)]).strip()


def _doubt(entry: dict[str, Any]) -> str:
    """Returns what is to be said of a factor that is not plain: "ambiguous", "not separated: no time"; "" for a plain one."""
    verdict, reason = str(entry.get("verdict") or ""), str(entry.get("reason") or "")
    if verdict in ("needed", "not separated"):
        return f"{verdict}: {reason}" if reason else verdict
    return verdict if verdict in ("ambiguous", "slower") else ""


def _factor(entry: dict[str, Any]) -> Text:
    return Text(ratio_text(entry["ratio"]), style=_style(entry)) if entry.get("ratio") else Text()


def _certainty(entry: dict[str, Any]) -> Text:
    interval, doubt = ratio_interval_text(entry.get("ci")), _doubt(entry)
    doubt_style = "unsure" if entry.get("verdict") == "ambiguous" else "quiet"
    return Text.assemble((interval, "quiet"), "  " if interval and doubt else "", (doubt, doubt_style))


def _style(entry: dict[str, Any]) -> str:
    return WORTH_STYLES.get(str(entry.get("verdict")), "name")


def _top(entries: list[dict[str, Any]], whole: float | None) -> float:
    """Returns the largest factor that a bar reaches to."""
    reached, top = 1.0, max(1.0, whole or 1.0)
    for entry in entries:
        reached *= entry.get("ratio") or 1.0
        top = max(top, reached)
    return top


def _bar(begun: float, reached: float, top: float, style: str) -> Text:
    """Returns a bar from one factor to another, on the log scale: equal factors are equally long."""
    if top <= 1.0:
        return Text()
    low, high = sorted(min(max(math.log(x) / math.log(top), 0.0), 1.0) for x in (begun, reached))
    start, end = round(low * BAR_WIDTH), round(high * BAR_WIDTH)
    return Text(f"{' ' * start}{'█' * (end - start) or '▏'}"[:BAR_WIDTH], style=style)
