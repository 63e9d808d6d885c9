"""What is known of a recipe before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchvision

from autotune.config.recipe import TORCHVISION, problems_of_recipe
from autotune.config.schema import StudyConfig


def config(**data: object) -> StudyConfig:
    made = StudyConfig()
    made.model.name = "resnet18"
    for key, value in data.items():
        setattr(made.data, key, value)
    return made


def test_the_table_of_names_is_torchvisions() -> None:
    assert set(torchvision.models.list_models(module=torchvision.models)) >= TORCHVISION


def test_a_name_that_is_in_no_table_is_looked_up_where_the_recipe_runs() -> None:
    unknown = config()
    unknown.model.name = "resnet17"
    assert (
        "model.name: no such classifier of torchvision, got 'resnet17'. Did you mean 'resnet1" in problems_of_recipe(unknown)[0]
    )


def test_an_interpreter_that_cannot_answer_leaves_it_to_the_baseline() -> None:
    unknown = config()
    unknown.model.name, unknown.program.python = "resnet17", "/bin/true"
    assert problems_of_recipe(unknown) == []


@pytest.mark.parametrize("place", ["new", "empty", "photos"])
def test_photos_may_lie_anywhere_new(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos" / "china").mkdir(parents=True)
    assert problems_of_recipe(config(name="photos", root=str(tmp_path / place))) == []


def test_a_folder_of_images_at_any_depth_is_taken(tmp_path: Path) -> None:
    (tmp_path / "cats" / "deep" / "down").mkdir(parents=True)
    (tmp_path / "cats" / "deep" / "down" / "1.JPEG").touch()
    (tmp_path / "notes.txt").touch()
    assert problems_of_recipe(config(name="folder", root=str(tmp_path))) == []


def test_folders_that_hold_themselves_end(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "again").symlink_to(".")
    assert problems_of_recipe(config(name="folder", root=str(tmp_path))) == []  # what is that deep is not looked at
