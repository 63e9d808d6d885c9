"""Removes secrets from the traces that torch.profiler wrote: from names of operators and ranges, paths and arguments.

A trace is large, so it is read and written in pieces. All strings of the JSON document are masked, one by one. Outside of
strings, JSON has only numbers, keywords and punctuation. Where a file has anything else, it is cut off.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20
MAX_STRING_CHARS = 4 << 20  # a trace is cut off before a longer string
MAX_TEXT_BYTES = 4 << 30  # of the decompressed trace; it is cut off there
NUM_KNOWN = 20_000  # strings whose masked form is remembered, since most strings occur in many events
LEVEL = 5  # of compression
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # the last string of a text may be cut off
_WHOLE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OUTSIDE = re.compile(r"[\s\d\[\]{}:,.+\-EeINaflnrstuy]*")  # numbers, true, false, null, NaN, Infinity

Mask = Callable[[str], str]


class _CutOff(Exception):
    """The rest of a trace cannot be read or is no JSON."""


def seal_trace(path: Path, mask: Mask) -> None:
    """Replaces a compressed trace by one without secrets, if it holds any. Whatever is not JSON is dropped.

    If the disk has no room for the copy, the trace is removed.

    Args:
        path: the trace, compressed by gzip.
        mask: returns a text without secrets.
    """
    if path.is_symlink() or not path.is_file():
        return
    masked = functools.lru_cache(maxsize=NUM_KNOWN)(functools.partial(_masked, mask))
    if _is_clean(path, masked):
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with (
            open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw,
            gzip.GzipFile("", "wb", LEVEL, raw) as out,
            contextlib.suppress(_CutOff),
        ):
            for piece in _pieces(path):
                out.write(_STRING.sub(lambda found: masked(found[0]), piece).encode("utf-8", "surrogateescape"))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _is_clean(path: Path, masked: Mask) -> bool:
    try:
        return all(masked(string) == string for piece in _pieces(path) for string in set(_STRING.findall(piece)))
    except _CutOff:
        return False


def _pieces(path: Path) -> Iterator[str]:
    """Yields a trace's text in pieces; no string is split between two.

    Raises:
        _CutOff: the rest cannot be read, or is not JSON.
    """
    rest = ""
    for text in _blocks(path):
        piece, rest = _split(rest + text)
        if len(rest) > MAX_STRING_CHARS or not _OUTSIDE.fullmatch(_STRING.sub("", piece)):
            raise _CutOff
        yield piece
    if rest:
        raise _CutOff


def _blocks(path: Path) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    num_bytes = 0
    try:
        with gzip.open(path) as file:
            while block := file.read1(BLOCK_BYTES):  # of a damaged file, this reads what comes before the damage
                yield decode(block)
                num_bytes += len(block)
                if num_bytes > MAX_TEXT_BYTES:
                    raise _CutOff
    except (OSError, EOFError, zlib.error):  # cut short, damaged, or not compressed
        raise _CutOff from None


def _split(text: str) -> tuple[str, str]:
    """Returns a text up to its last string, if that is cut off, and the rest."""
    strings = _STRING.findall(text)
    if not strings or not text.endswith(strings[-1]) or _WHOLE.fullmatch(strings[-1]):
        return text, ""
    return text[: -len(strings[-1])], strings[-1]


def _masked(mask: Mask, string: str) -> str:
    """Returns a string of JSON, in its quotes, masked."""
    try:
        text = str(json.loads(string, strict=False))
    except ValueError:
        text = string[1:-1]
    after = mask(text)
    return string if after == text else json.dumps(after)
