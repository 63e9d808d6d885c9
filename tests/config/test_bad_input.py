"""Bad configurations that are not in tests/corpus."""

from __future__ import annotations

import pytest
from omegaconf.errors import OmegaConfBaseException

from autotune.config.compose import compose
from autotune.errors import BadInput
from tests.config.conftest import FACTS


def test_error_of_omegaconf_is_kept_as_the_cause() -> None:
    with pytest.raises(BadInput) as caught:
        compose(["model=resnet18", "study.seed=x"], command=None, facts=FACTS)
    assert isinstance(caught.value.__cause__, OmegaConfBaseException)
    assert "Integer" in str(caught.value.__cause__)


def test_search_space_may_be_nested_but_not_name_a_knob_twice(make, refused, tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("loader:\n  batch_size: [8, 16]\n")
    assert make(f"search_space={path}").space.domains.keys() == {"loader.batch_size"}
    path.write_text("loader:\n  batch_size: [8, 16]\nloader.batch_size: auto\n")
    assert "loader.batch_size: given twice" in refused(f"search_space={path}")[0]


def test_torchvision_prefix_of_a_model_selects_the_source(make) -> None:
    config = make("model=torchvision/resnet34").config
    assert (config.model.source, config.model.name) == ("torchvision", "resnet34")
