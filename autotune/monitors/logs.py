"""What a trial has written, once it has ended: the end of its logs, and its files without secrets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.harness import protocol
from autotune.masking import Secrets

TAIL_BYTES = 8 << 10
KEEP_BYTES = 1 << 20  # of a log that a trial has flooded
SCRATCH = "scratch"  # where a trial's own W&B and MLflow write, so that the user's records stay clean


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Returns the end of a text file, cut at a line's start; "" when there is none. Not masked."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            end = file.read(max_bytes)
    except OSError:
        return ""
    if size > max_bytes:
        end = end[end.find(b"\n") + 1 :]  # half a line at the start; one endless line is kept
    return end.decode("utf-8", errors="replace")


def shorten(path: Path, keep_bytes: int = KEEP_BYTES) -> None:
    """Keeps the end of a log that has grown past eight times `keep_bytes`, so that a chatty program does not fill the disk."""
    try:
        if path.stat().st_size <= 8 * keep_bytes:
            return
        end = tail(path, keep_bytes)
        path.write_text(f"[autotune: only the last {keep_bytes} bytes are kept]\n{end}", encoding="utf-8")
    except OSError:
        return


def seal(folder: Path, secrets: Secrets) -> None:
    """Takes the secrets out of what a trial's own processes wrote. They must have ended.

    Logs and results are the program's: it may print its environment or raise an exception that quotes it. Each file is
    replaced whole; what nobody reads again (half-written results, the scratch folder) is removed. Doing it twice changes
    nothing.

    Args:
        folder: the trial's, `runs/<study>/trials/0007`.
        secrets: what is known to be secret.
    """
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    for name in (protocol.STDOUT_FILE, protocol.STDERR_FILE):
        shorten(folder / name)
        _rewrite(folder / name, secrets.text)
    for file in folder.glob("result.rank*"):
        if file.suffix == ".tmp":
            file.unlink(missing_ok=True)
        else:
            _rewrite(file, lambda text: _masked_json(text, secrets))


def seal_leftovers(trials: Path, secrets: Secrets) -> None:
    """Seals the trials that a killed tuner left without a record; called when none of their processes is alive.

    Args:
        trials: `runs/<study>/trials`.
        secrets: what is known to be secret.
    """
    for folder in _folders(trials):
        if not (folder / "trial.json").exists():
            seal(folder, secrets)


def _folders(trials: Path) -> Iterator[Path]:
    yield from sorted(folder for folder in trials.glob("[0-9]*") if folder.is_dir())


def _masked_json(text: str, secrets: Secrets) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # a program has overwritten its result
        return secrets.text(text)
    masked = secrets.document(document)
    return text if masked == document else json.dumps(masked)


def _rewrite(path: Path, mask: Callable[[str], str]) -> None:
    """Replaces a file by its masked text; where the disk has no room for a copy, in place."""
    try:
        if path.is_symlink() or not path.is_file():
            return
        before = path.read_bytes()
        after = mask(before.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if after == before:
            return
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(after)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            _overwrite(path, after[: len(before)])
    except OSError:
        return


def _overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
