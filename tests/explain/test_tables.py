"""All tables of an explanation: their content, and the reasons why tables are absent."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from autotune.errors import Unreadable
from autotune.explain.passes import read_document, read_passes
from autotune.explain.table import Table
from autotune.explain.tables import TRACE_TABLES, explained, read_tables, write_tables
from autotune.harness.explain.documents import THREAD, Compiled, Line, Lines, Stage, document_file, trace_file
from autotune.masking import Secrets
from tests.explain.kineto import ALL_REDUCE, GEMM, Kineto
from tests.explain.passes import lines, memory, step_of_the_cpu, traced, write


def test_passes_of_one_rank_produce_all_applicable_tables(tmp_path: Path) -> None:
    write(tmp_path, lines(), traced(), memory())
    step_of_the_cpu(tmp_path)
    found = explained([tmp_path]).tables
    assert set(found.tables) == {
        "breakdown", "operators", "roofline", "phases", "lines", "stages", "syncs", "memory", "memory_modules", "ranks",
    }  # fmt: skip
    assert found.absent == {
        "kernels": "the program ran on the CPU", "compile": "no recompilation and no graph break",
    }  # fmt: skip
    for table in found.tables.values():
        assert all(list(row) == list(table.columns) for row in table.rows), table.name
    assert found.traces == {0: str(tmp_path / trace_file(0))}
    assert [each.name for each in found.timeline] == ["forward", "backward", "aten::mm"]


def test_passes_of_one_configuration_may_lie_in_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, document in zip(folders, (lines(), traced(), memory()), strict=True):
        folder.mkdir()
        write(folder, document)
    step_of_the_cpu(folders[1])
    assert {"lines", "breakdown", "memory"} <= set(explained(folders).tables.tables)


def test_note_on_the_category_named_other_lists_its_parts_and_slowest_line(tmp_path: Path) -> None:
    other = Line("/p/watch.py", 3, "watch", "poll()", "other", THREAD, True, 0.09, 0.09)  # runs beside the step
    write(tmp_path, lines(lines=[other, *lines().lines]), traced())
    step_of_the_cpu(tmp_path)
    found = explained([tmp_path]).tables
    assert found.other_parts == {0: [("between backward and the end of the step", pytest.approx(0.02))]}
    assert found.tables["breakdown"].notes == [
        "20.0 % of the step is in category other: 20 ms between backward and the end of the step; the program's slowest line "
        "there is /p/train.py:12, 4 ms"
    ]


def test_number_of_workers_needed_follows_from_demand_and_service_time(tmp_path: Path) -> None:
    rows = {row["stage"]: row for row in explained([write(tmp_path, lines())]).tables.rows("stages")}
    # The demand is 16 samples in 0.08 s without waiting: 200 per second. A sample takes a worker 0.005 s, so one worker is just
    # enough. A margin of 10 % is added, and the result is rounded up.
    assert (rows["all"]["seconds"], rows["all"]["workers_needed"]) == (pytest.approx(0.005), 2)
    assert (rows["decode"]["workers_needed"], rows["decode"]["share_frac"]) == (1, pytest.approx(0.8))
    assert (rows["decode"]["file"], rows["decode"]["line"]) == ("/p/data.py", 7)
    assert (rows["all"]["cpu_s"], rows["all"]["blocked_s"]) == (None, pytest.approx(0.001))


@pytest.mark.parametrize(("num_workers", "needed"), [(0, 1), (1, None)])
def test_workers_are_needed_for_work_of_the_training_process_only_without_workers(
    tmp_path: Path, num_workers: int, needed: int | None
) -> None:
    """If there are workers, the training process receives and pins batches, which more workers would not do."""
    received = Stage("hand-over", "main", 0.001, 0.001, None, 10)
    found = explained([write(tmp_path, lines(stages=[received], num_workers=num_workers))]).tables
    assert [row["workers_needed"] for row in found.rows("stages") if row["stage"] == "all"] == [needed]


def test_demand_counts_all_batches_of_a_step_that_accumulates_gradients(tmp_path: Path) -> None:
    found = explained([write(tmp_path, lines(samples=640.0))]).tables  # four batches of 16 a step: 800 samples per second
    rows = {row["stage"]: row for row in found.rows("stages")}
    assert (rows["decode"]["workers_needed"], rows["all"]["workers_needed"]) == (4, 5)
    tokens = explained([write(tmp_path, lines(samples=640.0, unit="tokens"))]).tables
    assert {row["stage"]: row["workers_needed"] for row in tokens.rows("stages")}["all"] == 2


def test_mfu_divides_the_flops_per_second_of_an_unprofiled_step_by_the_measured_peak(tmp_path: Path) -> None:
    write(tmp_path, lines(), traced(peaks={"float32": 1e12, "bytes": 1e10}), memory(samples=8.0))
    step_of_the_cpu(tmp_path)
    row = explained([tmp_path]).tables.rows("roofline")[0]
    assert (row["flops"], row["flops_from"], row["step_s"]) == (12e9, "memory", 0.1)
    assert row["mfu_frac"] == pytest.approx(0.12)
    assert (row["dtype"], row["bound"], row["peak_source"]) == ("float32", "compute", "measured")


def test_roofline_of_a_gpu_step_shows_how_busy_the_gpu_is_and_which_peak_applies(tmp_path: Path) -> None:
    write(tmp_path, lines(), traced(device="cuda", plain_step_s=0.05))
    made = Kineto()
    made.step(1, 0, 100)  # the profiler doubles the step, not the kernels
    made.operator("aten::convolution", 0, 5, [[64, 64], [64, 64]], ["float"] * 2)
    made.kernel("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc", 10, 9, launched=1)
    made.kernel("void nchwToNhwcKernel<float>", 20, 3, launched=2)
    made.write(tmp_path / trace_file(0))
    row = explained([tmp_path]).tables.rows("roofline")[0]
    assert (row["step_s"], row["busy_frac"], row["tensor_core_frac"]) == (0.05, pytest.approx(0.24), pytest.approx(0.75))
    assert (row["dtype"], row["peak_flops_per_s"], row["bound"]) == ("tf32", 156e12, "host")


@pytest.mark.parametrize(("dtype", "expected"), [("c10::BFloat16", 0.75), ("int", None)])
def test_products_of_triton_count_as_tensor_core_work_if_they_are_in_16_bits(
    tmp_path: Path, dtype: str, expected: float | None
) -> None:
    """In DeepSeek's published profile, float8 products of an extension take 31 % of the time, known kernels only 8 %."""
    write(tmp_path, lines(), traced(device="cuda", plain_step_s=0.1))
    made = Kineto()
    made.step(1, 0, 100)
    made.operator("triton_tem_fused_mm_0", 0, 5, [[64, 64], [64, 64]], [dtype] * 2)
    made.kernel("triton_tem_fused_mm_0", 10, 9, launched=1)
    made.kernel("void at::native::vectorized_elementwise_kernel<4, float>", 20, 3)
    made.write(tmp_path / trace_file(0))
    row = explained([tmp_path]).tables.rows("roofline")[0]
    assert row["tensor_core_frac"] == (None if expected is None else pytest.approx(expected))


