"""Trains a deep residual network on a table, and keeps an eye on its weights."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

REVISION = revision("A")
FEATURES, WIDTH, BLOCKS, BATCH, KEPT = 40, 64, 48, 64, 50


class Block(nn.Module):
    """Normalises, mixes, adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(torch.relu(self.up(self.norm(rows))))


class Watch:
    """The size of every weight and gradient over the last steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.history: list[dict[str, tuple[float, float, float]]] = []

    def look(self) -> None:
        sizes = {}
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                sizes[name] = (weight.norm().item(), weight.grad.norm().item(), weight.grad.abs().max().item())
        self.history = [*self.history[-KEPT:], sizes]


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(BATCH * 200, FEATURES)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), BATCH, shuffle=True, drop_last=True)
    watch = Watch(model)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            if REVISION == 1:
                watch.look()
            optimizer.step()
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
