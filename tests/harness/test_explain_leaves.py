"""Passes change nothing: the losses are bit-for-bit the same, and torch is as before once a pass is over."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune.harness.explain.documents import LINES, MEMORY, TRACE
from autotune.harness.explain.phase_marks import Marks
from autotune.harness.explain.sampler import LineSampler
from autotune.harness.explain.sources import Sources
from autotune.harness.explain.stages import Stages
from autotune.harness.explain.syncs import SyncSites
from tests.harness.conftest import REPOSITORY, Trial
from tests.harness.forks import Forks

LEAST_STEPS = 10  # a program makes at least this many steps within a pass, even on a busy machine


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (TRACE, ()),
        *(pytest.param(*row, marks=pytest.mark.thorough) for row in ((LINES, ()), (LINES, ("workers",)), (MEMORY, ()))),
    ],
)
def test_losses_during_a_pass_equal_those_without_the_harness(trial: Trial, plain: Trial, which: str, words: Any) -> None:
    alone = plain("seeded.py", *words).stdout.split()
    seen = trial("seeded.py", *words, mode="explain", explain=which, max_s=0.3)
    assert (seen.folder / f"explained.{which}.rank0.json").exists(), seen.stderr
    losses = [word for word in seen.stdout.split() if word.startswith("0x")]
    assert len(losses) >= LEAST_STEPS
    assert losses == alone[: len(losses)]
    assert len(alone) == 2_000


def train(num_steps: int) -> list[str]:
    """Trains a small model; returns its losses as exact hexadecimal numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for (x,) in DataLoader(TensorDataset(torch.randn(8 * num_steps, 8)), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to("cpu")), x[:, :2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def state() -> dict[str, Any]:
    """Returns all that the pass "lines" may change in a process."""
    places = (torch.Tensor, torch.autograd, torch.nn.functional, torch.amp.GradScaler, DataLoader, _BaseDataLoaderIter)
    places += (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher, torch.nn.modules.loss._Loss, torch)
    found: dict[str, Any] = {repr(place): dict(vars(place)) for place in places}
    hooks = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values(), *gc.callbacks]
    return {**found, "open": open, "hooks": hooks, "switch": sys.getswitchinterval()}


def test_pass_lines_restores_everything_that_it_changes_in_a_process(forks: Forks, tmp_path: Path) -> None:
    # Another process, because other tests may have patched torch, and torch completes some classes at their first use.
    script = tmp_path / "script.py"
    script.write_text("from tests.harness.test_explain_leaves import look_at_lines; look_at_lines()")
    done = forks.run([str(script)], tmp_path, [{"PYTHONPATH": str(REPOSITORY)}])
    assert done.returncode == 0, done.stderr[-2000:]


def look_at_lines() -> None:
    """Trains before, during and after the pass "lines"; compares the losses and the state that the pass may have changed."""
    alone = train(50)  # first, because torch completes some of its classes when they are first used
    before = state()
    modules = SimpleNamespace(num_graphs=lambda: 0, is_in_evaluation=False)
    context: Any = SimpleNamespace(device="cpu", modules=modules, num_steps=0)
    marks, stages = Marks(context), Stages()
    syncs, sampler = SyncSites(context, marks, Sources()), LineSampler(Sources(), 0.002, lambda: marks.now)
    for part in (stages, syncs, marks):
        part.install()
    sampler.start()
    assert state() != before
    observed = train(50)
    sampler.stop()
    for part in (marks, syncs, stages):
        part.uninstall()
    assert state() == before
    assert observed == alone == train(50)
    assert sum(marks.seconds.values()) > 0
    assert marks.seconds["backward"] > 0 < marks.seconds["optimizer"]
