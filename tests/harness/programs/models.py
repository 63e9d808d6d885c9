"""Models that are called in unusual ways; the first word names one. Prints the findings as JSON, then trains on."""

import abc
import json
import sys
import typing

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KIND = sys.argv[1]
X = torch.ones(3, 4)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).relu()


class Head(Net):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Abstract(abc.ABC, Net):
    pass


class Typed(typing.Generic[typing.TypeVar("T")], Net):
    pass


class Registered(abc.ABC, Net):
    registry = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.registry.append(cls)


class Choosing(Net):
    def forward(self, module, x):
        return getattr(self, module)(x)


def another():
    """A second model of the same class as the training model has its own weights."""
    model = Net()
    yield model, lambda: model(X)
    other = type(model)()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    yield {"sums": [float(other(X).sum()), float(model(X).sum()) > 0]}


def wrapped():
    """The program checks the exact class of the wrapper before it unwraps its model."""
    model = nn.DataParallel(Net())
    yield model, lambda: model(X)
    is_wrapped = type(model) in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel)
    yield {"names": list((model.module if is_wrapped else model).state_dict())}


def lazy():
    """The model gets its shapes in the first step, after the optimizer was made. Prints the precisions in which it ran."""
    seen = []
    model = nn.Sequential(nn.LazyLinear(4), Net())
    model[1].layer.register_forward_hook(lambda module, inputs, output: seen.append(str(output.dtype)))
    yield model, lambda: model(X)
    yield {"dtypes": sorted(set(seen))}


def checkpointed():
    """The model itself is computed again in the backward pass."""
    model = Net()
    yield model, lambda: checkpoint(model, X, use_reentrant=False)
    yield {}


def based():
    """Another class comes before torch's among the bases of the model's class, which the second word names."""
    model = globals()[sys.argv[2]]()
    yield model, lambda: model(X)
    yield {"registered": len(getattr(model, "registry", ()))}


def named():
    """An argument of the model has the name `module`."""
    model = Choosing()
    yield model, lambda: model(module="layer", x=X)
    yield {}


def compiled():
    """The program compiles a function that calls the model."""
    import torch._dynamo

    model = Net()
    called = torch.compile(lambda x: model(x), backend="eager")
    yield model, lambda: called(X)
    keeps_original = torch._dynamo.utils.unpatched_nn_module_call is nn.Module._wrapped_call_impl
    yield {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], "keeps_original": keeps_original}


def evaluated():
    """One model or two, compiled by a stand-in for the compiler, are trained and evaluated."""
    seen = []

    def compile_it(module, **options):
        def call(*args):
            seen.append("training" if module.training else "evaluation")
            return module._call_impl(*args)

        module._compiled_call_impl = call

    nn.Module.compile = compile_it
    models = nn.ModuleList([Net()] if "single" in sys.argv else [Net(), Head()])

    def called():
        out = X
        for each in models:
            out = each(out)
        return out

    yield models, called
    models.eval()
    with torch.no_grad():
        called()
    models.train()
    yield {"compiled": sorted(set(seen)), "trained": called().requires_grad}


def traced():
    """A model, compiled without a backend that needs a compiler, is traced after training."""
    own = nn.Module.compile
    nn.Module.compile = lambda module, **_: own(module, backend="eager")
    model = Net()
    yield model, lambda: model(X)
    is_compiled = model._compiled_call_impl is not None
    seen = {"compiled": is_compiled, "traced": torch.equal(torch.jit.trace(model, X)(X), model(X))}
    wrapper = nn.Sequential(model)
    torch.optim.SGD(model.parameters(), lr=0.1)  # begins a search for what it trains
    torch.jit.trace(wrapper, X, check_trace=False)
    torch.jit._get_trace_graph(model, X)  # as torch.onnx.export(dynamo=False) does
    yield {**seen, "wrapper_is_compiled": wrapper._compiled_call_impl is not None}


found = globals()[KIND]()
model, call = next(found)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


def step():
    optimizer.zero_grad()
    call().sum().backward()
    optimizer.step()


for _ in range(8):
    step()
print(json.dumps(next(found)), flush=True)
while "ends" not in sys.argv:
    step()
