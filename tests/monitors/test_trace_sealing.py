"""Secrets are removed from a compressed trace when the tuner collects it."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import Unreadable
from autotune.explain.trace import read_trace
from autotune.masking import Secrets
from autotune.monitors import trace_sealing
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


@pytest.mark.parametrize("block_bytes", [3, 64, 1 << 20])
def test_names_paths_and_arguments_are_masked_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(trace_sealing, "BLOCK_BYTES", block_bytes)
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


@pytest.mark.parametrize(
    "content",
    [SECRET.encode(), gzip.compress(SECRET.encode()), gzip.compress(f'{{"a": {SECRET} b}}'.encode()), b""],
    ids=["text", "compressed text", "no JSON", "nothing"],
)
def test_nothing_is_kept_of_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.rank0.json.gz"
    path.write_bytes(content)
    seal(tmp_path, SECRETS)
    assert gzip.decompress(path.read_bytes()) == b""


def test_a_string_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_sealing, "MAX_STRING_CHARS", 1 << 20)
    path = tmp_path / "trace.rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"name": "' + b'\\"' * (3 << 20)))
    seal(tmp_path, SECRETS)
    assert gzip.decompress(path.read_bytes()) in (b"", b'{"name": ')


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.rank0.json.gz"
    event = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2.0, "args": {"x": "y" * 2_000}})
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write('{"traceEvents": [')
        for number in range(15_000):
            out.write(f'{event}, {{"name": "{number} {SECRET}"}}, ')
        out.write("{}]}")
    tracemalloc.start()
    seal(tmp_path, Secrets([SECRET]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with gzip.open(path, "rt") as file:
        assert json.load(file)["traceEvents"][29_999]["name"] == "14999 ***"
    assert peak_bytes < 15 << 20  # the text has 31 MiB


def test_what_was_not_written_to_its_end_is_removed(tmp_path: Path) -> None:
    for name in ("unfinished.trace.rank0.json.gz", "trace.rank0.json.gz.77.tmp"):
        (tmp_path / name).write_bytes(gzip.compress(SECRET.encode()))
    seal(tmp_path, SECRETS)
    assert not list(tmp_path.iterdir())
