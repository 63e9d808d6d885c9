"""Gradient accumulation in two ranks over gloo: gradients are exchanged once per step, and the training is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.harness.knobs.parallel import ParallelKnobs
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from tests.harness.conftest import Run, Trial
from tests.harness.contexts import context

KEY = "step.accumulation"
ASKED, STEPS = 6, 8  # rank 0 announces the last step two steps in advance


class Job:
    """A finished run of gradients.py in two ranks: rank 0's result, and the files that the ranks wrote."""

    def __init__(self, run: Run) -> None:
        self._folder, self.result = run.folder, run.result()
        told = [(run.folder / f"exchanges{rank}.txt").read_text() for rank in (0, 1)]
        assert told[0] == told[1]
        self.exchanges = [int(line) for line in told[0].splitlines()]

    def weights(self, rank: int = 0) -> list[torch.Tensor]:
        """Returns a rank's initial weights and those after each step except the last, during which the trial ends."""
        lines = (self._folder / f"weights{rank}.txt").read_text().splitlines()
        return [torch.tensor([float.fromhex(word) for word in line.split()]) for line in dict.fromkeys(lines)]


@pytest.fixture
def job(trial: Trial) -> Callable[..., Job]:
    """Returns a function that runs gradients.py in two ranks under the harness."""

    def run(words: str, **options: Any) -> Job:
        return Job(trial("gradients.py", *words.split(), ranks=2, mode="parity", seed=3, max_steps=ASKED, **options))

    return run


HALF = [1, 2, 3, 4, *range(6, 2 * STEPS + 1, 2)]  # each batch while the harness observes the program, then every other one
CASES = ["", pytest.param("static clip momentum", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("words", CASES)
def test_accumulated_gradients_are_exchanged_once_per_step_with_the_same_result(job: Any, words: str) -> None:
    each = job(f"{words} batch=8 own=2")
    once = job(f"{words} batch=8", knobs={KEY: 2})
    assert once.result.knobs[KEY].status == APPLIED
    assert each.exchanges == list(range(1, 2 * STEPS + 1))
    assert once.exchanges == HALF
    assert len(once.weights()) == STEPS
    for one, other in zip(each.weights(), once.weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(once.weights(0), once.weights(1), strict=True))


def test_no_sync_of_the_program_is_respected_with_accumulation(job: Any) -> None:
    own = job("batch=4 own=2 quiet", knobs={KEY: 1})
    assert own.exchanges == list(range(2, 2 * STEPS + 1, 2))
    both = job("batch=4 own=2 quiet", knobs={KEY: 2})
    assert both.result.knobs[KEY].status == APPLIED
    assert both.exchanges == [2, 4, 6, 8, *range(12, 4 * STEPS + 1, 4)]


def test_held_back_gradients_are_exchanged_if_a_second_optimizer_steps(job: Any) -> None:
    found = job("batch=8 late", knobs={KEY: 4})
    report = found.result.knobs[KEY]
    assert (report.status, report.reason.split(":")[0]) == (NOT_APPLICABLE, "several optimizers step")
    assert 9 not in found.exchanges
    for one, other in zip(found.weights(0), found.weights(1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.thorough
def test_global_batch_counts_the_samples_of_all_ranks(job: Any) -> None:
    parts, whole = job("batch=8", global_batch=32), job("batch=16", global_batch=32)
    for found, every in ((parts, 2), (whole, 1)):
        assert (found.result.knobs[KEY].status, found.result.knobs[KEY].observed) == (APPLIED, every)
    assert whole.exchanges == list(range(1, STEPS + 1))
    assert parts.exchanges == HALF
    assert torch.allclose(parts.weights()[-1], whole.weights()[-1], atol=1e-5)


def test_exchange_is_held_back_only_in_wrappers_where_the_program_allows_it() -> None:
    class Wrapper:
        require_backward_grad_sync = True

    free, quiet = Wrapper(), Wrapper()
    quiet.require_backward_grad_sync = False
    wrappers = ParallelKnobs(context())
    for wrapper in (free, quiet):
        wrappers.add(wrapper)
    assert wrappers.hold_back() == []  # the program's own setting
    wrappers.is_due = lambda: True
    assert wrappers.hold_back() == []
    wrappers.is_due = lambda: False
    held = wrappers.hold_back()
    assert (held, free.require_backward_grad_sync) == ([free], False)
    wrappers.let_go(held)
    assert (free.require_backward_grad_sync, quiet.require_backward_grad_sync) == (True, False)
