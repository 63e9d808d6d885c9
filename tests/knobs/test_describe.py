"""`autotune knobs [NAME]`."""

from __future__ import annotations

import pytest

from autotune.errors import BadInput
from autotune.knobs.base import Circumstances
from autotune.knobs.catalogue import CATALOGUE
from autotune.knobs.describe import describe, overview


@pytest.mark.parametrize("key", [*CATALOGUE, "env.LD_PRELOAD"])
def test_every_knob_renders(key: str) -> None:
    text = describe(key, Circumstances(num_cores=2))
    assert text.startswith(f"# {key}\n")
    for part in ("When it helps", "When it hurts", "Start-up cost", "Tier", "Values", "On this machine", f"{key}="):
        assert part in text


def test_the_overview_has_a_row_for_every_knob_and_ends_with_the_environment() -> None:
    rows = overview()
    assert [row.key for row in rows] == [*CATALOGUE, "env.NAME"]
    assert all(row.summary.endswith(".") and row.values and row.tier for row in rows)


def test_an_unknown_name_says_what_was_meant() -> None:
    with pytest.raises(BadInput, match=r"Did you mean 'precision\.amp'"):
        describe("precision.amps")
