import json
import math
from pathlib import Path

import pytest

from autotune.records import Outcome
from autotune.replay.bench import Result
from autotune.replay.figures import at_seconds, at_trials, figures, random_after_ten, reached
from autotune.replay.space import grid_of
from autotune.replay.study import Claim, Replayed, Step
from tests.replay.tables import BEST, OK_S, OOM_S, REFERENCE, make_table, rate_of


def study(*fractions, oom=()):
    steps = [
        Step(trials=n, seconds=10.0 * (n + 1), fraction=fraction, outcome=Outcome.host_oom if n in oom else Outcome.ok)
        for n, fraction in enumerate(fractions)
    ]
    return Replayed(steps=steps, final_fraction=fractions[-1], total_s=500.0, own_s=0.1)


def claim(**found):
    usual = {"ratio": 2.0, "ci": (1.9, 2.1), "overstated_frac": 0.01, "is_truth_inside": True, "is_verified": True}
    return Claim(**{**usual, "verdict": "holds", **found})


@pytest.fixture(scope="module")
def result():
    table = make_table()
    studies = [study(0.2, 0.5, 0.96, 0.97), study(0.2, 0.99, 0.94, 0.99), study(0.2, 0.3, 0.3, 0.4, oom=(1, 2))]
    studies[0].claim, studies[1].claim = claim(), claim(is_verified=False, overstated_frac=0.03, verdict="no longer holds")
    return Result(
        path=Path("formula.jsonl.gz"), table=table, grid=grid_of(table), studies={"one": studies, "<b>two": studies[:1]}
    )


def test_target_counts_as_reached_once_the_search_stays_above_it():
    assert reached(study(0.2, 0.96, 0.97).steps, 0.95).trials == 1
    assert reached(study(0.2, 0.99, 0.94, 0.99).steps, 0.95).trials == 3, "a later fall below the target counts"
    assert reached(study(0.2, 0.99, 0.5).steps, 0.95) is None


def test_choice_of_the_finals_counts_from_the_end_of_their_trials():
    mended = study(0.2, 0.5)
    mended.choice = Step(trials=7, seconds=90.0, fraction=0.97)
    assert reached(mended.path, 0.95).trials == 7
    assert [at_trials(mended.path, n) for n in (1, 6, 7)] == [0.5, 0.5, 0.97]
    spoilt = study(0.2, 0.96)
    spoilt.choice = Step(trials=7, seconds=90.0, fraction=0.9)
    assert reached(spoilt.path, 0.95) is None


def test_fraction_between_two_trials_is_that_of_the_earlier_one():
    steps = study(0.2, 0.5, 0.9).steps
    assert [at_trials(steps, n) for n in (0, 1, 2, 40)] == [0.2, 0.5, 0.9, 0.9]
    assert [at_seconds(steps, s) for s in (5, 10, 19.9, 20, 99)] == [0.0, 0.2, 0.2, 0.5, 0.9]


def test_figures_summarise_the_studies_of_a_strategy(result):
    found = figures([result])["tables"][0]["strategies"]["one"]
    assert found["at_trials"]["10"]["median"] == 0.97
    assert found["to"]["0.95"] == {
        "reached_frac": pytest.approx(2 / 3), "trials": {"median": 3, "p90": None}, "seconds": {"median": 40, "p90": None},
    }  # fmt: skip
    assert found["out_of_memory_frac"]["10"] == pytest.approx(2 / 9)
    assert found["calibration"] == {
        "claims": 2, "overstated_frac": pytest.approx(0.02), "truth_inside_frac": 1.0,
        "verifiable": 2, "verified": 1, "verified_frac": 0.5, "no_longer_holds_frac": 0.5,
    }  # fmt: skip


def test_figures_of_a_table_match_its_formula(result):
    found = figures([result])["tables"][0]
    assert found["optimum"]["changed"] == BEST
    assert found["optimum"]["value"] == pytest.approx(rate_of(BEST))
    assert found["optimum"]["over_baseline"] == pytest.approx(rate_of(BEST) / rate_of(REFERENCE))
    assert found["seconds_per_trial"] == pytest.approx((30 * OK_S + 6 * OOM_S) / 36)
    assert found["memory"] == {"out_of_memory": 6, "optimum_frac": pytest.approx(1.28 / 1.5), "is_near_cap": True}
    assert found["spread_frac"] == pytest.approx(0.0, abs=1e-12)


def test_value_of_ten_random_trials_matches_the_exact_median():
    groups = make_table(has_oom=False).by_configuration()
    rates = sorted(group[0].value for key, group in groups.items() if key)
    # The best of ten draws is at most rates[k] if all ten are. The median is at the first k where this has probability 1/2.
    size = len(rates)
    below = [math.comb(k + 1, 10) / math.comb(size, 10) for k in range(size)]
    median = next(rates[k] for k in range(size) if below[k] >= 0.5)
    assert random_after_ten(groups) == pytest.approx(median / rates[-1])


def test_summary_of_all_tables_names_the_worst_table(result):
    found = figures([result, result])
    assert found["strategies"]["one"]["studies"] == 6
    assert found["strategies"]["one"]["worst_table"] == {"table": "formula", "median_at_20": 0.97}
    json.dumps(found, allow_nan=False)
