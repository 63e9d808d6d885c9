"""Removes secrets from the files that a trial's processes wrote, once the processes have exited."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from autotune.documents import write_bytes
from autotune.harness import protocol
from autotune.masking import Secrets

LOOK_S = 0.2  # time between two looks for running trials
MAX_TEXT_BYTES = 512 << 20  # longer texts of traces are cut off; a pass records at most 200,000 events, about 100 MB
BLOCK_BYTES = 1 << 20
NUM_KNOWN = 20_000  # number of strings whose masked form is cached, since most strings occur in many events
LEVEL = 5  # compression level
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # a string of JSON, with its quotes
_OUTSIDE = re.compile(r"[\s\d\[\]{}:,.+\-EeINaflnrstuy]*")  # what JSON has outside strings: numbers, true, NaN, ...

Mask = Callable[[str], str]


def seal(folder: Path, secrets: Secrets) -> None:
    """Removes secrets from the files that a trial's processes wrote. The processes must have exited.

    What the program writes may contain secrets: it may print its environment, or an exception may quote a secret. Each file is
    replaced atomically. Files that autotune never reads again (half-written results, the scratch folder) are removed. A second
    call changes nothing.
    """
    shutil.rmtree(folder / protocol.SCRATCH, ignore_errors=True)
    for name in (protocol.STDOUT_FILE, protocol.STDERR_FILE):
        _rewrite(folder / name, secrets.text)
        _rewrite(folder / first_attempt(name), secrets.text)
    for file in (*folder.glob("result.rank*"), *folder.glob("explained.*")):
        if file.suffix == ".tmp":
            file.unlink(missing_ok=True)
        else:
            _rewrite(file, lambda text: _masked_json(text, secrets))
    for file in (*folder.glob("unfinished.trace.*"), *folder.glob("trace.rank*.tmp")):
        with contextlib.suppress(OSError):
            file.unlink()
    for file in folder.glob("trace.rank*.json.gz"):
        seal_trace(file, secrets.text)


def first_attempt(name: str) -> str:
    """Returns the name that the first attempt's log is given when a second attempt begins: "stderr.first.log"."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.first.{suffix}"


def seal_leftovers(
    study: Path, secrets: Secrets, *, wait_s: float = 0.0, is_running: Callable[[], bool] = lambda: False
) -> None:
    """Seals the trials that a killed tuner left without a record.

    A node of a cluster may still write to a trial's files until it notices that the tuner is gone. The next call of this
    function masks what the node wrote.

    Args:
        study: the study's folder.
        secrets: what to mask.
        wait_s: longest wait for trials that still run on this machine. If a trial runs longer, nothing is sealed.
        is_running: returns whether a tuner works on the study now. If so, nothing is sealed: its trials may run on any machine.
    """
    until_s = time.monotonic() + wait_s
    while _is_training(study):
        if time.monotonic() >= until_s:
            return
        time.sleep(LOOK_S)
    if is_running():
        return
    for folder in sorted(study.glob("trials/[0-9]*")):
        if not (folder / "trial.json").exists():
            seal(folder, secrets)


def _is_training(study: Path) -> bool:
    """Whether any process on this machine carries the mark of one of the study's trials."""
    mark = os.fsencode(f"{protocol.MARK_VARIABLE}={study.resolve()}:")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environment.read_bytes().split(b"\0")
        except OSError:  # exited, or another user's
            continue
        if any(variable.startswith(mark) and variable[len(mark) :].rpartition(b"/")[2].isdigit() for variable in variables):
            return True
    return False


def _masked_json(text: str, secrets: Secrets) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # not JSON: the program has overwritten its result
        return secrets.text(text)
    masked = secrets.document(document)
    return text if masked == document else json.dumps(masked)


def _rewrite(path: Path, mask: Callable[[str], str]) -> None:
    """Replaces a file with its masked text. If the disk has no room for a copy, overwrites the file, up to its old size."""
    try:
        if path.is_symlink() or not path.is_file():
            return
        before = path.read_bytes()
        after = mask(before.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if after == before:
            return
        try:
            write_bytes(path, after)
        except OSError:
            _overwrite(path, after[: len(before)])
    except OSError:
        return


def _overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def seal_trace(path: Path, mask: Mask) -> None:
    """Masks the secrets in a compressed trace, and drops whatever is not JSON.

    All strings of the JSON document are masked, one by one: names of operators and ranges, paths, arguments. Outside its
    strings, JSON has only numbers, constants and punctuation. A file with anything else there is not a trace and is emptied.
    If the disk has no room for the copy, the trace is removed.
    """
    if path.is_symlink() or not path.is_file():
        return
    masked = functools.lru_cache(maxsize=NUM_KNOWN)(functools.partial(_masked, mask))
    text, is_whole = _text_of(path)
    outside, quote, cut_off = _STRING.sub("", text).partition('"')  # `quote + cut_off`: a last string without an end
    kept = text[: len(text) - len(quote + cut_off)] if _OUTSIDE.fullmatch(outside) else ""
    if is_whole and kept == text and all(masked(string[0]) == string[0] for string in _STRING.finditer(text)):
        return
    content = _STRING.sub(lambda string: masked(string[0]), kept).encode("utf-8", "surrogateescape")
    try:
        write_bytes(path, gzip.compress(content, LEVEL))
    except OSError:
        path.unlink(missing_ok=True)


def _text_of(path: Path) -> tuple[str, bool]:
    """Returns the part of a compressed trace's text that can be read, and whether this part is the whole text."""
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
