"""If a trial with several changes fails, the culprit is searched for at once and not proposed again."""

from types import SimpleNamespace

import pytest

from autotune.harness.protocol import NOT_APPLICABLE, KnobReport
from autotune.records import Kind, Outcome, Tier
from autotune.study import resume_study
from autotune.study.culprits import Culprits
from tests.study.conftest import RATES, Bench, folder_in_memory
from tests.support.fake_launcher import Failure, Surface
from tests.support.records import a_trial

GAINS = {("precision.amp", "bf16"): 1.5, ("layout.channels_last", True): 1.3, ("optimizer.implementation", "fused"): 1.1}
LAYOUT, AMP = ("layout.channels_last", True), ("precision.amp", "bf16")


def failing(*bad, **how):
    """Returns a failure rule: a trial fails if a knob has one of these values."""
    error = {"type": "RuntimeError", "message": "it fails", "traceback": "", **how.pop("error", {})}
    return lambda trial, knobs: Failure(error=error, **how) if any(knobs.get(key) == value for key, value in bad) else None


@pytest.fixture(scope="module")
def channels_last_fails(tmp_path_factory):
    """A finished study in which every trial with channels_last fails. Tests must not change it."""
    surface = Surface(gains=GAINS, failures=failing(LAYOUT))
    with folder_in_memory(tmp_path_factory.mktemp("culprits")) as folder:
        study = Bench(folder / "runs", surface, RATES, minutes=30)
        study.run()
        yield study


def searched(study):
    return [trial for trial in study.trials if trial.kind is Kind.search]


def lost(study):
    return [trial for trial in searched(study) if not trial.outcome.has_value and not trial.outcome.is_no_answer]