def test_memory_categories_sum_to_the_peak_and_notes_show_the_used_capacity(tmp_path: Path) -> None:
    document = memory(fragmentation_frac=0.25, alloc_retries=3, timeline=[[0.0, 10, 20], [0.1, 30, 40]])
    found = explained([write(tmp_path, document)]).tables
    amounts = {row["category"]: row["bytes"] for row in found.rows("memory")}
    total = amounts.pop("total")
    assert sum(amounts.values()) == total == 1000
    notes = " ".join(found.tables["memory"].notes)
    assert "25.0 % of the reserved memory" in notes
    assert "retry 3 times" in notes
    assert "25.0 % of the capacity" in notes
    assert [row["allocated_bytes"] for row in found.rows("memory_timeline")] == [10, 30]


def test_phase_shares_use_gpu_time_if_there_is_a_gpu(tmp_path: Path) -> None:
    on_device = {"forward": 0.06, "other": 0.01}
    for device_phases_s, share in ((None, 0.03 / 0.1), (on_device, 0.06 / 0.1)):
        rows = explained([write(tmp_path, lines(device_phases_s=device_phases_s))]).tables.rows("phases")
        assert {row["phase"]: row["share_frac"] for row in rows}["forward"] == pytest.approx(share)


# Several ranks -------------------------------------------------------------------------------------------------------------


