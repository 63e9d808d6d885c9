"""Makes terminal output fit for quoting: removes colours and control codes, cuts at the end of a sentence or word."""

from __future__ import annotations

import os
import re
import shlex

ELLIPSIS = "…"
KEPT_FRAC = 0.5  # `shortened` cuts after a sentence or a word only if the rest has at least this share of the allowed length

# Escape sequences of ECMA-48, even if cut in half: control sequences (colours), strings (titles, links) up to their end, and
# two-letter escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|$)"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?",
    re.MULTILINE,
)
# Control characters, and characters that reorder the text around them or break its lines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SENTENCE = re.compile(r"[.;!?](?=\s)")


def plain(text: str) -> str:
    """Returns a text without escape sequences and control characters; each state of a progress bar gets its own line."""
    return visible(_ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def visible(text: str) -> str:
    """Returns a text without its control characters. An escape sequence loses only its escape character: "[31m" stays."""
    return _CONTROLS.sub("", text)


def escaped_document(document: str) -> str:
    r"""Returns a JSON or YAML document, whose strings must be quoted, with its control characters written as "\u009b"."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def shortened(text: str, most: int, end: str = ELLIPSIS) -> str:
    """Returns a text of at most `most` characters, cut after a sentence or else after a word, with an ellipsis.

    Args:
        text: text that is quoted, such as a message of the program. Do not cut autotune's own words with it.
        most: maximum number of characters, including the ellipsis.
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


def escaped(text: str) -> str:
    """Returns a text with each unprintable letter replaced by its escape: a line feed by a backslash and n."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def storable(text: str) -> str:
    r"""Returns a text that UTF-8 can express: bytes of a file name that are not UTF-8 become "\udce9"."""
    return text.encode("utf-8", "backslashreplace").decode()


def shell_word(text: str) -> str:
    r"""Returns a text as one word of a shell's command line. Unprintable letters are escaped, as in $'a\x0ab'."""
    if text.isprintable():
        return shlex.quote(text)
    letters = (each if each.isprintable() and each not in "'\\" else _escaped_bytes(each) for each in text)
    return f"$'{''.join(letters)}'"


def _escaped_bytes(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(text))


def one_line(text: str, most: int) -> str:
    """Returns text as one line of at most `most` printable characters, for a terminal, a comment or a table."""
    printable = "".join(letter if letter.isprintable() else " " for letter in plain(text))
    return shortened(" ".join(printable.split()), most, "...")
