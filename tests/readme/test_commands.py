"""Every fence of README.md and docs/ has a known kind, cheap commands run here, and no link is broken."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import autotune.config.compose
from autotune.cli import app
from autotune.config.compose import compose
from autotune.config.domains import keys_of_spaces
from autotune.knobs.describe import page
from tests.readme.commands import KINDS, PAGES, README, ROOT, Command, command_for_tests, commands, other_commands

TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
COMMANDS = list(commands(TEXT))
CHEAP = ("knobs", "list", "doctor")
FOLDERS = ("", "tests/faults", "autotune/search/rates")  # folders of files that a page names without a folder


def test_every_fence_of_commands_has_a_known_kind() -> None:
    assert COMMANDS
    assert CHEAP_LINES
    assert {command.kind for command in COMMANDS} <= set(KINDS)


def test_unmarked_fences_contain_no_commands() -> None:
    bodies = [body for page in PAGES for body in page.read_text(encoding="utf-8").split("```")[1::2]]
    prompts = [body for body in bodies if not body.startswith("sh") and re.search(r"^(\$|autotune) ", body, re.MULTILINE)]
    assert prompts == []


def test_newcomer_needs_one_command_for_a_verdict_and_one_for_the_tests() -> None:
    tests = command_for_tests(TEXT)
    first, *_ = other_commands(TEXT, None)
    assert first.endswith("autotune run model=resnet18")
    for command in (first, tests):
        assert command.startswith("python -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")


def test_a_lowered_budget_reaches_every_run() -> None:
    text = "```sh\nautotune run model=x\nautotune verify x\nautotune explain x\nautotune explain x --trial 0\n"
    text += "python -m pytest\n```\n```sh server\nautotune ui\n```\n"
    lowered = list(other_commands(text, "1"))
    assert lowered[0] == "autotune run study.budget.minutes=1 model=x"
    assert lowered[1] == "autotune verify --rounds 2 --minutes 1 x"
    assert lowered[2] == "autotune explain --passes lines --minutes 1 x"
    assert lowered[3] == "autotune explain --passes lines --minutes 0 x --trial 0"
    assert "autotune ui" in lowered[4]


def test_continued_lines_and_comments_are_read_as_a_shell_would() -> None:
    text = "```sh\n# a remark\nautotune run \\\n  model=x  # why\n\n```\n"
    assert list(commands(text)) == [Command("sh", "autotune run    model=x")]


CHEAP_LINES = [c.line for c in COMMANDS if c.kind == "sh" and c.line.split()[:1] == ["autotune"] and c.line.split()[1] in CHEAP]


@pytest.mark.parametrize("line", CHEAP_LINES)
def test_cheap_commands_run(line: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    command = [sys.executable, "-m", "autotune", *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_every_recipe_in_the_docs_can_be_composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only composes the configurations. tests/programs runs the recipes' programs."""
    (tmp_path / "images" / "cats").mkdir(parents=True)
    (tmp_path / "images" / "cats" / "1.png").touch()
    (tmp_path / "timm.py").write_text("def list_models(): return ['convnextv2_tiny']\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(autotune.config.compose, "problems_of_parts", lambda config: [])  # tests/config/test_parts.py
    monkeypatch.chdir(tmp_path)
    lines = [command.line for command in commands(RECIPES)]
    assert len(lines) == 10
    for line in lines:
        _, run, *words = shlex.split(line)
        assert run == "run"
        assert compose(words, command=None, facts={"num_cores": 2, "gpus": []}).command.is_recipe


def test_all_documented_subcommands_exist() -> None:
    documented = {words[1]: command.line for command in COMMANDS if (words := command.line.split())[0].endswith("autotune")}
    assert len(documented) > 5
    for name, line in documented.items():
        assert name in app.build().commands, line


MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "runs" / "README.md"])


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_every_path_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = {name.rstrip("/") for name in re.findall(r"`((?:autotune|tests|conf|search_spaces|docs)/[\w./*-]+)`", text)}
    modules = set(re.findall(r"`([\w/]+\.py)`", text))
    missing = [name for name in named if not list(ROOT.glob(name))]
    missing += [name for name in modules if not any((ROOT / folder / name).exists() for folder in FOLDERS)]
    assert missing == []


def test_page_of_knobs_matches_the_catalogue() -> None:
    assert (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8") == page(keys_of_spaces()), (
        "autotune knobs --page > docs/knobs.md"
    )


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("CONTRIBUTING.md", 150)])
def test_readme_and_contributing_stay_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most