def test_the_slow_rank_and_its_phase_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        slow = 0.02 if rank == 1 else 0.0
        phases = {
            "input": 0.0,
            "transfer": 0.0,
            "forward": 0.03 + slow,
            "backward": 0.07 - slow,
            "optimizer": 0.0,
            "other": 0.0,
        }
        waits = {"exposed_s": 0.03 - slow, "gradient_bytes": 4_000_000}
        write(tmp_path, lines(rank, 3, phases_s=phases, wait_s=0.0, communication=waits))
    found = explained([tmp_path]).tables
    assert [row["behind_s"] for row in found.rows("ranks")] == [0.0, pytest.approx(0.02), 0.0]
    assert [row["forward_s"] for row in found.rows("ranks")] == [0.03, 0.05, 0.03]
    assert [row["is_slowest"] for row in found.rows("ranks")] == [False, True, False]


def test_slow_rank_is_found_from_traces_if_no_other_pass_measured_the_waits(tmp_path: Path) -> None:
    for rank in (0, 1):
        made = Kineto()
        made.step(1, 0, 100)
        made.kernel(GEMM, 0, 60 + 20 * rank)
        made.kernel(ALL_REDUCE, 60 + 20 * rank, 40 - 20 * rank)
        made.write(tmp_path / trace_file(rank))
        write(tmp_path, traced(rank, 2, device="cuda"))
    found = explained([tmp_path]).tables
    assert [(row["is_slowest"], row["behind_s"]) for row in found.rows("ranks")] == [(False, 0.0), (True, pytest.approx(0.02))]
    assert {row["rank"] for row in found.rows("breakdown")} == {row["rank"] for row in found.rows("kernels")} == {0, 1}


def test_missing_ranks_are_named_and_the_other_ranks_are_kept(tmp_path: Path) -> None:
    write(tmp_path, *(lines(rank, 3) for rank in (0, 2)), *(traced(rank, 3) for rank in (0, 1, 2)))
    step_of_the_cpu(tmp_path, 0)
    step_of_the_cpu(tmp_path, 1)
    (tmp_path / trace_file(2)).write_bytes((tmp_path / trace_file(1)).read_bytes()[:100])
    found = explained([tmp_path]).tables
    assert {row["rank"] for row in found.rows("breakdown")} == {0, 1}
    assert "rank 2: trace.rank2.json.gz: cut short after 0 events" in found.tables["breakdown"].notes
    assert "rank 1: explained.lines.rank1.json is missing" in found.tables["lines"].notes


# What is absent ------------------------------------------------------------------------------------------------------------


def test_without_any_pass_every_table_is_absent_with_a_reason(tmp_path: Path) -> None:
    found = explained([tmp_path, tmp_path / "gone"]).tables
    assert found.tables == {}
    assert {"breakdown", "operators", "kernels", "roofline", "lines", "stages", "syncs", "memory", "ranks"} <= set(found.absent)
    assert found.absent["memory"] == "the pass 'memory' was not run, or wrote nothing"
    assert found.timeline == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "trace.rank0.json.gz: not there"),
        (b"", "trace.rank0.json.gz: cut short after 0 events"),
        (b'{"traceEvents": [{"ph": "X"', "trace.rank0.json.gz: cut short after 0 events"),
        (b"CUDA error: out of memory", "trace.rank0.json.gz: not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"traceEvents": []}', "the trace has no ranges ProfilerStep#"),
    ],
)
def test_a_trace_that_cannot_be_read_makes_its_tables_absent(tmp_path: Path, content: bytes | None, reason: str) -> None:
    write(tmp_path, lines(), traced())
    if content is not None:
        (tmp_path / trace_file(0)).write_bytes(content)
    found = explained([tmp_path]).tables
    assert {name: found.absent[name] for name in TRACE_TABLES} == dict.fromkeys(TRACE_TABLES, f"rank 0: {reason}")
    assert "lines" in found.tables


