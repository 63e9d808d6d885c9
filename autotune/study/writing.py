"""Writes what a study has found so far: summary.json, best.yaml and, at the end, the report."""

from __future__ import annotations

import json
from collections.abc import Callable

from autotune.clock import Clock
from autotune.explain.explanation import Document, with_best
from autotune.export.formats import render
from autotune.records import StudyRecord, Summary, TrialRecord
from autotune.report.writing import write_report
from autotune.run_dir import StudyFolder
from autotune.studies import call
from autotune.study.summary import Standing, files_of, summarise, trial_entry
from autotune.trials.events import Listener

# While trials run, the summary is written at most once in SUMMARY_EVERY_S. Writing takes at most SUMMARY_FRAC of the tuner's
# time, even if the summary is large. If the tuner is killed with an old summary on disk, a new one is made from the records.
SUMMARY_EVERY_S, SUMMARY_FRAC = 5.0, 0.02
# With many trials, the summary is not written again until their number has grown by this share, or this time has passed.
# Otherwise a study of 10,000 trials on one slot would write 10,000 summaries of up to 10,000 trials.
SUMMARY_GROWTH_FRAC, SUMMARY_LATEST_S = 0.02, 600.0


class Writer:
    """Writes a study's summary, best configuration and report.

    Args:
        folder: the study's folder.
        listener: receives notices.
        clock: the study's clock.
        is_best_written: whether best.yaml is written while the study runs; false for a recording, which has no winner.
    """

    def __init__(self, folder: StudyFolder, listener: Listener, clock: Clock, *, is_best_written: bool) -> None:
        self._folder, self._listener, self._clock = folder, listener, clock
        self._is_best_written = is_best_written and folder.is_kept
        self._is_old, self._next_s, self._num_written = False, 0.0, 0

    def write(self, about: StudyRecord, records: list[TrialRecord], standing: Standing) -> Summary:
        """Writes the summary and what is made from it, and returns it.

        Args:
            about: the study.
            records: its trials.
            standing: how far the study is. Unless its status is "running", the report is written as well.
        """
        made = summarise(about, records, standing)
        # The JSON round trip makes the returned document equal to the one on disk (tuples become lists). Until the study ends,
        # the trials skip the round trip, because there may be thousands.
        left_out = {"trials": made["trials"]} if standing.status == "running" else {}
        summary: Summary = json.loads(json.dumps({**made, **dict.fromkeys(left_out)})) | left_out
        # The report is written before the summary. Once the summary is final, the tracker reads the folder for the last time,
        # and `resume` does nothing more.
        if standing.status != "running":
            self.report(summary)
        if summary["best"] and self._is_best_written:
            self._folder.write_best(render(summary, "yaml", None).text)
        self._folder.write_summary(summary)
        self._is_old, self._num_written = False, len(records)
        return summary

    def amend(self, summary: Summary, records: list[TrialRecord], explanation: Document | None) -> None:
        """Adds passes, checks, their files and the explanation to a summary, and changes nothing else in it."""
        summary["trials"] = json.loads(json.dumps([trial_entry(record) for record in records]))
        summary["num_trials"] = len(summary["trials"])
        summary["files"] = files_of(records)
        summary["explanation"] = with_best(explanation, (summary["best"] or {}).get("trial", 0))
        self._folder.write_summary(summary)
        if summary["best"] and not summary.get("recording"):  # no finals have confirmed the best of a recording
            self._folder.write_best(render(summary, "yaml", None).text)

    def report(self, summary: Summary) -> None:
        """Writes the report. A failure to write it does not fail the study, since `autotune report` can write it later."""
        if not self._folder.is_kept:
            return
        try:
            write_report(self._folder, summary)
        except Exception as error:
            self._listener.notice(f"No report was written ({error}). `autotune report {call(self._folder)}` makes it.")

    def note_trial(self) -> None:
        """Notes that a trial has ended, so the summary on disk lacks it."""
        self._is_old = self._folder.is_kept

    def write_when_due(self, num_trials: int, write: Callable[[], object]) -> None:
        """Calls `write`, which must write the summary, if the one on disk is old and it is time for a new one.

        Args:
            num_trials: number of the study's trials.
            write: writes the summary.
        """
        if not self._is_old or (began_s := self._clock.monotonic()) < self._next_s:
            return
        has_grown = num_trials + 1 >= (1 + SUMMARY_GROWTH_FRAC) * self._num_written  # always true below 50 trials
        if has_grown or began_s >= self._next_s + SUMMARY_LATEST_S:
            write()
            now_s = self._clock.monotonic()
            self._next_s = now_s + max(SUMMARY_EVERY_S, (now_s - began_s) / SUMMARY_FRAC)
