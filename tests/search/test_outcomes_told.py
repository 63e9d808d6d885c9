import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.records import Outcome
from autotune.search import add_known, begin_study, make_sampler, tell
from autotune.search.rates.history import History
from autotune.search.study import told
from tests.support.records import a_trial

SPACE = {"loader.batch_size": IntDistribution(8, 128), "precision.amp": CategoricalDistribution(["off", "bf16"])}


def record(outcome, value=None, **more):
    knobs = {"loader.batch_size": 32, "precision.amp": "off", **more.pop("knobs", {})}
    return a_trial(7, knobs=knobs, outcome=outcome, value=value, **more)


EXPECTED = {
    Outcome.ok: (TrialState.COMPLETE, 50.0, None),
    Outcome.raced: (TrialState.COMPLETE, 50.0, None),
    Outcome.unsteady: (TrialState.COMPLETE, 9.0, "steady"),
    Outcome.infeasible: (TrialState.COMPLETE, 50.0, None),
    Outcome.device_oom: (TrialState.COMPLETE, 9.0, "memory"),
    Outcome.host_oom: (TrialState.COMPLETE, 9.0, "memory"),
    Outcome.timeout: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.crash: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.error: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.nonfinite: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.parity: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.invalid: (TrialState.COMPLETE, 9.0, "works"),
    Outcome.disturbed: (TrialState.FAIL, None, None),
    Outcome.interrupted: (TrialState.FAIL, None, None),
}


def test_expectations_cover_every_outcome():
    assert set(EXPECTED) == set(Outcome)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_outcome_is_told_to_optuna_with_the_expected_state_value_and_constraint(outcome, tmp_path):
    state, value, constraint = EXPECTED[outcome]
    study = begin_study(tmp_path / "journal", "s", make_sampler("tpe", seed=0, distributions=SPACE))
    trial = study.ask(SPACE)
    tell(study, trial, record(outcome, 50.0 if outcome.has_value else None), worst=[9.0])
    (frozen,) = study.trials
    assert (frozen.state, frozen.value) == (state, value)
    assert {name for name, violation in frozen.constraints.items() if violation > 0} == ({constraint} - {None})
    assert frozen.user_attrs["trial"] == 7


def test_memory_violation_is_the_share_above_the_cap():
    assert told(record(Outcome.device_oom, peak_memory_bytes=150), worst=[1.0], memory_capacity_bytes=100).constraints == {
        "memory": 0.5
    }
    below = told(record(Outcome.device_oom, peak_memory_bytes=90), worst=[1.0], memory_capacity_bytes=100)
    assert below.constraints["memory"] > 0, "running out of memory is a violation even if the last known peak is below the cap"


def test_value_outside_the_search_space_is_not_told_to_optuna(tmp_path):
    study = begin_study(tmp_path / "journal", "s", make_sampler("random", seed=0, distributions=SPACE))
    add_known(study, record(Outcome.ok, 20.0, knobs={"loader.batch_size": 4, "threads.intra": 2}), SPACE, worst=[20.0])
    assert study.trials[0].params == {"precision.amp": "off"}


def values_in(journal):
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return [trial.value for trial in optuna.load_study(study_name="s", storage=storage).trials]


def test_journal_is_at_the_given_path_and_readable_only_by_its_owner(tmp_path):
    journal = tmp_path / "optuna.journal"
    study = begin_study(journal, "s", make_sampler("random", seed=0, distributions=SPACE))
    add_known(study, record(Outcome.ok, 20.0), SPACE, worst=[20.0])
    assert values_in(journal) == [20.0]
    assert journal.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("left", ["half a line", "a lock"])
def test_journal_left_damaged_or_locked_by_a_killed_tuner_is_replaced(left, tmp_path):
    journal = tmp_path / "optuna.journal"
    study = begin_study(journal, "s", make_sampler("random", seed=0, distributions=SPACE))
    study.ask(SPACE)  # a trial that never ends
    if left == "a lock":
        journal.with_name("optuna.journal.lock").symlink_to(journal)
    else:
        journal.write_text(journal.read_text() + '{"op_code": 5, "wor', encoding="utf-8")
    again = begin_study(journal, "s", make_sampler("random", seed=0, distributions=SPACE))
    add_known(again, record(Outcome.ok, 20.0), SPACE, worst=[20.0])
    assert values_in(journal) == [20.0]


