"""The pass "lines" notes what makes its steps slow although it is not part of them, or not the model's fault."""

from __future__ import annotations

import sys

import torch

from autotune.harness.explain.lines import EVALUATED, PROFILED, TRACED, of_debugging, of_evaluations


def test_profilers_that_the_program_left_on_are_noted():
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        assert TRACED in of_debugging()
    finally:
        sys.setprofile(before)
    assert PROFILED not in of_debugging()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert PROFILED in of_debugging()


def test_evaluations_that_take_much_of_the_time_are_noted():
    assert of_evaluations(10.0, 6.0) == [EVALUATED.format(40)]
    assert of_evaluations(10.0, 9.5) == of_evaluations(0.0, 0.0) == []
