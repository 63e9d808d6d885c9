"""Renders the verdict at the end of a study: the speed-up, what changed, where the files are, what to type next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import BORDER_STYLES, VERDICT_STYLES
from autotune.cli.waterfall import TABLE_FROM, Waterfall
from autotune.explained import limit_lines
from autotune.export.claims import is_compared
from autotune.knobs.catalogue import CATALOGUE
from autotune.plain_text import escaped
from autotune.quantities import ratio_text, seconds_text
from autotune.records import Summary, Tier, objective_names
from autotune.report.changes import change_lines, dropped_lines, missing_text, tried_text
from autotune.report.trials import outcomes_text
from autotune.report.verdict import (
    advice_of,
    file_lines,
    front_lines,
    has_winner,
    next_commands,
    no_interval_text,
    noise_lines,
    objective_lines,
    origin_text,
    reason_of,
    tier_ratio,
    verdict_of,
)
from autotune.report.verification_rows import Row, compared_rows, long_rows, long_title
from autotune.report.verification_rows import lines as claim_lines
from autotune.run_dir import StudyFolder
from autotune.studies import call
from autotune.wording import (
    changes_phrase,
    headline,
    objective_text,
    parity_lines,
    search_cost_text,
    side_texts,
    warm_start_text,
)


def panel(summary: Summary, path: Path, *, is_said: bool = False) -> Panel:
    """Returns the verdict of a study as a panel for the terminal.

    Args:
        summary: the study's summary.
        path: the study's folder.
        is_said: whether to leave out the reason for a failure, because the final error message of `autotune run` gives it.
    """
    parts: list[RenderableType | None]
    if summary.get("verification"):
        parts = [_claims(summary), _rest(summary, path)]
    elif summary.get("recording"):
        parts = [_rest(summary, path)]
    else:
        parts = [
            _sides(summary),
            Waterfall(summary) if has_winner(summary) else None,
            _tiers(summary),
            _front(summary),
            _limits(summary, path),
            _rest(summary, path),
        ]
    blocks: list[RenderableType] = [_headline(summary, is_said=is_said)]
    blocks += [Padding(part, (1, 0, 0, 0)) for part in parts if part is not None]
    style = BORDER_STYLES.get(verdict_of(summary), "quiet")
    title = Text(f" {escaped(summary['study'])} ")
    return Panel(Group(*blocks), title=title, title_align="left", border_style=style, padding=(1, 2))


def _headline(summary: Summary, *, is_said: bool) -> Text:
    verdict = verdict_of(summary)
    text = Text(headline(summary, is_said=is_said), style=VERDICT_STYLES.get(verdict, "name"))
    is_verified = bool(summary.get("verification"))
    for line in (advice_of(summary), *objective_lines(summary)):
        if line and not (is_said and is_verified):
            text.append(f"\n{line}", style="not bold not dim default")
    return text


def _grid() -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, min_width=11)
    return made


def _sides(summary: Summary) -> Table | None:
    """Returns a row for the baseline and one for the best: rate, interval, and which measurement they come from."""
    made, cells = _grid(), dict[str, tuple[str, str, str]]()
    for name in ("baseline", "best"):
        side = summary.get(name)
        if side and _is_baseline(name, side):
            cells |= {name: ("the baseline", "", "")} if is_compared(summary) else {}
        elif side and side.get("value") is not None:
            value, interval = side_texts(summary, side)
            cells[name] = (value, interval or no_interval_text(side), origin_text(summary, side))
    widths = [max((len(texts[at]) for texts in cells.values()), default=0) for at in (0, 1)]
    for name, (value, interval, origin) in cells.items():
        text = Text.assemble((value.ljust(widths[0]), "name"), f"  {interval.ljust(widths[1])}  ", (origin, "quiet"))
        text.rstrip()
        made.add_row(name, text)
    return made if made.row_count else None


def _is_baseline(name: str, side: dict[str, Any]) -> bool:
    return name == "best" and side.get("trial") == 0


@dataclass(frozen=True)
class _Tiers:
    """The best of each tier: a table of tier, rate, ratio, interval and changes, or lines if the terminal is too narrow."""

    rows: list[tuple[str | Text, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        yield Text("best by tier")
        if options.max_width < TABLE_FROM:
            yield from (Padding(Text("  ".join(filter(None, map(str, row)))), (0, 0, 0, 2)) for row in self.rows)
            return
        made = Table.grid(padding=(0, 2, 0, 0))
        for name in ("tier", "rate", "ratio", "interval", "what"):
            made.add_column(no_wrap=name in ("tier", "ratio"), overflow="fold")
        for tier, *cells in self.rows:
            made.add_row(f"  {tier}", *cells)
        yield made


def _tiers(summary: Summary) -> RenderableType | None:
    tiers = summary.get("best_by_tier") or {}
    if not any(side.get("overrides") for side in tiers.values()):
        return None  # the baseline is the best of every tier
    rows: list[tuple[str | Text, ...]] = []
    seen: set[Any] = set()
    for tier in Tier:
        side = tiers.get(tier.value)
        if side and side.get("trial") in seen:
            rows.append((tier.value, Text("same as above", style="quiet")))
        elif side and side.get("value") is not None:
            ratio, words = tier_ratio(summary, side, tier)
            if ratio is None and not side.get("overrides"):
                others = _changes_of(summary, tier)
                why = f"tried only with others: {changes_phrase(others)}" if others else "nothing tried"
                rows.append((tier.value, "", "", "", Text(why, style="quiet")))
                continue
            seen.add(side.get("trial"))
            what = Text(changes_phrase(side.get("overrides") or {}), style="quiet")
            if side.get("overrides") and side.get("measured_in") == "search":
                what.append("  (measured once: likely overstated)")
            rate, interval = Text(side_texts(summary, side)[0]), Text(words, style="quiet")
            rows.append((tier.value, rate, ratio_text(ratio), interval, what))
    return _Tiers(rows) if rows else None


def _changes_of(summary: Summary, tier: Tier) -> dict[str, Any]:
    """Returns the best configuration's changes that belong to a tier."""
    changes = (summary.get("best") or {}).get("overrides") or {}
    return {key: value for key, value in changes.items() if key in CATALOGUE and CATALOGUE[key].tier is tier}