@pytest.mark.thorough  # one row always runs: the next test
@pytest.mark.parametrize("sampler", ["rates", "tpe", "random"])
@pytest.mark.parametrize("bad", [LAYOUT, AMP, ("loader.num_workers", 2), ("optimizer.implementation", "fused")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_failing_value_costs_at_most_two_of_twelve_trials(bench, sampler, bad, seed):
    budget = [f"search.sampler={sampler}", "study.budget.trials=12"]
    study = bench(Surface(gains=GAINS, failures=failing(bad)), *budget, seed=seed, minutes=60)
    study.run()
    assert len(searched(study)) >= 10
    assert len(lost(study)) <= 2, [(trial.changed, trial.why) for trial in lost(study)]


def test_one_failing_value_costs_at_most_two_trials_of_a_study_of_30_minutes(channels_last_fails):
    assert len(searched(channels_last_fails)) >= 10
    assert len(lost(channels_last_fails)) <= 2, [(trial.changed, trial.why) for trial in lost(channels_last_fails)]


def test_trial_after_a_failure_tests_one_suspected_change_and_says_so(channels_last_fails):
    study = channels_last_fails
    first = lost(study)[0]
    assert len(first.changed) > 2
    after = searched(study)[searched(study).index(first) + 1]
    assert after.why.startswith("does ")
    assert f"fail? trial {first.number} failed with it and {len(first.changed) - 1} other changes" in after.why
    assert len(after.changed) == 1
    alone = next(trial for trial in searched(study) if trial.changed == dict([LAYOUT]))
    assert alone in lost(study)
    later = searched(study)[searched(study).index(alone) + 1 :]
    assert len(later) > 3
    assert not [trial for trial in later if trial.changed.get(LAYOUT[0]) == LAYOUT[1]]


@pytest.mark.thorough
def test_failed_compilation_is_tested_alone_only_if_it_would_be_proposed_again(bench):
    study = bench(Surface(gains=GAINS, failures=failing(("compile.mode", "default"))), "search.sampler=rates", minutes=60)
    study.run()
    trials, (first, *later) = searched(study), lost(study)
    assert first.changed["compile.mode"] == "default"
    assert not trials[trials.index(first) + 1].why.startswith("does ")
    assert [trial.why for trial in later] == [f"does compile default fail? trial {first.number} failed with it"]


def test_next_expert_configuration_leaves_out_changes_known_to_fail(channels_last_fails):
    experts = [trial for trial in searched(channels_last_fails) if trial.origin == "expert" and trial.outcome.has_value]
    assert experts
    assert all(LAYOUT[0] not in trial.changed and AMP[0] in trial.changed for trial in experts)
    assert all("without channels_last" in trial.why for trial in experts)
    assert channels_last_fails.folder.read_summary()["best"]["overrides"][AMP[0]] == AMP[1]


@pytest.mark.parametrize(
    "how",
    [
        {"error": {"knob": "layout.channels_last"}},
        {"error": None, "knob_reports": {"layout.channels_last": KnobReport(NOT_APPLICABLE, "no convolutions")}},
    ],
)
def test_failure_that_names_its_knob_needs_no_trial_to_find_the_culprit(bench, how):
    failure = failing(LAYOUT, **how) if how["error"] else lambda _, knobs: Failure(**how) if knobs.get(LAYOUT[0]) else None
    study = bench(Surface(gains=GAINS, failures=failure), "search.sampler=rates", "study.budget.trials=8", minutes=30)
    study.run()
    assert len(lost(study)) == 1
    assert not [trial for trial in searched(study) if trial.why.startswith("does ")]


@pytest.mark.thorough
def test_resumed_study_continues_the_search_for_a_culprit(bench):
    interrupted = failing(LAYOUT)

    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == 2 else interrupted(trial, knobs)

    study = bench(Surface(gains=GAINS, failures=failures), "search.sampler=rates", "study.budget.trials=8", minutes=30)
    assert study.run()["status"] == "interrupted"
    study.surface.failures, study.launcher.is_closed = interrupted, False
    resume_study(study.inputs, study.folder, study.listener)
    again = [trial for trial in searched(study) if trial.outcome is not Outcome.interrupted]
    assert again[1].why.startswith("does ")
    assert len(lost(study)) <= 2


def test_grid_visits_every_point_even_if_some_fail(bench, tiny):
    study = bench(Surface(failures=failing(AMP)), *tiny, "search.sampler=grid", minutes=60)
    study.run()
    assert len(searched(study)) == 3
    assert len(lost(study)) == 2


@pytest.mark.thorough
def test_two_changes_that_fail_only_together_are_each_tried_without_the_other(bench):
    def failures(_, knobs):
        is_both = knobs.get(AMP[0]) == AMP[1] and knobs.get(LAYOUT[0]) is LAYOUT[1]
        return Failure(error={"type": "RuntimeError", "message": "not both", "traceback": ""}) if is_both else None

    study = bench(Surface(gains=GAINS, failures=failures), "search.sampler=rates", "study.budget.trials=12", minutes=60)
    summary = study.run()
    worked = [trial.changed for trial in searched(study) if trial.outcome.has_value]
    assert len(lost(study)) <= 2  # afterwards, no configuration with both changes was tried
    assert any(AMP[0] in changed for changed in worked)
    assert any(LAYOUT[0] in changed for changed in worked)
    assert summary["best"]["overrides"][AMP[0]] == AMP[1]


class Tight(Surface):
    """A program whose samples need twice the memory without bf16."""

    def peak_bytes(self, knobs):
        return int(1e7 * knobs["loader.batch_size"]) // (2 if knobs.get(AMP[0]) == AMP[1] else 1)


@pytest.mark.thorough
def test_trials_that_look_for_a_culprit_do_not_run_out_of_memory(bench):
    def failures(_, knobs):
        is_both = knobs["loader.batch_size"] > 32 and knobs.get(LAYOUT[0]) is LAYOUT[1]
        return Failure(error={"type": "RuntimeError", "message": "too large for it", "traceback": ""}) if is_both else None

    study = bench(Tight(gains=GAINS, failures=failures), "search.sampler=rates", "study.budget.trials=16", minutes=60)
    study.run()
    assert lost(study)
    asked = [trial for trial in searched(study) if trial.why.startswith("does ")]
    assert asked
    assert not [(trial.changed, trial.why) for trial in asked if trial.outcome.is_memory]


def record(number, changed, outcome, value=None, **evidence):
    return a_trial(number, kind=Kind.search, knobs=changed, changed=changed, outcome=outcome, value=value, evidence=evidence)


CHANGED = {AMP[0]: AMP[1], LAYOUT[0]: LAYOUT[1]}


@pytest.mark.parametrize(
    ("failed", "is_asked"),
    [
        (record(1, CHANGED, Outcome.error), True),
        (record(1, CHANGED, Outcome.crash, earlier_attempt={"outcome": "crash"}), True),
        (record(1, CHANGED, Outcome.crash), False),  # a single crash may be chance
        (record(1, CHANGED, Outcome.crash, earlier_attempt={"outcome": "disturbed"}), False),  # the first attempt worked
        (record(1, CHANGED, Outcome.timeout, earlier_attempt={"outcome": "interrupted"}), False),  # its node was lost
        (record(1, CHANGED, Outcome.timeout, hang={"kind": "user code"}), True),
        (record(1, CHANGED, Outcome.device_oom), False),
        (record(1, CHANGED, Outcome.interrupted), False),
        (record(1, CHANGED, Outcome.parity, value=100.0, barred_for=[AMP[0]]), False),  # it ran, but changed the losses
    ],
)
def test_culprit_is_sought_only_for_failures_that_changes_can_cause(failed, is_asked):
    reference = {AMP[0]: "off", LAYOUT[0]: False}
    space = SimpleNamespace(reference=reference, active=lambda knobs: knobs, tier=lambda _: Tier.numerics)
    culprits = Culprits(space)
    culprits.learn(failed)
    assert bool(list(culprits.questions(record(0, {}, Outcome.ok, value=1.0)))) is is_asked


def test_reason_for_testing_a_single_suspect_counts_no_other_changes():
    space = SimpleNamespace(
        reference={AMP[0]: "off", LAYOUT[0]: False}, active=lambda knobs: knobs, tier=lambda _: Tier.numerics
    )
    culprits = Culprits(space)
    culprits.learn(record(1, CHANGED, Outcome.error))
    culprits.learn(record(2, {AMP[0]: AMP[1]}, Outcome.ok, value=1.0))
    whys = [why for _, _, why in culprits.questions(record(0, {}, Outcome.ok, value=1.0))]
    assert whys == ["does channels_last fail? trial 1 failed with it"]
