"""Removes secrets from the files that a trial's processes wrote, once the processes have exited."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from autotune.documents import write_bytes
from autotune.harness import protocol
from autotune.masking import Secrets
from autotune.monitors.trace_sealing import seal_trace

SCRATCH = "scratch"  # where a trial's W&B and MLflow write, to keep the user's records clean
LOOK_S = 0.2


def seal(folder: Path, secrets: Secrets) -> None:
    """Removes secrets from the files that a trial's processes wrote. The processes must have exited.

    What the program writes may contain secrets: it may print its environment, or an exception may quote a secret. Each file is
    replaced atomically. What is not read again (half-written results, the scratch folder) is removed. A second call changes
    nothing.
    """
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
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


def seal_leftovers(study: Path, secrets: Secrets, *, wait_s: float = 0.0) -> None:
    """Seals the trials that a killed tuner left without a record, unless one of them still runs after `wait_s` seconds."""
    until_s = time.monotonic() + wait_s
    while _is_training(study):
        if time.monotonic() >= until_s:
            return
        time.sleep(LOOK_S)
    for folder in sorted(study.glob("trials/[0-9]*")):
        if not (folder / "trial.json").exists():
            seal(folder, secrets)


def _is_training(study: Path) -> bool:
    """Whether any process carries the mark of one of the study's trials."""
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
    except (ValueError, RecursionError):  # the program has overwritten its result
        return secrets.text(text)
    masked = secrets.document(document)
    return text if masked == document else json.dumps(masked)


def _rewrite(path: Path, mask: Callable[[str], str]) -> None:
    """Replaces a file with its masked text; in place if the disk has no room for a copy."""
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
