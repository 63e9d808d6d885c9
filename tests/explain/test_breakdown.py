"""Breakdown of the time of a step, on synthetic traces of a GPU and of a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import Unreadable
from autotune.explain.breakdown import GPU_CATEGORIES, breakdown, swept
from autotune.explain.host import host_of
from autotune.explain.intervals import gaps, joined, seconds_in, union
from tests.explain.kineto import ALL_REDUCE, AUTOGRAD, GEMM, GEMM_16, Kineto, milliseconds, sums_to_its_steps


def test_each_instant_of_a_gpu_step_counts_for_the_first_category_that_applies(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 20)
    made.phase("input", 0, 4)
    made.copy("Memcpy HtoD (Pinned -> Device)", 3, 2)  # for 1 ms of this, the host waits for input
    made.phase("forward", 4, 6)
    made.operator("aten::mm", 4.5, 2, [[8, 8], [8, 8]], ["float", "float"])
    made.kernel(GEMM, 6, 3, launched=5.5)
    made.kernel(GEMM_16, 8, 2)  # 1 ms of this overlaps with the other kernel
    made.phase("backward", 10, 6)
    made.kernel(ALL_REDUCE, 9, 3, stream=20)  # 1 ms of this overlaps with computing
    made.copy("Memcpy DtoH (Device -> Pageable)", 12, 1)
    made.copy("Memcpy DtoD (Device -> Device)", 13, 0.5)
    made.add("cuda_runtime", "cudaStreamSynchronize", 14, 1)
    made.add("cuda_runtime", "cudaLaunchKernel", 15, 0.5)
    found = made.breakdown(tmp_path)
    assert milliseconds(found) == {
        "compute_16bit": 2, "compute_32bit": 2, "exposed_collective": 2, "d2h": 1, "d2d": 0.5, "h2d": 2, "input_wait": 3,
        "kernel_launch": 0.505, "synchronise": 1, "host": 1.995, "other": 4,
    }  # fmt: skip
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert list(found.seconds) == list(GPU_CATEGORIES)
    assert found.collective_s == pytest.approx(3e-3)


def test_a_call_that_returns_after_its_copy_is_a_wait_and_not_a_launch(tmp_path: Path) -> None:
    """To fetch a number, torch copies it to pageable memory: cudaMemcpyAsync returns once the device has done all its work."""
    made = Kineto()
    made.step(1, 0, 100)
    made.kernel(GEMM, 5, 35)
    made.kernel("Memcpy DtoH (Device -> Pageable)", 80, 1, category="gpu_memcpy", correlation=90)
    made.add("cuda_runtime", "cudaMemcpyAsync", 10, 80, correlation=90)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 95, 2, category="gpu_memcpy", correlation=91)
    made.add("cuda_runtime", "cudaMemcpyAsync", 92, 3, correlation=91)
    expected = {"compute_32bit": 35.0, "d2h": 1.0, "h2d": 2.0, "kernel_launch": 3.0, "synchronise": 49.0, "other": 10.0}
    assert milliseconds(made.breakdown(tmp_path)) == expected


def test_compiling_counts_only_while_the_device_is_idle(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 10)
    made.add("user_annotation", "compile_fx.<locals>.fw_compiler_base (dynamo_timed)", 0, 8)
    made.kernel(GEMM, 2, 3)
    assert milliseconds(made.breakdown(tmp_path)) == {"compute_32bit": 3, "compile": 5, "other": 2}


def test_input_wait_is_read_from_autotune_or_dataloader_ranges(tmp_path: Path) -> None:
    for name in ("autotune::input", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
        made = Kineto()
        made.step(1, 0, 10)
        made.add("user_annotation", name, 1, 6)
        made.kernel(GEMM, 0, 3)
        assert milliseconds(made.breakdown(tmp_path))["input_wait"] == 4


def test_precision_comes_from_the_operator_if_the_kernel_name_lacks_it(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 10)
    made.operator("aten::softmax", 0, 2, [[8, 8]], ["c10::BFloat16"])
    made.kernel("cunn_SoftMaxForward", 1, 2, launched=0.5)
    made.operator("aten::softmax", 4, 2, [[8, 8]], ["float"])
    made.kernel("cunn_SoftMaxForward", 5, 2, launched=4.5)
    made.kernel("mystery", 8, 1)
    found = milliseconds(made.breakdown(tmp_path))
    assert (found["compute_16bit"], found["compute_32bit"], found["compute_unknown"]) == (2, 2, 1)


def test_device_work_outside_the_steps_does_not_count(tmp_path: Path) -> None:
    made = Kineto()
    made.kernel(GEMM, -5, 6)
    made.step(1, 0, 10)
    made.step(2, 10, 10)
    made.kernel(GEMM, 19, 6)
    found = made.breakdown(tmp_path)
    assert found.by_step[:, 1] == pytest.approx([1e-3, 1e-3])
    assert found.step_s == pytest.approx(10e-3)


def test_cpu_breakdown_counts_innermost_operators_and_the_autograd_thread(tmp_path: Path) -> None:
    made = Kineto(device="")
    made.step(1, 0, 20)
    made.phase("input", 0, 3)
    made.operator("aten::stack", 1, 1)  # the batch is made in the training process
    made.phase("forward", 3, 5)
    made.operator("aten::conv2d", 4, 3)
    made.operator("aten::mkldnn_convolution", 4.5, 2)
    made.phase("backward", 8, 6)
    made.operator("autograd::engine::evaluate_function: MmBackward0", 9, 3, thread=AUTOGRAD)
    made.operator("aten::mm", 9.5, 2, thread=AUTOGRAD)
    made.phase("optimizer", 14, 3)
    made.operator("aten::_foreach_add_", 15, 1)
    assert milliseconds(made.breakdown(tmp_path)) == {
        "input_wait": 3, "convolution": 3, "matmul": 2, "autograd": 1, "optimizer": 1, "python": 7, "other": 3,
    }  # fmt: skip


def test_a_wait_for_other_ranks_on_the_cpu_is_an_exposed_collective(tmp_path: Path) -> None:
    made = Kineto(device="")
    made.step(1, 0, 10)
    made.phase("backward", 0, 10)
    made.operator("aten::mm", 0, 6)
    made.add("user_annotation", "gloo:all_reduce", 4, 4, thread=300)
    assert milliseconds(made.breakdown(tmp_path)) == {"matmul": 6, "exposed_collective": 2, "python": 2}


def test_category_other_above_five_percent_is_split_by_the_ranges_around_it(tmp_path: Path) -> None:
    made = Kineto(device="")
    for step in (0, 1):
        start = 20 * step
        made.step(step, start, 20)
        made.phase("forward", start, 8)
        made.phase("backward", start + 11, 4)
        made.phase("optimizer", start + 15, 4)
    found = made.breakdown(tmp_path)
    assert found.other_parts == [
        ("between forward and backward", pytest.approx(3e-3)),
        ("between optimizer and the end of the step", pytest.approx(1e-3)),
    ]


def test_category_other_below_five_percent_is_not_split(tmp_path: Path) -> None:
    made = Kineto(device="")
    made.step(0, 0, 100)
    made.phase("forward", 0, 96)
    assert made.breakdown(tmp_path).other_parts == []


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    made = Kineto()
    made.kernel(GEMM, 0, 1)
    with pytest.raises(Unreadable, match="no ranges ProfilerStep#"):
        made.breakdown(tmp_path)


TIMES = st.integers(0, 40)
KINDS = st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "cuda_runtime", "user_annotation"])
NAMES = st.sampled_from(
    [GEMM, GEMM_16, ALL_REDUCE, "Memcpy DtoH (a)", "aten::mm", "cudaLaunchKernel", "cudaDeviceSynchronize", "autotune::input"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(KINDS, NAMES, TIMES, TIMES, st.integers(0, 3)), max_size=30), st.booleans())
def test_categories_sum_to_the_step_for_any_trace(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str, int, int, int]], has_device: bool
) -> None:
    made = Kineto()
    made.step(1, 0, 20)
    made.step(2, 20, 15)
    if has_device:
        made.kernel(GEMM, 1, 1)
    for category, name, start, length, lane in events:
        made.add(category, name, start, length, thread=100 + lane)
    trace = made.trace(tmp_path_factory.mktemp("traces"))
    assert sums_to_its_steps(breakdown(trace, host_of(trace)), trace)


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=20)


@settings(max_examples=100, deadline=None)
@given(INTERVALS, INTERVALS)
def test_unions_and_gaps_agree_with_counting_unit_by_unit(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def counted(intervals: list[tuple[int, int]]) -> set[int]:
        return {unit for start, length in intervals for unit in range(start, start + length)}

    def as_union(intervals: list[tuple[int, int]]) -> np.ndarray:
        starts = np.array([start for start, _ in intervals], dtype=float)
        return union(starts, starts + np.array([length for _, length in intervals], dtype=float))

    both = joined([as_union(first), as_union(second)])
    window = np.array([[5.0, 45.0]])
    units = {unit for unit in counted(first) | counted(second) if 5 <= unit < 45}
    assert seconds_in(both, window)[0] == pytest.approx(len(units))
    left = gaps(both, window)
    assert (left[:, 1] - left[:, 0]).sum() == pytest.approx(40 - len(units))
    by_layer = swept([("a", as_union(first)), ("b", as_union(second))], window, ("a", "b", "rest"))[0]
    mine = {unit for unit in counted(first) if 5 <= unit < 45}
    assert by_layer.tolist() == pytest.approx([len(mine), len(units) - len(mine), 40 - len(units)])
