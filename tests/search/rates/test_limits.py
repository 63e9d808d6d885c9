"""The probability that a configuration keeps within a limit, as forecast from the trials so far."""

import pytest
from optuna.distributions import CategoricalDistribution

from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import BATCH, Coding
from autotune.search.rates.history import Seen
from autotune.search.rates.limits import ACCUMULATION, chances
from autotune.search.rates.regime import Machine

LIMIT_S = {"step_p95_s": 0.5}  # steps of 32 samples take 0.32 s at 100 samples/s


@pytest.mark.parametrize(
    ("key", "values", "is_held", "may_keep"),
    [
        (BATCH, [32, 256], False, False),
        (BATCH, [32, 256], True, True),  # train.global_batch: an eighth of the batches makes a step of the same samples
        (ACCUMULATION, [1, 8], False, False),
    ],
)
def test_step_time_is_forecast_from_the_samples_of_an_optimizer_step(key, values, is_held, may_keep):
    coding = Coding({key: CategoricalDistribution(values)})
    trials = [Seen(params={key: values[0]}, rate=100.0, metrics={"step_p95_s": 0.32})]
    forecast = AveragedForecast(coding, trials, Machine(num_cores=4))
    same, larger = chances(LIMIT_S, trials, forecast, coding, coding.all_codes(), is_held=is_held)
    assert same > 0.9
    assert bool(larger > 0.5) is may_keep
