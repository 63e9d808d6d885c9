"""The verdict at a study's end: how much faster, what changed, where the files are, what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune.cli import claims
from autotune.cli.terminal import BORDER_STYLES, VERDICT_STYLES
from autotune.records import Summary, Tier
from autotune.run_dir import StudyFolder, call
from autotune.wording import (
    bytes_text,
    changes_phrase,
    counts_text,
    interval_text,
    own_command_text,
    rate_text,
    ratio_interval_text,
    ratio_text,
    seconds_text,
    value_text,
)

MAX_FILES = 5  # named of those the trials left
ADVICE = {
    "same": "The program already runs about as fast as it can with these knobs.",
    "ambiguous": "The measurements do not tell them apart: give more time, study.budget.minutes=30.",
}


def panel(summary: Summary, path: Path, *, is_said: bool = False) -> Panel:
    """Returns the verdict of a study, for a terminal.

    Args:
        summary: the study's summary.
        path: the study's folder.
        is_said: whether why the study failed is said elsewhere, as the error that ends `autotune run`.
    """
    parts: list[RenderableType | None]
    if summary.get("verification"):
        parts = [claims.blocks(summary), _rest(summary, path)]
    else:
        parts = [_sides(summary), _changes(summary), _tiers(summary), _diagnosis(summary), _rest(summary, path)]
    blocks: list[RenderableType] = [_headline(summary, is_said=is_said)]
    blocks += [Padding(part, (1, 0, 0, 0)) for part in parts if part is not None]
    style = BORDER_STYLES.get(_verdict(summary), "quiet")
    return Panel(Group(*blocks), title=f" {summary['study']} ", title_align="left", border_style=style, padding=(1, 2))


def headline(summary: Summary, *, is_said: bool = False) -> str:
    """Returns the verdict in a line: "faster: 2.41x [2.36, 2.46]", "failed: every trial ...", "running".

    Args:
        summary: the study's summary.
        is_said: whether why the study failed is said elsewhere.
    """
    if is_said and summary.get("status") == "failed":
        return "failed"
    speedup = summary.get("speedup") or {}
    status, reason = str(summary.get("status")), str(summary.get("reason") or "")
    if (verification := summary.get("verification")) and status != "failed":
        words = claims.headline(verification)
        return words if status == "complete" else f"{words} ({status})"
    if not speedup or status == "failed":
        return f"{status}: {reason}" if reason else status
    if speedup.get("ratio") is None:
        words = "same" if speedup.get("verdict") == "same" else "no verdict"
        words = f"{words}: {speedup.get('reason') or reason}"
    else:
        words = f"{speedup.get('verdict')}: {ratio_text(speedup['ratio'])} {ratio_interval_text(speedup.get('ci'))}".strip()
    return words if status == "complete" else f"{words} ({status})"


def has_winner(summary: Summary) -> bool:
    """Returns whether there is a configuration to export: a best that changes something."""
    return bool((summary.get("best") or {}).get("overrides"))


def next_commands(summary: Summary, path: Path) -> list[str]:
    """Returns what to type next, ready to copy.

    Args:
        summary: the study's summary.
        path: the study's folder.
    """
    study = call(StudyFolder(path))
    commands = [f"autotune resume {study}"] if summary.get("status") == "interrupted" else []
    commands += [f"autotune export {study} -o best.yaml"] if has_winner(summary) and not summary.get("verification") else []
    return [*commands, f"autotune show {study}", own_command_text("ui", runs=path.parent)]


def _headline(summary: Summary, *, is_said: bool) -> Text:
    verdict = _verdict(summary)
    text = Text(headline(summary, is_said=is_said), style=VERDICT_STYLES.get(verdict, "name"))
    reason = _reason(summary) or ADVICE.get(verdict, "")
    if reason and not (is_said and summary.get("verification")):
        text.append(f"\n{reason}", style="not bold not dim default")
    return text


def _verdict(summary: Summary) -> str:
    return str((summary.get("verification") or summary.get("speedup") or {}).get("verdict") or "")


def _reason(summary: Summary) -> str:
    if verification := summary.get("verification"):
        return claims.explanation(verification)
    return str((summary.get("speedup") or {}).get("reason") or "")


def _grid(*, indent: int = 0) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, min_width=11 - indent)
    return made


def _sides(summary: Summary) -> Table | None:
    unit, made = str(summary.get("unit") or "samples"), _grid()
    for name in ("baseline", "best"):
        side = summary.get(name)
        if side and side.get("value") is not None:
            cells = (
                rate_text(side["value"], unit),
                interval_text(side.get("ci")) or "no interval",
                f"trial {side.get('trial')}",
            )
            made.add_row(name, Text(cells[0], style="name"), Text(cells[1]), Text(cells[2], style="quiet"))
    return made if made.row_count else None


def _changes(summary: Summary) -> RenderableType | None:
    overrides = (summary.get("best") or {}).get("overrides") or {}
    if not overrides:
        return None
    before = (summary.get("baseline") or {}).get("knobs") or {}
    worth = {entry["knob"]: entry for entry in summary.get("attribution") or []}
    made = Table.grid(padding=(0, 2, 0, 0))
    for key in sorted(overrides, key=lambda k: (-(worth.get(k, {}).get("ratio") or 0.0), k)):
        entry = worth.get(key, {})
        share = f"{ratio_text(entry['ratio'])} {ratio_interval_text(entry.get('ci'))}" if entry.get("ratio") else ""
        change = Text.assemble((value_text(before.get(key)), "quiet"), " → ", (value_text(overrides[key]), "name"))
        made.add_row(Text(f"  {key}", style="key"), change, Text(share, style="quiet"))
    title = Text("what changed")
    if worth:
        title.append("  (at the right: what the knob is worth alone)", style="quiet")
    return Group(title, made)


def _tiers(summary: Summary) -> RenderableType | None:
    tiers, unit = summary.get("best_by_tier") or {}, str(summary.get("unit") or "samples")
    speedup, best = summary.get("speedup") or {}, summary.get("best") or {}
    base, made = (summary.get("baseline") or {}).get("value"), Table.grid(padding=(0, 2, 0, 0))
    seen: set[Any] = set()
    for tier in Tier:
        side = tiers.get(tier.value)
        if side and side.get("trial") in seen:
            made.add_row(f"  {tier.value}", Text("the same", style="quiet"))
        elif side and side.get("value") is not None:
            seen.add(side.get("trial"))
            ratio = (
                speedup.get("ratio") if side.get("trial") == best.get("trial") else None
            )  # the finals' ratio is the better one
            ratio = ratio or (side["value"] / base if base else None)
            what = Text(changes_phrase(side.get("overrides") or {}), style="quiet")
            made.add_row(f"  {tier.value}", rate_text(side["value"], unit), ratio_text(ratio), what)
    return Group(Text("best by tier"), made) if made.row_count else None


def _diagnosis(summary: Summary) -> Group | None:
    found = []
    for entry in summary.get("diagnosis") or []:
        text = Text(f"{entry.get('finding', '')}: ")
        text.append(". ".join(str(entry[key]).rstrip(".") for key in ("evidence", "advice") if entry.get(key)), style="quiet")
        found.append(Padding(text, (0, 0, 0, 2)))
    return Group(Text("diagnosis"), *found) if found else None


def _rest(summary: Summary, path: Path) -> Table:
    made, seconds = _grid(), (summary.get("seconds") or {}).get("total")
    took = f"  ·  {seconds_text(seconds)}" if seconds else ""
    made.add_row("outcomes", f"{counts_text(summary.get('counts') or {})}{took}")
    made.add_row("files", Text(str(path), overflow="fold"))
    for name, text in file_lines(summary):
        made.add_row(name, Text(text, overflow="fold"))
    for n, command in enumerate(next_commands(summary, path)):
        made.add_row("" if n else "next", Text(command, style="command"))
    return made


def file_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns what the trials did to files of the user's, as (label, text)."""
    files = summary.get("files") or {}
    left = [f"{entry['name']} ({bytes_text(entry['bytes'])}, trial {entry['trial']})" for entry in files.get("left") or []]
    said = []
    if left:
        more = f" and {len(left) - MAX_FILES} more" if len(left) > MAX_FILES else ""
        said.append(("left", f"{', '.join(left[:MAX_FILES])}{more}: written by trials, not removed"))
    for entry in files.get("restored") or []:
        numbers = entry["trials"]
        who = f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        said.append(("put back", f"{entry['path']}: {who} wrote over it; it is as it was"))
    return said


