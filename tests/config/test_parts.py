"""The user's own parts of a recipe are found before anything is trained, or refused by name."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import autotune.config.compose
from autotune.config.compose import compose
from autotune.config.recipe import problems_of_parts
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput
from tests.config.conftest import FACTS


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working directory with a user's module, which leaves a file when it is imported."""
    (tmp_path / "mine.py").write_text(
        "open('imported', 'w').close()\ndef model(): ...\ndef data(root): ...\ndef step(model, batch): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipe_of_user_parts_is_named_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune.config.compose, "problems_of_parts", lambda config: [])
    words = ["model.factory=mine:model", "data.factory=mine:data", "train.step=mine:step"]
    composed = compose(words, command=None, facts=FACTS)
    assert (composed.name, composed.title) == ("mine-model", "mine:model on mine:data")
    assert composed.command.is_recipe


def test_all_unusable_parts_are_refused_at_once(mine: Path) -> None:
    words = ["model.factory=mine:modle", "data.factory=mine:data", "train.step=nosuch:step"]
    with pytest.raises(BadInput) as caught:
        compose(words, command=None, facts=FACTS)
    model, data, step = caught.value.problems
    assert model.startswith(f"model.factory: cannot be used, got 'mine:modle' (no 'modle' in {mine}/mine.py; nearest: model)")
    assert "data.factory: cannot be used, got 'mine:data' (it is called as (): missing a required argument: 'root')" in data
    assert step.startswith(f"train.step: cannot be used, got 'nosuch:step' (no module 'nosuch' in {mine} or among")
    assert (mine / "imported").exists()
    assert data.endswith("Allowed: PACKAGE.MODULE:FUNCTION, searched for in the working directory first. Give one that exists.")


def config(python: Path, **parts: str) -> StudyConfig:
    made = StudyConfig()
    made.program.python = str(python)
    made.train.step = parts["step"]
    return made


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that makes a stand-in for an interpreter, from a line of shell."""

    def make(line: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.mark.parametrize(
    "reference", ["mine", "mine:", ":step", "mine.py:step()", "a b:c", "-m:x", "../mine:step", "mine:a:b", ""]
)
def test_invalid_function_reference_starts_no_program(python: Callable[[str], Path], tmp_path: Path, reference: str) -> None:
    found = config(python(f"touch {shlex.quote(str(tmp_path))}/started"), step=reference)
    assert problems_of_parts(found)[0].startswith(f"train.step: not a reference to a function, got {reference!r}. Allowed: ")
    assert not (tmp_path / "started").exists()


def test_module_that_ends_python_on_import_is_reported(python: Callable[[str], Path]) -> None:
    problems = problems_of_parts(config(python("echo 'no licence' >&2; exit 7"), step="mine:step"))
    assert "(importing it ended Python with exit code 7: no licence)" in problems[0]


def test_output_of_an_imported_module_is_ignored(python: Callable[[str], Path]) -> None:
    assert problems_of_parts(config(python("echo 'mine:step is here'; echo warning >&2"), step="mine:step")) == []
