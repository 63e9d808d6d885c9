"""Which of a study's trials MLflow has: what was found there, joined by tags, and what should not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.trackers.entries import DIGEST_TAG, PARENT_TAG, TRIAL_TAG

PARENT = ""  # the mark of the study's own run


@dataclass
class _Known:
    run_id: str
    digest: str = ""
    is_over: bool = False
    params: Mapping[str, str] = field(default_factory=dict)
    parent_id: str = ""


class KnownRuns:
    """A study's runs by mark: PARENT for the study, "7:nonce" for a trial.

    Args:
        runs: what MLflow found under the study's tag, in any order.
        marks: trial number -> the mark of the attempt that counts.

    Attributes:
        superfluous: ids of runs to delete: the same mark twice (a request that was carried out though its answer was lost),
            or an attempt that was made again under the same number.
        orphans: ids of trials' runs that hang below a parent which is to be deleted.
    """

    def __init__(self, runs: Sequence[Any], marks: Mapping[int, str]) -> None:
        self._runs: dict[str, _Known] = {}
        self.superfluous: list[str] = []
        current = dict(marks)
        children: dict[str, int] = {}
        for run in runs:
            parent_id = run.data.tags.get(PARENT_TAG, "")
            children[parent_id] = children.get(parent_id, 0) + 1
        # The most whole of several stays; then the one that trials hang below; then any, always the same.
        for run in sorted(runs, key=lambda run: (not _is_over(run), -children.get(run.info.run_id, 0), run.info.run_id)):
            mark = run.data.tags.get(TRIAL_TAG, PARENT)
            number = mark.partition(":")[0]
            is_current = mark == PARENT or not number.isdigit() or current.get(int(number), mark) == mark
            if mark in self._runs or not is_current:
                self.superfluous.append(run.info.run_id)
            else:
                self.add(mark, run)
        parent = self._runs.get(PARENT)
        strays = [known.run_id for mark, known in self._runs.items() if parent and known.parent_id != parent.run_id and mark]
        self.orphans = strays

    def __contains__(self, mark: str) -> bool:
        return mark in self._runs

    def add(self, mark: str, run: Any) -> None:
        """Notes a run as MLflow returned it."""
        tags = run.data.tags
        self._runs[mark] = _Known(
            run_id=run.info.run_id,
            digest=tags.get(DIGEST_TAG, ""),
            is_over=_is_over(run),
            params=run.data.params,
            parent_id=tags.get(PARENT_TAG, ""),
        )

    def forget(self, mark: str) -> None:
        """Takes back a run that was deleted."""
        del self._runs[mark]

    def done(self, mark: str, digest: str, *, is_over: bool = True) -> None:
        """Notes that a run has been written whole, and whether it was ended."""
        self._runs[mark].digest, self._runs[mark].is_over = digest, is_over

    def run_id(self, mark: str) -> str:
        """Returns MLflow's id of a run that is there."""
        return self._runs[mark].run_id

    def is_done(self, mark: str, digest: str, *, is_over: bool = True) -> bool:
        """Returns whether a run is there with this very content, ended or not as it should be."""
        known = self._runs.get(mark)
        return known is not None and known.digest == digest and known.is_over == is_over

    def contradicts(self, mark: str, params: Mapping[str, str]) -> bool:
        """Returns whether a run that is there holds another value of any of these params."""
        known = self._runs.get(mark)
        return known is not None and any(params.get(key, value) != value for key, value in known.params.items())


def _is_over(run: Any) -> bool:
    return bool(run.info.status != "RUNNING")
