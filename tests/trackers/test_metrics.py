from functools import partial

import pytest

from autotune.records import Kind, Outcome
from autotune.trackers import metrics
from tests.support.records import a_trial
from tests.support.studies import make_study

UNITS = (
    " s",
    " min",
    " per second",
    " per s",
    " GiB",
    " percent",
    " J",
    " W",
    " MHz",
    "ratio to baseline",
    "ratio measured once",
    "trials",
    "minutes",
)


trial = partial(a_trial, number=7, kind=Kind.search)


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path)


def test_numbers_have_three_digits_and_readable_units():
    shown = metrics.trial_metrics(
        trial(value=51.2345, peak_memory_bytes=1_502_068_700, data_wait_frac=0.03456, device_rate=57.8123)
    )
    assert shown["Samples per second"] == 51.2
    assert shown["memory GiB"] == 1.40
    assert shown["waiting for data percent"] == 3.46
    assert shown["step alone per second"] == 57.8


def test_rate_metric_names_the_unit_that_it_counts():
    assert metrics.trial_metrics(trial(value=12345.6, unit="tokens"))["Tokens per second"] == 12346


def test_a_trial_is_compared_with_the_baseline_by_its_score():
    baseline = trial(number=0, kind=Kind.baseline, value=10.0, scores={"energy_per_sample": 2.0})
    found = metrics.trial_metrics(trial(value=30.0, scores={"energy_per_sample": 5.0}), baseline)
    assert found[metrics.SINGLE_RATIO] == 2.5


def test_without_a_baseline_there_is_no_ratio():
    failed = trial(number=0, kind=Kind.baseline, outcome=Outcome.crash)
    assert metrics.SINGLE_RATIO not in metrics.trial_metrics(trial(value=30.0), failed)
    assert metrics.SINGLE_RATIO not in metrics.trial_metrics(trial(value=30.0))


def test_a_trial_without_a_rate_has_no_metrics():
    failed = trial(outcome=Outcome.device_oom, peak_memory_bytes=10**10, phases_s={"init": 3.0}, metrics={"step_p50_s": 1.0})
    assert metrics.trial_metrics(failed) == {}


def test_rate_is_the_first_metric_that_the_compare_page_shows(folder):
    """With SQLite, MLflow shows the first name in alphabetical order, capitals first; with PostgreSQL, the first written."""
    for record in folder.read_trials():
        names = list(metrics.trial_metrics(record, folder.read_trials()[0]))
        assert names[:1] == sorted(names)[:1]
        assert not names or names[0] == "Samples per second"


def test_every_name_ends_with_its_unit(folder):
    shown = [metrics.trial_metrics(record, folder.read_trials()[0]) for record in folder.read_trials()]
    for name in {name for found in [*shown, metrics.study_metrics(folder.read_summary())] for name in found}:
        assert name.endswith(UNITS), name


@pytest.mark.parametrize(
    ("stored", "name", "value"),
    [
        ("gpu.power_w", "system/gpu power W", 2.0),
        ("gpu.memory_used_bytes", "system/gpu memory used GiB", 2 / 2**30),
        ("host.pressure_cpu_frac", "system/host pressure cpu percent", 200.0),
        ("host.read_bytes_per_s", "system/host read MiB per s", 2 / 2**20),
        ("rank1.step_s", "ranks/rank1 step s", 2.0),
        ("communication.exposed_s", "ranks/communication exposed s", 2.0),
        ("step_p95_s", "time/step p95 s", 2.0),
        ("compiled_graphs", "time/compiled graphs", 2.0),
    ],
)
def test_stored_names_become_readable_names_in_a_group(stored, name, value):
    assert metrics.readable(stored, 2.0) == (name, value)


def test_only_finite_numbers_become_metrics():
    found = metrics.trial_metrics(trial(value=2.0, metrics={"gpu.power_w": float("nan"), "gpu.energy_j": 3.0}))
    assert found["system/gpu energy J"] == 3.0
    assert "system/gpu power W" not in found
    assert "memory GiB" not in found


def test_an_objective_is_a_metric_with_its_unit():
    found = metrics.trial_metrics(trial(value=9.0, objectives={"energy_per_sample": 0.3, "throughput": 9.0}))
    assert (found["energy per sample J"], found["Samples per second"]) == (0.3, 9.0)
    assert "throughput" not in found
    found = metrics.trial_metrics(trial(value=9.0, objectives={"energy_per_sample": 0.3}, unit="tokens"))
    assert found["energy per token J"] == 0.3


def test_best_so_far_never_falls(folder):
    rates = [rate for _, rate in metrics.best_so_far(folder.read_trials())]
    assert rates == sorted(rates)
    assert rates[0] == 16.8


def test_a_raced_trial_is_not_the_best_so_far():
    assert metrics.best_so_far([trial(outcome=Outcome.raced, value=9.0)]) == []


def test_trials_of_the_attribution_are_not_in_the_curve():
    assert metrics.best_so_far([trial(kind=Kind.attribution, value=9.0)]) == []


def test_curves_reach_from_the_baseline_to_the_last_trial(folder):
    found = metrics.curves(folder.read_trials())
    assert found["progress/best per second"] == [(n, 16.8 if n < 1 else 38.4 if n < 5 else 40.7) for n in range(8)]
    assert found["progress/baseline per second"] == [(n, 16.8) for n in range(8)]


def test_no_curve_is_a_single_point(folder):
    assert metrics.curves(folder.read_trials()[:1]) == {}
    assert metrics.curves([]) == {}
    failed = trial(number=0, kind=Kind.baseline, outcome=Outcome.crash)
    assert metrics.curves([failed, trial(number=1, value=3.0)]) == {}
    for number in range(2, 8):
        assert all(len(points) > 1 for points in metrics.curves(folder.read_trials()[:number]).values())


def test_curve_follows_the_score():
    records = [trial(number=n, value=9.0 - n, scores={"energy_per_sample": score}) for n, score in enumerate((2.0, 3.0, 2.5))]
    assert metrics.curves(records) == {"progress/best score": [(0, 2.0), (1, 3.0), (2, 3.0)]}


def test_study_has_no_ratio_before_the_finals(folder):
    summary = folder.read_summary()
    summary["speedup"] = {"ratio": 4.56, "ci": None, "verdict": "ambiguous", "reason": "the finals have not run"}
    assert metrics.RATIO not in metrics.study_metrics(summary)
    summary["speedup"] |= {"ratio": 2.92, "num_rounds": 1}
    assert metrics.study_metrics(summary)[metrics.RATIO] == 2.92


def test_study_metrics_contain_rates_ratio_and_minutes(folder):
    found = metrics.study_metrics(folder.read_summary())
    assert (found["Best samples per second"], found["baseline samples per second"]) == (40.6, 16.8)
    assert (found[metrics.RATIO], found["minutes"], found["trials"]) == (2.41, 7.85, 8)
