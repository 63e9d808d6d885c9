"""Identifies configurations, and finds their trials among a study's records."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.records import Kind, Knobs, KnobValue, TrialRecord

ConfigurationKey = frozenset[tuple[str, KnobValue]]
SEARCHED = (Kind.baseline, Kind.search)


def configuration_key(changed: Knobs) -> ConfigurationKey:
    """Returns a configuration's identity: its changes to the baseline."""
    return frozenset(changed.items())


def attribution_of(winner: TrialRecord) -> str:
    """Returns the `origin` of the ablation trials of a winner."""
    return f"{Kind.attribution} {winner.number}"


def first_of(records: Iterable[TrialRecord], changed: Knobs) -> TrialRecord | None:
    """Returns the first trial with these changes that has a score; None if there is none. Checks are left out."""
    key = configuration_key(changed)
    return next((r for r in records if r.score and r.kind is not Kind.check and configuration_key(r.changed) == key), None)
