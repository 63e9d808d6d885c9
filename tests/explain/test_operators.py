"""Operators and kernels in a GPU's trace: their work, and what limits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.explain.formulas import bytes_of, flops_of
from autotune.explain.host import host_of
from autotune.explain.kernels import COLUMNS as KERNEL_COLUMNS
from autotune.explain.kernels import kernel_rows
from autotune.explain.operators import COLUMNS, operator_rows, operators_of
from autotune.explain.roofline import Peaks, documented_peaks, measured_peaks, roof
from tests.explain.kineto import ALL_REDUCE, GEMM, GEMM_16, Kineto

A100 = documented_peaks("NVIDIA A100-SXM4-80GB")


def by_name(made: Kineto, folder: Path, peaks: Peaks | None = A100) -> dict[str, dict[str, Any]]:
    trace = made.trace(folder)
    host = host_of(trace)
    rows, _ = operator_rows(trace, host, operators_of(trace, host), rank=2, peaks=peaks)
    assert all(list(row) == list(COLUMNS) and row["rank"] == 2 for row in rows)
    return {row["operator"]: row for row in rows}


def test_a_kernel_belongs_to_the_innermost_operator_that_launched_it(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 20)
    made.phase("forward", 0, 6)
    made.operator("aten::linear", 1, 4, [[64, 32], [16, 32]], ["c10::BFloat16", "c10::BFloat16"])
    made.operator("aten::addmm", 2, 2, [[16], [64, 32], [32, 16]], ["c10::BFloat16"] * 3)
    made.kernel(GEMM_16, 6, 8, launched=3)
    made.kernel(ALL_REDUCE, 15, 1)
    rows = by_name(made, tmp_path)
    assert rows["aten::linear"]["device_self_s"] == 0
    assert rows["aten::linear"]["device_total_s"] == rows["aten::addmm"]["device_self_s"] == pytest.approx(8e-3)
    assert rows["aten::linear"]["host_self_s"] == pytest.approx(2e-3)
    assert rows["aten::addmm"]["host_self_s"] == pytest.approx(2e-3 - 5e-6)
    assert rows["aten::addmm"]["flops"] == 2 * 64 * 32 * 16
    assert rows["aten::linear"]["flops"] is None
    assert rows["aten::addmm"]["phase"] == "forward"
    assert rows["aten::addmm"]["share_frac"] == pytest.approx(8 / 9)  # of all that the device does


def test_kernels_of_a_cuda_graph_belong_to_no_operator_but_count_in_the_whole(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 20)
    made.operator("aten::copy_", 1, 1, [[64, 64], [64, 64]], ["float"] * 2)
    made.kernel("vectorized_elementwise_kernel", 2, 1, launched=1.5)
    made.add("cuda_runtime", "cudaGraphLaunch", 3, 0.1, correlation=99)
    for start in (4, 8):
        made.kernel(GEMM_16, start, 4.5 - 0.5 * (start == 8), correlation=99)
    trace = made.trace(tmp_path)
    host = host_of(trace)
    rows, notes = operator_rows(trace, host, operators_of(trace, host))
    assert [(row["operator"], row["share_frac"]) for row in rows] == [("aten::copy_", pytest.approx(1 / 9.5))]
    assert notes == ["89 % of the device's seconds were launched outside of operators, as by CUDA graphs or extensions"]


def test_work_counts_for_the_call_that_autocast_makes_in_16_bits(tmp_path: Path) -> None:
    """Autocast converts the arguments inside the operator, and calls the same operator again."""
    dims = [[3072], [16384, 768], [768, 3072]]
    made = Kineto()
    made.step(1, 0, 30)
    made.operator("aten::addmm", 1, 8, dims, ["float", "c10::BFloat16", "float"])
    made.operator("aten::copy_", 2, 1, [[768, 3072], [768, 3072]], ["c10::BFloat16", "float"])
    made.kernel("bfloat16_copy_kernel_cuda", 10, 3, launched=2.5)
    made.operator("aten::addmm", 4, 2, dims, ["c10::BFloat16"] * 3)
    made.kernel(GEMM_16, 14, 8, launched=5)
    trace = made.trace(tmp_path)
    host = host_of(trace)
    found = operators_of(trace, host)
    rows = {(row["operator"], row["dtype"]): row for row in operator_rows(trace, host, found, peaks=A100)[0]}
    flops = 2 * 16384 * 768 * 3072
    assert rows["aten::addmm", "float32"]["flops"] is None
    assert rows["aten::addmm", "bfloat16"]["flops_per_s"] == pytest.approx(flops / 8e-3)
    assert rows["aten::addmm", "bfloat16"]["bound"] == "compute"
    assert rows["aten::copy_", "bfloat16"]["bound"] == "memory"
    assert found.a_step(found.flops) == flops


def test_bound_of_an_operator_follows_from_the_peaks_of_the_device(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 100)
    made.operator("aten::mm", 0, 1, [[8192, 8192], [8192, 8192]], ["c10::BFloat16"] * 2)
    made.kernel(GEMM_16, 2, 5, launched=0.5)
    made.operator("aten::mul", 10, 1, [[8192, 8192], [8192, 8192]], ["c10::BFloat16"] * 2)
    made.kernel("vectorized_elementwise_kernel", 12, 2, launched=10.5)
    made.operator("aten::add", 20, 1, [[8], [8]], ["float"] * 2)
    made.kernel("vectorized_elementwise_kernel", 21, 0.01, launched=20.5)
    rows = by_name(made, tmp_path)
    assert [rows[name]["bound"] for name in ("aten::mm", "aten::mul", "aten::add")] == ["compute", "memory", "launch"]
    assert rows["aten::mm"]["roofline_frac"] == pytest.approx(2 * 8192**3 / 312e12 / 5e-3)
    assert rows["aten::mul"]["bytes"] == 3 * 2 * 8192**2
    assert by_name(made, tmp_path, peaks=None)["aten::mm"]["bound"] == ""
    volta = by_name(made, tmp_path, peaks=documented_peaks("Tesla V100-SXM2-16GB"))["aten::mm"]
    assert volta["bound"] == ""  # it has no documented peak in bfloat16, so the product only seemed to be bound by memory


def test_operators_are_compared_with_the_peak_for_the_precision_of_their_kernels(tmp_path: Path) -> None:
    """With the defaults of torch on an H100, convolutions round to TF32 and matrix products do not."""
    made = Kineto()
    made.step(1, 0, 100)
    made.operator("aten::mm", 0, 1, [[4096, 4096], [4096, 4096]], ["float"] * 2)
    made.kernel(GEMM, 2, 10, launched=0.5)
    made.operator("aten::bmm", 20, 1, [[1, 4096, 4096], [1, 4096, 4096]], ["float"] * 2)
    made.kernel("void nchwToNhwcKernel<float>", 21, 1, launched=20.2)
    made.kernel("sm90_xmma_gemm_f32f32_tf32f32_f32_nhwckrsc", 22, 9, launched=20.5)
    rows = by_name(made, tmp_path)
    assert rows["aten::mm"]["roofline_frac"] == pytest.approx(2 * 4096**3 / 19.5e12 / 10e-3)
    assert rows["aten::bmm"]["roofline_frac"] == pytest.approx(2 * 4096**3 / 156e12 / 10e-3)


def test_operator_rows_average_over_steps_and_ignore_work_outside_them(tmp_path: Path) -> None:
    made = Kineto()
    for step in (0, 1):
        made.step(step, 20 * step, 10)
        made.operator("aten::mm", 20 * step + 1, 2, [[4, 4], [4, 4]], ["float"] * 2)
        made.kernel(GEMM, 20 * step + 4, 3, launched=20 * step + 2)
    made.operator("aten::mm", 13, 5, [[4, 4], [4, 4]], ["float"] * 2)
    row = by_name(made, tmp_path)["aten::mm"]
    assert (row["count"], row["device_self_s"], row["host_total_s"]) == (1, pytest.approx(3e-3), pytest.approx(2e-3))


CONVOLUTION = {
    "dims": [[8, 16, 20, 20], [32, 4, 3, 3], [], [], [], [], [], [], []],
    "types": ["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"],
    "values": ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "4"],
}
PRODUCT = 2 * 8 * 10 * 10 * 32 * 4 * 9
BACKWARD = {
    "dims": [[8, 32, 10, 10], [8, 16, 20, 20], [32, 4, 3, 3]],
    "values": ["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "4", "[True, True, False]"],
}


@pytest.mark.parametrize(
    ("name", "arguments", "flops"),
    [
        ("aten::mm", {"dims": [[3, 4], [4, 5]]}, 120),
        ("aten::bmm", {"dims": [[7, 3, 4], [7, 4, 5]]}, 840),
        ("aten::addmm", {"dims": [[5], [3, 4], [4, 5]]}, 120),
        ("aten::baddbmm", {"dims": [[7, 3, 5], [7, 3, 4], [7, 4, 5]]}, 840),
        ("aten::convolution", CONVOLUTION, PRODUCT),
        ("aten::convolution_backward", BACKWARD, 2 * PRODUCT),
        ("aten::_scaled_dot_product_flash_attention", {"dims": [[2, 3, 9, 8], [2, 3, 7, 8], [2, 3, 7, 4]]}, 2 * 6 * 63 * 12),
        ("aten::add", {"dims": [[4], [4]]}, None),
        ("aten::mm", {}, None),
        ("aten::mm", {"dims": [[3, 4]]}, None),
        ("aten::mm", {"dims": "odd"}, None),
        ("aten::mm", {"dims": [[3, 4], [5, 6]]}, None),
        ("aten::convolution", {"dims": CONVOLUTION["dims"], "values": ["x("] * 9}, None),
        ("aten::convolution", {"dims": CONVOLUTION["dims"]}, None),
        ("aten::convolution", {"dims": CONVOLUTION["dims"], "values": ["", "", "", "[0, 0]", "[1]", "[1]", "False"]}, None),
    ],
)  # fmt: skip
def test_flops_are_computed_from_shapes_and_unknown_without_them(
    name: str, arguments: dict[str, Any], flops: int | None
) -> None:
    assert flops_of(name, arguments) == flops


@pytest.mark.parametrize(
    ("name", "dims", "types", "num_bytes"),
    [
        ("aten::add", [[4, 4], [4, 4]], ["float", "float"], 3 * 64),
        ("aten::relu", [[4, 4]], ["c10::Half"], 2 * 32),
        ("aten::copy_", [[4, 4], [4, 4]], ["float", "c10::BFloat16"], 64 + 32),
        ("aten::fill_", [[4, 4], []], ["float", "Scalar"], 64),
        ("aten::sum", [[4, 4]], ["float"], 64),
        ("aten::mm", [[3, 4], [4, 5]], ["float", "float"], 4 * (12 + 20 + 15)),
        ("aten::view", [[4, 4]], ["float"], 0),
        ("aten::add", [[], []], ["float", "Scalar"], 0),
        ("aten::embedding", [[1000, 8], [4]], ["float", "long int"], None),
        ("aten::add", [[4]], ["c10::Unheard"], None),
        ("aten::_foreach_add_", [[[4], [4]]], ["TensorList"], None),
    ],
)
def test_bytes_are_the_minimal_traffic_or_unknown(name: str, dims: Any, types: list[str], num_bytes: int | None) -> None:
    assert bytes_of(name, {"dims": dims, "types": types}) == num_bytes


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4), (8, 16, 20, 20)),
        (nn.Conv1d(4, 8, 3, dilation=2), (2, 4, 30)),
        (nn.ConvTranspose2d(64, 32, 2, stride=2), (8, 64, 10, 10)),  # the way up of a U-Net
        (nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1), (8, 64, 10, 10)),
        (nn.ConvTranspose2d(8, 12, 3, stride=(3, 2), output_padding=(2, 1), dilation=2, groups=4), (2, 8, 5, 7)),
    ],
)
def test_bytes_of_a_convolution_are_those_of_its_tensors(module: Any, shape: tuple[int, ...]) -> None:
    images = torch.rand(shape)
    tensors = (images, module.weight, module.bias, module(images))
    is_transposed = "Transpose" in type(module).__name__
    rest = (module.stride, module.padding, module.dilation, is_transposed, module.output_padding, module.groups)
    arguments = {
        "dims": [*(list(tensor.shape) for tensor in tensors[:3]), *[[]] * 6],
        "types": ["float"] * 3 + ["ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"],
        "values": ["", "", "", *(str(list(value) if isinstance(value, tuple) else value) for value in rest)],
    }
    assert bytes_of("aten::convolution", arguments) == sum(4 * tensor.numel() for tensor in tensors)


def test_kernels_are_counted_by_launch_configuration(tmp_path: Path) -> None:
    made = Kineto()
    made.step(1, 0, 50)
    made.operator("aten::mm", 0, 10, [[8, 8], [8, 8]], ["float"] * 2)
    made.kernel(GEMM, 11, 2, launched=1)
    made.kernel(GEMM, 14, 4, launched=2)
    made.kernel(GEMM, 60, 4, launched=3)  # after the step
    made.kernel("odd\x1b[31m kernel, =1+1", 20, 1)
    trace = made.trace(tmp_path)
    rows, notes = kernel_rows(trace, host_of(trace), rank=1)
    assert notes == []
    assert [list(row) for row in rows] == [list(KERNEL_COLUMNS)] * 2
    first = rows[0]
    assert (first["kernel"], first["operator"], first["count"]) == (GEMM, "aten::mm", 2)
    assert [first[name] for name in ("total_s", "mean_s", "min_s", "max_s")] == pytest.approx([6e-3, 3e-3, 2e-3, 4e-3])
    assert [first[name] for name in ("registers", "shared_bytes", "grid", "block", "occupancy_frac")] == [
        32, 1024, "108x1x1", "256x1x1", 0.5,
    ]  # fmt: skip
    assert (first["tensor_core_used"], first["tensor_core_eligible"], first["precision"]) == ("no", "yes", "compute_32bit")
    assert (rows[1]["kernel"], rows[1]["tensor_core_used"]) == ("odd kernel, =1+1", "unknown")


def test_kernels_of_a_step_that_is_left_out_do_not_count(tmp_path: Path) -> None:
    """As in a step with an evaluation, between two steps that count."""
    made = Kineto()
    for number, kernel_ms in enumerate((2, 7, 4)):
        made.step(number, 50 * number, 50)
        made.kernel(GEMM, 50 * number + 10, kernel_ms)
    trace = made.trace(tmp_path)
    trace.left_out = [1]
    (row,), _ = kernel_rows(trace, host_of(trace))
    assert (row["count"], row["total_s"]) == (1, pytest.approx(3e-3))


@pytest.mark.parametrize(
    ("shared_bytes", "percent", "occupancy"), [(231_424, 0, None), (16, 0, 0.0), (1024, 12, 0.12), (65_536, 25, 0.25)]
)
def test_occupancy_that_kineto_could_not_estimate_is_unknown_and_not_zero(
    tmp_path: Path, shared_bytes: int, percent: int, occupancy: float | None
) -> None:
    """On an H100, Kineto estimates 0 % for kernels with more shared memory than a block gets by default."""
    made = Kineto()
    made.step(1, 0, 50)
    made.kernel(GEMM, 11, 2, launched=1, **{"shared memory": shared_bytes, "est. achieved occupancy %": percent})
    trace = made.trace(tmp_path)
    (row,), _ = kernel_rows(trace, host_of(trace))
    assert row["occupancy_frac"] == occupancy


@pytest.mark.parametrize(
    ("name", "bfloat16", "bytes_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 3352e9), ("NVIDIA H100 PCIe", 756e12, 2039e9), ("NVIDIA H100 NVL", 835e12, 3938e9),
        ("NVIDIA H200", 989e12, 4800e9), ("NVIDIA B200", 2250e12, 8000e9), ("NVIDIA A100-SXM4-40GB", 312e12, 1555e9),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2039e9), ("NVIDIA A100 80GB PCIe", 312e12, 1935e9), ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA L40S", 362e12, 864e9), ("NVIDIA A10G", 70e12, 600e9), ("NVIDIA GeForce RTX 4090", 165.2e12, 1008e9),
        ("Tesla T4", None, 320e9), ("Tesla V100-SXM2-16GB", None, 900e9), ("NVIDIA GB200", 2500e12, 8000e9),
        ("NVIDIA B300 SXM6 AC", 2250e12, 8000e9), ("NVIDIA GB300", 2500e12, 8000e9), ("NVIDIA H800 PCIe", 756e12, 2039e9),
    ],
)  # fmt: skip
def test_documented_peaks_are_found_by_the_device_name_of_the_driver(
    name: str, bfloat16: float | None, bytes_per_s: float
) -> None:
    peaks = documented_peaks(name)
    assert peaks is not None
    assert peaks.of("bfloat16") == (None if bfloat16 is None else pytest.approx(bfloat16))
    assert peaks.bytes_per_s == bytes_per_s
    assert peaks.source.startswith("NVIDIA")


@pytest.mark.parametrize(
    "name",
    [
        "", "Intel(R) Xeon(R)", "NVIDIA GeForce RTX 9999", "AMD Instinct MI300X", "NVIDIA GeForce GTX 1080",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 Laptop GPU",
    ],
)  # fmt: skip
def test_an_unknown_device_has_no_documented_peaks(name: str) -> None:
    assert documented_peaks(name) is None


def test_the_measured_peak_of_bfloat16_is_that_of_float16_unless_this_was_measured() -> None:
    def of(**found: float) -> float | None:
        peaks = measured_peaks(found)
        assert peaks is not None
        return peaks.of("float16")

    assert of(float32=1e13, bfloat16=8e13) == 8e13
    assert of(float32=1e13, float16=4e13) == 4e13  # a GPU older than Ampere
    assert of(float32=1e13) is None


def test_the_roof_is_unknown_without_peaks() -> None:
    assert roof(1e9, 1e6, None, None).least_s is None
    assert A100 is not None
    assert A100.of("float32") == 19.5e12
    assert A100.of("tf32") == 156e12
