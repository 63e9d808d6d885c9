"""The journal file: Optuna's own backend can read it and append to it."""

import os

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.search import begin_study

BATCH = "loader.batch_size"


@pytest.fixture
def study(tmp_path):
    return begin_study(tmp_path / "optuna.journal", "s", optuna.samplers.RandomSampler(seed=0))


@pytest.fixture
def viewed(tmp_path):
    """Returns the study as another process sees it."""
    file = str(tmp_path / "optuna.journal")
    return lambda: optuna.load_study(study_name="s", storage=JournalStorage(JournalFileBackend(file)))


def measure(study, rate):
    trial = study.ask({BATCH: CategoricalDistribution((16, 32))})
    trial.set_user_attr("measured", {"rate": rate, "list": [1.5, None]})
    trial.set_constraint("memory", 0.0)
    study.tell(trial, rate)
    return trial.number


def test_journal_file_contains_all_trials_of_the_tuner(study, viewed):
    for rate in (1.0, 3.0, 2.0):
        measure(study, rate)
    study.ask({BATCH: CategoricalDistribution((16, 32))})
    assert viewed().trials == study.trials
    assert [trial.values for trial in study.trials] == [[1.0], [3.0], [2.0], None]


def test_entries_of_another_process_are_read_and_trial_numbers_continue(study, viewed):
    measure(study, 1.0)
    viewed().set_user_attr("note", "seen in a dashboard")
    assert study.user_attrs == {"note": "seen in a dashboard"}
    viewed().add_trial(optuna.create_trial(value=9.0))
    assert measure(study, 2.0) == 2
    viewed().set_user_attr("note", "changed")
    assert measure(study, 3.0) == 3
    assert [trial.value for trial in study.trials] == [1.0, 9.0, 2.0, 3.0]
    assert viewed().trials == study.trials
    assert study.user_attrs == {"note": "changed"}


def test_tuner_does_not_read_the_file_after_its_own_writes(study, monkeypatch):
    def unread(*_):
        raise AssertionError("the file was read")

    monkeypatch.setattr(JournalFileBackend, "read_logs", unread)
    measure(study, 1.0)
    assert study.best_value == 1.0


def test_interrupt_while_the_journal_is_unlocked_stays_an_interrupt(study, monkeypatch):
    remove = os.unlink

    def interrupted(path, **more):
        remove(path, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.ask()