def _front(summary: Summary) -> RenderableType | None:
    """Returns the Pareto front of a study with several objectives: one row per configuration, one column per objective."""
    if not (points := summary.get("front")):
        return None
    names, unit, made = objective_names(summary["objective"]), str(summary.get("unit") or "samples"), _grid()
    for point in points:
        values = [Text(objective_text(name, point["objectives"].get(name), unit)) for name in names]
        what = changes_phrase(point.get("overrides") or {})
        made.add_row(f"  trial {point['trial']}", *values, Text(point["measured_in"], style="quiet"), Text(what, style="quiet"))
    return Group(Text("Pareto front  (no other trial is better at every objective)"), made)


def _limits(summary: Summary, path: Path) -> Group | None:
    lines = [Padding(Text(line), (0, 0, 0, 2)) for line in limit_lines(summary, call(StudyFolder(path)))]
    return Group(Text("limited by"), *lines) if lines else None


def _claims(summary: Summary) -> Group:
    """Returns claimed and measured values side by side, then the long runs, then what differs from the claim's conditions."""
    found, unit = summary["verification"], str(summary.get("unit") or "samples")
    made: list[RenderableType] = [
        Text.assemble((f"{found['file']}  ", "quiet"), changes_phrase(found.get("changed") or {}), overflow="fold"),
        Text(),
    ]
    made.append(_claim_table((f"{unit}/s", "claimed", "here and now", "now / claimed"), compared_rows(found)))
    if found.get("long"):
        title = (f"{unit}/s", "claimed", "long run", "claimed / long")
        made.append(Padding(Group(Text(long_title(found)), _claim_table(title, long_rows(found))), (1, 0, 0, 0)))
    if found.get("differences"):
        lines = [Text(f"  {phrase}", style="quiet", overflow="fold") for phrase in found["differences"]]
        made.append(Padding(Group(Text("what differs from the conditions of the claim"), *lines), (1, 0, 0, 0)))
    return Group(*made)


def _claim_table(titles: Row, rows: list[Row]) -> RenderableType:
    made = Table(box=None, header_style="quiet", padding=(0, 3, 0, 0), pad_edge=False)
    made.add_column(Text(titles[0]), no_wrap=True)
    for title in titles[1:]:
        made.add_column(title)
    for name, *cells in rows:
        made.add_row(Text(name, style="name" if name == "speed-up" else ""), *map(Text, cells))
    return made


def _rest(summary: Summary, path: Path) -> Table:
    made, seconds = _grid(), (summary.get("seconds") or {}).get("total")
    took = f"  ·  {seconds_text(seconds)}" if seconds else ""
    tried, taken_over = tried_text(summary), warm_start_text(summary.get("warm_start") or {})
    rows = [("outcomes", f"{outcomes_text(summary)}{took}"), ("cost", search_cost_text(summary))]
    rows += [("tried", f"not kept: {tried}" if tried else ""), *parity_lines(summary), ("warm start", taken_over)]
    rows += [("files", str(path)), *noise_lines(summary), *file_lines(summary)]
    for name, text in rows:
        if text:
            made.add_row(name, Text(text, overflow="fold"))
    for n, command in enumerate(next_commands(summary, path)):
        made.add_row("" if n else "next", Text(command, style="command", overflow="fold"))
    return made


def lines(summary: Summary, path: Path) -> list[str]:
    """Returns the verdict as plain lines, for a pipe. Omits why a study failed: the final error message says it."""
    said = [f"verdict  {headline(summary, is_said=True)}"]
    if summary.get("verification"):
        return [*said, *claim_lines(summary), *_last_lines(summary, path)]
    if summary.get("recording"):
        return [*said, *_last_lines(summary, path)]
    if reason := reason_of(summary):
        said.append(f"reason  {reason}")
    said += [f"note  {line}" for line in objective_lines(summary)]
    for name in ("baseline", "best"):
        side: dict[str, Any] = summary.get(name) or {}
        if _is_baseline(name, side):
            said += [f"{name}  the baseline"] if is_compared(summary) else []
        elif side.get("value") is not None:
            said.append(" ".join([f"{name} ", *filter(None, side_texts(summary, side)), origin_text(summary, side)]))
    said += [f"changed  {line}" for line in change_lines(summary)]
    said += [f"effects  {missing}" for missing in [missing_text(summary)] if missing]
    said += [f"dropped  {line}" for line in dropped_lines(summary)]
    said += [f"tried  not kept: {tried}" for tried in [tried_text(summary)] if tried]
    said += [f"front  {line}" for line in front_lines(summary)]
    said += [f"{name}  {text}" for name, text in parity_lines(summary)]
    said += [f"cost  {cost}" for cost in [search_cost_text(summary)] if cost]
    said += [f"limited by  {line}" for line in limit_lines(summary, call(StudyFolder(path)))]
    return said + _last_lines(summary, path)


def _last_lines(summary: Summary, path: Path) -> list[str]:
    said = [f"outcomes  {outcomes_text(summary)}", f"files  {path}"]
    said += [f"{name}  {text}" for name, text in [*noise_lines(summary), *file_lines(summary)]]
    return said + [f"next  {command}" for command in next_commands(summary, path)]
