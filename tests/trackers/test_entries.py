import dataclasses
from functools import partial

import pytest

from autotune.records import Kind, Outcome, StudyRecord
from autotune.trackers import entries
from autotune.wording import headline
from tests.support.records import a_trial
from tests.support.studies import make_study


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path)


trial = partial(a_trial, number=7, kind=Kind.search)


def test_run_names_list_the_changed_knobs():
    changed = {"loader.batch_size": 64, "precision.amp": "bf16"}
    assert entries.trial_name(trial(changed=changed)) == "0007 bf16 batch 64"


def test_finals_are_named_after_the_trial_they_repeat():
    assert entries.trial_name(trial(kind=Kind.final, repeats=3, round=2)) == "0007 final 2 of 0003"


def test_names_of_attribution_trials_say_what_is_left_out():
    found = trial(kind=Kind.attribution, round=2, why="trial 5 without precision.amp")
    assert entries.trial_name(found) == "0007 attribution 2: trial 5 without precision.amp"


def test_study_note_states_the_effect_of_each_change(folder):
    note = entries.study_note(folder.read_study(), folder.read_summary())
    assert "- `precision.amp`: off → **bf16**, 1.62x [1.58, 1.66]\n" in note
    assert "- `loader.num_workers`: 0 → **2**, 1.03x [0.99, 1.07] ambiguous, estimated\n" in note
    assert "No clear effect, so left as it was: `loader.pin_memory` = true" in note


def test_study_note_names_the_measured_effect_of_a_change_left_out(folder):
    summary = folder.read_summary()
    dropped = {"knob": "loader.batch_size", "to": 128, "ratio": 1.05, "ci": [0.96, 1.16], "verdict": "ambiguous"}
    summary["minimality"] = {"dropped": [{**dropped, "basis": "estimated"}]}
    note = entries.study_note(folder.read_study(), summary)
    assert "No clear effect, so left as it was: `loader.batch_size` = 128, 1.05x [0.96, 1.16] ambiguous, estimated." in note


def test_best_trial_is_listed_first_even_if_the_attribution_measured_it():
    study = StudyRecord(name="s", title="t", command=[], cwd="/")
    best = entries.trial_tags(trial(kind=Kind.attribution), study, "n", ratio=2.9, is_best=True)
    faster = entries.trial_tags(trial(), study, "n", ratio=3.2)
    part = entries.trial_tags(trial(kind=Kind.attribution), study, "n", ratio=2.9)
    assert [tags["best"] for tags in (best, faster, part)] == ["yes", "-", "-"]
    assert [tags["repeat"] for tags in (best, faster, part)] == ["no", "no", "yes"]
    assert best["order"] < faster["order"]
    assert best["mlflow.runColor"] != faster["mlflow.runColor"]


def test_run_of_a_study_names_its_best_trial_once_the_study_is_over(folder):
    study, summary = folder.read_study(), folder.read_summary()
    assert entries.study_tags(study, summary)["best"] == "trial 5"
    assert entries.study_tags(study, {**summary, "status": "running"})["best"] == "-"
    assert entries.study_tags(study, {**summary, "best": {"trial": 0}})["best"] == "the baseline"


def test_parity_runs_are_named_after_the_configuration_they_compare():
    several = {"precision.amp": "bf16", "optimizer.implementation": "fused"}
    assert entries.trial_name(trial(kind=Kind.parity, repeats=3, changed=several)) == "0007 losses of bf16 fused optimizer"
    assert entries.trial_name(trial(kind=Kind.parity, repeats=0)) == "0007 losses of the baseline"
    assert entries.trial_name(trial(kind=Kind.parity, repeats=3, changed={"precision.amp": "bf16"})) == "0007 losses of bf16"


def test_long_values_are_cut_to_the_limits_of_mlflow():
    assert len(entries.params({"env.LONG": "x" * 10_000})["env.LONG"]) == entries.MAX_PARAM_CHARACTERS
    tags = entries.trial_tags(trial(reason="x" * 10_000), StudyRecord(name="s", title="t", command=[], cwd="/"), "n")
    assert max(map(len, tags.values())) <= entries.MAX_TAG_CHARACTERS


def test_tags_of_a_run_say_where_it_ran():
    study = StudyRecord(name="s", title="t", command=[], cwd="/")
    tags = entries.trial_tags(trial(slot="2: n1, job 12", host="n1", neighbours=3), study, "n")
    assert (tags["slot"], tags["host"], tags["neighbours"]) == ("2: n1, job 12", "n1", "3")
    alone = entries.trial_tags(trial(evidence={"node": {"host": "n1", "boot_id": "x", "job": "12"}}), study, "n")
    assert alone["host"] == "n1"
    assert not {"slot", "neighbours"} & set(alone)
    assert not {"slot", "host", "neighbours"} & set(entries.trial_tags(trial(), study, "n"))


def test_credentials_in_addresses_are_masked(folder):
    study = folder.read_study()
    study.command = ["python", "train.py", "--data", "https://me:secret@host/data"]
    for tags in (entries.trial_tags(trial(), study, "n"), entries.study_tags(study, folder.read_summary())):
        assert "@host/data" in tags["mlflow.source.name"]
        assert "secret" not in str(tags)