def test_refused_cupti_removes_only_the_kernels_table_and_gives_advice(tmp_path: Path) -> None:
    write(tmp_path, lines(), traced(device="cuda", notes=["CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"]), memory())
    step_of_the_cpu(tmp_path)
    found = explained([tmp_path]).tables
    assert found.absent["kernels"].startswith("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES; let users profile with")
    assert {"operators", "lines", "memory"} <= set(found.tables)
    assert any(note.startswith("shows only what the host did: CUPTI") for note in found.tables["breakdown"].notes)


def test_reason_for_a_missing_trace_is_the_note_of_its_pass(tmp_path: Path) -> None:
    found = explained([write(tmp_path, traced(file="", notes=["the profiler could not start"]))]).tables
    assert found.absent["breakdown"] == "rank 0: the profiler could not start"


def test_a_trace_outside_of_its_folder_is_not_read(tmp_path: Path) -> None:
    assert read_passes([write(tmp_path, traced(file="../../etc/passwd"))]).traces == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON, or cut short"), ('{"rank": 0', "not JSON, or cut short"), ("[]", "list instead of object"),
        ("{}", "missing"), ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_read_is_refused_with_a_reason(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / document_file("lines", 0)
    path.write_text(content)
    with pytest.raises(Unreadable, match=reason):
        read_document(path, Lines)
    assert reason in explained([tmp_path]).tables.absent["lines"]


def test_error_for_a_wrong_type_in_a_document_names_its_key(tmp_path: Path) -> None:
    write(tmp_path, lines())
    path = tmp_path / document_file("lines", 0)
    document = json.loads(path.read_text())
    for key, value in (("steps", "ten"), ("lines", {}), ("phases_s", {"input": None}), ("stages", [{"name": 1}])):
        path.write_text(json.dumps({**document, key: value}))
        with pytest.raises(Unreadable, match=f"not a document of this pass: {key}: "):
            read_document(path, Lines)


@pytest.mark.parametrize("value", ["two", 10**30, float("nan"), {}])
def test_error_for_an_unusable_number_in_a_row_names_its_column(tmp_path: Path, value: object) -> None:
    write(tmp_path, lines())
    path = tmp_path / document_file("lines", 0)
    compiled = {"recompilations": [{"file": "train.py", "count": value}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "compiled": compiled}))
    with pytest.raises(Unreadable, match="not a document of this pass: count: not a number"):
        read_document(path, Lines)


def test_a_document_that_claims_millions_of_ranks_is_refused(tmp_path: Path) -> None:
    found = read_passes([write(tmp_path, lines(world_size=10**12))])
    (reason,) = found.absent["lines"]
    assert reason.endswith("not a document of this pass: world_size: larger than 65,536")


def test_a_path_that_is_not_utf_8_can_be_written(tmp_path: Path) -> None:
    line = Line("/p/caf\udce9.py", 12, "main", "log(loss)", "other", "main", True, 0.004, 0.004)
    write(tmp_path, lines(lines=[line]))
    write_tables(explained([tmp_path]).tables, tmp_path)
    assert "/p/caf?.py" in (tmp_path / "explain" / "lines.csv").read_text()


