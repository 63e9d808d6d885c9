"""The winner of a study as a file for other tools: YAML for Hydra and autotune, shell exports, a Python dictionary."""

from __future__ import annotations

from collections.abc import Callable

from autotune.errors import BadInput, one_of
from autotune.export import environment, python, yaml
from autotune.export.winner import Winner, winner
from autotune.records import Summary, Tier

FORMATS: dict[str, Callable[[Winner], str]] = {
    "yaml": yaml.render,
    "env": environment.render,
    "python": python.render,
}


def export(summary: Summary, format: str, tier: Tier | None) -> str:
    """Returns the best configuration of a study as text.

    Args:
        summary: the study's summary.
        format: member of FORMATS.
        tier: the best that changes no more than this; None for the study's best.

    Raises:
        BadInput: no such format, or the study has no winner yet.
    """
    if format not in FORMATS:
        raise BadInput(f"--format: no such format, got {format!r}. {one_of(format, FORMATS)}")
    return FORMATS[format](winner(summary, tier))
