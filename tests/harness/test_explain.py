"""The passes of mode "explain" find what was planted in programs, and leave nothing behind."""

from __future__ import annotations

import errno
import functools
import gc
import gzip
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.explain.trace import read_trace
from autotune.harness.explain import allocations, compiling, documents, kineto, workers
from autotune.harness.explain.documents import LINES, MAIN, MEMORY, TRACE, WORKER, Restarts
from autotune.harness.explain.passes import CUT_SHORT, Explained
from autotune.harness.explain.restarts import RestartTimer
from autotune.harness.explain.sampler import SWITCH_S, LineSampler, stack_of, threads
from autotune.harness.explain.sources import HARNESS, LIBRARY, OWN, Sources
from autotune.harness.explain.stages import Stages
from autotune.harness.explain.trace import MAX_EVENTS, MAX_STEPS, MIN_STEPS, RANGE, TracePass, _num_wanted
from autotune.harness.patches import Patches, patches
from autotune.harness.protocol import SCRATCH
from autotune.harness.worker import read_together
from tests.harness.conftest import PROGRAMS, Run, Trial, trials_in
from tests.harness.contexts import context
from tests.support.waiting import wait_until

PROGRAM = "explained.py"
LENGTH_S = 0.7


def explain(trial: Trial, which: str, *words: str, **options: Any) -> Run:
    return trial(PROGRAM, *words, mode="explain", explain=which, max_s=LENGTH_S, **options)


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Returns a function that makes the pass "lines" with the given words, once for all tests."""
    return functools.cache(functools.partial(explain, trials_in(tmp_path_factory.mktemp("lines"), request), LINES))


def document(run: Run, which: str, rank: int = 0) -> dict[str, Any]:
    path = run.folder / documents.document_file(which, rank)
    assert path.exists(), f"no document; exit {run.returncode}\n{run.stdout}\n{run.stderr}"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def line_of(text: str) -> int:
    """Returns the number of the program's line that contains a text."""
    return next(number for number, line in enumerate((PROGRAMS / PROGRAM).read_text().splitlines(), 1) if text in line)


# --- lines ---


def test_phases_sum_to_the_step_and_the_slow_line_is_named(lines_of: Callable[..., Run]) -> None:
    run = lines_of("burn", "sync")
    found = document(run, LINES)
    assert run.result().status == "measured"
    assert run.result().window is None
    step_s = found["seconds"] / found["steps"]
    assert sum(found["phases_s"].values()) == pytest.approx(step_s, rel=0.001)
    own = [line for line in found["lines"] if line["is_own"] and line["where"] == MAIN]
    assert sum(line["self_s"] for line in own) == pytest.approx(step_s, rel=0.1)
    slow = max((line for line in own if line["phase"] == "other"), key=lambda line: line["self_s"])
    assert (slow["function"], slow["callee"]) == ("burn", "")
    assert slow["self_s"] + 0.0005 > 0.5 * 0.004  # the loop has two lines
    assert slow["text"].startswith(("while", "pass"))


def test_synchronisations_are_attributed_to_the_line_of_the_program(lines_of: Callable[..., Run]) -> None:
    found = document(lines_of("burn", "sync"), LINES)
    site = next(site for site in found["syncs"] if site["function"] == "report")
    assert (site["kind"], site["line"], site["phase"]) == ("item", line_of("the place of the sync"), "other")
    assert site["count"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("words", [("evaluate",), pytest.param(("evaluate", "epochs"), marks=pytest.mark.thorough)])
def test_evaluations_are_excluded_from_the_pass_lines(lines_of: Callable[..., Run], words: tuple[str, ...]) -> None:
    run = lines_of(*words)
    found = document(run, LINES)
    step_s = found["seconds"] / found["steps"]
    rounds = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("seconds ")][1:]  # of four steps each
    own_s, evaluated_s = (statistics.mean(map(float, column)) / 4 for column in zip(*rounds, strict=True))
    assert evaluated_s >= 0.01
    assert step_s < own_s + 0.5 * evaluated_s
    assert sum(found["phases_s"].values()) == pytest.approx(step_s, rel=0.001)
    assert found["samples"] / found["steps"] == pytest.approx(8, rel=0.05)
    assert not [site for site in found["syncs"] if site["function"] == "report"]
    assert not [line for line in found["lines"] if line["text"].startswith("time.sleep(0.01)")]


