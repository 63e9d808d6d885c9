"""The harness reads and sets attributes of a program's objects without calling methods that the program may override."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.harness import members
from autotune.harness.knobs.layout import verify_layout
from autotune.harness.knobs.loader import LoaderKnobs
from autotune.harness.knobs.module import LAYOUT, ModuleKnobs, observe
from autotune.harness.protocol import APPLIED
from tests.harness.conftest import REPOSITORY
from tests.harness.contexts import context

# Allowed calls, on tensors that the harness or a GradScaler has created: (file, call).
ALLOWED = {
    ("products.py", "each.to(dtype)"),
    ("optimizers.py", "found.to(device)"),
    ("optimizers.py", "self._sum.to(device)"),
    ("gradients.py", "self._scale().to(norm.device)"),
    ("gradient_state.py", "scale.to(gradient.device)"),
}
OF_MODULES = {name for name in dir(nn.Module) if not name.startswith("__")} - {"apply"}
OF_OPTIMIZERS = {name for name in dir(torch.optim.Optimizer) if not name.startswith("__")} - {"step"}
OF_TORCH = {"members", "torch", "Tensor", "Module", "Optimizer", "DistributedDataParallel", "Wrapped", "re"}


class ConvolutionsOfAllDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.plane, self.space = nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3)
        self.space.weight.data = self.space.weight.data.to(memory_format=torch.channels_last_3d)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        torch.empty(0).to(*args, **kwargs)  # stands for any side effect
        return super().to(*args, **kwargs)


@pytest.mark.parametrize("is_asked", [True, False])
def test_layout_changes_only_weights_of_four_dimensions(is_asked: bool) -> None:
    net = ConvolutionsOfAllDimensions()
    before = {name: (parameter, parameter.stride()) for name, parameter in net.named_parameters()}
    knobs = ModuleKnobs(context({LAYOUT: is_asked}))
    knobs.on_module(net, observe(net))
    assert net.plane.weight.is_contiguous(memory_format=torch.channels_last) == is_asked
    for name, parameter in net.named_parameters():
        assert parameter is before[name][0]
        assert name == "plane.weight" or parameter.stride() == before[name][1]
    assert knobs.verify()[LAYOUT].status == APPLIED
    assert verify_layout([net], is_asked).status == APPLIED


def test_layout_changes_only_inputs_of_four_dimensions() -> None:
    net, seen = ConvolutionsOfAllDimensions(), list[Any]()
    around = ModuleKnobs(context({LAYOUT: True})).around_calls(net)
    assert around is not None
    given = [torch.rand(2, *(5,) * (rank - 1)) for rank in (2, 3, 4, 5)]
    around(lambda _, *args: seen.extend(args), net, given, {})
    assert [one is other for one, other in zip(given, seen, strict=True)] == [True, True, False, True]
    assert seen[2].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("was_channels_last", [True, False])
def test_inputs_of_a_program_in_channels_last_are_put_back_with_its_weights(was_channels_last: bool) -> None:
    net, seen = nn.Conv2d(3, 8, 3), list[Any]()
    batch = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    if was_channels_last:
        net.to(memory_format=torch.channels_last)
    knobs = ModuleKnobs(context({LAYOUT: False}))
    knobs.on_module(net, observe(net))
    around = knobs.around_calls(net)
    assert (around is not None) == was_channels_last, "calls of other programs stay as they are"
    if around is not None:
        around(lambda _, *args: seen.extend(args), net, [batch], {})
        assert seen[0].is_contiguous()
        assert net(seen[0]).is_contiguous()


@pytest.mark.parametrize("make", [lambda net: net, torch.compile, lambda net: nn.DataParallel(nn.Sequential(net, net))])
def test_members_of_a_module_are_those_that_torch_lists(make: Any) -> None:
    net = make(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ModuleList([nn.Linear(2, 2)])))
    net.register_parameter("none", None)
    assert list(members.modules(net)) == list(net.modules())
    assert list(members.children(net)) == list(net.children())
    assert [name for name, _ in members.named_parameters(net)] == [name for name, _ in net.named_parameters()]


def test_attributes_are_read_directly_and_an_unreadable_one_counts_as_missing() -> None:
    class Odd(nn.Module):
        steps = 3

        @property
        def module(self) -> Any:
            raise KeyError("not now")

        def __getattr__(self, name: str) -> Any:
            raise LookupError(name)

    odd = Odd()
    odd._buffers["mean"] = torch.zeros(2)
    assert members.attribute(odd, "steps") == 3
    assert members.attribute(odd, "mean") is odd._buffers["mean"]
    assert members.attribute(odd, "module", "none") == members.attribute(odd, "anything", "none") == "none"


def test_object_with_unreadable_attributes_counts_as_having_none() -> None:
    class Lazy:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not loaded yet")

    assert members.held(Lazy()) == {}
    assert members.attribute(Lazy(), "shape") is None


def test_batch_sampler_whose_batch_size_cannot_be_set_is_left_alone() -> None:
    class Fixed:
        batch_size = property(lambda self: 4)

    training = SimpleNamespace(settings={"loader.batch_size": 4})
    knobs = LoaderKnobs(context({"loader.batch_size": 8}, loaders=SimpleNamespace(training=training)))
    knobs.on_loader({"batch_sampler": Fixed()}, SimpleNamespace(num_drawn=None), is_chained=False, is_unshared=False)
    assert "does not let its batch_size be set" in knobs.verify()["loader.batch_size"].reason


def test_harness_calls_no_overridable_method_of_modules_and_optimizers() -> None:
    harness = REPOSITORY / "autotune" / "harness"
    assert {(path.name, call) for path in harness.rglob("*.py") for call in calls(path)} == ALLOWED


def calls(path: Path) -> list[str]:
    """Returns a file's calls of methods that modules and optimizers have, except on what is imported from torch."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    odd = [node for node in found if isinstance(node.func, ast.Attribute) and node.func.attr in OF_MODULES | OF_OPTIMIZERS]
    return [ast.unparse(node) for node in odd if ast.unparse(node.func).split(".")[0] not in OF_TORCH]
