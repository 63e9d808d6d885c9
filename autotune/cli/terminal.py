"""Makes the consoles that commands print to, and defines the colours of outcomes and verdicts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.theme import Theme

from autotune.cli.process_start import silence
from autotune.plain_text import escaped_document, plain
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
MAX_WIDTH = 120  # columns of a panel, since wider text is hard to read. Tables use the terminal's width
BLANKS = re.compile(r" +(?=\n)")
GAP = 2  # blanks between two columns
PIPE_WIDTH = 10_000  # for output that is not a terminal: nothing wraps, nothing is cut


class PlainConsole(Console):
    """Console that removes control characters from texts, because texts in a stranger's file could control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments to print."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()  # true for most segments; halves the time for a long list
            yield segment if is_plain else segment._replace(text=plain(segment.text))


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Returns a console that replaces characters that its stream cannot encode; it does not fail on them."""
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(AttributeError, ValueError):  # captured streams cannot be reconfigured
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    nowhere = io.StringIO()  # used instead of a stream that the caller has closed
    file = None if stream else nowhere
    made = PlainConsole(file=file, stderr=stderr, theme=THEME, highlight=False, width=width, soft_wrap=False)
    if width is None and not made.is_terminal and "COLUMNS" not in os.environ:
        made.width, made.file = PIPE_WIDTH, cast(IO[str], _Unpadded(stream or nowhere))
    return made


class _Unpadded:
    """A stream that removes the blanks with which tables pad their lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(BLANKS.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Outlasted:
    """A stream that drops output once it cannot be written: a closed terminal is no reason to end a study."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes to the stream if it can be written."""
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        """Writes what is still in the buffer."""
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Lines:
    """A table with one line per row, for long lists: rich's own table takes half a second for a thousand rows.

    Args:
        header: names of the columns.
        rows: the cells, without line breaks. The first column has the style "name".

    Attributes:
        width: columns of the terminal that the widest line takes.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._rows = [header, *rows]
        self._widths = [max(map(cell_len, column)) for column in zip(*self._rows, strict=True)]
        self.width = sum(self._widths) + GAP * (len(header) - 1)

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """Yields the segments to print."""
        quiet, name = out.get_style("quiet"), out.get_style("name")
        for number, cells in enumerate(self._rows):
            padded = [cell + " " * (width + GAP - cell_len(cell)) for cell, width in zip(cells, self._widths, strict=True)]
            yield Segment(padded[0], name if number else quiet)
            yield Segment("".join(padded[1:]).rstrip(), None if number else quiet)
            yield Segment.line()


def can_redraw(out: Console) -> bool:
    """Whether a line on this console can be drawn again; False in a pipe and on a dumb terminal (such as Emacs' shell)."""
    return out.is_terminal and not out.is_dumb_terminal


def table_width(out: Console) -> int | None:
    """Returns the maximum width of a table; None in a pipe."""
    return out.width if out.width < PIPE_WIDTH else None


def outcome_style(outcome: str) -> str:
    """Returns the style of an outcome: green for ok, red for a failure, grey or yellow in between."""
    return OUTCOME_STYLES.get(Outcome(outcome), "bad")


def print_json(document: Any) -> None:
    """Prints one JSON document to standard output, without styles."""
    is_ascii = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(escaped_document(json.dumps(document, indent=2, ensure_ascii=is_ascii)))
