"""What a summary says of the effects of changes after a few trials, and of the time that the missing ones need."""

import pytest

from autotune.compare.ablation import Change
from autotune.records import Kind, Outcome, StudyRecord, Tier, TrialRecord
from autotune.study.effects import needed, with_estimates

ALL = {"precision.amp": "bf16", "layout.channels_last": True, "optimizer.implementation": "fused"}
ABOUT = StudyRecord(name="s", title="s", command=[], cwd="/", budget_s=180.0)


def trial(number, changed, value, kind=Kind.search, repeats=None):
    return TrialRecord(
        number=number, kind=kind, knobs=changed, changed=changed, outcome=Outcome.ok, value=value, seconds=18.0,
        tier=Tier.numerics, repeats=repeats, phases_s={"steady": 8.0}, round=None if repeats is None else number,
    )  # fmt: skip


def entries(changed):
    return [
        Change(knob=knob, before="off", after=value, also=(), ratio=None, worth="not measured", is_kept=True, reason="no time")
        .as_json()
        for knob, value in changed.items()
    ]  # fmt: skip


RECORDS = [trial(0, {}, 13.5, Kind.baseline), trial(1, ALL, 31.5), trial(2, {**ALL, "loader.batch_size": 64}, 30.1)]
FINALS = [trial(3, {}, 13.6, Kind.final, 0), trial(4, ALL, 28.5, Kind.final, 1)]


def test_changes_that_were_only_tried_together_say_what_budget_they_need():
    records = [*RECORDS, *FINALS]
    told = with_estimates(entries(ALL), records[1], ABOUT, records)
    assert told == entries(ALL)
    need = needed(told, ABOUT, records)
    assert need["more_minutes"] == need["minutes"] - 3
    assert 5 <= need["minutes"] <= 9, "an eight-minute study measures three effects of this program"
    fewer = needed(told[:1], ABOUT, records)
    assert fewer["minutes"] < need["minutes"]


def test_what_a_trial_without_a_change_tells_is_said_as_an_estimate():
    without = {key: value for key, value in ALL.items() if key != "optimizer.implementation"}
    records = [*RECORDS, trial(3, without, 31.0)]
    told = {entry["knob"]: entry for entry in with_estimates(entries(ALL), records[1], ABOUT, records)}
    fused = told.pop("optimizer.implementation")
    assert (fused["basis"], fused["verdict"], fused["reason"]) == ("estimated", "ambiguous", "")
    assert fused["ci"][0] < fused["ratio"] < fused["ci"][1]
    assert fused["ratio"] == pytest.approx(31.5 / 31.0, rel=0.02)
    assert {entry["verdict"] for entry in told.values()} == {"not measured"}


def test_what_was_measured_is_left_as_it_is_and_needs_nothing():
    measured = [{**entry, "verdict": "faster", "ratio": 1.3, "ci": (1.2, 1.4)} for entry in entries(ALL)]
    assert with_estimates(measured, RECORDS[1], ABOUT, RECORDS) == measured
    assert needed(measured, ABOUT, RECORDS) is None
    assert needed(entries(ALL), StudyRecord(name="s", title="s", command=[], cwd="/"), RECORDS) is None
