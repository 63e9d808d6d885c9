"""One BadInput lists all problems of an input. tests/corpus covers single bad words, files and commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf.errors import OmegaConfBaseException

from autotune.config.compose import compose
from autotune.errors import BadInput

FACTS = {"num_cores": 4, "isa": ["avx2"], "gpus": [], "has_compiler": True}
PYTHON = sys.executable


def test_all_problems_of_one_input_are_in_one_message(refused) -> None:
    problems = refused("loader.batchsize=3", "tiers=exakt", "objective=latency", "search_space=no", "study.name=a/b", "foo")
    assert len(problems) == 6
    assert any("Did you mean 'none'?" in problem for problem in problems)


def test_error_of_omegaconf_is_kept_as_the_cause() -> None:
    with pytest.raises(BadInput) as caught:
        compose(["model=resnet18", "study.seed=x"], command=None, facts=FACTS)
    assert isinstance(caught.value.__cause__, OmegaConfBaseException)
    assert "Integer" in str(caught.value.__cause__)


def test_pin_and_sweep_of_one_key_contradict_each_other(refused) -> None:
    assert "pinned to one value and tuned" in refused("loader.num_workers=1", "loader.num_workers=1,2")[0]
    assert "two domains" in refused("loader.num_workers=0,1", "loader.num_workers=1,2")[0]


def test_pins_without_effect_because_of_another_pin_are_refused(refused) -> None:
    problems = refused("loader.num_workers=0", "loader.prefetch_factor=4", "loader.persistent_workers=true")
    assert len(problems) == 2
    assert "has no effect without workers" in problems[0]


def test_sweep_above_the_tier_bound_is_refused(refused) -> None:
    assert "tier is numerics" in refused("tiers=exact", "precision.amp=off,bf16")[0]


def test_request_without_a_program_is_refused_with_the_list_of_models() -> None:
    with pytest.raises(BadInput, match=r"nothing to tune\. Give model=NAME \(bert_base"):
        compose([], command=None, facts=FACTS)


def test_keys_of_a_recipe_are_refused_with_a_command(refused) -> None:
    problems = refused("model=resnet18", "train.lr=1", "program.python=python3", command=[PYTHON, "-c", "pass"])
    assert [problem.partition(":")[0] for problem in problems] == ["model", "train.lr", "program.python"]


def test_config_folders_and_their_files_must_exist(refused, tmp_path: Path) -> None:
    assert "--config-dir: no such folder" in refused(config_dirs=[tmp_path / "nosuch"])[0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text("# @package _global_\n")
    assert "Did you mean 'best'" in refused("+mine=bets", config_dirs=[tmp_path])[0]


def test_search_space_may_be_nested_but_not_name_a_knob_twice(make, refused, tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("loader:\n  batch_size: [8, 16]\n")
    assert make(f"search_space={path}").space.domains.keys() == {"loader.batch_size"}
    path.write_text("loader:\n  batch_size: [8, 16]\nloader.batch_size: auto\n")
    assert "loader.batch_size: given twice" in refused(f"search_space={path}")[0]


def test_torchvision_prefix_of_a_model_selects_the_source(make) -> None:
    config = make("model=torchvision/resnet34").config
    assert (config.model.source, config.model.name) == ("torchvision", "resnet34")