def test_page_faults_are_counted_unless_the_program_evaluates(lines_of: Callable[..., Run]) -> None:
    assert document(lines_of("blocks"), LINES)["page_faults"] >= 2**26 / 4096
    assert document(lines_of(), LINES)["page_faults"] < 1000
    assert document(lines_of("evaluate"), LINES)["page_faults"] is None


@pytest.mark.thorough
def test_new_workers_for_each_epoch_are_timed_unless_they_live_on(trial: Trial) -> None:
    found = document(explain(trial, LINES, "epochs", "workers"), LINES)
    seen = found["restarts"]
    assert seen["count"] >= 1
    assert (seen["num_remade"], seen["steps_per_epoch"]) == (0, 4)
    assert min(seen["start_s"], seen["first_s"], seen["end_s"]) > 0
    assert seen["start_s"] + seen["first_s"] + seen["end_s"] <= 1.01 * found["phases_s"]["input"] * found["steps"]
    remade = document(explain(trial, LINES, "epochs", "workers", "remade"), LINES)["restarts"]
    assert remade["num_remade"] == remade["count"]
    kept = explain(trial, LINES, "epochs", "workers", knobs={"loader.persistent_workers": True})
    assert document(kept, LINES)["restarts"] is None


def test_starts_of_workers_in_a_step_that_does_not_count_are_forgotten() -> None:
    timer = RestartTimer(SimpleNamespace(loaders=SimpleNamespace(training=SimpleNamespace(steps_per_epoch=9))))  # type: ignore[arg-type]
    assert timer.result() is None
    timer.found.count, timer.found.start_s = 1, 0.5
    timer.step_begins()
    timer.found.count, timer.found.start_s = 2, 1.5
    timer.leave_out_step()
    assert timer.result() == Restarts(count=1, start_s=0.5, steps_per_epoch=9)


def test_work_of_workers_is_reported_by_stage_and_line(lines_of: Callable[..., Run]) -> None:
    run = lines_of("item", "transform", "workers")
    assert not list(run.folder.rglob("stages*")), "the files of the workers are removed"
    found = document(run, LINES)
    stages = {stage["name"]: stage for stage in found["stages"] if stage["where"] == WORKER}
    assert stages["item"]["blocked_s"] == pytest.approx(0.003, rel=0.8)
    assert stages["transform: Halve"]["blocked_s"] == pytest.approx(0.002, rel=0.8)
    assert stages["transform: Halve"]["function"] == "Halve.__call__"
    assert stages["item"]["line"] == line_of("def __getitem__")
    assert {"collate", "hand-over"} <= set(stages)
    lines = [line for line in found["lines"] if line["where"] == WORKER and line["is_own"]]
    assert {line["line"] for line in lines[:2]} == {line_of("time.sleep(0.003)"), line_of("time.sleep(0.002")}
    assert found["num_workers"] == 2
    assert found["wait_s"] > 0
    assert found["phases_s"]["input"] >= 0.9 * found["wait_s"]


def test_worker_of_a_short_epoch_writes_what_it_saw_when_it_ends(tmp_path: Path) -> None:
    start = workers.prefix(str(tmp_path), 0)
    process = multiprocessing.get_context("fork").Process(target=workers.observe, args=(start,))
    process.start()
    process.join()
    (found,) = workers.read(start).values()
    assert found["counts"]["fetches"] == 0


def test_without_workers_stages_are_reported_for_the_training_process(trial: Trial) -> None:
    found = document(explain(trial, LINES, "item"), LINES)
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["item"]["where"] == MAIN
    assert stages["item"]["blocked_s"] == pytest.approx(0.003, rel=0.8)
    slow = next(line for line in found["lines"] if line["line"] == line_of("time.sleep(0.003)"))
    assert slow["phase"] == "input"


def test_only_some_cheap_items_are_timed(lines_of: Callable[..., Run]) -> None:
    found = document(lines_of(), LINES)
    item = next(stage for stage in found["stages"] if stage["name"] == "item")
    assert 0 < item["count"] < 0.2 * found["steps"] + 2


