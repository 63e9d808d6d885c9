"""For each new trial, the tuner reads as many earlier trials in a long study as in a short one."""

import random

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.records import Kind, TrialRecord
from autotune.search import begin_study, make_sampler
from autotune.search.rates import MEASURED
from autotune.search.rates.history import Seen
from autotune.search.rates.sampler import MOST_TRIALS
from autotune.search.rates.step import MOST_WINNERS
from autotune.study import loop
from tests.study.conftest import RATES
from tests.support.fake_launcher import Surface

SPACE = {f"k{number}": CategoricalDistribution([0, 1, 2, 3]) for number in range(8)}


def watch(monkeypatch, *kinds):
    """Returns the ids of the objects whose attributes are read from now on."""
    read = set()

    def note(self, name):
        read.add(id(self))
        return object.__getattribute__(self, name)

    for kind in kinds:
        monkeypatch.setattr(kind, "__getattribute__", note)
    return read


@pytest.fixture
def read(monkeypatch):
    """The ids of the trials that the sampler has looked at."""
    return watch(monkeypatch, FrozenTrial, Seen)


def end(study, trial, rng):
    rate = rng.uniform(50, 150)
    trial.set_user_attr(MEASURED, {"rate": rate, "score": rate, "outcome": "ok"})
    study.tell(trial, rate)


@pytest.mark.thorough
def test_proposal_in_a_long_study_reads_no_more_trials_than_in_a_short_one(tmp_path, read):
    rng, sampler = random.Random(0), make_sampler("rates", seed=0, distributions=SPACE)
    study = begin_study(tmp_path / "optuna.journal", "s", sampler)

    def num_read(num_trials):
        study.sampler = optuna.samplers.RandomSampler(seed=num_trials)
        for _ in range(num_trials):
            end(study, study.ask(SPACE), rng)
        study.sampler = sampler
        running = [study.ask(SPACE) for _ in range(3)]  # the first `ask` reads the new trials
        read.clear()
        running.append(study.ask(SPACE))
        num = len(read)
        for trial in running:
            end(study, trial, rng)
        return num

    early, late = num_read(250), num_read(800)
    assert late <= early + 5 <= MOST_TRIALS + MOST_WINNERS + 30


def test_storage_reads_only_trials_that_have_changed(tmp_path, read):
    rng, study = random.Random(0), begin_study(tmp_path / "optuna.journal", "s", optuna.samplers.RandomSampler(seed=0))
    states = (TrialState.COMPLETE, TrialState.RUNNING)
    for number in range(60):
        trial = study.ask(SPACE)
        if number % 7 == 0:
            study.tell(trial, state=TrialState.FAIL)
        elif number % 3:
            end(study, trial, rng)
        read.clear()
        found = study.get_trials(deepcopy=False, states=states)
        assert len(read) <= 3
        assert found == JournalStorage.get_all_trials(study._storage, study._study_id, False, states)
    assert study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) == [one for one in found if one.state.is_finished()]


def test_each_search_trial_reads_only_a_few_records(bench, monkeypatch):
    study = bench(Surface(noise_frac=0.003), RATES, "search.stop=false", "study.budget.trials=50", minutes=10_000, num_slots=4)
    monkeypatch.setattr(loop._Study, "_write_when_due", lambda _: None)  # the summary reads all trials, but is written seldom
    read, counts = watch(monkeypatch, TrialRecord), []

    def ended(trial):
        counts.append(len(read) if trial.kind is Kind.search else 0)
        read.clear()

    study.listener.trial_ended = ended
    study.run()
    searched = [count for count in counts if count]
    assert len(searched) == 50
    assert sorted(searched)[-4] <= 25  # a trial that doubts an earlier result reads all records
