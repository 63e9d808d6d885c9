"""Determines the search space of a replay: a part of a table that was recorded completely."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import BadInput
from autotune.harness.protocol import RankResult
from autotune.knobs.environment import PREFIX
from autotune.knobs.step import ACCUMULATION
from autotune.machine import host_context
from autotune.records import KnobValue
from autotune.replay.results import ended_of
from autotune.replay.table import Key, Table, key_of
from autotune.space import Choice, Domain, ResolvedSpace, SearchSpace, domain_from_json, resolve
from autotune.study.design import MAX_GRID_POINTS, MIN_CONFIGURATIONS, recorded_values

Levels = dict[str, tuple[KnobValue, ...]]  # knob -> its values in the grid


@dataclass(kw_only=True)
class Grid:
    """The part of a table that is recorded completely: its search space, and the keys of its configurations."""

    space: SearchSpace
    keys: frozenset[Key]


def grid_of(table: Table) -> Grid:
    """Finds a large part of a table's space in which every configuration was recorded.

    For a complete recording this is the whole space. For a sample or an interrupted recording, values are removed one by one
    until no configuration is missing. The value with the largest share of missing configurations is removed first. While the
    grid has more than MAX_GRID_POINTS points, missing configurations are not counted. The value with the fewest recorded
    configurations is then removed first.

    Raises:
        BadInput: the remaining part is too small to search.
    """
    recorded, space = set(table.by_configuration()), _resolved(table)
    levels = {key: _values(table, key) for key in table.space}
    while math.prod(map(len, levels.values())) > MAX_GRID_POINTS:  # a list of more points could fill the memory
        levels = _without_rarest(table, levels)
    while holes := [point for point in itertools.product(*levels.values()) if _key(space, levels, point) not in recorded]:
        levels = _without_worst(table, levels, holes)
    keys = frozenset(_key(space, levels, point) for point in itertools.product(*levels.values()))
    if len(keys) < MIN_CONFIGURATIONS:
        is_large = len(recorded) >= MIN_CONFIGURATIONS
        do = "it to the end, or record a smaller space" if is_large else f"at least {MIN_CONFIGURATIONS}"
        raise BadInput(
            f"TABLE: {table.workload!r} has {len(recorded)} configurations and only {len(keys)} of them make a complete grid, "
            f"too few to search. Record {do}."
        )
    domains: dict[str, Domain | None] = {key: Choice(values) for key, values in levels.items() if len(values) > 1}
    is_held = table.settings.get("train.global_batch") is not None
    return Grid(space=SearchSpace(domains=domains, pinned=table.pinned, is_held=is_held), keys=keys)


def _values(table: Table, key: str) -> tuple[KnobValue, ...]:
    """Returns the values of a knob that occur in the table, in the order of its domain."""
    domain = domain_from_json(table.space[key])
    assert domain is not None
    there = {_typed(one.changed.get(key, table.reference[key])) for one in table.measurements}
    return tuple(value for value in recorded_values(domain, table.reference[key]) if _typed(value) in there)


def _typed(value: KnobValue) -> tuple[str, KnobValue]:
    return type(value).__name__, value


def _without_rarest(table: Table, levels: Levels) -> Levels:
    """Returns the levels without the value that occurs in the fewest recorded configurations."""
    count, names = Counter(change for key in table.by_configuration() for change in key), list(levels)
    return _without_largest(table, levels, lambda place, value: -count[names[place], _typed(value)])


def _without_worst(table: Table, levels: Levels, holes: list[tuple[KnobValue, ...]]) -> Levels:
    """Returns the levels without the value that has the largest share of missing configurations."""
    lengths = [len(values) for values in levels.values()]

    def share(place: int, value: KnobValue) -> float:
        return sum(hole[place] == value for hole in holes) * lengths[place] / math.prod(lengths)

    return _without_largest(table, levels, share)


def _without_largest(table: Table, levels: Levels, of: Callable[[int, KnobValue], float]) -> Levels:
    """Returns the levels without the value for which `of`, called with the knob's place and a value, is largest.

    The baseline's values stay.
    """
    may_go = [
        (of(place, value), place, value)
        for place, (name, values) in enumerate(levels.items())
        for value in values
        if _typed(value) != _typed(table.reference[name])
    ]
    if not may_go:
        raise BadInput(f"TABLE: {table.workload!r} lacks its baseline. Record it again.")
    _, place, value = max(may_go, key=lambda one: (one[0], one[1], repr(one[2])))
    name = list(levels)[place]
    return {**levels, name: tuple(own for own in levels[name] if _typed(own) != _typed(value))}


def _key(space: ResolvedSpace, levels: Levels, point: tuple[KnobValue, ...]) -> Key:
    """Returns the key of the configuration at a point of the grid, without inactive knobs."""
    return key_of(space.changed(space.active({**space.reference, **dict(zip(levels, point, strict=True))})))


def _resolved(table: Table) -> ResolvedSpace:
    """Returns just enough of a resolved space to compare configurations."""
    held = None
    if table.settings.get("train.global_batch") is not None and isinstance(
        batch := table.reference.get("loader.batch_size"), int
    ):
        held = batch * int(table.reference.get(ACCUMULATION.key, 1))
    return ResolvedSpace(
        domains={}, pinned=table.pinned, baseline=table.baseline, dropped={}, reference=table.reference, held=held
    )


def first_result(table: Table) -> RankResult:
    """Returns rank 0's result of the recorded baseline.

    The environment variables of the recorded baseline count as observed, because they may have other values in the process that
    replays the table.
    """
    first = next(one for one in table.measurements if one.number == 0)
    result = ended_of(first, trial=0, nonce="").results[0]
    variables = {key: value for key, value in table.reference.items() if key.startswith(PREFIX)}
    result.observed = {**result.observed, **variables}
    return result


def resolved(table: Table, grid: Grid) -> ResolvedSpace:
    """Returns the space as a study will resolve it."""
    here = host_context(table.machine, first_result(table), is_recipe=table.is_recipe)
    return resolve(grid.space, here, passed=table.placeholders)
