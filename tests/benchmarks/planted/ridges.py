"""Trains a deep network on a table; looks after the size of its gradients."""

from typing import Any

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION_A, REVISION_B = revision("A"), revision("B")
FEATURES, WIDTH, BLOCKS, BATCH = 30, 48, 40, 64


class Block(nn.Module):
    """Normalises, mixes, adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + torch.relu(self.layer(self.norm(rows)))


def sizes(model: nn.Module) -> dict[str, list[float]]:
    """Returns the mean, norm and largest entry of every gradient."""
    found = {}
    for name, weight in model.named_parameters():
        slope = weight.grad
        if slope is not None:
            found[name] = [slope.mean().item(), slope.norm().item(), slope.abs().max().item()]
    return found


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))
    more: dict[str, Any] = {"fused": True} if REVISION_B == 2 else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **more)
    inputs = torch.randn(BATCH * 100, FEATURES)
    targets = inputs.sin().sum(1, keepdim=True)
    last: dict[str, list[float]] = {}
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, wanted in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            loss = nn.functional.mse_loss(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            if REVISION_A == 1:
                last = sizes(model)
            optimizer.step()
            if meter.add(len(rows)):
                return
    print(last)


if __name__ == "__main__":
    main()
