"""Activation checkpointing of blocks and the choice of attention kernels take effect and change nothing else."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.harness import checkpointing
from autotune.harness.knobs import attention, device
from autotune.harness.knobs.module import APART, RUNS_AGAIN, ModuleKnobs, observe
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from autotune.knobs.catalogue import CATALOGUE
from tests.harness.conftest import Trial
from tests.harness.contexts import context

COMPILE, SCOPE = "compile.mode", "compile.scope"
CHECKPOINTING, SDPA, L2 = "memory.activation_checkpointing", "backend.sdpa", "backend.l2_fetch_granularity"


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())


def test_blocks_are_the_outermost_modules_of_the_most_frequent_class() -> None:
    stem, deep = nn.Sequential(Block(), Block()), nn.Sequential(*(nn.ModuleDict({"inner": Block()}) for _ in range(3)))
    model = nn.ModuleDict({"stem": stem, "body": deep, "head": nn.Linear(4, 2)})
    assert checkpointing.blocks(model) == list(deep)
    assert checkpointing.blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    assert checkpointing.blocks(nn.Sequential(Block(), nn.Linear(4, 4))) == []


def test_checkpointed_block_is_copied_and_pickled_as_its_original_class() -> None:
    model = nn.Sequential(Block(), Block())
    assert checkpointing.Checkpointing().put_into(model, is_watched=False) == ""
    assert type(model[0]) is not Block
    assert isinstance(model[0], Block)
    assert model[0].__class__ is Block
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copy[0]) is Block


@pytest.fixture
def runs(trial: Trial) -> Any:
    def run(*words: str, **options: Any) -> Any:
        found = trial("blocks.py", *words, mode="parity", seed=1, max_steps=6, **options)
        return found.result(), (found.folder / "losses.txt").read_text()

    return run


def test_checkpointing_of_blocks_leaves_losses_and_statistics_unchanged(runs: Any) -> None:
    (plain, told), (found, other) = runs(), runs(knobs={CHECKPOINTING: True})
    assert (found.knobs[CHECKPOINTING].status, found.knobs[CHECKPOINTING].observed) == (APPLIED, True)
    assert other == told  # the losses; and the running statistics, which include each batch only once
    assert plain.observed[CHECKPOINTING] is False
    assert CHECKPOINTING not in plain.applicability


def test_checkpointing_is_not_applicable_to_blocks_that_change_their_state(runs: Any) -> None:
    (_, told), (found, other) = runs("spectral"), runs("spectral", knobs={CHECKPOINTING: True})
    assert other != told  # power iteration has made twice as many steps
    assert found.knobs[CHECKPOINTING].status == NOT_APPLICABLE
    assert "expand.parametrizations.weight.0._u" in found.knobs[CHECKPOINTING].reason


def test_a_model_without_repeated_blocks_is_not_checkpointed(runs: Any) -> None:
    found, _ = runs("single", knobs={CHECKPOINTING: True})
    assert (found.knobs[CHECKPOINTING].status, found.knobs[CHECKPOINTING].reason) == (NOT_APPLICABLE, checkpointing.NO_BLOCKS)
    assert found.applicability[CHECKPOINTING] == checkpointing.NO_BLOCKS


@pytest.mark.parametrize(("words", "compiled"), [((), "Block Block Block"), (("single",), "Net")])
def test_repeated_blocks_are_compiled_one_by_one(runs: Any, words: tuple[str, ...], compiled: str) -> None:
    found, told = runs(*words, "eager", knobs={COMPILE: "default", SCOPE: "blocks"})
    assert told.splitlines()[0] == compiled
    assert (SCOPE in found.applicability) == bool(words)


@pytest.mark.parametrize(("mode", "is_apart"), [("default", True), ("reduce-overhead", False), ("max-autotune", False)])
def test_modes_with_cuda_graphs_compile_the_whole_model_instead_of_blocks(mode: str, is_apart: bool) -> None:
    """With a CUDA graph per block, torch raises "accessing tensor output of CUDAGraphs ..." in evaluation (pytorch #152887)."""
    net = nn.Sequential(Block(), Block(), Block())
    knobs = ModuleKnobs(context({COMPILE: mode, SCOPE: "blocks"}))
    knobs.on_module(net, observe(net))
    compiled = [each for each in net.modules() if each._compiled_call_impl is not None]
    assert compiled == (list(net) if is_apart else [net])
    knobs._context.modules.num_graphs = lambda: 1
    report = knobs.verify()[SCOPE]
    assert (report.status, report.reason) == ((APPLIED, "") if is_apart else (NOT_APPLICABLE, APART))
    assert CATALOGUE[SCOPE].is_active({COMPILE: mode}) == is_apart


def test_blocks_that_are_checkpointed_are_compiled_one_by_one_as_well() -> None:
    net = nn.Sequential(Block(), Block())
    knobs = ModuleKnobs(context({CHECKPOINTING: True, COMPILE: "default", SCOPE: "blocks"}))
    knobs.on_module(net, observe(net))
    assert [each._compiled_call_impl is not None for each in (net, *net)] == [False, True, True]
    assert observe(net)["repeats"]
    kinds = [type(each) for each in net]
    assert checkpointing.Checkpointing().put_into(net, is_watched=False) == ""  # called again, with the wrapper of a wrapper
    assert [type(each) for each in net] == kinds, "a block is checkpointed only once"


def test_checkpointing_that_the_program_turns_on_later_overrides_the_trial() -> None:
    class Switched(nn.Module):
        gradient_checkpointing = True

        def gradient_checkpointing_enable(self, *_: Any) -> None:
            self.gradient_checkpointing = True

        def gradient_checkpointing_disable(self) -> None:
            self.gradient_checkpointing = False

    net, knobs = Switched(), ModuleKnobs(context({CHECKPOINTING: False}))
    knobs.on_module(net, observe(net))
    knobs._context.modules.living = [SimpleNamespace(module=net)]
    assert knobs.verify()[CHECKPOINTING].status == APPLIED
    net.gradient_checkpointing_enable()  # for example between the construction of a wrapper and its first call
    assert (knobs.verify()[CHECKPOINTING].status, knobs.verify()[CHECKPOINTING].observed) == (OVERRIDDEN, True)


def test_checkpointing_without_a_switch_is_seen_and_cannot_be_turned_off(runs: Any) -> None:
    found, _ = runs("checkpointed")
    assert (found.observed[CHECKPOINTING], found.applicability[CHECKPOINTING]) == (True, RUNS_AGAIN)
    report = runs("checkpointed", knobs={CHECKPOINTING: False})[0].knobs[CHECKPOINTING]
    assert (report.status, report.observed) == (OVERRIDDEN, True)


@pytest.mark.thorough
def test_blocks_that_differ_only_in_their_weights_share_a_compilation(runs: Any) -> None:
    found, _ = runs(knobs={COMPILE: "default", SCOPE: "blocks"})
    assert {found.knobs[key].status for key in (COMPILE, SCOPE)} == {APPLIED}
    assert found.compiled["graphs"] == 2, "three blocks need two graphs: the input of the first needs no gradient"
    single, _ = runs("single", knobs={COMPILE: "default", SCOPE: "blocks"})
    assert (single.knobs[SCOPE].status, single.knobs[SCOPE].reason) == (NOT_APPLICABLE, checkpointing.NO_BLOCKS)


@pytest.mark.parametrize(("asked", "kernels"), [("flash", {"flash"}), ("math", set()), ("default", {"flash"})])
def test_attention_uses_the_requested_kernels(runs: Any, asked: str, kernels: set[str]) -> None:
    found, _ = runs(knobs={SDPA: asked})
    assert (found.knobs[SDPA].status, found.knobs[SDPA].observed) == (APPLIED, asked)
    assert SDPA in found.applicability if not kernels else SDPA not in found.applicability


def test_unavailable_attention_kernel_is_reported_as_not_applicable(runs: Any) -> None:
    found, _ = runs(knobs={SDPA: "mem_efficient"})  # the CPU has no such kernel
    assert found.knobs[SDPA].status == NOT_APPLICABLE
    assert attention.UNSEEN in found.knobs[SDPA].reason


def test_fused_attention_kernels_are_read_from_the_autograd_graph() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    loss = nn.functional.scaled_dot_product_attention(q, q, q).sum()
    assert attention.seen(loss.grad_fn) == {"flash"}
    assert attention.seen((q * 2).sum().grad_fn) == set()
    assert attention.seen(None) == set()


class FakeRuntime:
    """A fake of the functions of the CUDA runtime library that the harness calls. tests/gpu calls the real library."""

    def __init__(self, *, keeps: bool = True, error: int = 0) -> None:
        self.limits, self._keeps, self._error = {device.MAX_L2_FETCH_GRANULARITY: 64}, keeps, error
        self.last_error = 0  # torch raises it after the next kernel

    def cudaDeviceSetLimit(self, limit: int, value: Any) -> int:
        if self._keeps:
            self.limits[limit] = value.value
        self.last_error = self._error
        return self._error

    def cudaDeviceGetLimit(self, pointer: Any, limit: int) -> int:
        pointer._obj.value = self.limits[limit]
        self.last_error = self._error
        return self._error

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


@pytest.mark.parametrize(("keeps", "status", "observed"), [(True, APPLIED, 128), (False, OVERRIDDEN, 64)])
def test_the_l2_granularity_is_set_and_read_back(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, status: str, observed: int
) -> None:
    fake = FakeRuntime(keeps=keeps)
    monkeypatch.setattr(device, "runtime", lambda: fake)
    knob = device.DeviceKnobs(context({L2: 128}))
    knob.on_activate()
    found = knob.verify()[L2]
    assert (found.status, found.observed) == (status, observed)
    assert knob.observe() == {L2: observed}


def test_gpu_without_the_l2_limit_leaves_no_cuda_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime(error=215)  # cudaErrorUnsupportedLimit
    monkeypatch.setattr(device, "runtime", lambda: fake)
    knob = device.DeviceKnobs(context({L2: 128}))
    knob.on_activate()
    assert fake.last_error == 0
    assert knob.verify()[L2].status == NOT_APPLICABLE
    assert fake.last_error == 0


def test_l2_granularity_is_set_on_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def current(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    fake = FakeRuntime()
    monkeypatch.setattr(device, "runtime", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", current)
    knob = device.DeviceKnobs(context({L2: 128}, device_index=1))
    knob.on_activate()
    assert knob.observe() == {L2: 128}
    assert entered == [1, 1]


def test_without_a_gpu_there_is_no_l2_granularity() -> None:
    knob = device.DeviceKnobs(context({L2: 128}, "cpu"))
    knob.on_activate()
    assert knob.verify()[L2].status == NOT_APPLICABLE
    assert L2 in knob.applicability()
    assert device.runtime() is None or device.granularity_bytes() is None


@pytest.mark.thorough
def test_checkpointing_uses_the_switch_of_a_library_that_has_one() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    how, tokens = checkpointing.Checkpointing(), torch.randint(0, 32, (2, 8))
    assert how.put_into(model, is_watched=True) == ""
    loss = model(input_ids=tokens, labels=tokens).loss
    assert how.is_run_again is False
    loss.backward()
    assert how.is_run_again
    how.stop_watching()
    how.take_from(model)
    assert not any(checkpointing.is_checkpointing(module) for module in model.modules())
