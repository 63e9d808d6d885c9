"""The end of a trial's log, with secrets masked: what goes into evidence, reports and trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TAIL_BYTES = 8 << 10
MAX_BYTES = 8 << 20  # a log that has grown past this is cut back
HEAD_BYTES, KEEP_BYTES = 256 << 10, 1 << 20  # to its beginning and its end
MASK = "***"
MIN_SECRET_CHARS = 8  # shorter values ("0", "true") of secret-sounding variables would mask half the log

_SECRET_WORDS = frozenset({"token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The look-behinds keep the searches linear: a name is tried from its first character only.
_KEY = re.compile(r"(?<![\w.-])([A-Za-z_-][\w.-]*)([\"']?\s*[=:]\s*[\"']?)")
_VALUE = re.compile(r"(?:Bearer |Basic )?[^\s\"',;&)}\]]+")
_FLAG = re.compile(r"(?<![\w.-])(--?[A-Za-z][\w-]*)(\s+)([^\s-]\S*)")
_URL = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/\s@]{1,1000}@")
_FORMAT = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|Bearer )[A-Za-z0-9._~+/=-]{12,}")


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Returns the end of a text file, cut at a line's start; "" when there is none. Not masked."""
    try:
        return _end(path, max_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""


def bound(path: Path) -> None:
    """Cuts a log that has grown past MAX_BYTES back to its beginning and its end, also while the program writes to it.

    The writers must have opened it for appending: they then go on at its new end. What they write between the reading and the
    cutting is lost, in the middle of a flood. A pipe that somebody drains would lose nothing, but it lets a print wait for the
    reader, and ends the program with the reader.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes <= MAX_BYTES:
            return
        end = _end(path, KEEP_BYTES)
        os.truncate(path, HEAD_BYTES)
        with path.open("ab") as file:
            file.write(b"\n[autotune: %d bytes left out here]\n" % (size_bytes - HEAD_BYTES - len(end)) + end)
    except OSError:
        return  # the folder is gone, or the disk is full


def _end(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - max_bytes))
        end = file.read(max_bytes)
    # Half a line at the start is left out; one endless line is kept.
    return end[end.find(b"\n") + 1 :] if size_bytes > max_bytes else end


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns the text with what looks like a secret replaced by "***".

    Masked are the values of keys that sound secret (`HF_TOKEN=...`, `"api_key": "..."`, `--password ...`), the credentials in
    URLs, tokens of well-known formats, and the given secrets wherever they stand.

    Args:
        text: a log's tail.
        secrets: values known to be secret, see `secrets_in`.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _FORMAT.sub(MASK, text)
    text = _without_values(text)
    return _FLAG.sub(lambda m: _hidden(m) if sounds_secret(m[1], "=") else m[0], text)


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Returns the values of an environment that must not appear in a log."""
    return [value for name, value in environment.items() if len(value) >= MIN_SECRET_CHARS and sounds_secret(name)]


def sounds_secret(name: str, separator: str = "=") -> bool:
    """Returns whether a key's value is likely a secret.

    "key" alone counts before "=" only: `key: conv1.weight` is what torch prints of a state dict.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if _SECRET_WORDS & set(words):
        return True
    return bool(words) and words[-1] == "key" and (len(words) > 1 or "=" in separator)


def _without_values(text: str) -> str:
    """Masks the values of keys that sound secret. Not one substitution: a harmless key's value may hold another key."""
    parts, at = [], 0
    for key in _KEY.finditer(text):
        if key.start() >= at and sounds_secret(key[1], key[2]) and (value := _VALUE.match(text, key.end())):
            parts += [text[at : key.end()], MASK]
            at = value.end()
    return "".join([*parts, text[at:]])


def _hidden(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{MASK}"
