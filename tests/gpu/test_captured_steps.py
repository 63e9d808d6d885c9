"""A program that captures its whole step as a CUDA graph keeps training, and each replay counts as a step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import Make

pytestmark = pytest.mark.gpu
CAPTURED = Path(__file__).with_name("captured_program.py")


def test_graph_replays_are_counted_and_timed_as_steps(program: Make, record_property: Callable[[str, object], None]) -> None:
    result = program(file=CAPTURED).baseline.result
    assert result
    assert result.window
    record_property("samples/s", result.throughput_per_s)
    record_property("gap", result.window.clock_gap_frac)
    assert (result.unit, result.window.samples) == ("samples", 64 * result.window.steps)
    assert result.window.clock_gap_frac is not None
    assert result.window.clock_gap_frac <= 0.01
    assert result.loss
    assert result.loss["is_finite"]
    assert len(result.loss["curve"]) > 10
    assert "harness_problems" not in result.detected
