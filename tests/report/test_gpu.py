"""What a report says about a study on a GPU. The trace is made up, in the form of a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.explain.tables import explained
from autotune.harness.explain.documents import trace_file
from autotune.quantities import flops_text, share_text, step_time_text
from autotune.report.figures.memory import memory as what_holds
from autotune.report.figures.memory import memory_timeline
from autotune.report.figures.operators import kernel_label, kernels, operators
from autotune.report.figures.step import categories
from autotune.report.figures.use import use
from autotune.report.study import Study, read
from tests.explain.kineto import Kineto
from tests.explain.passes import lines, memory, traced, write
from tests.support.studies import make_study

TF32 = "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize256x64x32_warpgroupsize1x1x1_g1_execute"


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study on an H100 whose best trial was explained; the profiler doubled the step of 50 ms."""
    folder = make_study(tmp_path / "runs")
    summary = folder.read_summary()
    found = read(folder, {**summary, "machine": {**summary["machine"], "device": "cuda"}})
    write(tmp_path, lines(), traced(device="cuda", plain_step_s=0.05), memory(other=50, activations=500))
    made = Kineto("NVIDIA H100 80GB HBM3")
    made.step(1, 0, 100)
    made.operator("aten::convolution", 0, 5, [[64, 64], [64, 64]], ["float"] * 2)
    made.kernel(TF32, 10, 9, launched=1)
    made.kernel("void nchwToNhwcKernel<float>(float const*)", 20, 3, launched=2)
    made.write(tmp_path / trace_file(0))
    found.tables[found.best] = explained([tmp_path]).tables
    return found


def facts(study: Study) -> dict[str, str]:
    grid = use(study).grid
    assert grid is not None
    return {row[0]: row[-1] for row in grid.rows}


def test_use_of_a_gpu_lists_busy_time_tensor_cores_and_share_of_the_peak(study: Study) -> None:
    said = facts(study)
    assert said["GPU busy, share of a step"] == "24.0 %"
    assert said["Tensor Cores, share of the kernels' time"] == "75.0 %"
    assert said["arithmetic"] == "120 GFLOP/s"
    assert said["arithmetic, share of the device's peak (MFU)"] == "under 0.1 % of 495 TFLOP/s, tf32"


def test_kernels_have_short_names_their_operator_and_a_share_of_a_plain_step(study: Study) -> None:
    figure = kernels(study)
    assert "which takes 50.0 ms without the profiler" in figure.says
    assert "9.00 ms, 18.0" in str(figure.drawing)
    assert "aten::convolution" in str(figure.drawing)
    assert "float const" not in str(figure.drawing)
    assert figure.grid is not None
    assert "float const" in figure.grid.rows[1][0]
    assert "By kind: convolution 12.0 ms (24.0" in operators(study).says
    assert "seconds are longer than without it, but not the GPU's" in operators(study).notes[0]


def test_step_slowed_by_the_profiler_is_split_into_gpu_work_and_idle_time(study: Study) -> None:
    figure = categories(study)
    assert figure.grid is not None
    assert [row[:2] for row in figure.grid.rows] == [["GPU idle", "0.038000"], ["32-bit arithmetic", "0.012000"]]
    assert "50.0 ms" in figure.says
    assert "Idle time is the duration of a step without the profiler" in figure.says


def test_both_steps_are_split_alike_if_the_profiler_slowed_only_one(study: Study, tmp_path: Path) -> None:
    (tmp_path / "baseline").mkdir()
    write(tmp_path / "baseline", lines(), traced(device="cuda", plain_step_s=0.1), memory())
    made = Kineto("NVIDIA H100 80GB HBM3")
    made.step(1, 0, 100)
    made.operator("aten::convolution", 0, 5, [[64, 64], [64, 64]], ["float"] * 2)
    made.kernel(TF32, 10, 20, launched=1)
    made.write(tmp_path / "baseline" / trace_file(0))
    study.tables[0] = explained([tmp_path / "baseline"]).tables
    figure = categories(study)
    assert figure.grid is not None
    assert [row[:3] for row in figure.grid.rows] == [
        ["GPU idle", "0.080000", "0.038000"], ["32-bit arithmetic", "0.020000", "0.012000"],
    ]  # fmt: skip


def test_memory_category_other_names_an_example_of_its_content(study: Study) -> None:
    figure = what_holds(study)
    assert "other, such as gradients of activations" in str(figure.drawing)
    assert "rank 0" not in " ".join(figure.notes)


def test_missing_gpu_figure_names_the_command_that_makes_it(study: Study) -> None:
    study.tables.clear()
    assert memory_timeline(study).absent.startswith("Not known yet. `autotune explain")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (TF32, "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize256x64x32"),
        (
            "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, true, (cudnnKernelDataType_t)0>(params<float>)",
            "nchwToNhwcKernel<float, float, true, 0>",
        ),
        ("void at::native::(anonymous namespace)::max_pool_forward_nchw<float, int>(int)", "max_pool_forward_nchw<float, int>"),
        ("(anonymous namespace)::mine(int)", "mine"),
        ("triton_poi_fused_relu_0", "triton_poi_fused_relu_0"),
        ("x" * 200, "x" * 89 + "…"),
        ("", ""),
    ],
)
def test_kernel_label_keeps_only_the_distinguishing_part(name: str, label: str) -> None:
    assert kernel_label(name) == label


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (0.0001, "under 0.1 %"), (0.0005, "0.1 %"), (1.0, "100.0 %"), (None, "-")]
)
def test_tiny_share_is_not_shown_as_zero(share: float | None, text: str) -> None:
    assert share_text(share) == text


def test_rates_and_durations_have_a_suitable_unit() -> None:
    assert [flops_text(rate) for rate in (4.879e13, 3.9e9, 4.2e6)] == ["48.8 TFLOP/s", "3.90 GFLOP/s", "4.20 MFLOP/s"]
    assert [step_time_text(seconds) for seconds in (0.0, 2.69e-6, 1e-4, 0.0123, 1.2)] == [
        "0 ms", "2.69 us", "0.100 ms", "12.3 ms", "1.20 s",
    ]  # fmt: skip
