"""Every bad input of the corpus is refused with exit code 2 and a message that names it; nothing is run or written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.launchers.environment import own_environment
from tests.corpus.commands import COMMANDS, OF_STUDY, OPTIONS, WITH_COMMAND
from tests.corpus.documents import FILES, NO_MAPPING, SPACES, TOP, UNREADABLE
from tests.corpus.overrides import OVERRIDES, TOGETHER
from tests.support.rows import more
from tests.support.studies import make_study

Refused = Callable[..., list[str]]
COMMAND = ["--", "python", "train.py"]


def test_the_corpus_is_large() -> None:
    files = 2 * len(UNREADABLE) + 2 * len(NO_MAPPING) + len(FILES) + len(SPACES)
    assert len(OVERRIDES) + len(TOGETHER) + files + len(COMMANDS) + len(WITH_COMMAND) + len(OPTIONS) >= 400


def says(messages: list[str], *parts: str) -> None:
    for part in parts:
        assert any(part in message for message in messages), (part, messages)


@pytest.mark.parametrize(("word", "message"), OVERRIDES, ids=lambda text: ascii(text)[1:40])
def test_bad_overrides_are_refused(refused: Refused, word: str, message: str) -> None:
    messages = refused("run", *([] if word.startswith("model=") else ["model=resnet18"]), word)
    says(messages, message)
    assert len(messages) == 1, messages


@pytest.mark.parametrize(("words", "parts"), TOGETHER, ids=str)
def test_overrides_that_conflict_are_refused(refused: Refused, words: list[str], parts: list[str]) -> None:
    messages = refused("run", *([] if words[0].startswith("model=") else ["model=resnet18"]), *words)
    says(messages, *parts)
    assert len(messages) == len(parts), messages


@pytest.mark.parametrize(("content", "message"), UNREADABLE, ids=lambda value: ascii(value)[:40])
@pytest.mark.parametrize(
    ("name", "words"), [("mine", ["--config-dir", ".", "+mine=bad"]), ("search_space", ["search_space=mine/bad.yaml"])]
)
def test_files_that_are_not_plain_yaml_are_refused(
    refused: Refused, place: Path, name: str, words: list[str], content: bytes, message: str
) -> None:
    (place / "mine" / "bad.yaml").write_bytes(content)
    says(refused("run", *words, *COMMAND), f"{name}: cannot be read, got 'mine/bad.yaml' (", message)


@pytest.mark.parametrize(("content", "message"), UNREADABLE, ids=lambda value: ascii(value)[:40])
def test_best_files_that_are_not_plain_yaml_are_refused(refused: Refused, place: Path, content: bytes, message: str) -> None:
    (place / "bad.yaml").write_bytes(content)
    says(refused("verify", "bad.yaml", *COMMAND), "BEST: cannot be read, got 'bad.yaml' (", message)


CLAIMS = [row for row in FILES if row[0].startswith(TOP) and "provenance" not in row[0]]
# The rest of a claim: a change and its effect. Without it, only what is missing would be reported.
CLAIMED = "threads: {intra: 1}\nprovenance: {speedup: {ratio: 1.5, ci: [1.4, 1.6]}}\n"
SAID_OF_A_CLAIM = {
    "env.A: cannot be resolved": "env.A: a reference, got",
    "study.name: not a plain name, got '../../etc'": "study.name: cannot be part of a claim, got '../../etc'",
    "study.name: not a plain name": "study.name: cannot be part of a claim",
    "study.budget.minutes: too small, got -1": "study.budget.minutes: cannot be part of a claim, got -1",
    "runs_dir: empty": "runs_dir: cannot be part of a claim, got ''",
    "search_space: cannot be read, got '/no/such.yaml'": "search_space: cannot be part of a claim, got '/no/such.yaml'",
}


@pytest.mark.parametrize(("content", "parts"), CLAIMS, ids=lambda value: ascii(value)[22:60])
def test_best_files_with_bad_keys_are_refused(refused: Refused, place: Path, content: str, parts: list[str]) -> None:
    (place / "bad.yaml").write_text(content + CLAIMED, encoding="utf-8")
    says(refused("verify", "bad.yaml", "model=resnet18"), *(SAID_OF_A_CLAIM.get(part, part) for part in parts))


@pytest.mark.parametrize("content", NO_MAPPING, ids=str)
@pytest.mark.parametrize(
    ("name", "words"), [("mine", ["--config-dir", ".", "+mine=bad"]), ("search_space", ["search_space=mine/bad.yaml"])]
)
def test_files_that_contain_no_mapping_are_refused(
    refused: Refused, place: Path, name: str, words: list[str], content: bytes
) -> None:
    (place / "mine" / "bad.yaml").write_bytes(content)
    says(refused("run", *words, *COMMAND), f"{name}: not a mapping", "mine/bad.yaml")


@pytest.mark.parametrize(("content", "parts"), FILES, ids=lambda value: ascii(value)[22:60])
def test_configuration_files_with_bad_keys_are_refused(refused: Refused, place: Path, content: str, parts: list[str]) -> None:
    (place / "mine" / "bad.yaml").write_text(content, encoding="utf-8")
    (place / "mine" / "other.yaml").write_text("# @package _global_\nstudy: {seed: 3}\n", encoding="utf-8")
    messages = refused("run", "--config-dir", ".", "+mine=bad", "model=resnet18")
    says(messages, *parts)


@pytest.mark.parametrize(("content", "parts"), SPACES, ids=lambda value: ascii(value)[:40])
def test_search_spaces_with_bad_domains_are_refused(refused: Refused, place: Path, content: str, parts: list[str]) -> None:
    (place / "space.yaml").write_text(content, encoding="utf-8")
    messages = refused("run", "search_space=./space.yaml", *COMMAND)
    says(messages, *parts)
    assert all("space.yaml" in message for message in messages)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "dangling", "absent", "long", "device", "unreadable"])
@pytest.mark.parametrize("what", ["mine", "search_space"])
def test_paths_that_are_not_readable_files_are_refused(refused: Refused, place: Path, kind: str, what: str) -> None:
    path = place / "mine" / "bad.yaml"
    make = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),  # nothing ever writes to it
        "loop": lambda: path.symlink_to("bad.yaml"),
        "dangling": lambda: path.symlink_to("nosuch"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "unreadable": lambda: path.symlink_to("/proc/self/mem"),  # even for root
    }
    make.get(kind, lambda: None)()
    name = "x" * 300 if kind == "long" else "bad"
    words = ["--config-dir", ".", f"+mine={name}"] if what == "mine" else [f"search_space=mine/{name}.yaml"]
    says(
        refused("run", *words, *COMMAND),
        f"{what}: ",
        f"got '{'mine/' * (kind not in ('absent', 'long') or what != 'mine')}{name[:40]}",
    )


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=lambda value: ascii(value)[:40])
def test_bad_commands_are_refused(refused: Refused, command: list[str], message: str) -> None:
    messages = refused("run", "--", *command)
    says(messages, message)
    assert len(messages) == 1, messages


@pytest.mark.parametrize(("words", "message"), WITH_COMMAND, ids=str)
def test_keys_without_effect_on_a_command_are_refused(refused: Refused, words: list[str], message: str) -> None:
    says(refused("run", *words, *COMMAND), message)


@pytest.mark.parametrize(("words", "message"), OPTIONS, ids=lambda value: ascii(value)[:40])
def test_bad_command_lines_are_refused(refused: Refused, words: list[str], message: str) -> None:
    messages = refused(*words)
    says(messages, message)
    assert max(map(len, messages)) < 2000  # words of thousands of characters are shortened


@pytest.mark.parametrize(("words", "message"), OF_STUDY, ids=lambda value: ascii(value)[:40])
def test_bad_requests_about_a_study_are_refused(refused: Refused, place: Path, words: list[str], message: str) -> None:
    make_study(place / "runs")
    says(refused(*words), message)


def test_error_names_a_damaged_variable_of_autotune(refused: Refused, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_study(place / "runs")
    monkeypatch.setenv("AUTOTUNE_SECRETS", "[")
    says(refused("sync", "resnet18", "--uri", "none"), "AUTOTUNE_SECRETS: not a JSON list of texts, got ***. Unset it")


def test_error_names_a_deleted_working_directory(place: Path) -> None:
    gone = place / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from autotune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    ended = _run("run", *COMMAND, cwd=gone, start=[sys.executable, "-c", code])
    assert "cwd: the folder you are in was deleted" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["run", "model=resnet18", "loader.num_workers=nan"],
        *more(["run", "--config-dir", ".", "+mine=evil", *COMMAND], ["nosuch"]),
        ["run", "--", "python", b"caf\xe9.py"],
    ],
    ids=str,
)
def test_bad_input_is_refused_in_a_new_process(place: Path, words: list[str]) -> None:
    (place / "mine" / "evil.yaml").write_text("!!python/object/apply:marker.touch []\n", encoding="utf-8")
    _run(*words, cwd=place)


def _run(*words: str, cwd: Path, start: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a new process; it must refuse its input."""
    before = {path for path in cwd.iterdir() if path.is_dir()} if cwd.exists() else set()
    ended = subprocess.run(
        [*(start or [sys.executable, "-m", "autotune"]), *words],
        cwd=cwd,
        env={**own_environment(), "PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended
    assert ended.stderr.startswith("autotune: ")
    assert "Traceback" not in ended.stderr
    assert not (cwd / "marker").exists()
    assert not (cwd / "runs").exists()
    assert before == ({path for path in cwd.iterdir() if path.is_dir()} if cwd.exists() else set())
    return ended