def test_tpe_avoids_configurations_that_ran_out_of_memory(tmp_path):
    study = begin_study(tmp_path / "journal", "s", make_sampler("tpe", seed=3, distributions=SPACE))
    too_big = 0
    for n in range(40):
        trial = study.ask(SPACE)
        batch = trial.params["loader.batch_size"]
        fits = batch <= 96
        too_big += n >= 20 and not fits
        outcome = Outcome.ok if fits else Outcome.device_oom
        tell(study, trial, record(outcome, float(batch) if fits else None), worst=[8.0])
    assert too_big <= 10, "of 20; a random search would try about 5, one that ignores memory nearly 20"


def test_infeasible_trial_is_told_with_the_worst_value_and_its_violation():
    found = told(record(Outcome.infeasible, 50.0, violations={"constraints.max_power_w": 0.2}), worst=[9.0])
    assert (found.values, found.constraints) == ([9.0], {"constraints.max_power_w": 0.2})


def test_each_objective_is_told_its_own_score(tmp_path):
    study = begin_study(
        tmp_path / "journal", "s", make_sampler("tpe", seed=0, distributions=SPACE), scores=["throughput", "energy"]
    )
    scores = {"throughput": 50.0, "energy_per_sample": 2.0}
    tell(study, study.ask(SPACE), record(Outcome.ok, 50.0, scores=scores), worst=[9.0, 1.0])
    tell(study, study.ask(SPACE), record(Outcome.crash), worst=[9.0, 1.0])
    add_known(study, record(Outcome.ok, 60.0, scores={**scores, "throughput": 60.0}), SPACE, worst=[9.0, 1.0])
    assert [trial.values for trial in study.trials] == [[50.0, 2.0], [9.0, 1.0], [60.0, 2.0]]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_every_sampler_proposes_for_several_objectives(sampler, tmp_path):
    study = begin_study(
        tmp_path / "journal", "s", make_sampler(sampler, seed=0, distributions=SPACE), scores=["throughput", "energy"]
    )
    for _ in range(12):
        trial = study.ask(SPACE)
        batch = trial.params["loader.batch_size"]
        broken = {"constraints.max_power_w": 0.5} if batch > 64 else {}
        scores = {"throughput": float(batch), "energy_per_sample": 1 / batch}
        tell(study, trial, record(Outcome.ok, float(batch), scores=scores, violations=broken), worst=[1.0, 0.0])
    assert study.best_trials


def test_journal_viewer_sees_metric_names_and_no_unsteady_winner(tmp_path):
    journal = tmp_path / "optuna.journal"
    study = begin_study(journal, "s", make_sampler("random", seed=0, distributions=SPACE), scores=["samples per second"])
    for outcome, rate, amp in ((Outcome.ok, 20.0, "off"), (Outcome.ok, 30.0, "bf16"), (Outcome.unsteady, 90.0, "bf16")):
        add_known(study, record(outcome, rate, knobs={"precision.amp": amp}), SPACE, worst=[20.0])
    seen = optuna.load_study(study_name="s", storage=JournalStorage(JournalFileBackend(str(journal))))
    assert seen.metric_names == ["samples per second"]
    assert max(trial.value for trial in seen.trials) == 30.0  # also for viewers that ignore constraints
    assert (seen.best_trial.value, seen.best_trial.params["precision.amp"]) == (30.0, "bf16")
    assert seen.best_trial.user_attrs["trial"] == 7


@pytest.mark.parametrize("outcome", [Outcome.device_oom, Outcome.host_oom])
def test_sampler_reads_from_the_journal_which_memory_ran_out(outcome, tmp_path):
    study = begin_study(tmp_path / "journal", "s", make_sampler("random", seed=0, distributions=SPACE))
    add_known(study, record(outcome), SPACE, worst=[9.0])
    (peak,) = History().seen(study).peaks
    assert (peak.is_out, peak.is_host) == (True, outcome is Outcome.host_oom)


def test_resumed_sampler_keeps_the_rate_of_a_trial_that_loss_parity_ruled_out(tmp_path):
    study = begin_study(tmp_path / "journal", "s", make_sampler("random", seed=0, distributions=SPACE))
    barred = {"evidence": {"barred_for": ["precision.amp"]}, "changed": {"precision.amp": "bf16"}, "device_rate": 60.0}
    add_known(study, record(Outcome.parity, 50.0, knobs={"precision.amp": "bf16"}, **barred), SPACE, worst=[9.0])
    known = History().seen(study)
    (seen,) = known.rated
    assert (seen.rate, seen.device_rate, seen.may_win, known.failed) == (50.0, 60.0, False, [])
    assert study.trials[0].value == 9.0
    assert max(study.trials[0].constraints.values()) > 0, "other samplers must avoid it"
