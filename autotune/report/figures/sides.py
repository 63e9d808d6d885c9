"""Shows baseline and best together, with the same names and colours in every figure."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from autotune.explain.kernel_names import BITS_16, BITS_32, BITS_UNKNOWN
from autotune.explain.tables import Tables
from autotune.quantities import DASH, number_text, step_time_text
from autotune.report.drawing import Scale, bar
from autotune.report.study import Study

ROLES = {"baseline": "unchanged", "best": "best"}  # role -> its name; the role is also the CSS class of its bars
NAMES = {
    BITS_16: "16-bit arithmetic", BITS_32: "32-bit arithmetic", BITS_UNKNOWN: "other arithmetic",
    "exposed_collective": "waiting for other ranks", "d2h": "copies to the host", "d2d": "copies on the device",
    "h2d": "copies to the device", "input_wait": "waiting for input", "input": "waiting for input",
    "transfer": "copies to the device", "kernel_launch": "GPU idle, host launches kernels",
    "synchronise": "GPU idle, host synchronises", "host": "GPU idle, host at work", "idle": "GPU idle", "compile": "compiling",
    "python": "Python", "matmul": "matrix products",
}  # fmt: skip


def named(category: str) -> str:
    """Returns a category's name for readers: "waiting for input" for "input_wait", "optimizer state" for "optimizer_state"."""
    return NAMES.get(category, category.replace("_", " "))


def sentence(words: str) -> str:
    """Returns a text with a capital first letter."""
    return f"{words[:1].upper()}{words[1:]}"


def pair(values: Mapping[str, float | None], scale: Scale) -> list[Markup]:
    """Returns the bars of baseline and best, one above the other. A single bar is centred.

    Args:
        values: role -> value, None or 0 for no bar.
        scale: maps values to shares of the width.
    """
    if len(values) == 1:
        return [bar(0, scale(value), role) for role, value in values.items() if value]
    tops = {"baseline": 2, "best": 12}
    return [bar(0, scale(value), role, top=tops[role], height=8) for role, value in values.items() if value]


def keys(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns the legend of `pair`; [] if there is only one bar."""
    return [(role, words) for role, words in ROLES.items() if role in values] if len(values) > 1 else []


def table_notes(study: Study, name: str) -> list[str]:
    """Returns the notes of a table, each with its side: "Best: NOTE."."""
    found = {role: tables.tables[name].notes for role, tables in _tables(study).items() if name in tables.tables}
    return [f"{sentence(ROLES[role])}: {note}." for role, notes in found.items() for note in notes]


def _tables(study: Study) -> dict[str, Tables]:
    return {role: study.tables[number] for role, number in study.sides.items() if number in study.tables}


def ms_text(seconds: float | None) -> str:
    """Returns the duration of a part of a step; a dash for 0 or None."""
    return step_time_text(seconds) if seconds else DASH


def tick_text(value: float) -> str:
    """Returns an axis label without trailing zeros: "20", "0.5", "1,500"."""
    words = number_text(value)
    return words.rstrip("0").rstrip(".") if "." in words else words
