"""Defines special syntax in text: `${` in the configuration, `{loader.batch_size=32}` in a command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# {loader.batch_size} or {loader.batch_size=32}; doubled braces are an escape for literal braces.
PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*(?:\.\w+)+)(?:=([^{}]*))?\}(?!\})")
DOUBLED = re.compile(r"\{(\{[A-Za-z_]\w*(?:\.\w+)+(?:=[^{}]*)?\})\}")
TRUTH = (("false", "true"), ("no", "yes"), ("off", "on"))  # ways to write False and True


def literal(text: str) -> str:
    """Returns text escaped for OmegaConf, so that `${` does not begin a reference."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def plain(text: str) -> str:
    """Undoes `literal`."""
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def filled(word: str, values: Mapping[str, Any]) -> str:
    """Returns a word of a command with its placeholders filled and doubled braces made single.

    Args:
        word: the word.
        values: key -> value. A placeholder for another key becomes its default (the text after its `=`), or "" without one.
    """

    def text(match: re.Match[str]) -> str:
        return _like(match[2], values[match[1]]) if match[1] in values else match[2] or ""

    return DOUBLED.sub(r"\1", PLACEHOLDER.sub(text, word))


def _like(own: str | None, value: object) -> str:
    """Returns a value as text. True and False are spelled like the placeholder's default, `own`, which the program can read."""
    if not isinstance(value, bool) or own is None:
        return str(value)
    own = own.strip()
    word = next((pair for pair in TRUTH if own.lower() in pair), TRUTH[0])[value]
    return word if own.islower() else word.upper() if own.isupper() else word.title()


def is_reference(value: object) -> bool:
    """Returns whether a value refers to another key or to the environment: `${oc.env:NAME}`."""
    return isinstance(value, str) and "${" in value
