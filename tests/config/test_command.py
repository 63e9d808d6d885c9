"""Commands: placeholders filled, scripts and programs checked before anything starts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from autotune.config.command import CommandTemplate, recipe_command, title, user_command
from autotune.config.schema import LaunchOptions, ModelConfig, StudyConfig
from autotune.config.wrapped_commands import program_of
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.masking import Secrets

MACHINE = HostContext(num_cores=4)
PYTHON = sys.executable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "start.sh").touch()
    return tmp_path


def template(folder: Path, *command: str) -> CommandTemplate:
    with contextlib.chdir(folder):
        return user_command(command, MACHINE)


def problems(folder: Path, *command: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        template(folder, *command)
    return caught.value.problems


def test_placeholders_are_filled_from_the_knobs_and_from_the_baseline(folder: Path) -> None:
    found = template(
        folder, PYTHON, "train.py", "--b={loader.batch_size=32}", "-j", "{loader.num_workers}", "{precision.amp=off}"
    )
    assert found.placeholders == {"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off"}
    assert found.argv({})[2:] == ["--b=32", "-j", "0", "off"]
    assert found.argv({"loader.batch_size": 64, "layout.channels_last": True})[2:] == ["--b=64", "-j", "0", "off"]


def test_baseline_value_is_given_once_and_used_everywhere(folder: Path) -> None:
    found = template(folder, PYTHON, "train.py", "{loader.batch_size}/{loader.batch_size=8}")
    assert found.argv({})[2] == "8/8"


@pytest.mark.parametrize(
    ("own", "true", "false"),
    [("true", "true", "false"), ("False", "True", "False"), ("no", "yes", "no"), ("ON", "ON", "OFF"), (None, "True", "False")],
)
def test_truth_values_are_spelled_as_in_the_placeholder(folder: Path, own: str | None, true: str, false: str) -> None:
    word = "{loader.pin_memory}" if own is None else f"{{loader.pin_memory={own}}}"
    found = template(folder, PYTHON, "train.py", word)
    assert [found.argv({"loader.pin_memory": value})[2] for value in (True, False)] == [true, false]
    assert own in (None, found.argv({})[2]), "the baseline is the command as typed"


@pytest.mark.parametrize(
    "text",
    ["{}", '{"a": {"b": 1}}', "{epoch:02d}-{step}.pt", "{0}", "${HOME}", "a{b", "}{", "runs/{model}_{batch_size}"],
)
def test_other_braces_are_passed_to_the_program_unchanged(folder: Path, text: str) -> None:
    assert template(folder, PYTHON, "train.py", text).argv({})[2] == text


def test_a_recipe_in_several_processes_is_started_by_torchrun_without_restarts() -> None:
    config = StudyConfig(model=ModelConfig(name="resnet18"), launch=LaunchOptions(nproc=3))
    alone, found = recipe_command(StudyConfig(model=ModelConfig(name="resnet18"))), recipe_command(config)
    words = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--nproc-per-node=3"]
    assert found.parts == [alone.parts[0], *words, *alone.parts[1:], "--strategy", "{parallel.strategy}"]
    assert (found.argv({})[-1], found.argv({"parallel.strategy": "fsdp"})[-1]) == ("ddp", "fsdp")
    assert program_of(found.parts).name == program_of(alone.parts).name == "vision"
    assert title(found, config, Secrets()) == "resnet18 on photos, 3 processes"


def test_recipe_gets_the_metrics_interval_only_where_it_can_matter() -> None:
    config = StudyConfig(model=ModelConfig(name="resnet18"))
    asked = recipe_command(config, has_cuda=True)
    assert asked.placeholders == {"step.metrics_sync_interval": 10}
    assert asked.argv({"step.metrics_sync_interval": 100})[-2:] == ["--print-every", "100"]
    assert recipe_command(config).placeholders == {}
    assert recipe_command(config, asked=["step.metrics_sync_interval"]).placeholders == asked.placeholders
    config.device.kind = "cpu"
    assert recipe_command(config, has_cuda=True).placeholders == {}
    config.step.metrics_sync_interval = 20
    assert recipe_command(config).argv({"step.metrics_sync_interval": 20})[-1] == "20"


def test_doubled_braces_become_literal_braces(folder: Path) -> None:
    assert (
        template(folder, PYTHON, "train.py", "{{loader.batch_size}}").argv({"loader.batch_size": 1})[2] == "{loader.batch_size}"
    )


@pytest.mark.parametrize(
    "command",
    [
        (PYTHON, "train.py"),
        (PYTHON, "-u", "-X", "dev", "-W", "error", "train.py", "nosuch.py"),
        (PYTHON, "-m", "nosuch.module"),
        (PYTHON, "-c", "print(1)"),
        ("sh", "-c", "exit 0"),
    ],
)
def test_commands_that_can_start_are_accepted(folder: Path, command: tuple[str, ...]) -> None:
    assert template(folder, *command).parts == list(command)


def test_common_starter_that_is_not_installed_is_not_suggested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert problems(folder, "accelerate", "launch", "train.py") == [
        "COMMAND: no such program, got 'accelerate'. Give a program on PATH, or a path to one."
    ]


def test_script_of_a_starter_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = folder / "torchrun"
    starter.write_text("#!/bin/sh\n")
    starter.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    template(folder, "torchrun", "--nproc_per_node=2", "train.py")
    assert "no such script" in problems(folder, "torchrun", "--nproc_per_node=2", "nosuch.py")[0]
