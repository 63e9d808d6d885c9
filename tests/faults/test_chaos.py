"""The short version of `python -m tests.benchmarks.chaos`: whatever is killed, nothing is lost, repeated or left behind."""

import json
from collections import Counter

import pytest

from tests.benchmarks import chaos


@pytest.mark.thorough  # the other tests of this folder kill each part at a chosen moment
def test_study_survives_the_death_of_its_parts(tmp_path):
    toll = sum(chaos.run(tmp_path, 3, seed=3, minutes=0.3, study_minutes=0.3), chaos.Toll())
    assert toll.is_clean, "\n".join(toll.lines())
    assert toll.kills.total() >= 1


def test_a_toll_that_is_not_clean_is_called_so():
    assert not chaos.Toll().is_clean, "no verdict"
    assert chaos.Toll(verdicts=["faster"]).is_clean
    for harm in (
        {"lost": ["x"]},
        {"repeated": ["x"]},
        {"orphans": ["x"]},
        {"segments": ["x"]},
        {"wrong": ["x"]},
        {"verdicts": ["faster", ""]},
    ):
        assert not chaos.Toll(**{"verdicts": ["faster"], **harm}).is_clean


def test_the_results_of_several_calls_are_summed(tmp_path):
    parts = [
        chaos.Toll(kills=Counter(tuner=2), verdicts=["faster"], num_trials=8),
        chaos.Toll(kills=Counter(tuner=1, trial=4), verdicts=[""], num_trials=3, orphans=["01: process 7"]),
    ]
    file = tmp_path / "chaos.jsonl"
    assert chaos.read(file) == []
    file.write_text("".join(f"{json.dumps(vars(part))}\n" for part in parts), encoding="utf-8")
    total = sum(chaos.read(file), chaos.Toll())
    assert total == chaos.Toll(
        kills=Counter(tuner=3, trial=4), verdicts=["faster", ""], num_trials=11, orphans=["01: process 7"]
    )
    assert not total.is_clean
