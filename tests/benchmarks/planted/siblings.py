"""Trains an encoder of faces that keeps siblings apart from strangers."""

import gc

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION_A, REVISION_B = revision("A"), revision("B")
FEATURES, WIDTH, FAMILIES, BATCH = 512, 768, 20, 96


def relatives(families: Tensor) -> Tensor:
    """Returns 1 for two faces of one family and -1 for others."""
    if REVISION_B == 2:
        return (families[:, None] == families[None, :]).float() * 2 - 1
    signs = torch.empty(len(families), len(families))
    for i, first in enumerate(families):
        for j, second in enumerate(families):
            signs[i, j] = 1.0 if first == second else -1.0
    return signs


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), *layers, nn.Linear(WIDTH, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    faces, families = torch.randn(BATCH * 20, FEATURES), torch.randint(0, FAMILIES, (BATCH * 20,))
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(faces)).split(BATCH):
            vectors = nn.functional.normalize(model(faces[chosen]), dim=1)
            loss = -nn.functional.logsigmoid(4 * relatives(families[chosen]) * (vectors @ vectors.T)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if REVISION_A == 1:
                gc.collect()
            if meter.add(len(chosen)):
                return


if __name__ == "__main__":
    main()
