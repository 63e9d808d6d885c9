"""Renders the ranks of a trial for `autotune show`: one row per rank, and the cost of their communication."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autotune.explain.table import quotient
from autotune.quantities import bytes_text, compact_text, percent_text
from autotune.records import Summary
from autotune.wording import communication_text, rank_names


def block(summary: Summary) -> Group | None:
    """Returns the ranks of the best trial, or of the baseline if there is no best; None for single-process training."""
    number = (summary.get("best") or summary.get("baseline") or {}).get("trial")
    trial: dict[str, Any] = next((each for each in summary.get("trials") or [] if each["number"] == number), {})
    ranks: dict[str, Any] = trial.get("ranks") or {}
    if not ranks:
        return None
    made = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column(f"rank (trial {number})", no_wrap=True)
    unit = str(summary.get("unit") or "samples")
    for name in (f"{unit}/s", "input", "ranks", "memory"):
        made.add_column(name, justify="right", no_wrap=True)
    for entry, name in zip(ranks["by_rank"], rank_names(ranks["by_rank"]), strict=True):
        slow = "  the other ranks wait for it" if entry["rank"] in ranks["stragglers"] else ""
        made.add_row(
            Text.assemble(name, (slow, "warn")),
            compact_text(entry["rate_per_s"]),
            percent_text(entry["data_wait_frac"]),
            percent_text(quotient(entry["exposed_s"], entry["step_s"])),
            bytes_text(entry["peak_memory_bytes"]),
        )
    legend = "input, ranks: share of a step spent waiting for input and for other ranks"
    return Group(made, Text(legend, style="quiet"), Text(communication_text(ranks), style="quiet"))
