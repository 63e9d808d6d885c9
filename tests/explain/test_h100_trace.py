"""Tables of a trace that torch.profiler wrote on a GPU: two steps of tests/benchmarks/image_program.py, resnet18 in float32.

NVIDIA H100, torch 2.11, batch 128, 224 pixels. The program waits for the GPU at every second step. The file has only the
events of these two steps, without strides and flow arrows. A step took 27.8 ms without the profiler.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from autotune.explain.breakdown import breakdown
from autotune.explain.host import host_of
from autotune.explain.kernel_names import converts_layout
from autotune.explain.kernels import kernel_rows
from autotune.explain.operators import operator_rows, operators_of
from autotune.explain.roofline import documented_peaks
from autotune.explain.trace import read_trace

FILE = Path(__file__).parents[1] / "data" / "traces" / "h100-resnet18-float32.json.gz"
STEPS, PLAIN_STEP_S = 2, 0.0278


@pytest.fixture(scope="module")
def kernels():
    events = json.loads(gzip.decompress(FILE.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


@pytest.fixture(scope="module")
def read():
    trace = read_trace(FILE)
    return trace, host_of(trace)


def seconds_of(events):
    return sum(event["dur"] for event in events) * 1e-6 / STEPS


def test_step_takes_as_long_as_without_profiler_and_computes_as_long_as_its_kernels(read, kernels):
    found = breakdown(*read)
    computing_s = sum(seconds for name, seconds in found.seconds.items() if name.startswith("compute"))
    assert found.is_gpu
    assert found.step_s == pytest.approx(PLAIN_STEP_S, rel=0.02)
    assert sum(found.seconds.values()) == pytest.approx(found.step_s, rel=0.001)
    assert computing_s == pytest.approx(seconds_of(kernels), rel=0.002)  # kernels of one stream do not overlap
    assert found.seconds["compute_16bit"] == 0


def test_every_kernel_has_an_operator_and_layout_conversions_are_recognised(read, kernels):
    rows, _ = kernel_rows(*read)
    assert all(row["operator"] for row in rows)
    converting_s = sum(row["total_s"] for row in rows if converts_layout(row["kernel"]))
    named = [kernel for kernel in kernels if re.search("nchwToNhwc|nhwcToNchw", kernel["name"])]
    assert converting_s == pytest.approx(seconds_of(named))
    assert converting_s / PLAIN_STEP_S == pytest.approx(0.19, abs=0.01)
    assert {row["tensor_core_used"] for row in rows if "tf32f32" in row["kernel"]} == {"yes"}


def test_operator_seconds_equal_the_seconds_of_their_kernels(read, kernels):
    trace, host = read
    rows, _ = operator_rows(trace, host, operators_of(trace, host))
    assert sum(row["device_self_s"] for row in rows) == pytest.approx(seconds_of(kernels), rel=0.01)
    convolutions = [row for row in rows if row["kind"] == "convolution" and row["device_self_s"]]
    assert {row["phase"] for row in convolutions} == {"forward", "backward"}


def test_no_operator_exceeds_the_documented_peak_of_the_gpu(read):
    trace, host = read
    rows, _ = operator_rows(trace, host, operators_of(trace, host), peaks=documented_peaks(trace.device_name))
    known = [row for row in rows if row["roofline_frac"] and row["bytes"] > 1e8 * row["count"]]  # more than the cache holds
    assert len(known) > 20
    assert 0.9 < max(row["roofline_frac"] for row in known) < 1.0


def test_only_short_kernels_have_zero_occupancy_and_tensor_cores_take_29_percent(read):
    rows, _ = kernel_rows(*read)
    for row in rows:
        assert row["occupancy_frac"] != 0 or row["mean_s"] < 10e-6
    assert {row["occupancy_frac"] for row in rows if row["shared_bytes"] > 200_000} == {None}
    on_tensor_cores = sum(row["share_frac"] for row in rows if row["tensor_core_used"] == "yes")
    assert on_tensor_cores == pytest.approx(0.287, abs=0.01)
