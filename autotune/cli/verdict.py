"""Renders the verdict at the end of a study: the speed-up, what changed, where the files are, what to type next."""

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
from autotune.cli.waterfall import Waterfall, change_lines, dropped_lines
from autotune.explained import why_lines
from autotune.export.claims import speedup_of
from autotune.knobs.catalogue import CATALOGUE
from autotune.quantities import bytes_text, ratio_interval_text, ratio_text, seconds_text
from autotune.records import THROUGHPUT, Summary, Tier, objective_names
from autotune.run_dir import StudyFolder, call
from autotune.wording import (
    break_even_text,
    changes_phrase,
    command_text,
    counts_text,
    objective_text,
    own_command_text,
    parity_lines,
    search_cost_text,
    side_texts,
    verdict_text,
    warm_start_text,
)

MAX_FILES = 5  # how many file names a line lists
MAX_COMMAND = 200  # characters; a longer command is replaced by COMMAND in the lines to copy
ADVICE = {
    "same": "The program already runs about as well as it can with these knobs.",
    "ambiguous": "The measurements cannot tell this configuration from the baseline. Give more time: study.budget.minutes=30.",
}


def panel(summary: Summary, path: Path, *, is_said: bool = False) -> Panel:
    """Returns the verdict of a study as a panel for the terminal.

    Args:
        summary: the study's summary.
        path: the study's folder.
        is_said: whether the reason of a failure is printed elsewhere: by the error message that ends `autotune run`.
    """
    parts: list[RenderableType | None]
    if summary.get("verification"):
        parts = [claims.blocks(summary), _rest(summary, path)]
    elif summary.get("recording"):
        parts = [_rest(summary, path)]
    else:
        parts = [
            _sides(summary),
            _changes(summary),
            _tiers(summary),
            _front(summary),
            _why(summary) or _diagnosis(summary),
            _rest(summary, path),
        ]
    blocks: list[RenderableType] = [_headline(summary, is_said=is_said)]
    blocks += [Padding(part, (1, 0, 0, 0)) for part in parts if part is not None]
    style = BORDER_STYLES.get(_verdict(summary), "quiet")
    return Panel(Group(*blocks), title=f" {summary['study']} ", title_align="left", border_style=style, padding=(1, 2))


def headline(summary: Summary, *, is_said: bool = False) -> str:
    """Returns the verdict as one line: "faster: 2.41x [2.36, 2.46]", "failed: every trial ...", "running".

    Args:
        summary: the study's summary.
        is_said: whether the reason of a failure is printed elsewhere.
    """
    if is_said and summary.get("status") == "failed":
        return "failed"
    speedup = summary.get("speedup") or {}
    status, reason = str(summary.get("status")), str(summary.get("reason") or "")
    if (verification := summary.get("verification")) and status != "failed":
        words = claims.headline(verification)
        return words if status == "complete" else f"{words} ({status})"
    if (recording := summary.get("recording")) and status != "failed":
        words = f"recorded: {recording['configurations']} configurations, {recording['trials']} measurements"
        return words if status == "complete" else f"{words} ({reason or status})"
    if not speedup or status == "failed":
        return f"{status}: {reason}" if reason else status
    if speedup.get("ratio") is None:
        words = "same" if speedup.get("verdict") == "same" else "no verdict"
        words = f"{words}: {speedup.get('reason') or reason}"
    else:
        words = verdict_text(summary)
    return words if status == "complete" else f"{words} ({status})"


def has_winner(summary: Summary) -> bool:
    """Whether there is a configuration to export: a best trial that changes at least one knob."""
    return bool((summary.get("best") or {}).get("overrides"))


