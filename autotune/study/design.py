"""Chooses the configurations that a recording measures: the whole search space if it is small enough, else a sample.

A sample must contain what samplers are likely to propose: the baseline, the expert's initial configurations, and points that
differ from one of these in a single knob. Random points cover the rest of the space.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import knob
from autotune.records import Knobs, KnobValue
from autotune.search.samplers import grid_levels
from autotune.space import Domain, ResolvedSpace
from autotune.trials.configurations import ConfigurationKey, configuration_key

# The product of all values is listed only up to this many points. Points that differ only in inactive knobs count separately.
MAX_GRID_POINTS = 100_000
MIN_CONFIGURATIONS = 4  # fewer leave a replay nothing to search
NEIGHBOUR_FRAC = 2 / 3  # share of a sample that is not random: initial configurations and points one knob away
MAX_DRAWS = 200  # after this many random draws in a row without a new configuration, the space counts as exhausted


def configurations(space: ResolvedSpace, host_context: HostContext | None, *, most: int, seed: int) -> tuple[list[Knobs], bool]:
    """Returns the configurations to record, the baseline first, and whether they are the whole space.

    Args:
        space: the search space.
        host_context: machine and program, for the expert's initial configurations; None to leave these out.
        most: upper limit for the number of configurations.
        seed: random seed of the sample.
    """
    whole = _grid(space, most)
    if whole is not None:
        return whole, True
    rng, found = random.Random(seed), dict[ConfigurationKey, Knobs]()
    seeds = [space.baseline, *(knobs for _, knobs in space.seeds(host_context))] if host_context else [space.baseline]
    for knobs in seeds[:most]:
        _add(found, space, knobs)
    near = [knobs for centre in seeds for knobs in _neighbours(space, centre)]
    rng.shuffle(near)
    num_near = round(NEIGHBOUR_FRAC * most)
    for knobs in near:
        if len(found) >= num_near:
            break
        _add(found, space, knobs)
    num_vain = 0
    while len(found) < most and num_vain < MAX_DRAWS:
        drawn = {key: rng.choice(values) for key, values in levels(space).items()}
        num_vain = 0 if _add(found, space, space.active({**space.reference, **drawn})) else num_vain + 1
    return list(found.values())[:most], False


def _add(found: dict[ConfigurationKey, Knobs], space: ResolvedSpace, knobs: Knobs) -> bool:
    """Adds a configuration if it is new; returns whether it was."""
    num_before = len(found)
    found.setdefault(configuration_key(space.changed(knobs)), knobs)
    return len(found) > num_before


def levels(space: ResolvedSpace) -> dict[str, list[KnobValue]]:
    """Returns {knob key: values to record}: every choice, every integer, or doublings if the scale is logarithmic."""
    return {key: recorded_values(domain, space.reference[key]) for key, domain in space.domains.items()}


def recorded_values(domain: Domain, own: KnobValue) -> list[KnobValue]:
    """Returns the values of a domain to record. They include `own`, the baseline's value, if the domain contains it."""
    values = grid_levels(domain.distribution())
    return values if own in values or not domain.contains(own) else sorted([*values, own], key=float)


def _grid(space: ResolvedSpace, most: int) -> list[Knobs] | None:
    """Returns every configuration; None if there are more than `most`, or too many points to list them."""
    listed = levels(space)
    found: dict[ConfigurationKey, Knobs] = {}
    _add(found, space, space.baseline)
    points = itertools.product(*listed.values())
    for point in itertools.islice(points, MAX_GRID_POINTS):
        _add(found, space, space.active({**space.reference, **dict(zip(listed, point, strict=True))}))
        if len(found) > most:
            return None
    return None if next(points, None) is not None else list(found.values())


def _neighbours(space: ResolvedSpace, centre: Knobs) -> Iterator[Knobs]:
    full = {**space.reference, **centre}
    for key, values in levels(space).items():
        if knob(key).is_active(full):
            yield from (space.active({**full, key: value}) for value in values)
