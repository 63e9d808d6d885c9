import dataclasses

import pytest

from autotune.errors import BadInput
from autotune.replay.space import grid_of
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
