"""What programs write for a terminal, made fit to be quoted: without colours and control codes, cut where a thought ends."""

from __future__ import annotations

import re

ELLIPSIS = "…"
KEPT_FRAC = 0.5  # of the room that a cut at a sentence's or a word's end must leave used

# ECMA-48: control sequences (colours), strings (titles, links) up to their end, two-letter escapes. Half a one at a cut, too.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|$)"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?",
    re.MULTILINE,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SENTENCE = re.compile(r"[.;!?](?=\s)")


def plain(text: str) -> str:
    """Returns a text without escape sequences and control characters; what a progress bar wrote over stands in lines."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def shortened(text: str, most: int, end: str = ELLIPSIS) -> str:
    """Returns a text of at most so many characters, cut after a sentence or else after a word, with an ellipsis.

    Args:
        text: for quoting: what autotune itself says is never cut.
        most: characters, the ellipsis included.
        end: the ellipsis.
    """
    if len(text) <= most:
        return text
    room = text[: most - len(end)]
    least = KEPT_FRAC * most
    sentences = [found.end() for found in _SENTENCE.finditer(text, 0, len(room)) if found.end() < len(room)]
    if sentences and sentences[-1] >= least:
        return f"{room[: sentences[-1]]} {end}"
    words = len(room) if text[len(room)].isspace() else room.rfind(" ")
    return f"{room[:words].rstrip() if words >= least else room}{end}"


def one_line(text: str, most: int) -> str:
    """Returns text as one line of printable characters, cut to `most` of them: fit for a terminal, a comment, a table."""
    printable = "".join(letter if letter.isprintable() else " " for letter in plain(text))
    return shortened(" ".join(printable.split()), most, "...")
