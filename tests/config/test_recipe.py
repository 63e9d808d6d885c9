"""Checks of a recipe before it starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from autotune.config.locate import program
from autotune.config.recipe import EVERYWHERE, MODELS, SCRIPTS, TORCHVISION, problems_of_recipe, tokens_per_sample, words_of
from autotune.config.schema import StudyConfig

GPT2: dict[str, object] = {"model.name": "gpt2_small", "model.source": "transformers", "data.name": "text"}
TIMM: dict[str, object] = {"model.name": "vit_tinny", "model.source": "timm"}


def with_keys(keys: dict[str, object]) -> StudyConfig:
    made = config()
    for key, value in keys.items():
        *groups, last = key.split(".")
        owner: object = made
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, last, value)
    return made


def config(**data: object) -> StudyConfig:
    made = StudyConfig()
    made.model.name = "resnet18"
    for key, value in data.items():
        setattr(made.data, key, value)
    return made


def test_every_name_in_the_table_exists_in_torchvision() -> None:
    import torchvision  # not at the top: every worker of pytest would import it

    assert set(torchvision.models.list_models(module=torchvision.models)) >= TORCHVISION


@pytest.mark.thorough
def test_name_in_no_table_is_looked_up_by_the_interpreter_of_the_recipe() -> None:
    unknown = config()
    unknown.model.name = "resnet17"
    assert (
        "model.name: no such classifier of torchvision, got 'resnet17'. Did you mean 'resnet1" in problems_of_recipe(unknown)[0]
    )


def test_model_name_is_not_refused_if_the_interpreter_gives_no_answer() -> None:
    unknown = config()
    unknown.model.name, unknown.program.python = "resnet17", "/bin/true"
    assert problems_of_recipe(unknown) == []


@pytest.mark.parametrize("place", ["new", "empty", "photos"])
def test_photos_folder_may_be_new_empty_or_already_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos" / "china").mkdir(parents=True)
    assert problems_of_recipe(config(name="photos", root=str(tmp_path / place))) == []


def test_folder_with_nested_images_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "cats" / "deep" / "down").mkdir(parents=True)
    (tmp_path / "cats" / "deep" / "down" / "1.JPEG").touch()
    (tmp_path / "notes.txt").touch()
    assert problems_of_recipe(config(name="folder", root=str(tmp_path))) == []


@pytest.mark.parametrize("source", ["torchvision", "timm", "transformers", "builtin"])
def test_script_accepts_every_flag_that_it_may_be_given(source: str) -> None:
    script = SCRIPTS[source]
    text = program(script.name).read_text() + program("recipe_parts.py").read_text()
    for flag in {**script.flags, **EVERYWHERE}:
        assert f'add_argument("{flag}"' in text
    for name in script.data:
        assert f'"{name}"' in text
    for name in MODELS.get(source, ()):
        assert f'"{name}"' in text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**GPT2, "model.name": "gpt3"}, "model.name: no such model of transformers, got 'gpt3'."),
        ({"model.name": "gpt2_small", "model.source": "transformers"}, "data.name: gpt2_small cannot train on this data"),
        (
            {**GPT2, "model.hidden_size": 101},
            "model.hidden_size: the width, 101, must be a multiple of 2, twice the number of attention heads (1, one ",
        ),
        (
            {**GPT2, "model.num_heads": 7},
            "model.num_heads: the width, 768, must be a multiple of 14, twice the number of attention heads, got 7.",
        ),
        ({**GPT2, "model.image_size": 32}, "model.image_size: has no effect with gpt2_small on text, got 32."),
        ({**GPT2, "data.root": "/no/such"}, "data.root: no folder with text in it, got '/no/such'."),
        ({"data.factory": "my:data", "data.root": "/tmp"}, "data.root: has no effect with data.factory, got '/tmp'."),
    ],
)
def test_incompatible_recipe_settings_are_refused(keys: dict[str, object], message: str) -> None:
    assert problems_of_recipe(with_keys(keys))[0].startswith(message)


def test_interpreter_without_transformers_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")  # stands for an interpreter without the package
    bare.chmod(0o755)
    said = f"model.source: transformers is not installed where the recipe runs, got 'transformers'. Install it: {bare} -m pip"
    assert problems_of_recipe(with_keys({**GPT2, "program.python": str(bare)}))[0].startswith(said)


def test_message_about_missing_timm_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "nowhere"))
    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed here")
    said = "model.source: timm is not installed where the recipe runs, got 'timm'. Install it: "
    assert problems_of_recipe(with_keys(TIMM)) == [f"{said}{sys.executable} -m pip install timm"]


def test_a_name_of_timm_is_looked_up_in_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("def list_models(): return ['convnext_nano', 'vit_tiny']\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert problems_of_recipe(with_keys({**TIMM, "model.name": "vit_tiny"})) == []
    assert "no such classifier of timm, got 'vit_tinny'. Did you mean 'vit_tiny'?" in problems_of_recipe(with_keys(TIMM))[0]


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        (GPT2, 512),
        ({**GPT2, "data.name": "synthetic", "data.sequence_length": 64}, 64),
        ({**GPT2, "objective": ["throughput", "time_for_samples"]}, None),
        ({**GPT2, "data.factory": "my:data"}, None),
        ({"model.name": None, "model.factory": "my:model", "data.name": "text"}, 512),
        ({"model.name": "resnet18"}, None),
        ({"model.name": None}, None),
    ],
)
def test_text_is_counted_in_tokens(keys: dict[str, object], tokens: int | None) -> None:
    assert tokens_per_sample(with_keys(keys)) == tokens


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model.factory": "m:f"}, ["--base", "vision.py", "--model-factory", "m:f", "--num-classes"]),
        ({"model.factory": "m:f", "data.name": "text"}, ["--base", "text.py", "--model-factory", "m:f", "--data", "text"]),
        (
            {"model.factory": "m:f", "data.factory": "m:d"},
            ["--base", "tabular.py", "--model-factory", "m:f", "--data-factory", "m:d"],
        ),
        ({**GPT2, "data.factory": "m:d"}, ["--base", "text.py", "--data-factory", "m:d", "--model", "gpt2_small"]),
        ({"model.name": "resnet18", "train.step": "m:s"}, ["--base", "vision.py", "--step", "m:s", "--model", "resnet18"]),
    ],
)
def test_parts_that_the_user_does_not_give_come_from_the_matching_script(keys: dict[str, object], words: list[str]) -> None:
    found = words_of(with_keys({"model.name": None, **keys}))
    assert Path(found[0]).name == "custom.py"
    assert found[1 : len(words) + 1] == words
    assert ("--data" in found) == ("data.factory" not in keys)


def test_search_for_images_ends_in_a_folder_that_contains_itself(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "again").symlink_to(".")
    # Folders too deep for the search count as having an image.
    assert problems_of_recipe(config(name="folder", root=str(tmp_path))) == []
