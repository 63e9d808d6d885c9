"""Secrets are removed from a compressed trace when the tuner collects it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import Unreadable
from autotune.explain.trace import read_trace
from autotune.masking import Secrets
from autotune.monitors import sealing
from autotune.monitors.sealing import seal
from tests.explain.kineto import Kineto

SECRET = "0123456789abc"
SECRETS = Secrets([SECRET])


def traced(*, name: str = "aten::mm", path: str = "/home/me/train.py", argument: str = "") -> Kineto:
    made = Kineto(device="")
    made.document["traceName"] = path
    made.step(1, 0, 10)
    made.operator("aten::add", 1, 2, [[4, 8], []], ["float", "Scalar"])
    made.add("user_annotation", name, 3, 1, **{"Concrete Inputs": ["[1, 1]", argument]})
    return made


def sealed(made: Kineto, folder: Path) -> dict[str, Any]:
    path = made.write(folder / "trace.rank0.json.gz")
    seal(folder, SECRETS)
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def test_names_paths_and_arguments_are_masked_and_the_rest_stays(tmp_path: Path) -> None:
    given = {"name": 'login "€"\n {}', "path": "/data/{}/x.py", "argument": "--password hunter2 {}"}
    made = traced(**{key: text.format(SECRET) for key, text in given.items()})
    found = sealed(made, tmp_path)
    masked = {**given, "argument": "--password *** {}"}
    assert found == traced(**{key: text.format("***") for key, text in masked.items()}).document
    assert [path.name for path in tmp_path.iterdir()] == ["trace.rank0.json.gz"]


def test_a_trace_without_secrets_is_not_written_again(tmp_path: Path) -> None:
    path = traced().write(tmp_path / "trace.rank0.json.gz")
    before = path.stat().st_ino
    seal(tmp_path, SECRETS)
    assert path.stat().st_ino == before


def test_a_trace_that_is_cut_short_is_masked_as_far_as_it_goes(tmp_path: Path) -> None:
    made = traced()
    for number in range(2_000):
        made.add("user_annotation", f"{SECRET} {number}", number, 1)
    path = made.write(tmp_path / "trace.rank0.json.gz")
    path.write_bytes(path.read_bytes()[:-2_000])
    seal(tmp_path, SECRETS)
    text = gzip.decompress(path.read_bytes()).decode()
    assert "*** 7" in text
    assert SECRET not in text
    with pytest.raises(Unreadable, match="cut short"):
        read_trace(path)


def test_a_trace_may_be_cut_short_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "trace.rank0.json.gz"
    text = gzip.decompress(traced(name=f'a "{SECRET}" \\', argument=SECRET).write(path).read_bytes())

    def masked(length: int) -> str:
        path.write_bytes(gzip.compress(text[:length], 1))
        seal(tmp_path, SECRETS)
        return gzip.decompress(path.read_bytes()).decode()

    whole = masked(len(text))
    assert SECRET not in whole
    lengths = [len(masked(length)) for length in range(len(text)) if whole.startswith(masked(length))]
    assert len(lengths) == len(text)
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    "content",
    [SECRET.encode(), gzip.compress(SECRET.encode()), gzip.compress(f'{{"a": {SECRET} b}}'.encode()), b""],
    ids=["text", "compressed text", "no JSON", "nothing"],
)
def test_file_that_is_not_a_trace_is_emptied(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.rank0.json.gz"
    path.write_bytes(content)
    seal(tmp_path, SECRETS)
    assert gzip.decompress(path.read_bytes()) == b""


def test_a_trace_that_is_too_large_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "BLOCK_BYTES", 64)
    monkeypatch.setattr(sealing, "MAX_TEXT_BYTES", 200)
    path = traced(name=SECRET).write(tmp_path / "trace.rank0.json.gz")
    seal(tmp_path, SECRETS)
    assert 150 < len(gzip.decompress(path.read_bytes())) <= 256


def test_unfinished_trace_files_are_removed(tmp_path: Path) -> None:
    for name in ("unfinished.trace.rank0.json.gz", "trace.rank0.json.gz.77.tmp"):
        (tmp_path / name).write_bytes(gzip.compress(SECRET.encode()))
    seal(tmp_path, SECRETS)
    assert not list(tmp_path.iterdir())
