"""Whole studies of a program whose own loss is not finite, on a launcher without processes."""

import pytest

from autotune.config.claim import Claim, Verify
from autotune.export.formats import render
from autotune.records import Kind, Outcome
from autotune.stats import Ratio
from autotune.study import resume_study
from tests.support.fake_launcher import Surface

GAINS = {("precision.amp", "bf16"): 2.0}
LOST = [2.0] * 5 + [None] * 59  # from step 6 on
KEPT = [2.0] * 64
WORDS = "the program's own loss is not finite (from step 6 on, in the baseline itself): losses cannot be compared"


def lost_with(*amps):
    """Returns losses that stop being finite if precision.amp is one of `amps`."""
    return lambda knobs, seed: LOST if knobs["precision.amp"] in amps else KEPT


@pytest.fixture
def study(bench, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("precision.amp: ['off', 'bf16']\nloader.num_workers: [0, 2]\n")

    def _study(losses, **more):
        return bench(
            Surface(gains=GAINS, losses=losses, loader_per_s=1e6),
            f"search_space={file}",
            "search.sampler=grid",
            minutes=20,
            **more,
        )

    return _study


def test_program_whose_own_loss_is_not_finite_is_tuned_without_rejecting_trials(study):
    one = study(lost_with("off", "bf16"))
    summary = one.run()
    assert summary["status"] == "complete"
    assert set(summary["counts"]) <= {"ok", "raced"}
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert not [trial for trial in one.trials if trial.kind is Kind.parity], "there is nothing to compare with"
    assert summary["parity"]["verdict"] == "not checked"
    assert summary["parity"]["text"] == f"not checked: {WORDS}"
    assert summary["not_finite"].startswith(f"{WORDS}, so changes of numerics are `not checked`. Only the speed")
    assert [line for line in one.listener.named("notice") if WORDS[1:] in line] == [f"T{summary['not_finite'][1:]}."]


def test_best_yaml_notes_a_baseline_loss_that_is_not_finite(study):
    text = render(study(lost_with("off", "bf16")).run(), "yaml", None).text
    assert f"# Loss parity: not checked: {WORDS}" in text.replace("\n#   ", " ").replace("\n#  ", " ")
    assert "so changes of numerics are `not checked`" in text


def test_trial_with_nonfinite_loss_is_rejected_if_the_baseline_loss_is_finite(study):
    one = study(lost_with("bf16"))
    summary = one.run()
    bf16 = [trial for trial in one.trials if trial.changed.get("precision.amp") == "bf16"]
    assert {trial.outcome for trial in bf16} == {Outcome.nonfinite}
    assert summary["not_finite"] is None
    assert "precision.amp" not in summary["best"]["overrides"]


def test_trial_with_finite_loss_can_win_if_the_baseline_loss_is_not_finite(study):
    summary = study(lost_with("off")).run()
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["verdict"] == "not checked"


def test_resumed_study_knows_that_the_baseline_loss_is_not_finite(study):
    one = study(lost_with("off", "bf16"))
    one.inputs.config.study.budget.trials = 2
    one.run()
    one.inputs.config.study.budget.trials = None
    summary = resume_study(one.inputs, one.folder, one.listener)
    assert len(summary["trials"]) > 4
    assert set(summary["counts"]) <= {"ok", "raced"}
    assert "from step 6 on, in the baseline itself" in summary["not_finite"]


def test_nonfinite_loss_is_accepted_in_trials_after_a_repeated_baseline_had_one(study):
    """The loss stops being finite late, and only some runs get that far."""
    seen = []

    def losses(knobs, seed):
        seen.append(knobs)
        return KEPT if len(seen) <= 4 else LOST  # in the baseline and the search, the loss stays finite

    one = study(losses)
    one.inputs.config.parity.steps = 0
    summary = one.run()
    finals = [trial for trial in one.trials if trial.kind is Kind.final]
    first = next(trial for trial in finals if not trial.changed)
    assert first.outcome is Outcome.ok
    assert {trial.outcome for trial in finals if trial.number > first.number} == {Outcome.ok}
    assert f"(from step 6 on, in trial {first.number}, which changes nothing)" in summary["not_finite"]


def test_a_claim_about_a_program_whose_loss_is_not_finite_can_be_verified(study):
    changed = {"precision.amp": "bf16"}
    claim = Claim(file="best.yaml", study="s", changed=changed, speedup=Ratio(ratio=2.0, ci=(1.95, 2.05), num_rounds=5))
    one = study(lost_with("off", "bf16"), verify=Verify(claim=claim, rounds=3, minutes=10.0, long_minutes=None))
    summary = one.run()
    assert summary["verification"]["verdict"] == "holds"
    assert WORDS in summary["not_finite"]
