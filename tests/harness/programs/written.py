"""Updates weights in ways that are hard to observe, mostly without torch.optim; writes a line to steps.txt for each step."""

import sys

import torch
from torch import nn

KIND, RATE = sys.argv[1], 0.01
notes = open("steps.txt", "w")  # noqa: SIM115
torch.manual_seed(0)


def write(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad
            parameter.grad = None


def stepped(samples=16):
    notes.write(f"{samples}\n")
    notes.flush()


def bare():
    """Tensors without a module. Each step gives them new memory."""
    tensors = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    while True:
        inputs = torch.randn(16, 64)
        (((inputs @ tensors[0]).tanh() @ tensors[1] - inputs) ** 2).mean().backward()
        for tensor in tensors:
            tensor.data = tensor.data - RATE * tensor.grad
            tensor.grad = None
        stepped()


def adversaries():
    """Two modules that are updated in turn. A backward pass through both precedes each update."""
    maker, critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    while True:
        for module, sign in ((critic, 1), (maker, -1)):
            (sign * critic(maker(torch.randn(16, 8))).mean()).backward()
            write(module)
            (critic if module is maker else maker).zero_grad()
        stepped()


def renormed():
    """Gradients are accumulated over four batches, and each forward call writes to an embedding."""
    words, model = nn.Embedding(50, 16, max_norm=0.5), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    while True:
        for _ in range(4):
            (model(words(torch.randint(0, 50, (16,)))) ** 2).mean().backward()
        write(words)
        write(model)
        stepped(64)


def loaded():
    """A loader feeds the steps."""
    model, data = nn.Linear(8, 8), torch.utils.data.TensorDataset(torch.randn(320, 8))
    while True:
        for (inputs,) in torch.utils.data.DataLoader(data, batch_size=16):
            (model(inputs) ** 2).mean().backward()
            write(model)
            stepped()


def rebuilt():
    """A new model every 40 steps."""
    while True:
        model = nn.Linear(8, 8)
        for _ in range(40):
            model(torch.randn(16, 8)).square().mean().backward()
            write(model)
            stepped()


def functional():
    """Each step makes new tensors and changes none in place."""
    weight = torch.randn(8, 8, requires_grad=True)
    while True:
        (torch.randn(16, 8) @ weight).square().mean().backward()
        weight = (weight - RATE * weight.grad).detach().requires_grad_()


def turned():
    """Updates by hand first, and by an optimizer later."""
    model = nn.Linear(8, 8)
    for number in range(10**6):
        model(torch.randn(16, 8)).square().mean().backward()
        if number < 20:
            write(model)
            continue
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer.step()
        optimizer.zero_grad()


def gathered():
    """An optimizer steps after every 100 backward passes; nothing else writes to the parameters."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    while True:
        for _ in range(100):
            model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped(1600)


def resting():
    """A model that stops changing after ten steps."""
    model = nn.Linear(8, 8)
    for number in range(10**6):
        model(torch.randn(16, 8)).square().mean().backward()
        if number < 10:
            write(model)


{each.__name__: each for each in (bare, adversaries, renormed, loaded, rebuilt, functional, turned, gathered, resting)}[KIND]()
