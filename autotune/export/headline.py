"""Writes the comment lines at the top of an exported file, the same in every format."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from autotune.config.command import CommandTemplate
from autotune.explained import why_lines
from autotune.export.claims import Claimed, day, describe_machine
from autotune.plain_text import one_line
from autotune.quantities import number_text
from autotune.records import THROUGHPUT, Knobs, Summary
from autotune.wording import BETTER, gain_words, objective_of, side_texts

WIDTH = 100  # characters of a comment line; fits the report's box
MAX_WORD = 160
INDENT = "  "


def headline(claimed: Claimed, hidden: Knobs, held: Knobs) -> list[str]:
    """Returns lines that say what the file is, its speedup, and where and when it was measured, wrapped at WIDTH.

    Args:
        claimed: the exported configuration.
        hidden: knobs whose values are secret.
        held: {"step.accumulation": N} that keeps the global batch constant; {} if accumulation is not exported.
    """
    summary, entry, speedup = claimed.summary, claimed.entry, claimed.speedup
    scope = f" up to tier {claimed.tier}" if claimed.tier else ""
    lines = [f"autotune: the best configuration{scope} found for {summary['title']}"]
    if not entry["overrides"]:
        lines.append(claimed.nothing)
        if claimed.beyond:
            lines.append(f"The best of all tiers is {claimed.beyond}.")
        if speedup and speedup.get("kept"):
            lines.append(f"The baseline was kept. The configuration compared with it: {speedup['kept']}")
    elif speedup and speedup.get("ratio"):
        lines.append(_gain_line(summary, speedup))
    sides = (summary["baseline"], entry) if entry["overrides"] else (summary["baseline"],)
    lines.append(" -> ".join(_measured(summary, side) for side in sides))
    if claimed.tier_of_changes:
        lines.append(f"Tier of the changes: {claimed.tier_of_changes}.")
    if claimed.dropped:
        lines.append(f"Reverted, because they had no clear effect: {', '.join(claimed.dropped)}.")
    if claimed.parity and entry["overrides"]:
        lines.append(f"Loss parity: {claimed.parity}")
    lines += [f"Note: {caveat}" for caveat in claimed.caveats]
    if claimed.is_best:
        lines += [f"What still costs time: {line}" for line in why_lines(summary)]
    if summary.get("placeholders") and not summary.get("is_recipe"):
        words = _filled_in(summary, {**entry["overrides"], **held})
        lines.append(f"Some of these settings are command-line arguments of the program: {words}")
    lines.append(_where(summary))
    lines = [part for line in lines for part in _wrapped(line)]  # lines become comments, so line breaks must go
    return lines + [f"{key}={value}: a secret, which is not in this file. Set it yourself." for key, value in hidden.items()]


def _wrapped(line: str) -> list[str]:
    """Returns a sentence wrapped at WIDTH. Words longer than MAX_WORD, which a user's command line may contain, are cut."""
    plain = one_line(line, len(line) + 1)
    words = " ".join(one_line(word, MAX_WORD) for word in plain.split())
    return textwrap.wrap(words, WIDTH, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def _where(summary: Summary) -> str:
    versions = summary["versions"]
    made_with = [f"{name} {versions[name]}" for name in ("torch", "autotune") if versions.get(name)]
    return f"Measured on {describe_machine(summary['machine'])}, {day(summary)}{''.join(f', {word}' for word in made_with)}."


def _filled_in(summary: Summary, knobs: Knobs) -> str:
    template = CommandTemplate(parts=summary["command"], placeholders=summary["placeholders"])
    return shlex.join(template.argv({**(summary.get("pinned") or {}), **knobs}))


def _gain_line(summary: Summary, speedup: dict[str, Any]) -> str:
    """Returns ratio, interval and verdict in the objective's words: "1.310 x less energy per sample, 95 % interval ..."."""
    interval = f", 95 % interval {speedup['ci'][0]:.3f} to {speedup['ci'][1]:.3f}" if speedup.get("ci") else ", no interval"
    reason = f" ({speedup['reason']})" if speedup.get("reason") else ""
    words = BETTER[objective_of(summary)] if speedup["verdict"] == "faster" else speedup["verdict"]
    of = gain_words(summary, "") or "the baseline"
    return f"{speedup['ratio']:.3f} x {of}{interval}: {words}{reason}"


def _measured(summary: Summary, side: dict[str, Any]) -> str:
    if objective_of(summary) != THROUGHPUT:
        return side_texts(summary, side)[0]
    return f"{number_text(side['value'], digits=4)} {summary['unit']}/s" if side.get("value") else "unknown"
