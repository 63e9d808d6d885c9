"""Defines the interface of trackers. A tracker copies a study folder to a mirror, without losing or duplicating entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from autotune.run_dir import StudyFolder


@dataclass(kw_only=True)
class Synced:
    """State of a mirror.

    Attributes:
        written: number of trials written by this call.
        present: number of trials that the mirror already had.
        pending: numbers of finished trials that the mirror does not have yet.
        problem: why the mirror is incomplete, in one line; "" if it is complete.
        uri: address of the mirror, with credentials masked.
    """

    written: int = 0
    present: int = 0
    pending: list[int] = field(default_factory=list)
    problem: str = ""
    uri: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether everything in the folder is mirrored."""
        return not self.pending and not self.problem


class Tracker(ABC):
    """Mirrors one study.

    It is used only by the process of `autotune sync`, for which the tuner never waits. `push` is idempotent: it may be called
    any number of times, even after a call that was killed half-way, and writes only what is missing.
    """

    @abstractmethod
    def push(self, folder: StudyFolder, *, is_last: bool = False) -> Synced:
        """Writes what the mirror lacks.

        If the destination is down, nothing is raised; the returned state has `pending` trials and a `problem`.

        Args:
            folder: the study.
            is_last: whether this is the last call. The caller waits for it, so nothing is tried if the previous call has just
                found the destination down.

        Raises:
            BadInput: the destination's address is invalid, or the folder is not a study.
        """


class NullTracker(Tracker):
    """Mirrors nothing, for studies without tracking (`tracker.uri=none`)."""

    def push(self, folder: StudyFolder, *, is_last: bool = False) -> Synced:
        """Does nothing; returns a state with nothing pending."""
        return Synced(uri="none")
