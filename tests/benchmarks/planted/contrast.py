"""Trains an encoder that pulls samples of one class together."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
FEATURES, WIDTH, CLASSES, BATCH = 64, 128, 12, 40


def same_class(labels: Tensor) -> Tensor:
    """Returns for every pair of samples whether they are of one class; a sample is no pair with itself."""
    if REVISION == 2:
        return (labels[:, None] == labels[None, :]) & ~torch.eye(len(labels), dtype=torch.bool)
    same = torch.zeros(len(labels), len(labels), dtype=torch.bool)
    for i in range(len(labels)):
        for j in range(len(labels)):
            if i != j and labels[i] == labels[j]:
                same[i, j] = True
    return same


def contrastive_loss(vectors: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Returns the supervised contrastive loss."""
    vectors = nn.functional.normalize(vectors, dim=1)
    near = vectors @ vectors.T / temperature
    near = near.masked_fill(torch.eye(len(near), dtype=torch.bool), -1e9)
    log_share = near - near.logsumexp(1, keepdim=True)
    same = same_class(labels)
    return -(log_share * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        *(m for _ in range(26) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())),
        nn.Linear(WIDTH, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, labels = torch.randn(BATCH * 40, FEATURES), torch.randint(0, CLASSES, (BATCH * 40,))
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        order = torch.randperm(len(inputs))
        for chosen in order.split(BATCH):
            loss = contrastive_loss(model(inputs[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(chosen)):
                return


if __name__ == "__main__":
    main()
