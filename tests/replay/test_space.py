import dataclasses

import pytest

from autotune.errors import BadInput
from autotune.replay.space import grid_of, resolved
from autotune.replay.table import key_of
from tests.replay.tables import BEST, DOMAINS, make_table


def without(table, is_left_out):
    kept = [one for one in table.measurements if one.number == 0 or not is_left_out(one.changed)]
    return dataclasses.replace(table, measurements=kept)


def test_complete_table_gives_the_complete_search_space():
    grid = grid_of(make_table())
    assert len(grid.keys) == 36
    assert {key: list(domain.values) for key, domain in grid.space.domains.items()} == DOMAINS


def test_values_with_missing_combinations_are_left_out():
    table = without(make_table(), lambda changed: changed.get("loader.batch_size") == 8 and "precision.amp" in changed)
    grid = grid_of(table)
    assert list(grid.space.domains["loader.batch_size"].values) == [32, 128]
    assert len(grid.keys) == 24
    assert grid.keys <= set(table.by_configuration())


def test_knob_with_a_single_remaining_value_is_not_searched():
    table = without(make_table(), lambda changed: "layout.channels_last" in changed and changed != BEST)
    grid = grid_of(table)
    assert "layout.channels_last" not in grid.space.domains
    assert key_of(BEST) not in grid.keys
    assert len(grid.keys) == 18


def test_table_of_scattered_points_is_refused():
    with pytest.raises(BadInput, match="too few to search"):
        grid_of(without(make_table(), lambda changed: len(changed) != 4))


def test_advice_for_a_table_of_too_few_configurations_is_to_record_more():
    with pytest.raises(BadInput, match=r"too few to search\. Record at least 4\."):
        grid_of(without(make_table(), lambda changed: changed != BEST))


def test_own_value_between_the_doublings_of_a_range_belongs_to_the_grid():
    """It was left out of the grid, so the table counted as one without a baseline."""
    table, batch = make_table(), "loader.batch_size"
    reference, space = {**table.reference, batch: 48}, {**table.space, batch: {"interval": [8, 128], "log": True}}
    grid = grid_of(dataclasses.replace(table, reference=reference, baseline=reference, space=space))
    assert list(grid.space.domains[batch].values) == [8, 48, 128]
    assert len(grid.keys) == 36


def test_sample_of_a_space_with_countless_points_is_reduced_without_listing_them(monkeypatch):
    monkeypatch.setattr("autotune.replay.space.MAX_GRID_POINTS", 100)  # listing as many as are allowed takes seconds
    table, names = make_table(), [f"env.A{number}" for number in range(40)]
    last = dataclasses.replace(table.measurements[0], number=len(table.measurements), changed=dict.fromkeys(names, "1"))
    space = {**table.space, **{name: {"choice": ["", "1"]} for name in names}}
    reference = {**table.reference, **dict.fromkeys(names, "")}
    measurements = [*table.measurements, last]
    grid = grid_of(dataclasses.replace(table, space=space, reference=reference, measurements=measurements))
    assert grid.space.domains.keys() == DOMAINS.keys()
    assert len(grid.keys) == 36


def test_baseline_has_the_recorded_variables_whatever_the_environment_holds(monkeypatch):
    monkeypatch.setenv("FLAG", "2")
    table, flag = make_table(), "env.FLAG"
    reference, space = {**table.reference, flag: "0"}, {**table.space, flag: {"choice": ["0", "1"]}}
    others = [
        dataclasses.replace(one, number=len(table.measurements) + one.number, changed={**one.changed, flag: "1"})
        for one in table.measurements
    ]
    table = dataclasses.replace(
        table, space=space, reference=reference, baseline=reference, measurements=[*table.measurements, *others]
    )
    space = resolved(table, grid_of(table))
    assert space.reference[flag] == "0"
    assert space.domains[flag].values == ("0", "1")
