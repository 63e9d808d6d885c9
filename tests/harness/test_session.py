"""How a trial begins and ends in real programs."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.harness import ending as ending_of_processes
from autotune.harness import protocol, report
from autotune.harness.ending import Ending
from tests.harness.conftest import RULES, SCRIPTS, Trial
from tests.harness.contexts import context


def test_measured_trial_ends_the_program_and_reports_its_result(trial: Trial) -> None:
    run = trial("basic.py", "catch=1", is_fresh=True)
    found = run.result()
    assert (run.returncode, found.status, found.error) == (0, "measured", None)
    assert "caught" not in run.stdout
    assert "autotune ends the program here" in run.stdout
    assert found.window is not None
    assert found.window.steps >= 20
    assert (found.unit, found.unit_source) == ("samples", "loader")
    assert found.window.samples == 16 * found.window.steps
    assert found.throughput_per_s == found.window.rate_per_s
    assert "harness_problems" not in found.detected
    assert set(found.phases_s) >= {"import", "init", "first_batch", "warmup", "steady"}
    lines = [json.loads(line) for line in (run.folder / protocol.PROGRESS_FILE).read_text().splitlines()]
    assert [line["phase"] for line in lines[:2]] == ["spawn", "import"]
    assert lines[-1]["phase"] == "exit"


@pytest.mark.parametrize(("program", "ranks"), [("basic.py", 1), (str(SCRIPTS / "ddp.py"), 2)])
def test_trial_whose_time_is_up_reports_the_window_so_far(trial: Trial, program: str, ranks: int) -> None:
    endless = dataclasses.replace(RULES, min_s=600.0, max_s=600.0, slow_max_s=600.0, race_min_s=0.2)
    run = trial(program, ranks=ranks, rules=endless, end_s=0.0)
    for rank in range(ranks):
        found = run.result(rank)
        assert found.status == "measured"
        assert found.window is not None
        assert found.window.is_steady
        # Only whole blocks count. Rank 0 ends all ranks' windows, so the others' may be a few steps shorter.
        least_s = endless.race_min_s - endless.block_min_s if rank == 0 else endless.race_min_s / 2
        assert least_s <= found.window.seconds < endless.min_s
        assert found.throughput_per_s
        assert rank or found.window.reason == "the trial's time was up"


def test_tokens_per_sample_applies_to_all_counts_and_rates(trial: Trial) -> None:
    found = trial("basic.py", tokens_per_sample=10).result()
    assert (found.unit, found.unit_source) == ("tokens", "loader")
    assert found.window is not None
    assert found.window.samples == 160 * found.window.steps
    assert set(found.steps["samples"]) == {160.0}
    assert found.loader_rate_per_s is not None
    assert found.loader_rate_per_s > found.window.rate_per_s  # both in tokens
    assert found.observed["loader.batch_size"] == 16


@pytest.mark.thorough
def test_graph_compiled_in_the_window_restarts_it(trial: Trial) -> None:
    rules = dataclasses.replace(RULES, warmup_max_s=20.0, min_s=1.0, max_s=2.0, cycles_max_s=20.0)
    found = trial("recompiling.py", rules=rules).result()
    assert found.compiled["graphs"] == 2
    assert found.window is not None
    assert found.window.is_steady, found.window.reason
    assert found.window.samples == 2 * found.window.steps  # all have the new shape
    assert found.steps["warmup"] + found.window.steps <= len(found.steps["end_s"]) + 1


def test_exception_of_the_program_is_reported_in_the_result(trial: Trial) -> None:
    run = trial("basic.py", "raise=5", "sleep=0.01")
    found = run.result()
    assert (run.returncode, found.status) == (1, "failed")
    assert found.error is not None
    assert (found.error["type"], found.error["message"]) == ("ArithmeticError", "the program's own trouble")
    assert found.detected["num_steps"] == 5


def test_exception_before_training_is_reported_in_the_result(trial: Trial) -> None:
    found = trial("basic.py", "raise=0").result()
    assert found.status == "failed"
    assert found.error is not None
    assert found.error["type"] == "ArithmeticError"


def test_program_that_ends_early_is_reported_with_its_number_of_steps(trial: Trial) -> None:
    run = trial("basic.py", "steps=7")
    found = run.result()
    assert (run.returncode, found.status, found.detected["num_steps"]) == (0, "ended", 7)
    assert len(found.steps["end_s"]) == 6
    assert found.throughput_per_s is None


@pytest.mark.parametrize("status", [0, 3])
def test_program_that_ends_by_os_exit_0_writes_its_result_first(trial: Trial, status: int) -> None:
    run = trial("basic.py", "steps=7", f"exit={status}")
    assert run.returncode == status
    assert run.has_result is (status == 0)  # after another status, the log says more than a result could
    if not status:
        found = run.result()
        assert (found.status, found.error, found.detected["num_steps"]) == ("ended", None, 7)


def test_loss_that_is_not_finite_is_reported(trial: Trial) -> None:
    loss = trial("basic.py", "nan=1").result().loss
    assert loss is not None
    assert loss["is_finite"] is False


def test_inspect_stops_after_five_steps_with_everything_detected(trial: Trial) -> None:
    found = trial("basic.py", mode="inspect").result()
    assert (found.status, found.detected["num_steps"]) == ("measured", 5)
    assert found.target is not None
    assert [(t["site"], t["ordinal"]) for t in found.target] == [(found.detected["loader"]["site"], 0)]
    assert found.detected["modules"] == ["Sequential"]
    assert found.observed["loader.batch_size"] == 16
    assert found.detected["optimizers"] == ["SGD"]


def test_apply_does_not_stop_the_program_and_writes_no_result(trial: Trial) -> None:
    run = trial("basic.py", "steps=60", mode="apply", knobs={"precision.amp": "bf16", "loader.batch_size": 8})
    assert run.returncode == 0, run.stderr
    assert len((run.folder / "losses.txt").read_text().split()) == 60
    assert sorted(path.name for path in run.folder.iterdir()) == ["losses.txt", "spec.json"]


def test_apply_reports_settings_without_effect_and_a_different_torch(trial: Trial) -> None:
    knobs = {"precision.amp": "bf16", "loader.batch_size": 8}
    elsewhere = {"target": [{"site": "/elsewhere.py:1", "ordinal": 0}], "origin": "best.yaml", "made_on": {"torch": "1.0"}}
    run = trial("basic.py", "steps=20", mode="apply", knobs=knobs, **elsewhere)
    lines = [line for line in run.stderr.splitlines() if line.startswith("autotune")]
    assert lines[0] == "autotune: 1 of 2 settings of best.yaml in effect"
    said = "autotune:   loader.batch_size=8: overridden by the program (8 was requested, but the training loader"
    assert lines[1].startswith(said)
    assert lines[2].startswith("autotune: made with torch 1.0, runs with torch 2")
    assert (run.returncode, len(lines)) == (0, 3)


@pytest.mark.parametrize("mode", ["measure", "apply"])
def test_fault_of_the_harness_is_reported_and_not_raised_in_the_program(trial: Trial, mode: str) -> None:
    run = trial("faulty_module.py", mode=mode)
    assert "the harness failed while preparing a module for training" in run.stderr
    if mode == "apply":
        assert (run.returncode, run.has_result) == (0, False)
        return
    found = run.result()
    assert found.status == "failed"
    assert found.error is not None
    assert found.error["message"].startswith("autotune's harness failed while preparing a module for training")


def test_failure_while_a_knob_is_set_names_the_knob(trial: Trial) -> None:
    run = trial("faulty_module.py", "stubborn", knobs={"layout.channels_last": True, "precision.amp": "bf16"})
    error = run.result().error
    assert error is not None
    assert error["knob"] == "layout.channels_last"
    assert "preparing a module for training (layout.channels_last): it stays as it is" in error["message"]


@pytest.mark.thorough
@pytest.mark.parametrize(("workers", "optimizer"), [(0, "sgd"), (2, "adam")])
def test_without_knobs_the_losses_are_bit_for_bit_the_same(trial: Trial, plain: Trial, workers: int, optimizer: str) -> None:
    words = (f"workers={workers}", f"optimizer={optimizer}", "steps=120")
    mine, own = trial("basic.py", *words), plain("basic.py", *words)
    watched = (mine.folder / "losses.txt").read_text().split()
    alone = (own.folder / "losses.txt").read_text().split()
    assert len(watched) >= 50, mine.stderr
    assert watched == alone[: len(watched)]


@pytest.mark.parametrize(("limit_per_s", "is_raced"), [(1e12, True), (1e-3, False)])
def test_a_trial_that_is_certainly_too_slow_ends_early_with_its_result(
    trial: Trial, limit_per_s: float, is_raced: bool
) -> None:
    rules = dataclasses.replace(RULES, race_min_s=0.1, min_s=0.4, max_s=3.0)
    if is_raced:  # needs more time, because no window is raced as long as a pause of the machine may belong to a cycle
        rules = dataclasses.replace(rules, warmup_max_s=20.0, min_s=20.0, max_s=30.0)
    found = trial("basic.py", race_below_per_s=limit_per_s, rules=rules).result()
    assert found.status == "measured"
    assert found.window is not None
    assert found.window.is_raced is is_raced
    assert found.throughput_per_s
    assert len(found.window.block_rates_per_s) >= 5 or found.window.cycles  # on a busy machine, pauses look like cycles


@pytest.mark.parametrize("error", [{"type": "torch.AcceleratorError", "message": "device-side assert triggered"}, None])
def test_dead_device_does_not_hide_an_error_of_the_program(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    idle, broken = SimpleNamespace(enter=lambda phase: None), SimpleNamespace(close_window=dead, finish=dead)
    ending, written = Ending(context(clock=broken, explained=broken, phases=idle)), []
    monkeypatch.setattr(ending, "_write_result", written.append)
    ending.error = error
    with contextlib.nullcontext() if error else pytest.raises(RuntimeError):
        ending._end()
    assert written == (["failed"] if error else [])


KERNEL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
ADDRESS = "CUDA error: operation not supported on global/shared address space"
WORKER = "DataLoader worker (pid 12) is killed by signal: Killed. "  # raised wherever the process is when the signal comes


@pytest.mark.parametrize(
    ("message", "is_program_s"),
    [(KERNEL, True), (ADDRESS, True), (WORKER, True), ("CUDA error: invalid resource handle", False)],
)
def test_failure_that_the_harness_only_notices_is_not_reported_as_its_fault(
    message: str, is_program_s: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = Ending(context(is_applying=False, is_over=False, clock_offset_s=0.0))
    monkeypatch.setattr(ending_of_processes.os, "_exit", lambda code: None)
    monkeypatch.setattr(protocol, "write_json", lambda path, document: None)
    monkeypatch.setattr(report, "bare", lambda *_: None)
    monkeypatch.setattr(ending, "_path", lambda: "")
    try:
        raise RuntimeError(message)
    except RuntimeError:
        ending.broke("counting a step")
    assert ending.error is not None
    assert ending.error["message"].startswith(("CUDA error", "DataLoader worker")) is is_program_s
    assert ("autotune: the harness failed" in capsys.readouterr().err) is not is_program_s


def test_forked_process_that_ends_early_writes_a_result_unless_it_raised(trial: Trial) -> None:
    rules = dataclasses.replace(RULES, min_s=30.0, max_s=30.0)
    found = trial("forked.py", rules=rules).result()
    assert (found.status, found.error, found.detected["num_steps"]) == ("ended", None, 40)
    found = trial("forked.py", "by_hand", rules=rules).result()
    assert (found.status, found.error, found.detected["num_steps"]) == ("ended", None, 40)
    run = trial("forked.py", "raises", rules=rules)
    assert not run.has_result  # the log says more than a result could
    assert "ValueError: no more data" in run.stderr


def test_failure_of_the_harness_is_reported_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, written = Ending(context(is_applying=False, is_over=False, clock_offset_s=0.0)), []
    monkeypatch.setattr(ending_of_processes.os, "_exit", lambda code: None)
    monkeypatch.setattr(protocol, "write_json", lambda path, document: written.append(document))
    monkeypatch.setattr(report, "bare", lambda _, status: status)
    monkeypatch.setattr(ending, "_path", lambda: "")
    monkeypatch.setattr("sys.stderr", None)
    try:
        raise RuntimeError("no such attribute")
    except RuntimeError:
        ending.broke("counting a step")
    assert written == ["failed"]
