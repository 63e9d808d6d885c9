"""A summary after a few trials estimates effects of changes, and states the time needed to measure the missing effects."""

from dataclasses import replace

import pytest

from autotune.compare.ablation import Change
from autotune.config.recorded import recorded
from autotune.records import Kind, StudyRecord, Tier
from autotune.study import resume_study
from autotune.study.effects import needed, with_estimates
from tests.study.conftest import RATES
from tests.support.fake_launcher import Surface
from tests.support.records import a_trial

ALL = {"precision.amp": "bf16", "layout.channels_last": True, "optimizer.implementation": "fused"}
ABOUT = StudyRecord(name="s", title="s", command=[], cwd="/", budget_s=180.0)


def trial(number, changed, value, kind=Kind.search, repeats=None):
    more = {"repeats": repeats, "round": None if repeats is None else number, "phases_s": {"steady": 8.0}, "seconds": 18.0}
    return a_trial(number, kind=kind, knobs=changed, changed=changed, value=value, tier=Tier.numerics, **more)


def entries(changed):
    return [
        Change(knob=knob, before="off", after=value, also=(), ratio=None, worth="not measured", is_kept=True, reason="no time")
        .as_json()
        for knob, value in changed.items()
    ]  # fmt: skip


RECORDS = [trial(0, {}, 13.5, Kind.baseline), trial(1, ALL, 31.5), trial(2, {**ALL, "loader.batch_size": 64}, 30.1)]
FINALS = [trial(3, {}, 13.6, Kind.final, 0), trial(4, ALL, 28.5, Kind.final, 1)]


def test_time_needed_to_measure_changes_tried_only_together_is_reported():
    records = [*RECORDS, *FINALS]
    told = with_estimates(entries(ALL), records[1], ABOUT, records)
    assert told == entries(ALL)
    need = needed(told, ABOUT, records)
    assert need["more_minutes"] == need["minutes"] - 3
    assert 5 <= need["minutes"] <= 9, "an eight-minute study measures three effects of this program"
    fewer = needed(told[:1], ABOUT, records)
    assert fewer["minutes"] < need["minutes"]


def test_trial_that_lacks_one_change_gives_an_estimate_of_its_effect():
    without = {key: value for key, value in ALL.items() if key != "optimizer.implementation"}
    records = [*RECORDS, trial(3, without, 31.0)]
    told = {entry["knob"]: entry for entry in with_estimates(entries(ALL), records[1], ABOUT, records)}
    fused = told.pop("optimizer.implementation")
    assert (fused["basis"], fused["verdict"], fused["reason"]) == ("estimated", "ambiguous", "")
    assert fused["ci"][0] < fused["ratio"] < fused["ci"][1]
    assert fused["ratio"] == pytest.approx(31.5 / 31.0, rel=0.02)
    assert {entry["verdict"] for entry in told.values()} == {"not measured"}


def test_measured_effects_stay_unchanged_and_need_no_more_time():
    measured = [{**entry, "verdict": "faster", "ratio": 1.3, "ci": (1.2, 1.4)} for entry in entries(ALL)]
    assert with_estimates(measured, RECORDS[1], ABOUT, RECORDS) == measured
    assert needed(measured, ABOUT, RECORDS) is None
    assert needed(entries(ALL), StudyRecord(name="s", title="s", command=[], cwd="/"), RECORDS) is None


def test_reported_budget_is_enough_to_measure_every_effect(bench, tmp_path):
    """A simulated three-minute study of a program whose trials take as long as resnet18's on two cores."""
    space = tmp_path / "space.yaml"
    space.write_text("precision.amp: ['off', 'bf16']\nlayout.channels_last: [false, true]\nloader.batch_size: [16, 32, 64]\n")
    gains = {("precision.amp", "bf16"): 1.7, ("layout.channels_last", True): 1.2}
    losses = [2.0 - 0.01 * step for step in range(40)]
    surface = Surface(
        gains=gains, base_per_s=14.0, half_batch=1.0, start_s=13.0, window_s=5.0, noise_frac=0.03, losses=lambda *_: losses
    )
    study = bench(surface, RATES, f"search_space={space}", minutes=3)
    before = study.run()
    assert {entry["verdict"] for entry in before["attribution"]} == {"not measured"}
    minutes = before["effects_need"]["minutes"]
    assert minutes <= 10
    composed = recorded(study.folder.read_study(), study.folder.config_file, [f"study.budget.minutes={minutes}"])
    after = resume_study(replace(study.inputs, config=composed.config), study.folder, study.listener)
    assert after["effects_need"] is None
    assert {"precision.amp", "layout.channels_last"} <= {entry["knob"] for entry in after["attribution"] if entry["ratio"]}
