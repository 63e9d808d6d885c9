"""The schema: documented, one node per knob group, generated from the catalogue."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from omegaconf import OmegaConf

from autotune.config import schema
from autotune.config.keys import LEAVES
from autotune.config.schema import StudyConfig
from autotune.knobs.catalogue import CATALOGUE

CLASSES = [member for _, member in inspect.getmembers(schema, dataclasses.is_dataclass) if member.__module__ == schema.__name__]


def test_every_knob_has_a_key_and_every_group_a_node() -> None:
    assert set(CATALOGUE) <= set(LEAVES)
    config = StudyConfig()
    for key in CATALOGUE:
        group, _, name = key.partition(".")
        assert getattr(getattr(config, group), name) is None


@pytest.mark.parametrize("found", [c for c in CLASSES if not c.__name__.endswith("Pins")], ids=lambda c: c.__name__)
def test_every_field_is_documented(found: type) -> None:
    for field in dataclasses.fields(found):
        assert f"\n    {field.name}: " in str(inspect.getdoc(found))


def test_schema_survives_a_round_trip_through_omegaconf() -> None:
    assert OmegaConf.to_object(OmegaConf.structured(StudyConfig)) == StudyConfig()


def test_finals_are_measured_more_tightly_than_screening() -> None:
    measure = StudyConfig().measure
    assert measure.finals.half_width_frac < measure.screening.half_width_frac
