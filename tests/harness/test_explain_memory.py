"""The pass "memory" counts tensors that share a storage once, and no FLOPs of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.harness.explain.activations import Activations, Storages, bytes_of
from autotune.harness.explain.allocations import Allocations
from autotune.harness.explain.memory import EVALUATED, MOST_COUNTED, OTHERS, MemoryPass
from tests.harness.contexts import context


def test_gradients_that_share_a_bucket_are_counted_once() -> None:
    """With gradient_as_bucket_view, DistributedDataParallel makes each gradient a view into a bucket."""
    bucket, weights = torch.zeros(100), [nn.Parameter(torch.ones(50)) for _ in range(2)]
    for number, weight in enumerate(weights):
        weight.grad = bucket[50 * number : 50 * number + 50]
    found = Activations(weights, set(), str, lambda _: False, lambda _: True)
    found.install()
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    found.uninstall()
    assert (found.peak_bytes, found.gradient_bytes) == (400, 400)
    assert bytes_of(torch.ones(1).expand(50)) == 4


def test_a_step_that_uses_torch_func_works_and_its_other_activations_are_counted() -> None:
    weight = nn.Parameter(torch.ones(50))
    found = Activations([weight], set(), str, lambda _: False, lambda _: True)
    found.install()
    torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(torch.ones(3, 2))  # refuses hooks like ours
    (weight * torch.ones(50)).sum().backward()
    found.uninstall()
    assert found.saved_bytes == 200
    torch.func.vmap(torch.sin)(torch.ones(3))  # with torch's own function again


def test_weights_that_share_a_buffer_are_counted_once_by_module() -> None:
    """On a GPU, all weights of an LSTM are views into one buffer."""
    module, buffer = nn.Module(), torch.zeros(100)
    for number in range(2):
        module.register_parameter(f"weight{number}", nn.Parameter(buffer[50 * number : 50 * number + 50]))
    memory = MemoryPass(context(device="cpu"))
    memory._roots = [module]
    (row,) = memory._by_module(SimpleNamespace(by_module={}))  # type: ignore[arg-type]
    assert row["parameters"] == 400


@pytest.mark.parametrize(("device", "is_counted"), [("cuda", False), ("cpu", True)])
def test_optimizer_state_kept_in_host_memory_does_not_count_on_a_gpu(device: str, is_counted: bool) -> None:
    """With an optimizer offloaded to the host, a GPU seemed to use more memory than it has."""
    optimizer = SimpleNamespace(state={0: {"exp_avg": torch.ones(100)}})
    memory = MemoryPass(context(device=device, optimizers=SimpleNamespace(optimizers=lambda: [optimizer])))
    memory._parameters, memory._names, memory._weights, memory._state = [], {}, Storages(), Storages()
    memory._begin_saved()
    memory._end_saved()
    assert memory._state.num_bytes == (400 if is_counted else 0)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_model_on_several_gpus_counts_only_on_the_gpu_whose_peak_is_known(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    kinds = [type("On", (nn.Parameter,), {"device": torch.device("cuda", index)}) for index in range(num_gpus)]
    module = nn.Module()
    for number, kind in enumerate(kinds):
        module.register_parameter(f"weight{number}", kind(torch.ones(100)))
    installed = SimpleNamespace(install=lambda: None)
    monkeypatch.setattr("autotune.harness.explain.memory.Marks", lambda _: installed)
    monkeypatch.setattr("autotune.harness.explain.memory.SyncSites", lambda *_: installed)
    monkeypatch.setattr("autotune.harness.explain.allocations.recorder", lambda *_: Allocations())
    memory = MemoryPass(context(device_index=0, optimizers=SimpleNamespace(optimizers=list)))
    memory.context.modules.living = [SimpleNamespace(module=module)]
    memory.begin()
    assert memory._weights.num_bytes == 400
    assert memory.notes == [OTHERS.format(0)] * (num_gpus - 1)
    (row,) = memory._by_module(SimpleNamespace(by_module={}))  # type: ignore[arg-type]
    assert row["parameters"] == 400


@pytest.fixture
def counting() -> Iterator[MemoryPass]:
    """A pass that has begun to count FLOPs."""
    memory = MemoryPass(context(device="cpu", window=SimpleNamespace(steps={"samples": [8.0]})))
    memory._num_steps = 3
    memory._begin_flops()
    yield memory
    if memory._flops is not None and not memory.is_over:
        memory._flops.end()


def test_flops_of_a_step_with_an_evaluation_are_counted_again(counting: MemoryPass) -> None:
    model, batch = nn.Linear(4, 4), torch.ones(8, 4)
    with torch.no_grad():
        model(torch.ones(1000, 4))
    model(batch).sum().backward()
    counting.leave_out(8.0, 0.0)
    counting.step_done()
    assert not counting.is_over
    model(batch).sum().backward()
    counting.step_done()
    assert counting.is_over
    assert counting._flops is not None
    assert counting._flops.total == 2 * (2 * 8 * 4 * 4)  # the input needs no gradient


def test_flops_stay_unknown_if_each_step_contains_an_evaluation(counting: MemoryPass) -> None:
    for _ in range(MOST_COUNTED):
        assert not counting.is_over
        counting.leave_out(8.0, 0.0)
        counting.step_done()
    assert counting.is_over
    assert counting._flops is None
    assert EVALUATED in counting.notes[0]
