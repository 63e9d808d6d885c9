import pytest

from autotune.records import Kind, Outcome, StudyRecord, TrialRecord
from autotune.testing.studies import make_study
from autotune.trackers import entries


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path)


def trial(**changes) -> TrialRecord:
    return TrialRecord(**{"number": 7, "kind": Kind.search, "knobs": {}, "changed": {}, "outcome": Outcome.ok} | changes)


def test_run_names_say_what_changed():
    changed = {"loader.batch_size": 64, "precision.amp": "bf16"}
    assert entries.trial_name(trial(changed=changed)) == "0007 bf16 batch 64"


def test_finals_are_named_after_what_they_repeat():
    assert entries.trial_name(trial(kind=Kind.final, repeats=3, round=2)) == "0007 final 2 of 0003"


def test_trials_of_the_attribution_say_what_is_missing():
    found = trial(kind=Kind.attribution, round=2, why="trial 5 without precision.amp")
    assert entries.trial_name(found) == "0007 attribution 2: trial 5 without precision.amp"
    assert entries.best_so_far([trial(kind=Kind.attribution, value=9.0)]) == []


def test_study_s_note_says_what_each_change_is_worth(folder):
    note = entries.study_note(folder.read_study(), folder.read_summary())
    assert "- `precision.amp`: off → **bf16**, 1.62x [1.58, 1.66]\n" in note
    assert "- `loader.num_workers`: 0 → **2**, 1.03x [0.99, 1.07] ambiguous, estimated\n" in note
    assert "No effect, so left as it was: `loader.pin_memory` = true." in note


def test_runs_that_compare_losses_are_named_after_what_they_compare():
    several = {"precision.amp": "bf16", "optimizer.implementation": "fused"}
    assert entries.trial_name(trial(kind=Kind.parity, repeats=3, changed=several)) == "0007 losses of bf16 fused optimizer"
    assert entries.trial_name(trial(kind=Kind.parity, repeats=0)) == "0007 losses of the baseline"
    assert entries.trial_name(trial(kind=Kind.parity, repeats=3, changed={"precision.amp": "bf16"})) == "0007 losses of bf16"


def test_only_numbers_become_metrics():
    metrics = entries.trial_metrics(trial(value=2.0, metrics={"power_w": float("nan"), "energy_j": 3.0}))
    assert metrics["energy_j"] == 3.0
    assert "power_w" not in metrics
    assert "peak_memory_bytes" not in metrics


def test_metrics_carry_their_units(folder):
    plain = {"speedup", "speedup_ci_low", "speedup_ci_high", "trials"}
    units = ("_s", "_per_s", "_bytes", "_frac", "_w", "_j", "_mhz")
    for record in folder.read_trials():
        for name in entries.trial_metrics(record):
            assert name.endswith(units) or name in plain or name == "seconds"


def test_long_values_are_cut_to_what_mlflow_takes():
    assert len(entries.params({"env.LONG": "x" * 10_000})["env.LONG"]) == entries.MAX_PARAM_CHARACTERS
    tags = entries.trial_tags(trial(reason="x" * 10_000), StudyRecord(name="s", title="t", command=[], cwd="/"), "n")
    assert max(map(len, tags.values())) <= entries.MAX_TAG_CHARACTERS


def test_credentials_in_addresses_are_masked(folder):
    study = folder.read_study()
    study.command = ["python", "train.py", "--data", "https://me:secret@host/data"]
    assert "secret" not in str(entries.trial_tags(trial(), study, "n"))


def test_best_so_far_never_falls(folder):
    rates = [rate for _, rate in entries.best_so_far(folder.read_trials())]
    assert rates == sorted(rates)
    assert rates[0] == 16.8


def test_a_raced_trial_is_not_the_best_so_far():
    assert entries.best_so_far([trial(outcome=Outcome.raced, value=9.0)]) == []


def test_note_names_baseline_best_and_the_change(folder):
    note = entries.study_note(folder.read_study(), folder.read_summary())
    assert "16.8 samples/s" in note
    assert "`precision.amp`: off → **bf16**" in note
    assert "autotune export resnet18" in note


def test_note_of_a_running_study_has_no_verdict(tmp_path):
    folder = make_study(tmp_path, status="running", num_trials=1)
    assert entries.study_note(folder.read_study(), folder.read_summary()).startswith("### running")


def test_equal_documents_have_equal_digests():
    assert entries.digest({"a": 1, "b": 2}) == entries.digest({"b": 2, "a": 1})


def test_an_objective_is_a_metric_with_its_unit():
    found = entries.trial_metrics(trial(value=9.0, objectives={"energy_per_sample": 0.3, "throughput": 9.0}))
    assert (found["energy_per_sample_j"], found["throughput_per_s"]) == (0.3, 9.0)
    assert "throughput" not in found


def test_curve_follows_the_score():
    records = [trial(value=9.0, scores={"energy_per_sample": 2.0}), trial(value=8.0, scores={"energy_per_sample": 3.0})]
    assert [score for _, score in entries.best_so_far(records)] == [2.0, 3.0]
    assert entries.curve_name(records) == "best_so_far"
    assert entries.curve_name([trial(value=9.0)]) == "best_so_far_per_s"
