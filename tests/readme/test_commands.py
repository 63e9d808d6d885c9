"""README.md's commands are known to .ci/run, and the cheap ones are run here."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import autotune.config.compose
from autotune.config.compose import compose
from tests.readme.commands import KINDS, README, Command, command_for_tests, commands, other_commands

TEXT = README.read_text(encoding="utf-8")
COMMANDS = list(commands(TEXT))
CHEAP = ("knobs", "list", "doctor")


def test_every_fence_of_commands_says_how_it_is_run() -> None:
    assert COMMANDS
    assert {command.kind for command in COMMANDS} <= set(KINDS)


def test_no_command_hides_in_an_unmarked_fence() -> None:
    bodies = TEXT.split("```")[1::2]
    prompts = [
        body for body in bodies if not body.startswith("sh") and any(line.startswith("$ ") for line in body.splitlines())
    ]
    assert prompts == []


def test_two_commands_take_a_newcomer_from_a_clone_to_a_verdict_and_through_the_tests() -> None:
    tests = command_for_tests(TEXT)
    first, *_ = other_commands(TEXT, None)
    assert first.endswith("autotune run model=resnet18")
    for command in (first, tests):
        assert command.startswith("python -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")


def test_a_lowered_budget_reaches_every_run() -> None:
    text = "```sh\nautotune run model=x\nautotune verify x\npython -m pytest\n```\n```sh server\nautotune ui\n```\n"
    lowered = list(other_commands(text, "1"))
    assert lowered[0] == "autotune run study.budget.minutes=1 model=x"
    assert lowered[1] == "autotune verify --rounds 2 --minutes 1 x"
    assert "autotune ui" in lowered[2]


def test_continued_lines_and_comments_are_read_as_a_shell_would() -> None:
    text = "```sh\n# a remark\nautotune run \\\n  model=x  # why\n\n```\n"
    assert list(commands(text)) == [Command("sh", "autotune run    model=x")]


@pytest.mark.parametrize(
    "line",
    [c.line for c in COMMANDS if c.kind == "sh" and c.line.split()[:1] == ["autotune"] and c.line.split()[1] in CHEAP],
)
def test_cheap_commands_run(line: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    command = [sys.executable, "-m", "autotune", *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SECTION = TEXT.partition("## Models and data\n")[2].partition("\n## ")[0]


def test_the_recipes_named_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed, not run: what each trains is run in tests/programs."""
    (tmp_path / "images" / "cats").mkdir(parents=True)
    (tmp_path / "images" / "cats" / "1.png").touch()
    (tmp_path / "timm.py").write_text("def list_models(): return ['convnextv2_tiny']\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(autotune.config.compose, "problems_of_parts", lambda config: [])  # tests/config/test_parts.py
    monkeypatch.chdir(tmp_path)
    lines = [command.line for command in commands(SECTION)]
    assert len(lines) == 10
    for line in lines:
        _, run, *words = shlex.split(line)
        assert run == "run"
        assert compose(words, command=None, facts={"num_cores": 2, "gpus": []}).command.is_recipe


def test_commands_for_the_readers_own_files_name_subcommands_that_exist() -> None:
    done = subprocess.run([sys.executable, "-m", "autotune", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        words = command.line.split()
        if words[0].endswith("autotune"):
            assert words[1] in done.stdout, command.line
