"""Formats the figures of a strategy as table columns, for the Markdown table.

The first seven columns and "final" say which share of the optimum the best configuration found so far reaches: the median over
the replayed studies, or the 10th percentile (p10). "10 trials" is the share after ten trials. "in time of 10" is the share
after the time of the baseline and ten trials. This time is eleven times the mean length of the table's recorded trials, so it
is the same for all strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]  # of one strategy, as `figures.figures` returns them
NONE = "–"  # noqa: RUF001 (a dash in a table)


def percent(value: float | None) -> str:
    """Returns a fraction as a percentage."""
    return NONE if value is None else f"{100 * value:.1f} %"


def count(value: float | None) -> str:
    """Returns a number without decimals."""
    return NONE if value is None else f"{value:.0f}"


def agreeing(found: Figures) -> str:
    """Returns how many of the claimed winners a later verify confirms: "47 of 50"."""
    calibration = found["calibration"]
    return f"{calibration['verified']} of {calibration['verifiable']}" if calibration["verifiable"] else NONE


COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("10 trials", lambda found: percent(found["at_trials"]["10"]["median"])),
    ("20", lambda found: percent(found["at_trials"]["20"]["median"])),
    ("40", lambda found: percent(found["at_trials"]["40"]["median"])),
    ("p10 of 20", lambda found: percent(found["at_trials"]["20"]["p10"])),
    ("in time of 10", lambda found: percent(found["at_seconds_of_trials"]["10"]["median"])),
    ("in time of 20", lambda found: percent(found["at_seconds_of_trials"]["20"]["median"])),
    ("in time of 40", lambda found: percent(found["at_seconds_of_trials"]["40"]["median"])),
    ("trials to 95 %", lambda found: count(found["to"]["0.95"]["trials"]["median"])),
    ("p90", lambda found: count(found["to"]["0.95"]["trials"]["p90"])),
    ("s to 95 %", lambda found: count(found["to"]["0.95"]["seconds"]["median"])),
    ("p90", lambda found: count(found["to"]["0.95"]["seconds"]["p90"])),
    ("trials to 98 %", lambda found: count(found["to"]["0.98"]["trials"]["median"])),
    ("p90", lambda found: count(found["to"]["0.98"]["trials"]["p90"])),
    ("trials", lambda found: count(found["trials"])),
    ("final", lambda found: percent(found["final"]["median"])),
    ("change without effect", lambda found: percent(found["needless_frac"])),
    ("out of memory", lambda found: percent(found["out_of_memory_frac"]["20"])),
    ("verified", agreeing),
    ("overstated", lambda found: percent(found["calibration"]["overstated_frac"])),
)


def cells(found: Figures) -> list[str]:
    """Returns the cells of a strategy's row."""
    return [text(found) for _, text in COLUMNS]


def markdown(strategies: Mapping[str, Figures]) -> str:
    """Returns the strategies as a Markdown table."""
    rows = [["strategy", *(head for head, _ in COLUMNS)], ["---", *("--:" for _ in COLUMNS)]]
    rows += [[f"`{name}`", *cells(found)] for name, found in strategies.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
