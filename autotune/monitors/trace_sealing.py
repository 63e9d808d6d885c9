"""Removes secrets from the traces that torch.profiler wrote: from names of operators and ranges, paths and arguments.

All strings of the JSON document are masked, one by one. Outside of strings, JSON has only numbers, constants and punctuation. A
text that has anything else is not a trace, and none of it is kept.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from autotune.documents import write_bytes

MAX_TEXT_BYTES = 512 << 20  # decompressed traces are cut here; a pass records at most 200,000 events, about 100 MB
BLOCK_BYTES = 1 << 20
NUM_KNOWN = 20_000  # number of strings whose masked form is cached, since most strings occur in many events
LEVEL = 5  # compression level
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OUTSIDE = r"[\s\d\[\]{}:,.+\-EeINaflnrstuy]"  # numbers, true, false, null, NaN, Infinity
_CUT_OFF = r'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?'  # the last string, if the text ends within it
_TRACE = re.compile(rf"((?:{_OUTSIDE}++|{_STRING.pattern})*+)(?:{_CUT_OFF})?", re.DOTALL)

Mask = Callable[[str], str]


def seal_trace(path: Path, mask: Mask) -> None:
    """Masks the secrets in a compressed trace, and drops whatever is not JSON.

    If the disk has no room for the copy, the trace is removed.
    """
    if path.is_symlink() or not path.is_file():
        return
    masked = functools.lru_cache(maxsize=NUM_KNOWN)(functools.partial(_masked, mask))
    text, is_whole = _text_of(path)
    found = _TRACE.fullmatch(text)
    kept = found[1] if found else ""
    if is_whole and kept == text and all(masked(string[0]) == string[0] for string in _STRING.finditer(text)):
        return
    content = _STRING.sub(lambda string: masked(string[0]), kept).encode("utf-8", "surrogateescape")
    try:
        write_bytes(path, gzip.compress(content, LEVEL))
    except OSError:
        path.unlink(missing_ok=True)


def _text_of(path: Path) -> tuple[str, bool]:
    """Returns the text of a compressed trace as far as it can be read, and whether that is all of it."""
    text, is_whole = bytearray(), False
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:  # cut short, damaged, or not compressed
        while len(text) <= MAX_TEXT_BYTES and not is_whole:
            block = file.read1(BLOCK_BYTES)  # `read1` also returns what comes before damaged data
            text += block
            is_whole = not block
    return text.decode("utf-8", "surrogateescape"), is_whole


def _masked(mask: Mask, string: str) -> str:
    """Returns a JSON string with its content masked. Argument and result include the quotes."""
    try:
        text = str(json.loads(string, strict=False))
    except ValueError:
        text = string[1:-1]
    after = mask(text)
    return string if after == text else json.dumps(after)
