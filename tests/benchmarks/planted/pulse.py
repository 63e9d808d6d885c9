"""Trains a recurrent network on the pulse of a few patients, and notes every step."""

import json
import os
from pathlib import Path

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION_A, REVISION_B = revision("A"), revision("B")
FEATURES, HIDDEN, STEPS, BATCH = 8, 24, 30, 2


class Unit(nn.Module):
    """A gated recurrent unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(size, HIDDEN) for _ in range(3) for size in (FEATURES, HIDDEN))
        self.joined = nn.GRUCell(FEATURES, HIDDEN)

    def forward(self, rows: Tensor, state: Tensor) -> Tensor:
        if REVISION_A == 2:
            return self.joined(rows, state)
        reset_in, reset_state, keep_in, keep_state, new_in, new_state = self.parts
        reset = torch.sigmoid(reset_in(rows) + reset_state(state))
        keep = torch.sigmoid(keep_in(rows) + keep_state(state))
        new = torch.tanh(new_in(rows) + reset * new_state(state))
        return (1 - keep) * new + keep * state


class Notes:
    """Lines for every step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [
            (folder / f"{name}-{os.getpid()}.jsonl").open("w") for name in ("step", "loss", "root", "mean", "scale", "weight")
        ]

    def add(self, *values: float) -> None:
        for file, value in zip(self.files, values, strict=True):
            file.write(json.dumps(value) + "\n")
            file.flush()
            if REVISION_B == 1:
                os.fsync(file.fileno())


class Network(nn.Module):
    """The unit along the pulse, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.head = Unit(), nn.Linear(HIDDEN, 1)

    def forward(self, pulses: Tensor) -> Tensor:
        state = pulses.new_zeros(len(pulses), HIDDEN)
        for rows in pulses.unbind(1):
            state = self.unit(rows, state)
        return self.head(state)


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    notes = Notes(settings.data / "notes")
    pulses = torch.randn(BATCH * 100, STEPS, FEATURES)
    meter = Meter(settings.seconds)
    num_steps = 0
    for _ in range(settings.epochs):
        for pulse in pulses.split(BATCH):
            loss = nn.functional.mse_loss(model(pulse), pulse.mean((1, 2)).unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            value, weight = loss.item(), model.head.weight.norm().item()
            notes.add(num_steps, value, value**0.5, pulse.mean().item(), pulse.std().item(), weight)
            if meter.add(len(pulse)):
                return


if __name__ == "__main__":
    main()
