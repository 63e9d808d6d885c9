"""A damaged table is refused with the reason, before any study is replayed on it."""

from dataclasses import replace

import pytest

from autotune.errors import BadInput
from autotune.records import Outcome
from autotune.replay.checks import usable
from autotune.replay.table import write
from tests.replay.tables import make_table


def _results(table, **changes):
    for one in table.measurements:
        one.results = [{**result, **changes} for result in one.results]


def _without_baseline(table):
    table.measurements = [one for one in table.measurements if one.changed]


DAMAGE = {
    "not a domain, got {'choice': 'x'}": lambda table: table.space.update({"loader.batch_size": {"choice": "x"}}),
    "no 'loader.batch_size'": lambda table: setattr(table, "reference", {}),
    "invalid literal for int": lambda table: setattr(table, "machine", {"memory_bytes": "much"}),
    "object is not iterable": lambda table: setattr(table, "machine", {**table.machine, "isa": 7}),
    "steady": lambda table: setattr(table, "settings", {"steady": {"": 1}}),
    "no measurement 0": _without_baseline,
    "str instead of int": lambda table: _results(table, rank="first"),
    "loader.num_workers is not a whole number": lambda table: table.reference.update({"loader.num_workers": "two"}),
    "loss.curve[1] is not a number": lambda table: _results(table, loss={"curve": [1.0, "x"]}),
    "no machine has so little memory": lambda table: setattr(table, "machine", {**table.machine, "memory_bytes": 0}),
    "memory.peak_bytes is not a number": lambda table: _results(table, memory={"kind": "cpu", "peak_bytes": "much"}),
    "must be a string": lambda table: table.measurements[3].ended["evidence"].update(num_steps=[]),
    "block lengths, not one per block": lambda table: [
        result["window"]["block_s"].pop() for one in table.measurements for result in one.results if "window" in result
    ],
    "has a window with a rate of 0.0": lambda table: [
        result["window"].update(rate_per_s=0.0) for one in table.measurements for result in one.results if "window" in result
    ],
}


@pytest.mark.parametrize("why", DAMAGE)
def test_damaged_table_is_refused_with_its_file_and_the_reason(tmp_path, why):
    table = make_table()
    table.reference, table.space = dict(table.reference), dict(table.space)
    DAMAGE[why](table)
    write(table, tmp_path / "t.jsonl.gz")
    with pytest.raises(BadInput, match=r"TABLE: cannot be replayed, got '.*t\.jsonl\.gz' \(.*Record it again") as refused:
        usable(tmp_path / "t.jsonl.gz")
    assert why in str(refused.value)


def test_a_table_whose_baseline_was_not_measured_is_refused(tmp_path):
    table = make_table()
    table.reference = {**table.reference, "loader.batch_size": 999}
    write(table, tmp_path / "t.jsonl.gz")
    with pytest.raises(BadInput, match="its baseline was not measured"):
        usable(tmp_path / "t.jsonl.gz")


def test_a_table_with_a_knob_that_is_inactive_in_the_baseline_is_usable(tmp_path):
    table, prefetch = make_table(), "loader.prefetch_factor"  # without workers, there is nothing to prefetch
    table.reference = {**table.reference, prefetch: 2}
    table.space = {**table.space, prefetch: {"choice": [2, 4]}}
    with_workers = [one for one in table.measurements if "loader.num_workers" in one.changed]
    for number, one in enumerate(with_workers, len(table.measurements)):
        table.measurements.append(replace(one, number=number, changed={**one.changed, prefetch: 4}))
    write(table, tmp_path / "t.jsonl.gz")
    assert len(usable(tmp_path / "t.jsonl.gz")[1].keys) == 36 + 24


def test_a_table_in_which_nothing_worked_is_refused(tmp_path):
    table = make_table()
    table.measurements = [replace(one, outcome=Outcome.unsteady) if one.value else one for one in table.measurements]
    write(table, tmp_path / "t.jsonl.gz")
    with pytest.raises(BadInput, match="every configuration failed in at least half of its repeats"):
        usable(tmp_path / "t.jsonl.gz")