def test_both_ranks_report_the_same_steps(trial: Trial) -> None:
    run = explain(trial, LINES, "ranks", "rank1", ranks=2)
    first, second = document(run, LINES, 0), document(run, LINES, 1)
    assert first["steps"] == second["steps"] > 0
    assert (first["world_size"], second["rank"]) == (2, 1)
    assert second["phases_s"]["other"] > 0.003
    burning = line_of("# the slow line")
    assert [burning in {line["line"] for line in found["lines"]} for found in (first, second)] == [False, True]
    assert first["communication"]["exposed_s"] > 0


# --- trace ---


def test_trace_has_the_phases_of_each_step(trial: Trial) -> None:
    run = explain(trial, TRACE, "item")
    found = document(run, TRACE)
    events = json.loads(gzip.decompress((run.folder / found["file"]).read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep")]
    assert len(steps) == found["steps"] >= MIN_STEPS
    ranges: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE):
            ranges.setdefault(event["name"], []).append(event["dur"])
    assert set(ranges) == {f"autotune::{phase}" for phase in ("input", "forward", "backward", "optimizer")}
    assert all(len(durations) >= len(steps) - 1 for durations in ranges.values())
    assert statistics.median(ranges["autotune::input"]) >= 8 * 3_000  # microseconds: the items of a batch sleep
    assert any(event.get("args", {}).get("Input Dims") for event in events)
    assert found["step_s"] > 0 < found["plain_step_s"]
    assert set(found["peaks"]) == {"float32", "bfloat16", "bytes"}
    assert run.stderr == ""


@pytest.mark.parametrize("words", [("evaluate",), pytest.param(("evaluate", "epochs"), marks=pytest.mark.thorough)])
def test_traced_steps_with_an_evaluation_are_listed_as_left_out(trial: Trial, words: tuple[str, ...]) -> None:
    run = explain(trial, TRACE, *words)
    found = document(run, TRACE)
    trace = read_trace(run.folder / found["file"])
    all_steps = trace.steps()
    trace.left_out = found["left_out"]
    kept, begun_s = trace.steps(), set(trace.steps()[:, 0].tolist())
    seconds = (kept[:, 1] - kept[:, 0]).tolist()
    assert len(all_steps) > len(seconds) == found["steps"] >= MIN_STEPS
    assert all(end_s - begin_s > 0.04 for begin_s, end_s in all_steps if begin_s not in begun_s)  # evaluations take 40 ms
    assert statistics.median(seconds) < 0.04
    assert sum(seconds) / len(seconds) <= found["step_s"]


def test_trace_that_cannot_be_written_is_reported_in_a_note(trial: Trial) -> None:
    run = explain(trial, TRACE, "blocked")
    found = document(run, TRACE)
    assert found["file"] == ""
    assert "could not be written" in found["notes"][0]
    assert run.result().status == "measured"


def test_trace_of_a_process_killed_meanwhile_is_left_only_in_the_scratch_folder(trial: Trial, tmp_path: Path) -> None:
    """It is not masked, and only that folder is removed in any case. Torch's own compression begins in TMPDIR."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = explain(trial, TRACE, "killed", env={"TMPDIR": str(temporary)}, is_fresh=True)
    assert run.returncode == -signal.SIGKILL
    assert not list(temporary.rglob("*.json"))
    assert [path.parent for path in run.folder.rglob("*trace*")] == [run.folder / SCRATCH]


@pytest.mark.parametrize("num_wanted", [None, 4])
def test_profiler_is_stopped_if_the_program_ends_in_a_first_traced_step(num_wanted: int | None) -> None:
    cut_off = TracePass(context(device="cpu"))
    cut_off._marks = cut_off._syncs = SimpleNamespace(uninstall=lambda: None, between_steps=None)  # type: ignore[assignment]
    cut_off._start()
    cut_off._num_wanted = num_wanted
    assert torch.autograd._profiler_enabled()
    try:
        assert cut_off.finish() is None
        assert not torch.autograd._profiler_enabled()
    finally:
        if torch.autograd._profiler_enabled():
            cut_off._profiler.stop()


@pytest.mark.parametrize(("step_s", "events", "steps"), [(1.0, 10, MIN_STEPS), (1e-4, 10, MAX_STEPS), (0.1, MAX_EVENTS, 1)])
def test_number_of_traced_steps_is_limited_directly_and_by_their_events(step_s: float, events: int, steps: int) -> None:
    assert _num_wanted(step_s, events) == steps


# --- memory ---


def test_memory_is_reported_by_category_and_flops_are_exact(trial: Trial) -> None:
    run = explain(trial, MEMORY, "wide")
    found = document(run, MEMORY)
    parts = ("parameters", "gradients", "optimizer_state", "activations", "input", "other")
    assert found["peak_bytes"] == sum(found[part] for part in parts)
    parameters = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert (found["parameters"], found["gradients"]) == (parameters, 0)  # at the peak the backward pass has only begun
    assert found["optimizer_state"] == pytest.approx(2 * parameters, abs=64)
    products = 2 * 512 * 64 * 256
    assert found["flops"] == 5 * products  # the input needs no gradient
    assert found["samples"] == 512
    modules = {row["module"]: row for row in found["by_module"]}
    assert (modules["0"]["class"], modules["0"]["flops"]) == ("Linear", 2 * products)
    assert modules["1"]["activations"] == 512 * 256 * 4  # the output of ReLU, which both it and the next layer need
    assert sum(row["flops"] for row in modules.values()) == found["flops"]
    assert found["products"]["timed_frac"] == pytest.approx(1.0)
    assert found["products"]["float32"] > 0 < found["products"]["bfloat16"]
    assert run.stderr == ""


def test_peak_of_a_small_batch_contains_all_gradients(trial: Trial) -> None:
    found = document(explain(trial, MEMORY), MEMORY)
    assert found["gradients"] == found["parameters"]
    assert found["activations"] < found["gradients"]


# --- programs that end, and bad input ---


def test_program_that_ends_during_warm_up_writes_no_document(trial: Trial) -> None:
    run = explain(trial, LINES, "short")
    assert run.result().status == "ended"
    assert not (run.folder / documents.document_file(LINES, 0)).exists()


def test_program_that_ends_during_a_pass_reports_what_was_seen(trial: Trial) -> None:
    run = trial(PROGRAM, "burn", "crash", mode="explain", explain=LINES, max_s=60.0)
    assert run.result().status == "failed"
    found = document(run, LINES)
    assert 0 < found["steps"] < 151
    assert "ended by itself" in found["notes"][0]


def test_program_that_crashes_in_a_pass_prints_the_line(trial: Trial) -> None:
    run = trial(PROGRAM, "segfault", mode="explain", explain=LINES, max_s=60.0)
    assert run.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in run.stderr
    assert f"line {line_of('signal.SIGSEGV')} in main" in run.stderr


def test_files_of_workers_are_in_the_scratch_folder_if_a_pass_is_cut_off(trial: Trial) -> None:
    """They contain source lines that are not masked, and only that folder is removed in any case."""
    run = trial(PROGRAM, "item", "workers", "segfault", mode="explain", explain=LINES, max_s=60.0)
    written = list(run.folder.rglob("loader*.json"))
    assert written
    assert all(path.is_relative_to(run.folder / SCRATCH) for path in written)


@pytest.mark.parametrize("is_announced", [False, True])
def test_rank_that_ends_with_rank_0_is_not_said_to_be_cut_short(tmp_path: Path, is_announced: bool) -> None:
    last_step = SimpleNamespace(is_announced=is_announced)
    explained = Explained(context(rank=1, last_step=last_step, spec={"explain": TRACE, "folder": str(tmp_path)}))
    traced = documents.Traced(1, 2, "cpu", "", 4, 0.1, 0.1)
    explained._pass = SimpleNamespace(which=TRACE, is_over=False, notes=[], finish=lambda: traced)  # type: ignore[assignment]
    explained._has_begun = True
    explained.finish()
    found = json.loads((tmp_path / documents.document_file(TRACE, 1)).read_text())
    assert found["notes"] == ([] if is_announced else [CUT_SHORT])


def test_unknown_pass_fails_the_trial(trial: Trial) -> None:
    run = trial(PROGRAM, mode="explain", explain="everything")
    assert not (run.folder / documents.document_file(LINES, 0)).exists()
    assert "no such pass, got 'everything'" in run.stderr


# --- nothing is left behind ---


def test_measured_trial_does_not_load_the_module_of_passes(trial: Trial) -> None:
    run = trial(PROGRAM, "seen", "workers")
    assert run.stdout.splitlines()[0] == "[]"
    assert not list(run.folder.rglob("stages*"))


def test_stages_restore_the_functions_that_they_replace() -> None:
    import builtins

    from torch.utils.data._utils import fetch

    before = (builtins.open, dict(vars(fetch._MapDatasetFetcher)), torch.load)
    stages = Stages()
    stages.install()
    assert builtins.open is not before[0]
    stages.uninstall()
    assert (builtins.open, dict(vars(fetch._MapDatasetFetcher)), torch.load) == before
    assert isinstance(patches, Patches)


def test_wait_for_a_core_between_two_readings_counts_on_both_clocks() -> None:
    """The first reading is interrupted: the thread waits 5 ms for a core after the clock was read."""
    delays_s, clock_s = iter([1.0, 1.005, 1.005, 1.005]), iter([10.0, 10.006])
    assert read_together(delays_s.__next__, clock_s.__next__) == (1.005, 10.006)


def test_clocks_are_read_after_a_few_attempts_if_each_is_interrupted() -> None:
    delay_s, clock_s = itertools.count(), itertools.count()
    assert read_together(delay_s.__next__, clock_s.__next__)[1] < 10


def test_sampler_restores_the_switch_interval() -> None:
    before = sys.getswitchinterval()
    sampler = LineSampler(Sources(), 0.002, lambda: "other")
    sampler.start()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    wait_until(lambda: sampler.num_samples, "a sample")
    sampler.stop()
    assert sys.getswitchinterval() == before


# --- parts ---


def test_graph_breaks_and_recompilations_are_reported_with_place_and_reason() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()  # the place of the break
        return x * 2

    torch._dynamo.reset()
    compilations = compiling.Compilations()
    try:
        function = torch.compile(broken, backend="eager", dynamic=False)
        for size in (3, 4, 5):
            function(torch.ones(size))
        found = compilations.result(Sources())
    finally:
        torch._dynamo.reset()
    assert found is not None
    lines = Path(__file__).read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if line.endswith("# the place of the break"))
    first = found.graph_breaks[0]
    assert (first["file"], first["line"]) == (__file__, place)
    assert "graph_break" in first["reason"]
    again = next(each for each in found.recompilations if each["function"] == "broken")
    assert (again["file"], again["count"]) == (__file__, 2)
    assert "size mismatch" in again["reason"]
    assert found.seconds > 0


def test_stack_is_read_from_the_innermost_frame() -> None:
    stack = stack_of(threading.get_ident())
    names = [code.co_name for code, _ in stack]
    assert names.index("stack_of") < names.index("test_stack_is_read_from_the_innermost_frame")
    assert stack_of(1) == []


READS_STACKS = """
import gc, sys, threading, time
from autotune.harness.explain.sampler import stack_of, threads

def pause(moment, info):
    if threading.get_ident() != main:
        time.sleep(0.0002)

def read():
    while not is_over:
        stack_of(main), threads()

def calls(depth):
    return [calls(depth - 1)] if depth else []

main, is_over = threading.get_ident(), False
gc.set_threshold(15)
gc.callbacks.append(pause)
reader = threading.Thread(target=read)
reader.start()
end_s = time.perf_counter() + 3
while time.perf_counter() < end_s:
    calls(40)
    [calls(3) for _ in range(20)]
is_over = True
reader.join()
assert gc.isenabled()
"""


def test_reading_stacks_during_garbage_collection_does_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", READS_STACKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reading_stacks_does_not_enable_the_garbage_collector() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in threads()
        assert stack_of(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frame_without_a_line_is_attributed_to_its_function() -> None:
    sampler = LineSampler(Sources(), 0.002, lambda: "other")
    code = test_frame_without_a_line_is_attributed_to_its_function.__code__
    sampler._note([(code, None)], "other", MAIN, 0.5)
    (line,) = sampler.lines(1.0)
    assert (line.line, line.self_s) == (code.co_firstlineno, 0.5)


def test_source_files_are_classified_as_program_library_or_harness() -> None:
    sources = Sources()
    assert sources.kind_of_file(__file__) == OWN
    assert sources.kind_of_file(os.path.join(os.path.dirname(torch.__file__), "nn", "x.py")) == LIBRARY
    assert sources.kind_of_file(json.__file__) == LIBRARY
    assert sources.kind_of_file(kineto.__file__) == HARNESS
    assert sources.kind_of_file("<frozen importlib>") == LIBRARY
    assert sources.kind_of_file("/tmp/torchinductor_me/ab/cab.py") == LIBRARY


@pytest.mark.parametrize("imported", ["from tool.cli import main", "import re\nimport sys\nfrom tool.cli import App"])
def test_package_of_an_entry_point_is_the_programs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str) -> None:
    libraries, script = tmp_path / "site-packages", tmp_path / "bin" / "tool"
    for folder in (libraries / "tool", script.parent):
        folder.mkdir(parents=True)
    (libraries / "tool" / "__init__.py").touch()
    script.write_text(f"#!/usr/bin/python\n{imported}\n")
    monkeypatch.syspath_prepend(str(libraries))
    monkeypatch.setitem(sys.modules, "tool", SimpleNamespace(__file__=str(libraries / "tool" / "__init__.py")))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(script.parent))
    sources = Sources()
    assert sources.kind_of_file(str(libraries / "tool" / "train.py")) == OWN
    assert sources.kind_of_file(str(libraries / "other" / "train.py")) == LIBRARY


def test_profiler_runs_if_the_program_has_closed_its_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(errno.EBADF, "closed")

    monkeypatch.setattr(kineto.os, "dup", fail)
    notes: list[str] = []
    with kineto.quiet(notes):
        notes.append("ran")
    assert notes == ["ran"]


def test_output_of_kineto_is_hidden_and_missing_gpu_permission_becomes_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    with kineto.quiet(notes):
        os.write(2, b"USDT: registered\nERROR: a b\n[rank0]:[W1124 CPUAllocator.cpp:245] x\nthe program's own\n")
        os.write(2, b"CUPTI: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\n")
    assert capfd.readouterr().err == "the program's own\n"
    assert notes == ["GPU kernels are not known: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"]


def test_history_of_the_gpu_allocator_is_reduced_to_its_peak() -> None:
    own, library = ({"filename": name, "line": 7, "name": "f"} for name in (__file__, torch.__file__))

    def entry(action: str, address: int, size: int, time_us: int, *frames: Any) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": list(frames)}

    history = allocations.History(allocated=100, reserved=1000)
    history.replay(
        [
            entry("alloc", 1, 300, 0, library, own),
            entry("alloc", 2, 200, 1_000_000, library),
            entry("free_requested", 1, 300, 1_500_000),
            entry("free_completed", 1, 300, 2_000_000),
            entry("segment_alloc", 9, 500, 2_500_000),
            entry("alloc", 3, 50, 3_000_000, own),
            entry("alloc", 4, 400, 3_500_000),
        ]
    )
    rows = history.at_peak(Sources())
    assert [(row["file"], row["bytes"], row["count"]) for row in rows] == [
        ("", 400, 1),
        (torch.__file__, 200, 1),
        ("", 100, 0),
        (__file__, 50, 1),
    ]
    assert [row["function"] for row in rows if not row["file"]] == [allocations.UNSEEN, allocations.EARLIER]
    assert history.points()[1] == [1.0, 600, 1000]
    assert history.points()[-1] == [3.5, 750, 1500]
    assert history.fragmentation_frac == pytest.approx(0.5)


def test_history_of_the_gpu_allocator_is_right_even_if_its_beginning_is_lost() -> None:
    recorder = allocations.DeviceAllocations(0)
    rest = [
        {"action": "free_completed", "addr": 1, "size": 300, "time_us": 0},
        {"action": "segment_alloc", "addr": 9, "size": 100, "time_us": 1_000_000},
        {"action": "alloc", "addr": 2, "size": 200, "time_us": 2_000_000},
    ]
    recorder._reduce(rest, allocated=500, reserved=1000)  # at its end
    assert recorder.timeline == [[0.0, 300, 900], [1.0, 300, 1000], [2.0, 500, 1000]]
    assert recorder.fragmentation_frac == pytest.approx(0.5)


def test_documents_can_be_read_back_into_their_dataclasses(lines_of: Callable[..., Run]) -> None:
    raw = document(lines_of(), LINES)
    raw["lines"] = [documents.Line(**line) for line in raw["lines"]]
    assert documents.Lines(**raw).schema == 1
    assert Path(raw["lines"][0].file).is_absolute()
