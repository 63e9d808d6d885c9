"""Defines special syntax in text: `${` in the configuration, `{loader.batch_size=32}` in a command."""

from __future__ import annotations

import re

# {loader.batch_size} or {loader.batch_size=32}; doubled braces are an escape for literal braces.
PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*(?:\.\w+)+)(?:=([^{}]*))?\}(?!\})")
DOUBLED = re.compile(r"\{(\{[A-Za-z_]\w*(?:\.\w+)+(?:=[^{}]*)?\})\}")


def literal(text: str) -> str:
    """Returns text escaped for OmegaConf, so that `${` does not begin a reference."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def plain(text: str) -> str:
    """Undoes `literal`."""
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def is_reference(value: object) -> bool:
    """Returns whether a value refers to another key or to the environment: `${oc.env:NAME}`."""
    return isinstance(value, str) and "${" in value
