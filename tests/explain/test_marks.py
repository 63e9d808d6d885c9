"""The phases of a step are marked where they happen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autotune.harness.explain.documents import OPTIMIZER, OTHER
from autotune.harness.explain.phase_marks import Marks


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("is_named", [True, False])
def test_what_a_closure_computes_is_not_the_optimizers_work(kind, is_named):
    """Lightning's training_step runs in a closure: its logging and metrics counted as the update of the weights."""
    marks = Marks(SimpleNamespace(num_steps=0))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight])
    optimizer.register_step_pre_hook(marks._step_begins)
    optimizer.register_step_post_hook(marks._step_ends)
    seen, changes = [], []
    marks.on_change = changes.append

    def closure():
        seen.append(marks.now)
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
    assert loss.item() == 3.0
    assert set(seen) == {OTHER}
    assert changes[:3] == [OPTIMIZER, OTHER, OPTIMIZER]
    assert marks.now == OTHER


def test_a_step_without_a_closure_is_called_as_before():
    marks = Marks(SimpleNamespace(num_steps=0))
    assert marks._step_begins(None, (None,), {}) is None
    assert marks.now == OPTIMIZER
