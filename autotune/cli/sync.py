"""`autotune sync`: brings tracking up to date with a study's folder; the process the study starts beside itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from autotune.errors import BadInput
from autotune.run_dir import StudyFolder, studies
from autotune.trackers import store
from autotune.trackers.base import Synced

NICENESS = 19  # beside a trial that is being measured


def sync(folder: StudyFolder, *, uri: str | None, follow: bool) -> int:
    """Mirrors a study into MLflow and says where the mirror stands; with `follow` until the study is over."""
    from autotune.trackers import mlflow

    if follow:
        os.nice(NICENESS)
    state = mlflow.sync(folder, uri, follow=follow, report=_Reports())
    if state.is_complete:
        print(f"{folder.name}: {state.written} trials written, {state.present} were there, in {state.uri}")
        return 0
    raise BadInput(_pending(folder, state))


def sync_all(runs: Path, *, uri: str | None) -> int:
    """Mirrors every study of a runs folder that goes to the same store as without `uri`, or as was asked.

    Args:
        runs: the runs folder.
        uri: address for all of them; studies that were configured with another one are left to it.
    """
    from autotune.trackers import mlflow

    problems = []
    for folder in studies(runs):
        if uri is not None and store.study_uri(folder) not in (None, uri):
            continue
        try:
            state = mlflow.sync(folder, uri)
        except BadInput as error:  # of another version: the others can be mirrored all the same
            problems += error.problems
            continue
        print(f"{folder.name}: {state.written} trials written, {state.present} were there, in {state.uri}")
        problems += [] if state.is_complete else [_pending(folder, state)]
    if problems:
        raise BadInput(problems)
    return 0


class _Reports:
    """Says once that a store does not take what it is given, and once that it does again."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, state: Synced) -> None:
        if state.problem != self._last:
            self._last = state.problem
            print(f"tracking: {state.problem or 'up to date again'} ({state.uri})", file=sys.stderr)


def _pending(folder: StudyFolder, state: Synced) -> str:
    waiting = f"{len(state.pending)} trials of {folder.name} are not tracked yet, nothing is lost"
    where = "" if str(folder.path.parent) == "runs" else f" --runs-dir {folder.path.parent}"
    return f"tracker.uri: {state.problem}, got {state.uri!r}; {waiting}. `autotune sync {folder.name}{where}` completes it."