def next_commands(summary: Summary, path: Path) -> list[str]:
    """Returns the commands to type next, ready to copy.

    Args:
        summary: the study's summary.
        path: the study's folder.
    """
    study = call(StudyFolder(path))
    commands = [f"autotune resume {study}"] if summary.get("status") == "interrupted" else []
    if has_winner(summary) and not (summary.get("verification") or summary.get("recording")):
        commands.append(f"autotune export {study} -o best.yaml")
        if program := summary.get("command") if not summary.get("is_recipe") else None:
            typed = command_text(program)
            commands.append(f"autotune apply {study} -- {typed if len(typed) <= MAX_COMMAND else 'COMMAND'}")
    return [*commands, f"autotune show {study}", own_command_text("ui", runs=path.parent)]


def _headline(summary: Summary, *, is_said: bool) -> Text:
    verdict = _verdict(summary)
    text = Text(headline(summary, is_said=is_said), style=VERDICT_STYLES.get(verdict, "name"))
    is_verified = bool(summary.get("verification"))
    has_ratio = (summary.get("speedup") or {}).get("ratio") is not None
    reason = _reason(summary) or (ADVICE.get(verdict, "") if has_ratio else "")
    for line in (reason, *objective_lines(summary)):
        if line and not (is_said and is_verified):
            text.append(f"\n{line}", style="not bold not dim default")
    return text


def objective_lines(summary: Summary) -> list[str]:
    """Returns notes on the ratio: a baseline that violates a constraint, the ratio without training changes, break-even."""
    baseline = summary.get("baseline") or {}
    barred = f"The program as it is run today cannot be chosen: {baseline.get('reason')}" if baseline.get("is_barred") else ""
    return [line for line in (barred, same_training_text(summary), break_even_text(summary)) if line]


def same_training_text(summary: Summary) -> str:
    """Returns the speed-up without changes of the training tier, as text; "" if the best configuration has no such changes."""
    best, tiers = summary.get("best") or {}, summary.get("best_by_tier") or {}
    lower = tiers.get(Tier.numerics.value) or {}
    if (
        not lower.get("overrides")
        or lower.get("trial") == best.get("trial")
        or (summary.get("speedup") or {}).get("ratio") is None
    ):
        return ""
    ratio, interval = _tier_ratio(summary, lower)
    overrides = best.get("overrides") or {}
    changed = {key: overrides[key] for key in overrides if key in CATALOGUE and CATALOGUE[key].tier is Tier.training}
    if not changed or ratio is None:
        return ""
    once = "" if interval else " (measured once)"
    return f"{f'{ratio_text(ratio)} {interval}'.strip()}{once} without changing the training: no {changes_phrase(changed)}"


def _verdict(summary: Summary) -> str:
    return str((summary.get("verification") or summary.get("speedup") or {}).get("verdict") or "")


def _reason(summary: Summary) -> str:
    if verification := summary.get("verification"):
        return claims.explanation(verification)
    speedup = summary.get("speedup") or {}
    # Without a ratio, the headline contains the reason.
    return "" if speedup.get("ratio") is None else str(speedup.get("reason") or "")


def _grid(*, indent: int = 0) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, min_width=11 - indent)
    return made


def _sides(summary: Summary) -> Table | None:
    made = _grid()
    for name in ("baseline", "best"):
        side = summary.get(name)
        if side and side.get("value") is not None:
            value, interval = side_texts(summary, side)
            cells = (value, interval or _no_interval_text(side), f"trial {side.get('trial')}")
            made.add_row(name, Text(cells[0], style="name"), Text(cells[1]), Text(cells[2], style="quiet"))
    return made if made.row_count else None


def _no_interval_text(side: dict[str, Any]) -> str:
    return f"no interval: {side['why_no_ci']}" if side.get("why_no_ci") else "no interval"


def _changes(summary: Summary) -> RenderableType | None:
    return Waterfall(summary) if has_winner(summary) else None


