"""Describes a proposal in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.knobs.base import value_text
from autotune.quantities import percent_text
from autotune.wording import knob_phrase, listed

MAX_CHANGES = 4  # changes that are listed by name; the rest are counted
LEAST_SAID = 0.005  # smallest gain that is shown as a number: a smaller one rounds to 0 %
MOST_SAID = 1.0  # a possible gain of this much or more is not shown as a number: it only means that little is known


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns what differs between two configurations: "batch 32 -> 64, bf16"."""
    keys = [key for key in after if key not in before or not _same(before[key], after[key])]
    return listed([_change(key, before.get(key), after[key]) for key in keys], MAX_CHANGES) or "the same"


def gain(expected: float, possible: float) -> str:
    """Returns the expected gain of a change: "+14 % expected", "up to +9 %", "gain unknown", "little gain expected".

    Args:
        expected: mean gain, a fraction.
        possible: gain that one in ten such changes exceeds, a fraction.
    """
    if expected >= LEAST_SAID:
        return f"{expected:+.0%} expected".replace("%", " %")
    if possible >= MOST_SAID:
        return "gain unknown"
    if possible >= LEAST_SAID:
        return f"up to {possible:+.0%}".replace("%", " %")
    return "little gain expected"


def risk(chance_to_fit: float) -> str:
    """Returns the text that follows the gain of a risky proposal: ", 10 % likely to fit the memory"."""
    return f", {percent_text(chance_to_fit)} likely to fit the memory"


def _change(key: str, old: Any, new: Any) -> str:
    if old is None or isinstance(new, bool):
        return knob_phrase(key, new)
    if isinstance(new, int | float):
        return f"{knob_phrase(key, old)} -> {value_text(new)}"
    return f"{knob_phrase(key, old)} -> {knob_phrase(key, new)}"


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
