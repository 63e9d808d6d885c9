"""Finds a study's runs in MLflow by their tags: the run of each trial, and the runs to delete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.trackers.entries import DIGEST_TAG, LAYOUT, LAYOUT_TAG, PARENT_TAG, TRIAL_TAG

PARENT = ""  # mark of the study's own run, the parent of the trials' runs


@dataclass
class _Known:
    run_id: str
    digest: str = ""
    is_over: bool = False
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    parent_id: str = ""


class KnownRuns:
    """A study's runs by mark: PARENT for the study, "7:nonce" for a trial.

    Args:
        runs: runs that MLflow found by the study's tag, in any order.
        marks: trial number -> mark of the last attempt.

    Attributes:
        superfluous: ids of runs to delete: runs of earlier attempts at a trial, runs in another layout (new runs replace them),
            and second runs with the same mark, which exist if a request was carried out, but its answer was lost.
        orphans: ids of trial runs whose parent is not the run that is kept for the study.
    """

    def __init__(self, runs: Sequence[Any], marks: Mapping[int, str]) -> None:
        self._runs: dict[str, _Known] = {}
        self.superfluous: list[str] = []
        children = Counter(run.data.tags.get(PARENT_TAG, "") for run in runs)
        # Of several runs with the same mark, one is kept: a finished run if there is one, else a running one; among equals, the
        # run with the most children; among equals, the run with the smallest id.
        for run in sorted(runs, key=lambda run: (not _is_over(run), -children[run.info.run_id], run.info.run_id)):
            mark = run.data.tags.get(TRIAL_TAG, PARENT)
            if mark in self._runs or not _is_current(mark, run, marks):
                self.superfluous.append(run.info.run_id)
            else:
                self.add(mark, run)
        parent = self._runs.get(PARENT)
        trials = [known for mark, known in self._runs.items() if mark != PARENT]
        self.orphans = [known.run_id for known in trials if parent and known.parent_id != parent.run_id]

    def __contains__(self, mark: str) -> bool:
        return mark in self._runs

    def add(self, mark: str, run: Any) -> None:
        """Records a run as MLflow returned it."""
        tags = run.data.tags
        self._runs[mark] = _Known(
            run_id=run.info.run_id,
            digest=tags.get(DIGEST_TAG, ""),
            is_over=_is_over(run),
            params=run.data.params,
            metrics=run.data.metrics,
            tags=tags,
            parent_id=tags.get(PARENT_TAG, ""),
        )

    def update(self, newer: KnownRuns) -> None:
        """Adds the runs of a newer answer from MLflow; replaces runs that are already known."""
        self._runs |= newer._runs

    def forget(self, mark: str) -> None:
        """Removes a run that was deleted in MLflow."""
        del self._runs[mark]

    def done(self, mark: str, digest: str, *, is_over: bool = True) -> None:
        """Records that a run has been written completely, and whether it was ended."""
        self._runs[mark].digest, self._runs[mark].is_over = digest, is_over

    def run_id(self, mark: str) -> str:
        """Returns MLflow's id of a known run."""
        return self._runs[mark].run_id

    def is_done(self, mark: str, digest: str, *, is_over: bool = True) -> bool:
        """Returns whether a run exists with exactly this content, and with the expected `is_over`."""
        known = self._runs.get(mark)
        return known is not None and known.digest == digest and known.is_over == is_over

    def tags(self, mark: str) -> Mapping[str, str]:
        """Returns the tags of a known run, as MLflow last returned them."""
        return self._runs[mark].tags

    def contradicts(self, mark: str, params: Mapping[str, str], metrics: Mapping[str, float]) -> bool:
        """Returns whether an existing run has a different value for any of these params or metrics."""
        known = self._runs.get(mark)
        pairs = ((params, known.params), (metrics, known.metrics)) if known else ()
        return any(new.get(key, value) != value for new, old in pairs for key, value in old.items())


def _is_current(mark: str, run: Any, marks: Mapping[int, str]) -> bool:
    number = mark.partition(":")[0]
    wanted = marks.get(int(number), "") if number.isdigit() else PARENT
    if mark and not wanted:  # the study's folder no longer has this trial: its run is kept
        return True
    return mark == wanted and run.data.tags.get(LAYOUT_TAG) == LAYOUT


def _is_over(run: Any) -> bool:
    return bool(run.info.status != "RUNNING")
