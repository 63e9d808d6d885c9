"""The seconds of a stage are divided between computing and waiting, even if other threads or processes compute for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset

from autotune.harness.explain.documents import DECODE, ITEM, WORKER
from autotune.harness.explain.stages import Stages, stages_of

BURN = "import time\nwhile time.process_time() < 0.2: pass"


def burn(seconds: float = 0.2) -> None:
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


def in_thread() -> None:
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()


def in_child() -> None:
    subprocess.run([sys.executable, "-c", BURN], check=True)


@pytest.mark.parametrize(
    ("work", "is_worker", "is_counted"),
    [(in_child, True, True), (in_child, False, True), (in_thread, True, True), (in_thread, False, False)],
)
def test_cpu_seconds_of_a_stage_include_those_of_the_processes_and_threads_that_it_waits_for(work, is_worker, is_counted):
    """A worker that calls ffmpeg, or a decoder with threads, was said to wait for storage."""
    stages = Stages(is_worker=is_worker)
    stages._is_timing = True
    stages._delay_s = lambda: 0.0  # on a busy machine, this thread may wait for a core as long as the other one computes
    stages.timed(DECODE, work, (), {})
    (stage,) = stages_of({"totals": stages.totals, "samples": 1, "timed": 1}, {}, WORKER, knows_delays=True)
    assert stage.cpu_s is not None
    assert (stage.cpu_s >= 0.19) is is_counted
    assert stage.blocked_s is not None
    assert (stage.blocked_s <= stage.seconds - 0.19) or not is_counted


def test_others_explain_at_most_the_wait_of_a_stage():
    totals = {DECODE: [1.0, 0.2, 0.1, 3.0, 4.0]}
    (stage,) = stages_of({"totals": totals, "samples": 1, "timed": 1}, {}, WORKER, knows_delays=True)
    assert (stage.seconds, stage.cpu_s, stage.blocked_s) == pytest.approx((1.0, 0.9, 0.0))
    totals = {DECODE: [1.0, 0.2, 0.1, 0.0, 4.0]}
    (stage,) = stages_of({"totals": totals, "samples": 1, "timed": 1}, {}, WORKER, knows_delays=True)
    assert (stage.cpu_s, stage.blocked_s) == pytest.approx((0.2, 0.7))


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(2)


@pytest.mark.parametrize(
    ("dataset", "function"),
    [
        (Subset(torch.ones(4, 2), [0, 1]), ""),  # as made by `random_split(tensor, ...)`
        (Subset(torch.ones(4, 2).numpy(), [0, 1]), ""),
        (StackDataset(images=Rows(), labels=Rows()), "Rows.__getitem__"),
    ],
)
def test_library_data_sets_of_arrays_or_of_named_data_sets_are_timed(dataset, function):
    """The program failed under `explain`: the truth value of a tensor is ambiguous, and a dict has no first item."""
    stages = Stages()
    stages.install()
    try:
        list(DataLoader(dataset, batch_size=2))
    finally:
        stages.uninstall()
    assert ITEM in stages.totals
    assert stages.places[ITEM][2] == function


def test_compose_returns_what_it_does_without_explain():
    """A program that calls `transform(img=image)` failed under `explain`."""
    from torchvision.transforms import Compose  # not at the top: every worker of pytest would import it

    stages = Stages()
    stages._is_timing = True
    call = stages._around_compose(Compose.__call__)
    assert call(Compose([abs, float]), img=-1) == 1.0
    assert set(stages.totals) == {"transform: abs", "transform: float"}
    added = call(SimpleNamespace(transforms=[torch.add]), torch.ones(1, 2), torch.ones(1, 2))
    assert added.shape == (1, 2)
