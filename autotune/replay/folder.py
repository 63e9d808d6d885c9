"""Provides a study's folder without a disk: a replay keeps nothing, and writing would take most of its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.run_dir import StudyFolder

NOWHERE = Path("/nonexistent/autotune-replay")


class NoFolder(StudyFolder):
    """A folder that discards all documents, but counts trials."""

    is_kept = False

    def __init__(self) -> None:
        super().__init__(NOWHERE)
        self.journal_file = None  # Optuna's study is kept in memory

    @contextlib.contextmanager
    def claimed(self) -> Iterator[str]:
        """Yields "" without locking anything, because no other process can work on the study."""
        yield ""

    def _put(self, write: Callable[[], None]) -> None:
        """Writes nothing."""
