"""Runs all applicable tests of Optuna's suite for samplers on the sampler of rates.

The suite's trials have scores but no rates, so the sampler lets TPE propose. Therefore, the suite for relative samplers also
runs on trials with rates. As in Optuna's tests, TPE proposes from the first trial on; in a study, its first trials are random.
`SingleOnlySamplerTestCase` does not apply: it is for samplers that refuse several objectives.
"""

import optuna
import pytest
from optuna.testing.pytest_samplers import BasicSamplerTestCase, MultiObjectiveSamplerTestCase, RelativeSamplerTestCase

from autotune.search.rates import MEASURED, RatesSampler


@pytest.fixture
def sampler():
    return lambda: RatesSampler(optuna.samplers.TPESampler(seed=1, n_startup_trials=0), seed=1)


class TestBasic(BasicSamplerTestCase):
    @pytest.fixture
    def sampler(self, sampler):
        return sampler


class TestRelative(RelativeSamplerTestCase):
    @pytest.fixture
    def sampler(self, sampler):
        return sampler


class TestSeveralObjectives(MultiObjectiveSamplerTestCase):
    @pytest.fixture
    def sampler(self, sampler):
        return sampler


class TestRelativeWithRates(RelativeSamplerTestCase):
    @pytest.fixture
    def sampler(self, sampler, monkeypatch):
        tell = optuna.Study.tell
        create = optuna.study.create_study

        def tell_rates(study, trial, values=None, **more):
            score = abs(values) + 1 if isinstance(values, int | float) else None
            if score is not None:
                trial.set_user_attr(MEASURED, {"rate": score, "device_rate": 1.1 * score, "loader_rate": 5.0 * score})
            return tell(study, trial, score if score is not None else values, **more)

        monkeypatch.setattr(optuna.Study, "tell", tell_rates)
        monkeypatch.setattr(optuna.study, "create_study", lambda **given: create(direction="maximize", **given))
        return sampler