def test_note_names_baseline_best_and_the_change(folder):
    note = entries.study_note(folder.read_study(), folder.read_summary())
    assert "16.8 samples/s" in note
    assert "`precision.amp`: off → **bf16**" in note
    assert "autotune export resnet18" in note


def test_note_says_if_a_changed_setting_was_not_set_before(folder):
    summary = folder.read_summary()
    del summary["baseline"]["knobs"]["precision.amp"]
    assert "`precision.amp`: not set → **bf16**" in entries.study_note(folder.read_study(), summary)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"status": None, "reason": "", "speedup": None}, "running"),
        ({"status": "interrupted"}, "faster: 2.41x [2.36, 2.46] (interrupted)"),
        ({"speedup": {"ratio": None, "verdict": "same", "reason": "nothing came near"}}, "same: nothing came near"),
        ({"speedup": None, "verification": {"verdict": "holds", "now": {"ratio": 2.04}, "claimed": {"ratio": 2.06}}},
         "holds: 2.04x now, 2.06x claimed"),
        ({"speedup": None, "recording": {"configurations": 4, "trials": 12}}, "recorded: 4 configurations, 12 measurements"),
    ],
)  # fmt: skip
def test_the_verdict_is_worded_as_on_the_terminal(folder, about, said):
    summary = {**folder.read_summary(), **about}
    assert headline(summary) == said
    assert entries.study_tags(folder.read_study(), summary)["outcome"] == said
    assert entries.study_note(folder.read_study(), summary).startswith(f"### {said}\n")


def test_note_names_only_commands_that_work(folder):
    study, summary = folder.read_study(), folder.read_summary()
    baseline = {**summary["baseline"], "trial": 0, "overrides": {}}
    note = entries.study_note(dataclasses.replace(study, name="a b"), {**summary, "best": baseline})
    assert "| best | 0 | the baseline | |" in note
    assert note.endswith("\n`autotune show 'a b'`")
    verified = entries.study_note(study, {**summary, "verification": {"verdict": "holds", "claimed": {"ratio": 2.4}}})
    assert "autotune export" not in verified


def test_note_of_a_running_study_has_no_verdict(tmp_path):
    folder = make_study(tmp_path, status="running", num_trials=1)
    assert entries.study_note(folder.read_study(), folder.read_summary()).startswith("### running")


def test_pareto_front_uses_the_unit_of_the_study(folder):
    point = {"trial": 5, "objectives": {"throughput": 1234.0, "energy_per_sample": 0.25}, "measured_in": "finals"}
    about = {"objective": ["throughput", "energy_per_sample"], "unit": "tokens", "front": [point]}
    note = entries.study_note(folder.read_study(), {**folder.read_summary(), **about})
    assert "| 5 | 1,234 tokens/s | 0.250 J/token | unchanged |" in note


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("ok", "FINISHED"), ("raced", "KILLED"), ("interrupted", "KILLED"), ("unsteady", "FAILED"), ("infeasible", "FAILED")],
)
def test_only_a_trial_whose_rate_counts_has_status_finished(outcome, status):
    assert entries.trial_status(trial(outcome=Outcome(outcome), value=9.0)) == status


def test_every_kind_of_outcome_has_a_different_color():
    """A rate that counts, the three kinds of rates that do not, and a failure."""
    study = StudyRecord(name="s", title="t", command=[], cwd="/")
    colors = {kind: entries.trial_tags(trial(outcome=kind), study, "n")["mlflow.runColor"] for kind in Outcome}
    failed = {color for kind, color in colors.items() if not kind.has_value}
    assert len(failed) == 1
    assert len(set(colors.values())) == 1 + sum(kind.has_value for kind in Outcome)
    assert entries.study_tags(study, {})["mlflow.runColor"] not in colors.values()


def test_multi_process_knobs_are_params_only_with_several_processes():
    knobs = {"loader.batch_size": 32, "parallel.strategy": "ddp", "nccl.algo": "auto"}
    assert set(entries.params(knobs, is_distributed=False)) == {"loader.batch_size"}
    assert set(entries.params(knobs)) == set(knobs)


def test_tables_order_valid_trials_by_ratio_then_failed_then_stopped_ones():
    study = StudyRecord(name="s", title="t", command=[], cwd="/")
    rows = [("raced", 1.5), ("device_oom", None), ("ok", 0.9), ("infeasible", 12.0), ("ok", 11.5), ("ok", 2.0)]
    tags = [
        (entries.trial_tags(trial(outcome=Outcome(name)), study, "n", ratio=ratio)["order"], name, ratio)
        for name, ratio in rows
    ]
    tags.append((entries.study_tags(study, {"speedup": {"ratio": 11.5, "ci": None}})["order"], "study", 11.5))
    sorted_rows = [(name, ratio) for _, name, ratio in sorted(tags)]
    assert sorted_rows == [
        ("study", 11.5), ("ok", 11.5), ("ok", 2.0), ("ok", 0.9), ("infeasible", 12.0), ("device_oom", None), ("raced", 1.5),
    ]  # fmt: skip
