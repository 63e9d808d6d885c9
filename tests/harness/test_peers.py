"""Several processes that train without torch.distributed are measured together if they share a model, else refused."""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
from pathlib import Path
from typing import Any

import pytest

from autotune import ranks
from autotune.harness import peers, protocol
from tests.harness.conftest import RULES, Trial

LONGER = dataclasses.replace(RULES, min_s=1.0, max_s=3.0)


def own_steps(folder: Path, number: int, span: list[float]) -> list[float]:
    """Returns the samples of each step that a process itself wrote down, within a span of the monotonic clock."""
    notes = [line.split() for line in (folder / f"steps{number}.txt").read_text().splitlines()]
    return [float(note[1]) for note in notes if len(note) == 2 and span[0] <= float(note[0]) <= span[1]]


@pytest.mark.parametrize(
    "how", ["shared", pytest.param("first", marks=pytest.mark.thorough), pytest.param("late", marks=pytest.mark.thorough)]
)
@pytest.mark.thorough
def test_processes_that_share_one_model_are_counted_together_over_one_span(trial: Trial, how: str) -> None:
    run = trial("hogwild.py", how, is_fresh=True, rules=LONGER)
    results = [run.result(rank) for rank in (0, 1)]
    assert [(found.status, found.rank, found.world_size) for found in results] == [("measured", 0, 2), ("measured", 1, 2)]
    assert results[0].pid != results[1].pid
    span = json.loads((run.folder / protocol.STOP_FILE).read_text())["span"]
    assert all(0.0 < found.steps["origin_s"] < span[0] for found in results)
    own: list[list[float]] = [own_steps(run.folder, number, span) for number in (0, 1)]
    windows: list[Any] = [found.window for found in results]
    assert sorted(window.steps for window in windows) == pytest.approx(sorted(map(len, own)), abs=3)
    assert sorted(window.samples / window.steps for window in windows) == pytest.approx([16, 24])
    assert ranks.rate_per_s(results) == pytest.approx(sum(window.samples / window.seconds for window in windows))


@pytest.mark.thorough
def test_inspect_reports_both_processes(trial: Trial) -> None:
    run = trial("hogwild.py", "shared", is_fresh=True, mode="inspect")
    assert [run.result(rank).world_size for rank in (0, 1)] == [2, 2]
    assert [run.result(rank).detected.get("harness_problems") for rank in (0, 1)] == [None, None]


@pytest.mark.thorough
def test_processes_that_train_separate_models_are_refused_with_their_pids(trial: Trial) -> None:
    found = trial("hogwild.py", "apart", is_fresh=True, rules=LONGER).result()
    assert found.error is not None
    assert found.error["type"] == protocol.UNMEASURABLE
    pids = re.search(
        r"2 processes train at the same time without torch.distributed \(pids (\d+), (\d+)\)", found.error["message"]
    )
    assert pids
    assert str(found.pid) in pids.groups()
    assert "torchrun" in found.error["message"]


@pytest.mark.thorough
def test_process_that_does_not_train_is_not_counted(trial: Trial) -> None:
    found = trial("hogwild.py", "idle", is_fresh=True, rules=LONGER).result()
    assert (found.status, found.rank, found.world_size, found.is_at_own_pace) == ("measured", 0, 1, False)


@pytest.mark.thorough
def test_remaining_process_is_not_measured_alone_after_the_other_has_ended(trial: Trial) -> None:
    run = trial("hogwild.py", "ending", is_fresh=True, rules=dataclasses.replace(RULES, min_s=20.0, max_s=30.0))
    told = [run.result(rank) for rank in (0, 1)]
    assert [found.window for found in told] == [None, None]
    assert {"type": protocol.UNMEASURABLE, "message": peers.LESS, "traceback": ""} in [found.error for found in told]


def test_shared_memory_is_identified_by_its_place_and_private_memory_is_not() -> None:
    import torch

    shared, private = torch.zeros(8).share_memory_(), torch.zeros(8)
    assert peers.shared_at(shared.data_ptr()) == peers.shared_at(shared.view(2, 4).data_ptr()) is not None
    assert peers.shared_at(shared[1:].data_ptr()) != peers.shared_at(shared.data_ptr())
    assert peers.shared_at(private.data_ptr()) is None
    assert peers.shared_at(mmap.PAGESIZE - 1) is None
