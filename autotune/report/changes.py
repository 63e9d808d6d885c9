"""Words the changes of the best configuration and their effects, as lines without layout."""

from __future__ import annotations

from typing import Any

from autotune.knobs.base import value_text
from autotune.quantities import ratio_with_interval_text
from autotune.records import Summary
from autotune.wording import changes_phrase, effect_number, effect_text, knob_phrase


def entries_of(summary: Summary) -> list[dict[str, Any]]:
    """Returns the best's changes in the order of the summary's attribution. Others follow, with knob and values only."""
    overrides = (summary.get("best") or {}).get("overrides") or {}
    before = (summary.get("baseline") or {}).get("knobs") or {}
    known = [entry for entry in summary.get("attribution") or [] if entry.get("knob") in overrides]
    rest = sorted(set(overrides) - {entry["knob"] for entry in known})
    return known + [{"knob": key, "from": before.get(key), "to": overrides[key]} for key in rest]


def basis_lines(summary: Summary) -> list[str]:
    """Returns notes on the numbers: which are estimates, and how to measure the missing ones."""
    entries = summary.get("attribution") or []
    lines = []
    if any(entry.get("basis") == "estimated" for entry in entries):
        lines.append("estimated: from all trials of the study, not measured side by side")
    return [*lines, *([missing] if (missing := missing_text(summary)) else [])]


def missing_text(summary: Summary) -> str:
    """Returns a line on the changes whose effects are not known, and on what it takes to know them; "" if all are known."""
    entries = [entry for entry in summary.get("attribution") or [] if entry.get("verdict") == "not measured"]
    if not entries:
        return ""
    what, need = "its effect" if len(entries) == 1 else "their effects", summary.get("effects_need")
    more = f"more time or trials measure {what}"
    if need:
        more = f"about {need['more_minutes']:.0f} more minutes measure {what}: study.budget.minutes={need['minutes']:.0f}"
    return f"only tried together with other changes: {changes_phrase({e['knob']: e['to'] for e in entries})}; {more}"


def dropped_lines(summary: Summary) -> list[str]:
    """Returns one or two lines on the winner's changes that had no effect and were reverted; [] without any."""
    found = summary.get("minimality") or {}
    dropped = found.get("dropped") or []
    if not dropped:
        return []
    words = ", ".join(f"{knob_phrase(e['knob'], e['to'])} {_dropped_text(e)}".strip() for e in dropped)
    whole = ratio_with_interval_text(found.get("ratio"), found.get("ci"))
    lines = [f"no clear effect, so reverted: {words}"]
    return [*lines, f"all of them together: {whole}"] if len(dropped) > 1 and found.get("ratio") else lines


def _dropped_text(entry: dict[str, Any]) -> str:
    return f"{effect_number(entry)}{' estimated' if entry.get('basis') == 'estimated' else ''}"


def change_lines(summary: Summary) -> list[str]:
    """Returns the changes as plain lines, one per change: "precision.amp: off -> bf16  1.62x [1.58, 1.66]"."""
    lines = []
    for entry in entries_of(summary):
        words = [f"{entry['knob']}: {value_text(entry.get('from'))} -> {value_text(entry.get('to'))}"]
        is_told = entry.get("ratio") or entry.get("verdict") not in (None, "not measured")
        lines.append("  ".join([*words, *([effect_text(entry)] if is_told else [])]))
    return lines
