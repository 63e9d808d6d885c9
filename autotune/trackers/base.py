"""What a tracker is: something that mirrors a study folder elsewhere, as often as it is asked, without losing or doubling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from autotune.run_dir import StudyFolder


@dataclass(kw_only=True)
class Synced:
    """Where a mirror stands.

    Attributes:
        written: trials written by this call.
        present: trials that were there before.
        pending: numbers of finished trials that are not there yet.
        problem: why not, in one line; "" when nothing is pending.
        uri: where the mirror is, credentials masked.
    """

    written: int = 0
    present: int = 0
    pending: list[int] = field(default_factory=list)
    problem: str = ""
    uri: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether everything the folder holds is mirrored."""
        return not self.pending and not self.problem


class Tracker(ABC):
    """Mirrors one study.

    Called by `autotune sync` only, in a process of its own that measures nothing; never by the tuner. `push` may be called
    any number of times, by processes that were killed half-way before: it writes what is missing and nothing twice.
    """

    @abstractmethod
    def push(self, folder: StudyFolder, *, is_last: bool = False) -> Synced:
        """Writes what the folder has and the mirror lacks.

        A destination that is down is no exception: it is `pending` and a `problem` in what is returned.

        Args:
            folder: the study.
            is_last: whether this call is waited for: a destination known to be down is not waited for again.

        Raises:
            BadInput: the destination's address cannot be meant, or the folder is not a study.
        """


class NullTracker(Tracker):
    """Mirrors nothing; for studies that want no tracking (`tracker.uri=none`)."""

    def push(self, folder: StudyFolder, *, is_last: bool = False) -> Synced:
        """Returns at once: nothing to do, nothing pending."""
        return Synced(uri="none")
