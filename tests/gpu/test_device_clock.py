"""CUDA events, one per step, agree with the wall clock, and give the rate of the device alone."""

from collections.abc import Callable

import pytest

from tests.gpu.conftest import Make

pytestmark = pytest.mark.gpu
CLOCK_GAP_FRAC = 0.01
PROGRAMS = {"bound by its launches": ("--batch", "16"), "bound by the device": ("--size", "224", "--batch", "128")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_events_and_wall_time_agree(program: Make, name: str, record_property: Callable[[str, object], None]) -> None:
    measured = program(*PROGRAMS[name]).baseline
    assert measured.result
    assert measured.result.window
    record_property("gap", measured.result.window.clock_gap_frac)
    record_property("samples/s", round(measured.rate_per_s or 0.0, 1))
    assert measured.result.window.clock_gap_frac is not None, "no device events were read"
    assert measured.result.window.clock_gap_frac <= CLOCK_GAP_FRAC


def test_device_rate_equals_the_measured_rate_for_a_fixed_batch(
    program: Make, record_property: Callable[[str, object], None]
) -> None:
    measured = program(*PROGRAMS["bound by the device"]).baseline
    assert measured.result
    assert measured.result.device_rate_per_s
    record_property("D", round(measured.result.device_rate_per_s, 1))
    record_property("samples/s", round(measured.rate_per_s or 0.0, 1))
    assert measured.result.device_rate_per_s == pytest.approx(measured.rate_per_s, rel=0.05)