def _tiers(summary: Summary) -> RenderableType | None:
    tiers = summary.get("best_by_tier") or {}
    made = Table.grid(padding=(0, 2, 0, 0))
    for name in ("tier", "rate", "ratio", "interval", "what"):
        made.add_column(no_wrap=name in ("tier", "ratio"), overflow="fold")
    seen: set[Any] = set()
    for tier in Tier:
        side = tiers.get(tier.value)
        if side and side.get("trial") in seen:
            made.add_row(f"  {tier.value}", Text("same as above", style="quiet"))
        elif side and side.get("value") is not None:
            seen.add(side.get("trial"))
            ratio, words = _tier_ratio(summary, side)
            what = Text(changes_phrase(side.get("overrides") or {}), style="quiet")
            if side.get("overrides") and side.get("measured_in") == "search":
                what.append("  (measured once: likely overstated)")
            rate, interval = side_texts(summary, side)[0], Text(words, style="quiet")
            made.add_row(f"  {tier.value}", rate, ratio_text(ratio), interval, what)
    return Group(Text("best by tier"), made) if made.row_count else None


def _tier_ratio(summary: Summary, side: dict[str, Any]) -> tuple[float | None, str]:
    """Returns the ratio of a tier's best to the baseline, and the ratio's interval as text ("" if there is none)."""
    entry = speedup_of(summary, side) or {}
    return entry.get("ratio"), ratio_interval_text(entry.get("ci"))


def _front(summary: Summary) -> RenderableType | None:
    """Returns the Pareto front of a study with several objectives: one row per configuration, one column per objective."""
    if not (points := summary.get("front")):
        return None
    names, unit, made = objective_names(summary["objective"]), str(summary.get("unit") or "samples"), _grid()
    for point in points:
        values = [objective_text(name, point["objectives"].get(name), unit) for name in names]
        what = changes_phrase(point.get("overrides") or {})
        made.add_row(f"  trial {point['trial']}", *values, Text(point["measured_in"], style="quiet"), Text(what, style="quiet"))
    return Group(Text("Pareto front  (no other trial is better at every objective)"), made)


def _diagnosis(summary: Summary) -> Group | None:
    found = []
    for entry in summary.get("diagnosis") or []:
        text = Text(f"{entry.get('finding', '')}: ")
        text.append(". ".join(str(entry[key]).rstrip(".") for key in ("evidence", "advice") if entry.get(key)), style="quiet")
        found.append(Padding(text, (0, 0, 0, 2)))
    return Group(Text("diagnosis"), *found) if found else None


def _why(summary: Summary) -> Group | None:
    said = why_lines(summary)
    lines = (Padding(Text(line), (0, 0, 0, 2)) for line in said)
    return Group(Text("what still costs time"), *lines) if said else None


def _rest(summary: Summary, path: Path) -> Table:
    made, seconds = _grid(), (summary.get("seconds") or {}).get("total")
    took = f"  ·  {seconds_text(seconds)}" if seconds else ""
    made.add_row("outcomes", f"{counts_text(summary.get('counts') or {})}{took}")
    if cost := search_cost_text(summary):
        made.add_row("cost", Text(cost, overflow="fold"))
    for name, text in parity_lines(summary):
        made.add_row(name, Text(text, overflow="fold"))
    if taken_over := warm_start_text(summary.get("warm_start") or {}):
        made.add_row("warm start", Text(taken_over, overflow="fold"))
    made.add_row("files", Text(str(path), overflow="fold"))
    for name, text in [*noise_lines(summary), *file_lines(summary)]:
        made.add_row(name, Text(text, overflow="fold"))
    for n, command in enumerate(next_commands(summary, path)):
        made.add_row("" if n else "next", Text(command, style="command"))
    return made


def front_lines(summary: Summary) -> list[str]:
    """Returns the Pareto front as plain lines; [] with a single objective."""
    names, unit = objective_names(summary.get("objective") or THROUGHPUT), str(summary.get("unit") or "samples")
    said = []
    for point in summary.get("front") or []:
        values = ", ".join(objective_text(name, point["objectives"].get(name), unit) for name in names)
        said.append(
            f"trial {point['trial']}: {values}  {changes_phrase(point.get('overrides') or {})} ({point['measured_in']})"
        )
    return said


