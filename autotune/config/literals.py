"""Text with a meaning of its own where it stands: `${` in configuration, `{loader.batch_size=32}` in a command."""

from __future__ import annotations

import re

# {loader.batch_size} or {loader.batch_size=32}; doubled braces stand for themselves.
PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*(?:\.\w+)+)(?:=([^{}]*))?\}(?!\})")
DOUBLED = re.compile(r"\{(\{[A-Za-z_]\w*(?:\.\w+)+(?:=[^{}]*)?\})\}")


def literal(text: str) -> str:
    """Returns text as OmegaConf must be given it to mean every letter: `${` would begin a reference."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def plain(text: str) -> str:
    """Returns the text that `literal` was given."""
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def is_reference(value: object) -> bool:
    """Returns whether a value refers to another key or to the environment: `${oc.env:NAME}`."""
    return isinstance(value, str) and "${" in value
