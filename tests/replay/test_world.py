"""The repeats of a table that are served to a replayed search, and those held out to judge the search."""

import math
import statistics

import pytest

from autotune.replay.table import key_of
from autotune.replay.world import Use, World, residuals
from tests.replay.tables import BEST, REFERENCE, make_table, rate_of


def world_of(table, seed=0):
    return World(table, table.by_configuration().keys(), seed=seed)


def knobs_of(key):
    return {**REFERENCE, **{name: value for name, (_, value) in key}}


def test_one_repeat_of_a_configuration_is_held_out_and_never_served():
    table = make_table(noise_frac=0.05)
    world, key = world_of(table), key_of(BEST)
    recorded = [one.value for one in table.by_configuration()[key]]
    served = {world.serve(key).value for _ in range(2)}
    (held,) = set(recorded) - served
    assert world.held_out(key) == held
    assert all(world.serve(key).value not in recorded for _ in range(20)), "simulated repeats follow"
    assert world.held_out(key) == held


def test_held_out_repeat_is_random_and_reproducible_by_seed():
    table, key = make_table(noise_frac=0.05), key_of(BEST)
    held = [world_of(table, seed).held_out(key) for seed in range(30)]
    assert len(set(held)) == 3
    assert held == [world_of(table, seed).held_out(key) for seed in range(30)]


def test_truth_excludes_only_repeats_served_for_the_given_uses():
    table, key = make_table(noise_frac=0.05), key_of(BEST)
    world = world_of(table)
    recorded = [one.value for one in table.by_configuration()[key]]
    assert world.truth(key) == pytest.approx(statistics.mean(recorded))
    lucky = world.serve(key).value
    others = [value for value in recorded if value != lucky]
    assert world.truth(key, Use.search) == pytest.approx(statistics.mean(others))
    world.serves = Use.choice
    served = world.serve(key).value
    world.serves = Use.report
    world.serve(key)
    assert world.truth(key, Use.search) == pytest.approx(statistics.mean(others))
    rest = [value for value in others if value != served]
    assert world.truth(key, Use.search, Use.choice) == pytest.approx(statistics.mean(rest))


def test_served_repeats_overestimate_the_winner_and_unserved_ones_do_not():
    best_served, best_true = [], []
    for seed in range(40):
        table = make_table(noise_frac=0.1, seed=seed, has_oom=False)
        world = world_of(table, seed)
        served = {key: world.serve(key).value for key in table.by_configuration()}
        picked = max(served, key=served.get)
        top = rate_of(knobs_of(picked))
        best_served.append(served[picked] / top)
        best_true.append(world.truth(picked, Use.search) / rate_of(knobs_of(picked)))
    assert statistics.mean(best_served) > 1.05
    assert abs(statistics.mean(best_true) - 1) < 0.03


def test_residuals_have_the_spread_of_the_recorded_noise():
    table = make_table(noise_frac=0.05, has_oom=False)
    found = residuals(table.by_configuration().values())
    assert len(found) == 36 * 3
    assert statistics.pstdev(found) == pytest.approx(0.05, rel=0.2)


def test_simulated_repeats_have_the_mean_of_served_and_spread_of_recorded_repeats():
    table, key = make_table(noise_frac=0.05), key_of(BEST)
    world = world_of(table)
    served = [world.serve(key).value for _ in range(2)]
    logs = [math.log(world.serve(key).value) for _ in range(400)]
    assert statistics.mean(logs) == pytest.approx(statistics.mean(map(math.log, served)), abs=0.01)
    assert statistics.stdev(logs) == pytest.approx(0.05, rel=0.25)


def test_unrecorded_configuration_is_not_served():
    assert world_of(make_table()).serve(key_of({"loader.batch_size": 7})) is None


def test_change_is_needless_if_the_configuration_is_as_fast_without_it():
    table = make_table()
    world = world_of(table)
    assert world.needless(BEST) == []
    slow_loader = {"loader.num_workers": 1, "precision.amp": "bf16", "layout.channels_last": True}
    without = {key: rate_of({**REFERENCE, **slow_loader, key: REFERENCE[key]}) for key in slow_loader}
    assert without["layout.channels_last"] > 0.99 * rate_of({**REFERENCE, **slow_loader}) > without["precision.amp"]
    assert world.needless(slow_loader) == ["layout.channels_last"]
