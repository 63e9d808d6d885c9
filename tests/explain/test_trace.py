"""Reading traces: what is kept, and what is refused and why."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from autotune.errors import BadInput, Unreadable
from autotune.explain import trace as reader
from autotune.explain.host import host_of
from autotune.explain.operators import operator_rows, operators_of
from autotune.explain.trace import read_trace
from autotune.masking import Secrets
from tests.explain.kineto import GEMM, Kineto


def small() -> Kineto:
    made = Kineto()
    made.step(3, 0, 10)
    made.operator("aten::mm", 1, 2, [[4, 8], [8, 2]], ["float", "float"])
    made.kernel(GEMM, 2, 3, launched=1.5)
    return made


def test_columns_hold_times_names_and_arguments(tmp_path: Path) -> None:
    trace = small().trace(tmp_path)
    assert [trace.texts[name] for name in trace.names] == ["ProfilerStep#3", "aten::mm", "cudaLaunchKernel", GEMM]
    assert trace.starts_s.tolist() == pytest.approx([0, 1e-3, 1.5e-3, 2e-3])
    assert trace.seconds.tolist() == pytest.approx([10e-3, 2e-3, 5e-6, 3e-3])
    assert trace.arguments[trace.details[1]] == {"dims": [[4, 8], [8, 2]], "types": ["float", "float"]}
    assert trace.arguments[trace.details[3]]["grid"] == [108, 1, 1]
    assert trace.correlations[2] == trace.correlations[3]
    assert trace.device_name == "NVIDIA A100-SXM4-80GB"
    assert trace.steps().tolist() == [pytest.approx([0, 10e-3])]


def test_device_is_the_gpu_that_runs_the_kernels_also_if_it_is_not_the_first(tmp_path: Path) -> None:
    made = small()
    made.document["deviceProperties"].append({"id": 1, "name": "NVIDIA H100"})
    for event in made.events:
        event["pid"] = 1 if event["cat"] == "kernel" else event["pid"]
    assert made.trace(tmp_path).device_name == "NVIDIA H100"


def test_compressed_indented_and_bare_list_traces_give_the_same_result(tmp_path: Path) -> None:
    made = small()
    compressed = read_trace(made.write(tmp_path / "a.json.gz"))
    (tmp_path / "b.json").write_text(json.dumps(made.document, indent=2))
    (tmp_path / "c.json").write_text(json.dumps(made.events))
    for name in ("b.json", "c.json"):
        assert read_trace(tmp_path / name).starts_s.tolist() == compressed.starts_s.tolist()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"^trace.json.gz: not there$"):
        read_trace(tmp_path / "trace.json.gz")


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_trace_that_is_cut_short_is_refused(tmp_path: Path, kept: float, suffix: str) -> None:
    path = small().write(tmp_path / f"trace.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(Unreadable, match=r"^trace.json(.gz)?: cut short after \d+ events$"):
        read_trace(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("")
    with pytest.raises(Unreadable, match="cut short after 0 events"):
        read_trace(tmp_path / "trace.json")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = small().write(tmp_path / "trace.json.gz")
    content = bytearray(path.read_bytes())
    content[40:60] = bytes(20)
    path.write_bytes(bytes(content))
    with pytest.raises(Unreadable, match=r"^trace.json.gz: (damaged|not JSON|cut short)"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback (most recent call last)", "not JSON"),
        ("<html><body>", "not JSON"),
        ('{"a": 1}', "not a trace: it has no traceEvents"),
        ('{"traceEvents": 5}', "not a trace: it has no traceEvents"),
        ('{"traceEvents": [{"ts": 1} {"ts": 2}]}', "not JSON"),
        ('{"traceEvents": [{"ts": inf}]}', "not JSON"),
        ("[" * 100_000, "nested too deeply|cut short"),
        ('{"traceEvents": [' + "[" * 100_000, "nested too deeply"),
        ('{"traceEvents": [{"ts": ' + "9" * 5000 + "}]}", "Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_trace_is_refused_with_one_reason(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(Unreadable, match=reason) as caught:
        read_trace(tmp_path / "trace.json")
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value, BadInput)


def test_more_events_than_allowed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_EVENTS", 2)
    with pytest.raises(Unreadable, match="more than 2 events; profile fewer steps"):
        small().trace(tmp_path)


def test_an_archive_that_unpacks_to_more_than_allowed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_TEXT_BYTES", 3 << 20)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (4 << 20)))
    with pytest.raises(Unreadable, match="larger than 3 MiB; profile fewer steps"):
        read_trace(tmp_path / "trace.json.gz")


def test_events_without_usable_times_or_names_are_counted_and_left_out(tmp_path: Path) -> None:
    made = small()
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1e9, "dur": 1}
    bad = [{**good, "ts": "soon"}, {**good, "dur": -1}, {**good, "dur": None}, {**good, "ts": 10**400}, "text", 5, None, []]
    bad += [{key: value for key, value in good.items() if key != missing} for missing in ("ts", "dur", "name")]
    made.events += bad
    trace = made.trace(tmp_path)
    assert len(trace) == 4
    assert trace.notes == [f"{len(bad)} of {len(made.events)} events have no usable name or time and are left out"]


def test_malformed_event_arguments_are_tolerated(tmp_path: Path) -> None:
    made = small()
    made.operator("aten::odd", 3, 1, [[1], "x", None, {"a": 1}], [None, 7])
    made.events[-1]["args"]["correlation"] = "many"
    made.add("cpu_op", "aten::none", 4, 1)
    made.events[-1]["args"] = None
    made.add(["cpu_op"], "aten::none", 4, 1)
    for dims in (7, ["x"], [{"0": 1}], [[1, [2]]], [[-1]], [[2**40, 2**40]]):
        made.operator("aten::mm", 5, 1, dims if isinstance(dims, list) else [])
        made.events[-1]["args"]["Input Dims"] = dims
    trace = made.trace(tmp_path)
    assert len(trace) == 12
    assert operator_rows(trace, host_of(trace), operators_of(trace, host_of(trace)))[0]


def test_shapes_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path = small().write(tmp_path / "trace.json")
    deep = "[" * 700 + "]" * 700
    path.write_text(path.read_text().replace("[[4, 8], [8, 2]]", deep))
    with pytest.raises(Unreadable, match="nested too deeply"):
        read_trace(path)


def test_names_are_masked_and_hold_no_control_characters(tmp_path: Path) -> None:
    made = small()
    made.add("user_annotation", "login password=hunter22secret", 1, 1)
    made.add("user_annotation", "red \x1b[31malert\x00\ud800", 2, 1)
    trace = read_trace(made.write(tmp_path / "trace.json"), Secrets().text)
    assert "login password=***" in trace.texts
    assert "red alert?" in trace.texts


def test_memory_beyond_the_text_grows_with_kept_events_only(tmp_path: Path) -> None:
    made = small()
    for number in range(20_000):
        made.operator("aten::mm", 11 + number, 0.5, [[number % 50, 8], [8, 2]], ["float", "float"])
    with gzip.open(tmp_path / "trace.json.gz", "wt") as out:
        out.write(json.dumps(made.document)[:-2])
        for _ in range(40):
            out.write(', {"ph": "i", "name": "' + "x" * 250_000 + '"}')
        out.write("]}")
    del made
    tracemalloc.start()
    trace = read_trace(tmp_path / "trace.json.gz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == 20_004
    assert peak < 32 << 20  # compressed, decompressed and as a string, the text takes 26 MiB
