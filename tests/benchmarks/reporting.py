"""Formats what every benchmark prints: the machine, the versions, tables and intervals."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from autotune.machine import host_facts

LIBRARIES = ("torch", "torchvision", "optuna", "mlflow")


def machine_lines() -> list[str]:
    """Returns lines with the machine and the versions, one fact per line."""
    facts = host_facts()
    gpus = ", ".join(str(gpu["name"]) for gpu in facts["gpus"]) or "none"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    return [f"machine   {facts['cpu_model']}, {facts['num_cores']} cores, GPUs: {gpus}", f"versions  {versions}"]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table with columns aligned for a terminal."""
    cells = [[str(cell).replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def interval(low_high: tuple[float, float] | None, decimals: int = 3) -> str:
    """Returns "[low, high]", or a text that says that there is no interval."""
    return "no interval" if low_high is None else f"[{low_high[0]:.{decimals}f}, {low_high[1]:.{decimals}f}]"