def noise_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns what affects the numbers, as (label, text): non-finite loss, other load, limited cores, drift, page cache."""
    said = [("not finite", str(why))] if (why := summary.get("not_finite")) else []
    if accepted := summary.get("disturbed_by"):
        since = f" from trial {accepted['since_trial']} on" if accepted["since_trial"] else ""
        text = f"{accepted['words']}{since}: rates are lower than on a quiet machine"
        if (summary.get("speedup") or {}).get("ci"):
            text += "; the finals measured in turn, so the ratio is still valid"
        said.append(("disturbed", text))
    if why := summary.get("own_share"):
        said.append(("shared", str(why)))
    if why := summary.get("drift"):
        said.append(("drift", str(why)))
    if why := summary.get("page_cache"):
        said.append(("disk", str(why)))
    return said


def file_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns what happened to the user's files during the trials, as (label, text)."""
    files = summary.get("files") or {}
    said = []
    if left := _listed([f"{_sized(entry)}, trial {entry['trial']})" for entry in files.get("left") or []]):
        said.append(("left", f"{left}: written by trials, not removed"))
    known = {entry["name"] for entry in files.get("left") or []}
    others = {entry["name"]: entry for entry in files.get("new") or [] if entry["name"] not in known}
    if new := _listed([f"{_sized(entry)})" for entry in others.values()]):
        said.append(("new", f"{new}: written during the study, by a trial or by another program"))
    for entry in files.get("kept") or []:
        numbers = entry["trials"]
        who = f"trial{'s' if len(numbers) > 1 else ''} {_listed([str(number) for number in numbers])}"
        said.append(("kept", f"{entry['path']}: {who} would have changed it; it is unchanged"))
    for entry in files.get("aside") or []:
        said.append(("overwritten", f"{entry['path']}: by trial {entry['trial']}; its previous content is in {entry['copy']}"))
    if open_ := [f"{entry['path']} ({entry['why']})" for entry in files.get("unguarded") or []]:
        said.append(("not guarded", f"{_listed(open_)}: a trial that saves there overwrites it"))
    return said


def _sized(entry: dict[str, Any]) -> str:
    return f"{entry['name']} ({bytes_text(entry['bytes'])}"


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - MAX_FILES} more" if len(texts) > MAX_FILES else ""
    return f"{', '.join(texts[:MAX_FILES])}{more}" if texts else ""


def lines(summary: Summary, path: Path) -> list[str]:
    """Returns the verdict as plain lines, for a pipe. They omit the reason of a failure: the final error message gives it."""
    said = [f"verdict  {headline(summary, is_said=True)}"]
    if summary.get("verification"):
        return [*said, *claims.lines(summary), *_last_lines(summary, path)]
    if summary.get("recording"):
        return [*said, *_last_lines(summary, path)]
    if reason := _reason(summary):
        said.append(f"reason  {reason}")
    said += [f"note  {line}" for line in objective_lines(summary)]
    for name in ("baseline", "best"):
        side: dict[str, Any] = summary.get(name) or {}
        if side.get("value") is not None:
            said.append(" ".join([f"{name} ", *filter(None, side_texts(summary, side)), f"trial {side.get('trial')}"]))
    said += [f"changed  {line}" for line in change_lines(summary)]
    said += [f"dropped  {line}" for line in dropped_lines(summary)]
    said += [f"front  {line}" for line in front_lines(summary)]
    said += [f"{name}  {text}" for name, text in parity_lines(summary)]
    said += [f"cost  {cost}" for cost in [search_cost_text(summary)] if cost]
    diagnosis = [f"finding  {found['finding']}: {found['advice']}" for found in summary.get("diagnosis") or []]
    said += [f"why  {line}" for line in why_lines(summary)] or diagnosis
    return said + _last_lines(summary, path)


def _last_lines(summary: Summary, path: Path) -> list[str]:
    said = [f"outcomes  {counts_text(summary.get('counts') or {})}", f"files  {path}"]
    said += [f"{name}  {text}" for name, text in [*noise_lines(summary), *file_lines(summary)]]
    return said + [f"next  {command}" for command in next_commands(summary, path)]
