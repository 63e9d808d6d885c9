"""Checks a program after its study: its files, and the rates of real runs with and without the winner."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.third_party_clock import Clock, Watch, marks, rate_per_s

# Seconds from the first line of progress to the measurement; length of the measurement; longest wait for the first line.
SETTLE_S, MEASURE_S, START_S = 3.0, 10.0, 90.0
LOOK_EVERY_S = 0.2
Listing = dict[Path, tuple[int, int]]


def listing(top: Path) -> Listing:
    """Returns size and modification time of every file, except compiled Python and the folders that autotune keeps."""
    found: Listing = {}
    for place, folders, names in os.walk(top):
        here = Path(place)
        folders[:] = [name for name in folders if name != "__pycache__" and not _is_autotunes(here / name)]
        for name in names:
            about = (here / name).lstat()
            found[here / name] = about.st_size, about.st_mtime_ns
    return found


def _is_autotunes(folder: Path) -> bool:
    return (folder / "study.json").exists() or folder.name in (".git", "mlartifacts")


def file_problems(before: Listing, after: Listing, *, folder: Path, named: Sequence[str]) -> list[str]:
    """Returns the files of a program that a study changed or removed, and those that it left without naming them.

    Args:
        before: the files before.
        after: the files after.
        folder: the program's working directory.
        named: files and folders that autotune says its trials left, relative to `folder`.
    """
    changed = [f"changed: {path}" for path, about in before.items() if not _is_ours(path) and after.get(path) != about]
    known = [(folder / name).resolve() for name in named]
    new = [path for path in after if path not in before and not _is_ours(path)]
    return changed + [f"not listed: {path}" for path in new if not any(path.is_relative_to(place) for place in known)]


def _is_ours(path: Path) -> bool:
    return path.name in (".mlflow.lock", ".autotune-data") or path.name.removeprefix(".").startswith("mlflow.db")


def own_rate_per_s(clock: Clock, command: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> float | None:
    """Runs a program for a while; returns the samples per second that its own output shows, None if it shows none in time.

    Args:
        clock: what the program prints.
        command: what is run.
        folder: working directory.
        environment: variables.
    """
    with tempfile.TemporaryDirectory(prefix="third-party-") as place, Watch(Path(place), "*.log") as watch:
        with (Path(place) / "all.log").open("wb") as log:
            options = {"cwd": folder, "env": dict(environment), "stdout": log, "stderr": log}
            process = subprocess.Popen(command, start_new_session=True, **options)
            try:
                begin_s = _first_s(clock, watch, Path(place), process)
                end_s = (begin_s or 0.0) + SETTLE_S + MEASURE_S
                while begin_s and process.poll() is None and time.monotonic() < end_s:
                    time.sleep(LOOK_EVERY_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return rate_per_s(clock, watch.lines[Path(place)], begin_s + SETTLE_S, end_s) if begin_s else None


def _first_s(clock: Clock, watch: Watch, place: Path, process: subprocess.Popen[bytes]) -> float | None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        for mark in marks(clock, list(watch.lines.get(place, []))).values():
            return mark.times_s[0]
        time.sleep(LOOK_EVERY_S)
    return None


def with_batch(clock: Clock, settings: Mapping[str, Any], *, baseline_batch: int | None) -> Clock:
    """Returns the clock for a run with other settings. If the clock counts steps, a new batch size changes their samples."""
    size = settings.get("loader.batch_size")
    is_larger = clock.is_steps and size and baseline_batch
    return dataclasses.replace(clock, samples=clock.samples * size / baseline_batch) if is_larger else clock
