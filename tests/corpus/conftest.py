"""Fixtures for the corpus of bad inputs: a folder with the files that they name, and a function that checks a refusal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import autotune.study
from autotune.cli.main import main

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn")
MARKER = "def touch(*_):\n    open('marker', 'w').close()\n\nclass Touch:\n    __init__ = touch\n\ntouch()\n"
STUB = "#!/bin/sh\ntouch marker\n"  # leaves a file when it is run
CLAIM = """# @package _global_
precision: {amp: bf16}
provenance: {speedup: {ratio: 1.5, ci: [1.4, 1.6]}, program: {command: [python, train.py, --epochs, "90"]}}
"""
FILES = {
    "train.py": ("raise SystemExit\n", 0o644),
    "plain.sh": (STUB, 0o644),
    "notes.txt": ("hello\n", 0o644),
    "headless": ("touch marker\n", 0o755),
    "nothing": ("", 0o755),
    "homeless": ("#!/nosuch/python\n", 0o755),
    "crlf.sh": ("#!/usr/bin/env bash\r\ntouch marker\r\n", 0o755),
    "marker.py": (MARKER, 0o644),
    "marker.sh": (STUB, 0o755),
    "mine/best.yaml": ("# @package _global_\n", 0o644),
    "claim.yaml": (CLAIM, 0o644),
    "no_images/cats/readme.txt": ("", 0o644),
    "images/cats/1.JPG": ("", 0o644),
    "images/dogs/deep/2.png": ("", 0o644),
    "bin/python": (STUB, 0o755),
    "bin/torchrun": (STUB, 0o755),
    "bin/accelerate": (STUB, 0o755),
}
_started: list[str] | None = None  # programs that a command line started; None while starts are not recorded


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in STARTS:
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_listen)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory, with scripts, image folders, and programs that create the file `marker`."""
    for name, (text, mode) in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        path.chmod(mode)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that an import of `marker` would work and be noticed
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("SURELY_NOT_SET", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(autotune.study, "run_study", _no_study)
    return tmp_path


def _no_study(*_: Any) -> None:
    raise AssertionError("a study was started")


@pytest.fixture
def refused(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Returns a function that runs a command line and returns the messages with which it was refused.

    The function fails if anything was started, written, or printed besides the messages.
    """

    def _refused(*words: str) -> list[str]:
        before = _tree(place)
        with _Listening() as started:
            code = main(list(words))
        said = capsys.readouterr()
        assert code == 2, (code, said)
        assert started == []
        assert _tree(place) == before
        assert said.out == ""
        messages = said.err.removesuffix("\n").split("\n")
        for message in messages:
            assert "Traceback" not in message
            assert message.isprintable(), message
            # autotune: <key>: <what is wrong>, got <value>. <What is allowed.> <What to do.>
            assert re.fullmatch(r"autotune: .+: .+\. .+[.`]", message), message
        return messages

    return _refused


class _Listening:
    def __enter__(self) -> list[str]:
        global _started
        _started = []
        return _started

    def __exit__(self, *_: object) -> None:
        global _started
        _started = None


def _tree(folder: Path) -> Iterator[str] | list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)