def test_further_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, lines())
    path = tmp_path / document_file("lines", 0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert read_document(path, Lines) == lines()


def test_distortion_by_the_profiler_is_reported(tmp_path: Path) -> None:
    write(tmp_path, traced(step_s=0.2, plain_step_s=0.1))
    step_of_the_cpu(tmp_path)
    found = explained([tmp_path]).tables
    assert found.distortion == {0: 2.0}
    assert "the profiler makes a step 2.0 times as long" in found.tables["breakdown"].notes[0]


# Files ---------------------------------------------------------------------------------------------------------------------


def test_tables_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, lines(), traced(), memory())
    step_of_the_cpu(tmp_path)
    found = explained([tmp_path]).tables
    written = write_tables(found, tmp_path)
    assert read_tables(tmp_path) == found
    assert {path.name for path in written} >= {"breakdown.csv", "breakdown.json", "tables.json"}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "explain" / "breakdown.csv").read_text())))
    assert sum(float(row["seconds"]) for row in rows) == pytest.approx(0.1)


def test_tables_with_unknown_texts_are_read_back(tmp_path: Path) -> None:
    breaks = [{"file": "/p/model.py", "line": 9, "reason": "print", "count": 1}]
    write(tmp_path, lines(compiled=Compiled(graph_breaks=breaks)), traced(device="cuda"))
    made = Kineto()
    made.step(1, 0, 100)
    made.operator("aten::mm", 10, 40)
    made.kernel(GEMM, 20, 10, launched=12, grid=None, block=None)
    made.write(tmp_path / trace_file(0))
    found = explained([tmp_path]).tables
    write_tables(found, tmp_path)
    assert {"compile", "kernels"} <= set(found.tables)
    assert read_tables(tmp_path) == found


def test_a_damaged_document_is_not_called_missing(tmp_path: Path) -> None:
    write(tmp_path, lines(0, 2), lines(1, 2))
    (tmp_path / document_file("lines", 1)).write_text("{")
    assert read_passes([tmp_path]).absent["lines"] == ["rank 1: explained.lines.rank1.json: not JSON, or cut short"]


def test_streams_of_several_gpus_have_lanes_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, traced(device="cuda"))
    made = Kineto()
    made.step(1, 0, 100)
    for gpu in (0, 1):
        made.kernel(GEMM, 20, 40)
        made.events[-1]["pid"] = gpu
    made.write(tmp_path / trace_file(0))
    assert [each.lane for each in explained([tmp_path]).tables.timeline] == ["GPU 0 stream 7", "GPU 1 stream 7"]


def test_an_unreadable_table_is_listed_as_absent(tmp_path: Path) -> None:
    write_tables(explained([write(tmp_path, lines())]).tables, tmp_path)
    (tmp_path / "explain" / "lines.json").write_text("{")
    found = read_tables(tmp_path)
    assert "lines" not in found.tables
    assert found.absent["lines"].startswith("lines.json cannot be read")


def test_an_index_of_another_version_is_refused(tmp_path: Path) -> None:
    write_tables(explained([tmp_path]).tables, tmp_path)
    (tmp_path / "explain" / "tables.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="another version"):
        read_tables(tmp_path)


def test_csv_text_cannot_start_a_spreadsheet_formula() -> None:
    table = Table(name="t", title="T", columns={"name": "", "value": ""}, rows=[{"name": "=cmd|'/c'!A1", "value": -5}])
    assert table.as_csv() == "name,value\n'=cmd|'/c'!A1,-5\n"


def test_secrets_in_lines_and_traces_are_masked_everywhere(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnop1234"
    line = lines().lines[0]
    line.text = f'login(token="{secret}")'
    write(tmp_path, lines(lines=[line], notes=[f"saw {secret}"]), traced(notes=[secret]))
    made = Kineto(device="")
    made.step(1, 0, 10)
    made.operator(f"my::{secret}", 1, 2)
    made.write(tmp_path / trace_file(0))
    write_tables(explained([tmp_path], mask=Secrets().text).tables, tmp_path)
    texts = [path.read_text() for path in (tmp_path / "explain").iterdir()]
    assert not any(secret in text for text in texts)
    assert any("my::***" in text for text in texts)
