"""Memory that the tuner keeps per trial. A study may have thousands of trials, and most of their parts are equal."""

import gc
import tracemalloc

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import RandomSampler

from autotune.records import Kind
from autotune.search import begin_study
from tests.support.fake_launcher import Surface

MOST_KIB = 12  # a trial needs less; if it had its own copy of everything, it would need more


def test_trials_share_equal_distributions_and_names(tmp_path):
    space = {"a": (1, 2), "b": ("off", "bf16"), "c": (False, True)}
    study = begin_study(tmp_path / "optuna.journal", "s", RandomSampler(seed=0))
    for number in range(6):
        trial = study.ask({key: CategoricalDistribution(choices) for key, choices in list(space.items())[: 2 + number % 2]})
        trial.set_constraint("memory", 0.0)
        study.tell(trial, float(number))
    found = study.get_trials(deepcopy=False)
    assert [list(trial.params) for trial in found[:2]] == [["a", "b"], ["a", "b", "c"]]
    for one, other in zip(found[2:], found, strict=False):
        assert one.distributions is other.distributions
        assert all(mine is others for mine, others in zip(one.system_attrs, other.system_attrs, strict=True))
        assert all(any(value is choice for choice in one.distributions[key].choices) for key, value in one.params.items())


def test_records_share_equal_knob_reports(bench):
    study, records = bench(Surface(), "study.budget.trials=8", minutes=1000), []
    study.listener.trial_ended = records.append
    study.run()
    reports = [report for record in records for report in record.knob_reports.values()]
    assert len({id(report) for report in reports}) == len({repr(report) for report in reports}) < len(reports) / 2


@pytest.mark.thorough
def test_a_trial_of_a_long_study_takes_little_memory(bench):
    given = ["search.sampler=random", "search.stop=false", "study.budget.trials=90"]
    study, marks = bench(Surface(), *given, minutes=100_000), []

    def ended(trial):
        if trial.kind is Kind.search and trial.number in (30, 80):
            gc.collect()
            marks.append(tracemalloc.get_traced_memory()[0])

    study.listener.trial_ended = ended
    tracemalloc.start()
    try:
        study.run()
    finally:
        tracemalloc.stop()
    assert marks[1] - marks[0] < 50 * MOST_KIB * 1024
