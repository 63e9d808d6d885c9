"""A study on several slots of an engine: its search runs on all of them at once, and its finals on one."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autotune.run_dir import StudyFolder
from tests.faults.quick_study import PROGRAM, QuickStudy

GIVEN = ("study.budget.minutes=8", "study.budget.trials=30", "measure.quiet=false", "explain.auto=false")
# Rates differ from process to process, by much less than the margin of the finals.
UNSTEADY = PROGRAM.replace("rate = 300.0 *", "import random; rate = random.uniform(299.7, 300.3) *")
MARGIN = 0.01


def check_slots(study: QuickStudy, *overrides: str, num: int = 2, where: Callable[[], Sequence[str]] | None = None) -> None:
    """Runs a study on several slots, and checks where its trials ran.

    Args:
        study: the study, not started yet.
        overrides: keys that choose the engine.
        num: number of slots.
        where: returns the node of each slot. If given, the slots must be divided evenly among two nodes.
    """
    process = study.start(*overrides, *GIVEN, f"launch.slots={num}")
    if where:
        study.wait_for_trial(0, process)
        assert list(Counter(where()).values()) == [num // 2] * 2
    out, err = process.communicate(timeout=500)
    assert "verdict" in out, err
    assert "trials run on nodes " in err
    others = "1 other" if num == 2 else f"{num - 1} others"
    assert f"{num} trials at a time: in parallel with {others}, a trial ran at " in out
    trials = study.folder.read_trials()
    by_kind = {
        kind: {trial.evidence["node"]["job"] for trial in trials if trial.kind.value == kind} for kind in ("search", "final")
    }
    assert len(by_kind["search"]) == num
    assert len(by_kind["final"]) == 1
    assert {trial.neighbours for trial in trials if trial.kind.value == "search"} >= {num - 1}
    assert study.none_is_left()


def check_four_slots(folder: Path, *overrides: str, where: Callable[[], Sequence[str]]) -> StudyFolder:
    """Runs a study on two slots of each of two nodes, and again on one slot; both must find the same speed-up.

    Args:
        folder: folder of the studies.
        overrides: keys that choose the engine.
        where: returns the node of each slot.

    Returns:
        The folder of the study on four slots.
    """
    for name in ("four", "one"):
        (folder / name).mkdir()
    four, one = (QuickStudy(folder / name, program=UNSTEADY) for name in ("four", "one"))
    check_slots(four, *overrides, num=4, where=where)
    out, err = one.start(*overrides, *GIVEN).communicate(timeout=500)
    assert "verdict" in out, err
    found = [study.shown()["speedup"] for study in (four, one)]
    assert [each["verdict"] for each in found] == ["faster", "faster"]
    assert [each["ratio"] for each in found] == pytest.approx([1.5, 1.5], rel=MARGIN)
    return four.folder


def wait_for_trial_of(study: QuickStudy, kind: str, process: subprocess.Popen[str], *, beside: int = 0) -> None:
    """Waits until a trial of a kind runs in parallel with at least `beside` others."""
    give_up_s = time.monotonic() + 200
    while True:
        running = [path for path in study.folder.path.glob("trials/[0-9]*") if _runs(path)]
        kinds = [json.loads((path / "asked.json").read_text())["kind"] for path in running]
        if kind in kinds and len(running) > beside:
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_s, f"no trial of kind {kind} came"
        time.sleep(0.02)


def _runs(trial: Path) -> bool:
    return (trial / "progress.jsonl").exists() and not (trial / "trial.json").exists()


def check_loss_of_all_slots(study: QuickStudy, process: subprocess.Popen[str], lose: Callable[[], object]) -> None:
    """Loses both slots of a study while both search; the study must repeat the two trials and reach its verdict.

    Args:
        study: the study.
        process: its tuner, which runs.
        lose: ends both slots.
    """
    wait_for_trial_of(study, "search", process, beside=1)
    lose()
    out, err = process.communicate(timeout=400)
    assert "verdict" in out, out + err
    again = [trial for trial in study.folder.read_trials() if "earlier_attempt" in trial.evidence]
    assert [trial.evidence["earlier_attempt"]["outcome"] for trial in again] == ["interrupted"] * 2
    assert all(trial.outcome.has_value for trial in again)
    assert study.none_is_left()
