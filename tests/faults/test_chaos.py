"""The short version of `python -m tests.benchmarks.chaos`: whatever is killed, nothing is lost, repeated or left behind."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from autotune.records import Kind, Outcome, TrialRecord
from tests.benchmarks import chaos
from tests.benchmarks.chaos_engines import OnRay, OnSlurm


@pytest.mark.thorough  # the other tests of this folder kill each part at a chosen moment
@pytest.mark.parametrize("is_stub", [True, False], ids=["stub", "torch"])
def test_study_survives_kills_of_its_processes(tmp_path, is_stub):
    toll = sum(chaos.run(tmp_path, 3, seed=3, minutes=0.3, study_minutes=0.3, is_stub=is_stub), chaos.Toll())
    assert toll.is_clean, "\n".join(toll.lines())
    assert toll.kills.total() >= 1


@pytest.mark.thorough  # tests/slurm and tests/ray kill each part at a chosen moment
@pytest.mark.parametrize("kind", [OnSlurm, OnRay])
def test_study_on_a_cluster_survives_kills_of_its_processes(tmp_path, kind):
    if why := kind.why_not():
        pytest.skip(why)
    engine = kind()
    try:
        toll = sum(chaos.run(tmp_path, 5, seed=3, minutes=0.7, study_minutes=0.7, engine=engine, is_stub=True), chaos.Toll())
    finally:
        engine.stop()
    assert toll.is_clean, "\n".join(toll.lines())
    assert toll.kills.total() >= 1


def test_a_toll_is_clean_only_with_verdicts_and_without_harm():
    assert not chaos.Toll().is_clean, "no verdict"
    assert chaos.Toll(verdicts=["faster"]).is_clean
    for harm in (
        {"lost": ["x"]},
        {"repeated": ["x"]},
        {"orphans": ["x"]},
        {"segments": ["x"]},
        {"files": ["x"]},
        {"untracked": ["x"]},
        {"wrong": ["x"]},
        {"verdicts": ["faster", ""]},
    ):
        assert not chaos.Toll(**{"verdicts": ["faster"], **harm}).is_clean


def test_tolls_of_several_calls_are_summed(tmp_path):
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


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Returns a `Victimized` study that starts no process; `answers` are the exit statuses of its commands."""
    made = chaos.Victimized(tmp_path, 0, random.Random(0), toll=chaos.Toll(), deadline_s=0.0)
    made.answers = {"show": 0, "verify": 0, "sync": 0}

    def answered(*words):
        summary = {"status": "complete", "speedup": {"verdict": "faster"}, "trials": []}
        return SimpleNamespace(returncode=made.answers[words[0]], stdout=json.dumps(summary), stderr="why")

    monkeypatch.setattr(made, "_autotune", answered)
    monkeypatch.setattr(made, "_processes", list)
    return made


@pytest.mark.parametrize(("status", "is_counted", "is_wrong"), [(0, 1, 0), (4, 1, 1), (1, 1, 1), (-9, 1, 1), (5, 0, 0)])
def test_a_result_that_verify_refutes_or_cannot_check_counts_as_wrong(study, status, is_counted, is_wrong):
    study.answers["verify"] = status
    study._close()
    assert (study._toll.num_verified, len(study._toll.wrong)) == (is_counted, is_wrong)
    assert study._toll.is_clean is not bool(is_wrong)


@pytest.mark.parametrize(("first", "is_repeated"), [(Outcome.ok, True), (Outcome.crash, True), (Outcome.disturbed, False)])
def test_only_disturbed_trials_may_be_repeated(study, first, is_repeated):
    outcomes = (Outcome.ok, first, Outcome.ok)
    changes = ({}, {"loader.num_workers": 1}, {"loader.num_workers": 1})
    kinds = (Kind.baseline, Kind.search, Kind.search)
    study._finished = {
        number: TrialRecord(number=number, kind=kind, knobs={}, changed=changed, outcome=outcome, value=1.0)
        for number, (kind, changed, outcome) in enumerate(zip(kinds, changes, outcomes, strict=True))
    }
    study._close()
    assert bool(study._toll.repeated) is is_repeated
    assert study._toll.num_trials == 3


AMP = {"precision.amp": "bf16"}


@pytest.mark.parametrize(
    ("verdict", "ratio", "changed", "is_wrong"),
    [
        ("faster", 1.5, AMP, False),
        ("faster", 1.5, {"loader.num_workers": 1}, True),
        ("faster", 1.3, AMP, True),
        ("ambiguous", 1.1, {"loader.num_workers": 1}, False),
        ("same", 1.0, {}, True),
    ],
)
def test_a_verdict_on_the_stub_is_compared_with_the_known_speed_of_the_stub(verdict, ratio, changed, is_wrong):
    speedup = {"verdict": verdict, "ratio": ratio, "overrides": changed}
    trials = [{"changed": AMP, "value": 450.0, "outcome": "ok"}]
    assert bool(chaos.why_wrong({"speedup": speedup, "trials": trials})) is is_wrong


@pytest.mark.parametrize(("outcome", "is_wrong"), [("crash", False), ("interrupted", True)])
def test_verdict_same_is_right_if_the_bf16_trial_was_killed(outcome, is_wrong):
    trials = [{"changed": AMP, "value": 450.0, "outcome": "ok"}, {"changed": AMP, "value": None, "outcome": outcome}]
    assert bool(chaos.why_wrong({"speedup": {"verdict": "same", "ratio": 1.0}, "trials": trials})) is is_wrong


def test_leftover_temporary_files_count_except_those_of_libraries(study, tmp_path):
    (tmp_path / "tmp" / "torchelastic_x").mkdir()
    study._close()
    assert study._toll.files == []
    (tmp_path / "tmp" / "autotune-slots-x").mkdir()
    (tmp_path / ".named.pt.7.tmp").touch()
    study._close()
    assert len(study._toll.files) == 2


def test_leftover_job_notes_count_except_those_of_lost_jobs(study, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".autotune-host-7-autotune-1a.job").write_text("lost\n")
    study._close()
    assert study._toll.files == []
    (tmp_path / "runs" / ".autotune-host-7-autotune-2b.job").touch()
    study._close()
    assert len(study._toll.files) == 1
