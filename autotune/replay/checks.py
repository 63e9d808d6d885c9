"""Checks a table before a replay, so that a damaged file leads to an error message instead of a crash."""

from __future__ import annotations

from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from autotune.errors import BadInput
from autotune.harness.protocol import KnobReport, RankResult, Spec, Window
from autotune.knobs.catalogue import is_knob, knob
from autotune.launchers.base import Ended
from autotune.machine import comparable
from autotune.plain_json import MAX_INT, from_json
from autotune.plain_text import one_line
from autotune.replay.results import ended_of
from autotune.replay.space import Grid, first_result, grid_of, resolved
from autotune.replay.strategies import STRATEGIES
from autotune.replay.study import config_of
from autotune.replay.table import Measurement, Table, key_of, read
from autotune.replay.world import worth
from autotune.space import domain_from_json
from autotune.trials.settings import capacity_bytes

MIN_BYTES = 1 << 20  # a table whose machine has less memory is damaged
# Errors that a damaged table may cause.
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration, OmegaConfBaseException)


def usable(path: Path) -> tuple[Table, Grid]:
    """Returns a table and the part of it that can be searched.

    Raises:
        BadInput: the file cannot be read, is not a table, or lacks what a replay needs.
    """
    table = read(path)
    try:
        _check_header(table)
        for one in table.measurements:
            _check(one)
        grid = grid_of(table)
        resolved(table, grid)
    except DAMAGED as error:
        why = f"no {error}" if isinstance(error, LookupError) else str(error) or "no measurement 0"
        raise BadInput(f"TABLE: cannot be replayed, got {str(path)!r} ({one_line(why, 200)}). Record it again.") from error
    groups, why = table.by_configuration(), ""
    if key_of({}) not in grid.keys:
        why = "its baseline was not measured"
    elif not any(worth(groups[key]) for key in grid.keys):
        why = "every configuration failed in at least half of its repeats"
    if why:
        raise BadInput(f"TABLE: cannot be replayed, got {str(path)!r} ({why}). Record it again.")
    return table, grid


def _check_header(table: Table) -> None:
    first = first_result(table)
    for key, domain in table.space.items():
        if domain_from_json(domain) is None:
            raise ValueError(f"{key} has no values")
        # A replay needs the reference value of each knob in the space; a missing one raises KeyError here. `table.baseline` is
        # not checked: knobs that have no effect are missing there.
        table.reference[key]
    for key, value in [*table.reference.items(), *table.baseline.items(), *first.observed.items()]:
        if is_knob(key) and knob(key).type is int and not isinstance(value, int | None):
            raise TypeError(f"{key} is not a whole number")
    for gpu in table.machine.get("gpus") or []:
        dict(gpu)
    if min(capacity_bytes(table.machine), table.memory_bytes or MIN_BYTES) < MIN_BYTES:
        raise ValueError("no machine has so little memory")
    comparable(table.machine)
    config_of(table, next(iter(STRATEGIES.values())))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < MAX_INT


def _check(measurement: Measurement) -> None:
    """Raises one of DAMAGED if a measurement has values of types that the harness does not write."""
    ended = ended_of(measurement, trial=0, nonce="")
    from_json({**vars(ended), "results": []}, Ended).facts(Spec(trial=0, nonce="", folder=""))
    for result in ended.results:
        comparable(from_json({**vars(result), "window": None, "knobs": {}}, RankResult).facts)
        numbers = {f"memory.{name}": value for name, value in result.memory.items() if name != "kind"}
        numbers |= {f"loss.curve[{at}]": value for at, value in enumerate((result.loss or {}).get("curve") or ())}
        if wrong := [name for name, value in numbers.items() if not (value is None or _is_number(value))]:
            raise TypeError(f"{wrong[0]} is not a number, or is out of range")
        for report in result.knobs.values():
            from_json(vars(report), KnobReport)
        if result.window:
            window = from_json(vars(result.window), Window)
            if not window.rate_per_s > 0:
                raise ValueError(f"measurement {measurement.number} has a window with a rate of {window.rate_per_s}")
            if window.block_s and len(window.block_s) != len(window.block_rates_per_s):
                raise ValueError(f"measurement {measurement.number} has {len(window.block_s)} block lengths, not one per block")
