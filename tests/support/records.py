"""Makes records of trials by hand."""

from __future__ import annotations

from typing import Any

from autotune.records import Kind, Outcome, TrialRecord


def a_trial(number: int = 0, **more: Any) -> TrialRecord:
    """Returns a trial that ended well: the baseline for number 0, else a search trial. `more` are its other fields."""
    given = {"kind": Kind.search if number else Kind.baseline, "knobs": {}, "changed": {}, "outcome": Outcome.ok}
    return TrialRecord(number=number, **{**given, **more})
