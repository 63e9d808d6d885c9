"""The passes of `autotune explain` read phases by CUDA events, kernels by CUPTI and allocations by the allocator's history."""

import sys
from collections.abc import Callable

import pytest

from autotune.explain.passes import Passes, read_passes
from autotune.explain.trace import read_trace
from autotune.harness.explain.documents import BACKWARD, FORWARD, NARROW, OPTIMIZER, WIDE
from autotune.machine.gpus import gpus
from autotune.records import Kind
from autotune.run_dir import StudyFolder
from tests.benchmarks.commands import run_command, run_study
from tests.benchmarks.rivals import PROGRAM

pytestmark = pytest.mark.gpu
BATCH = 128
ALONE = ("search_space=none", "study.budget.trials=1", "search.warm_start=off", "explain.auto=false")


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Passes:
    """The results of the three passes for a program that is limited by the GPU and never waits for it."""
    if not gpus():  # this fixture comes before the one that skips each test
        pytest.skip("no CUDA device")
    runs, command = tmp_path_factory.mktemp("runs"), [sys.executable, str(PROGRAM), "--size", "224", "--batch", str(BATCH)]
    run_study(runs, "device", ALONE, minutes=1.0, command=command)
    run_command("-m", "autotune", "explain", "device", "--runs-dir", str(runs), "--minutes", "0")
    study = StudyFolder(runs / "device")
    return read_passes([study.trial_path(one.number) for one in study.read_trials() if one.kind is Kind.explain])


def test_phases_are_device_times_and_every_step_is_counted(
    passes: Passes, record_property: Callable[[str, object], None]
) -> None:
    lines = passes.lines[0]
    step_s, phases = lines.seconds / lines.steps, lines.device_phases_s
    assert phases is not None
    record_property("host", {name: round(seconds / step_s, 3) for name, seconds in lines.phases_s.items()})
    record_property("device", {name: round(seconds / step_s, 3) for name, seconds in phases.items()})
    assert lines.samples == pytest.approx(BATCH * lines.steps)
    assert sum(phases.values()) == pytest.approx(step_s, rel=0.02)
    assert phases[FORWARD] + phases[BACKWARD] > 0.7 * step_s
    assert phases[OPTIMIZER] < 0.2 * step_s
    assert "optimizer.step()" not in [site.text for site in lines.syncs if site.kind == "synchronize"]


def test_kept_trace_contains_gpu_kernels(passes: Passes, record_property: Callable[[str, object], None]) -> None:
    traced = passes.traced[0]
    record_property("step ms", [round(1e3 * (seconds or 0.0), 2) for seconds in (traced.plain_step_s, traced.step_s)])
    record_property("peaks", {name: f"{value:.3g}" for name, value in traced.peaks.items()})
    record_property("notes", traced.notes)
    assert read_trace(passes.traces[0]).has_device
    assert traced.peaks[NARROW] > traced.peaks[WIDE]


def test_memory_pass_records_the_peak_and_what_fills_it(passes: Passes, record_property: Callable[[str, object], None]) -> None:
    memory = passes.memory[0]
    record_property("peak MiB", memory.peak_bytes >> 20)
    record_property("other", round(memory.other / memory.peak_bytes, 3))
    assert memory.timeline
    assert any(row["file"] for row in memory.at_peak)
    assert memory.activations > memory.parameters
    assert memory.peak_bytes <= (memory.capacity_bytes or 0)
    record_property("products", {name: f"{value:.3g}" for name, value in memory.products.items()})
    assert memory.products
