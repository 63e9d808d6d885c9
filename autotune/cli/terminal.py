"""The consoles commands print to, and the colours of outcomes and verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.theme import Theme

from autotune.records import Outcome

THEME = Theme(
    {
        "good": "green",
        "warn": "yellow",
        "bad": "red",
        "quiet": "bright_black",
        "win": "bold green",
        "unsure": "bold yellow",
        "lost": "bold red",
        "name": "bold",
        "number": "default",
        "key": "cyan",
        "command": "cyan",
    }
)
OUTCOME_STYLES = {
    Outcome.ok: "good",
    Outcome.raced: "quiet",
    Outcome.unsteady: "warn",
    Outcome.infeasible: "warn",
    Outcome.disturbed: "warn",
    Outcome.interrupted: "warn",
    Outcome.invalid: "quiet",
}
VERDICT_STYLES = {"faster": "win", "same": "name", "ambiguous": "unsure", "holds": "win", "no longer holds": "lost"}
BORDER_STYLES = {"faster": "good", "ambiguous": "warn", "holds": "good", "no longer holds": "bad"}
MAX_WIDTH = 120  # of a panel: wider lines of words are hard to read. Tables take the terminal's width
PIPE_WIDTH = 10_000  # output that is not a terminal has no lines' ends: nothing wraps and nothing is cut


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Returns a console that never fails on a character the terminal does not know."""
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(AttributeError, ValueError):  # a captured stream has no encoding of its own
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    made = Console(stderr=stderr, theme=THEME, highlight=False, width=width, soft_wrap=False)
    if width is None and not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def table_width(out: Console) -> int | None:
    """Returns the width that a table has to keep to; None in a pipe."""
    return out.width if out.width < PIPE_WIDTH else None


def outcome_style(outcome: str) -> str:
    """Returns the style an outcome is written in: green for a number, red for a failure, quiet or yellow between."""
    return OUTCOME_STYLES.get(Outcome(outcome), "bad")


def print_json(document: Any) -> None:
    """Prints one JSON document to standard output, plain."""
    print(json.dumps(document, indent=2, ensure_ascii=False))