def lines(summary: Summary, path: Path) -> list[str]:
    """Returns the verdict as plain lines, for output that is not a terminal; why a study failed is the error that follows."""
    unit = str(summary.get("unit") or "samples")
    said = [f"verdict  {headline(summary, is_said=True)}"]
    if summary.get("verification"):
        return [*said, *claims.lines(summary), *_last_lines(summary, path)]
    if reason := (summary.get("speedup") or {}).get("reason"):
        said.append(f"reason  {reason}")
    said += [f"finding  {found['finding']}: {found['advice']}" for found in summary.get("diagnosis") or []]
    for name in ("baseline", "best"):
        side: dict[str, Any] = summary.get(name) or {}
        if side.get("value") is not None:
            said.append(f"{name}  {rate_text(side['value'], unit)} {interval_text(side.get('ci'))} trial {side.get('trial')}")
    before = (summary.get("baseline") or {}).get("knobs") or {}
    for key, value in sorted(((summary.get("best") or {}).get("overrides") or {}).items()):
        said.append(f"changed  {key}: {value_text(before.get(key))} -> {value_text(value)}")
    return said + _last_lines(summary, path)


def _last_lines(summary: Summary, path: Path) -> list[str]:
    said = [f"outcomes  {counts_text(summary.get('counts') or {})}", f"files  {path}"]
    said += [f"{name}  {text}" for name, text in file_lines(summary)]
    return said + [f"next  {command}" for command in next_commands(summary, path)]
