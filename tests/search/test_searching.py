"""Whole searches on made-up programs: some follow the model of D, L and memory, others break it."""

import pytest

from tests.search.landscapes import Landscape
from tests.search.searching import search


def reached(landscape, sampler, *, trials, seed=0):
    return search(landscape, f"search.sampler={sampler}", f"study.budget.trials={trials}", seed=seed)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_ten_trials_find_nearly_the_best_of_twenty_four_tpe_trials(is_gpu):
    landscape = Landscape(seed=1, num_cores=16 if is_gpu else 2, is_gpu=is_gpu)
    best = max(reached(landscape, "tpe", trials=24).best_rates())
    assert reached(landscape, "rates", trials=10).best_rates()[-1] > 0.93 * best


def test_search_uses_large_batches_with_at_most_one_out_of_memory_trial():
    searched = reached(Landscape(seed=2, num_cores=8, is_gpu=True, fill_frac=0.9), "rates", trials=14)
    assert searched.num_out_of_memory <= 1
    assert max(trial.knobs["loader.batch_size"] for trial in searched.trials if trial.outcome.may_win) >= 64


@pytest.mark.thorough
def test_search_nearly_matches_tpe_on_programs_that_d_and_l_do_not_explain():
    found = {"rates": 0.0, "tpe": 0.0}
    for seed in range(4):
        landscape = Landscape(seed=seed, num_cores=4, breaks=0.12)
        for sampler in found:
            found[sampler] += reached(landscape, sampler, trials=20, seed=seed).best_rates()[-1] / 4
    assert found["rates"] > 0.9 * found["tpe"]
