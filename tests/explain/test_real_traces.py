"""Tables of a real trace of torch.profiler, compared with torch's own numbers for the same steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from autotune.explain.breakdown import breakdown
from autotune.explain.host import Host, host_of
from autotune.explain.operators import operator_rows, operators_of
from autotune.explain.timeline import MAX_RECTANGLES, timeline
from autotune.explain.trace import Trace, read_trace
from tests.explain.kineto import ALL_REDUCE, GEMM, Kineto

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, str(PROGRAM), str(made)], check=True, capture_output=True, timeout=240)
    return made


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "truth.json").read_text())


@pytest.fixture(scope="module")
def real(folder: Path) -> tuple[Trace, Host]:
    trace = read_trace(folder / "trace.json.gz")
    return trace, host_of(trace)


def test_cpu_categories_sum_to_the_step_within_two_percent(real: tuple[Trace, Host]) -> None:
    found = breakdown(*real)
    assert sum(found.seconds.values()) == pytest.approx(found.step_s, rel=0.02)
    assert not found.is_gpu


def test_input_wait_equals_the_time_that_the_loop_waited(real: tuple[Trace, Host], truth: dict[str, Any]) -> None:
    waited_s = sum(truth["waits"]) / len(truth["waits"])
    assert breakdown(*real).seconds["input_wait"] == pytest.approx(waited_s, rel=0.05, abs=2e-3)


def test_time_between_phases_is_located(real: tuple[Trace, Host], truth: dict[str, Any]) -> None:
    found = breakdown(*real)
    where, seconds = found.other_parts[0]
    assert where == "between optimizer and the end of the step"
    assert truth["slept_s"] <= seconds < found.seconds["other"] + 1e-9


def test_operator_self_times_equal_those_of_key_averages(real: tuple[Trace, Host], truth: dict[str, Any]) -> None:
    rows, notes = operator_rows(*real, operators_of(*real))
    self_s, counts = defaultdict(float), defaultdict(float)
    for row in rows:
        self_s[row["operator"]] += 4 * row["host_self_s"]
        counts[row["operator"]] += 4 * row["count"]
    assert notes == []
    assert len(self_s) > 50
    for name, seconds in self_s.items():
        assert seconds == pytest.approx(truth["self_s"][name], rel=0.02, abs=20e-6), name
    for name in ("aten::mm", "aten::convolution_backward", "aten::native_batch_norm", "aten::_foreach_add_"):
        assert counts[name] == truth["counts"].get(name, 0), name


def test_flops_from_shapes_equal_those_of_the_flop_counter(real: tuple[Trace, Host], truth: dict[str, Any]) -> None:
    """The counter of torch counts attention on the CPU since 2.15. Its formula has 2 products forward and 5 backward."""
    rows, _ = operator_rows(*real, operators_of(*real))
    attention = sum(row["flops"] for row in rows if row["kind"] == "attention" and row["flops"])
    assert attention == 7 * 2 * 8 * 2 * 25 * 25 * 8
    found = operators_of(*real)
    is_counted = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    assert found.a_step(found.flops) == pytest.approx(truth["flops"] + (0 if is_counted else attention), rel=1e-9)


def test_operator_rows_contain_phase_and_shapes(real: tuple[Trace, Host]) -> None:
    rows, _ = operator_rows(*real, operators_of(*real))
    phases = {row["phase"] for row in rows if "Backward" in row["operator"]}
    assert phases == {"backward"}
    first = next(row for row in rows if row["operator"] == "aten::mkldnn_convolution" and row["shapes"].startswith("8x3x20x20"))
    assert (first["shapes"], first["phase"], first["dtype"]) == ("8x3x20x20, 8x3x3x3, 8", "forward", "float32")
    assert first["flops"] == 2 * 8 * 10 * 10 * 8 * 3 * 9
    assert sum(row["share_frac"] for row in rows) == pytest.approx(1)
    assert rows[-1]["cumulative_frac"] == pytest.approx(1)


def test_the_timeline_of_a_step_stays_small_and_inside_the_step(real: tuple[Trace, Host]) -> None:
    found = timeline(*real)
    length_s = max(end - start for start, end in real[0].steps())
    assert 10 < len(found) <= MAX_RECTANGLES
    assert [each.name for each in found if each.lane == "phases"] == ["input", "forward", "backward", "optimizer"]
    assert all(each.seconds > 0 and each.start_s >= 0 and each.start_s + each.seconds <= length_s + 1e-9 for each in found)


def test_real_and_synthetic_traces_pass_the_validator_of_torch(folder: Path, tmp_path: Path) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="added in torch 2.14")
    made = Kineto()
    made.step(1, 0, 20)
    made.operator("aten::mm", 0, 2, [[8, 8], [8, 8]], ["float", "float"], **{"External id": 1})
    made.kernel(GEMM, 3, 2, launched=1)
    made.kernel(ALL_REDUCE, 6, 2, launched=5.5, stream=20)
    for path in (folder / "trace.json.gz", made.write(tmp_path / "trace.json.gz")):
        passed, violations = validator.validate_trace(str(path))
        assert passed, violations
