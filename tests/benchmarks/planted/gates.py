"""Trains a recurrent network with a cell of its own on short sequences."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
FEATURES, HIDDEN, STEPS, BATCH = 16, 32, 28, 4


class Norm(nn.Module):
    """Layer normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, rows: Tensor) -> Tensor:
        if REVISION == 2:
            return nn.functional.layer_norm(rows, self.scale.shape, self.scale, self.shift)
        centred = rows - rows.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale + self.shift


class Cell(nn.Module):
    """A long short-term memory with normalised gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(HIDDEN) for _ in range(4))
        if REVISION == 2:
            self.gates = nn.Linear(FEATURES + HIDDEN, 4 * HIDDEN)
        else:
            self.gates = nn.ModuleList(nn.Linear(FEATURES + HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, rows: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([rows, hidden], 1)
        parts = self.gates(joined).chunk(4, 1) if REVISION == 2 else [gate(joined) for gate in self.gates]
        keep, add, new, show = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(add) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(memory), memory


class Network(nn.Module):
    """The cell along the sequence, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        hidden = memory = sequences.new_zeros(len(sequences), HIDDEN)
        for rows in sequences.unbind(1):
            hidden, memory = self.cell(rows, hidden, memory)
        return self.head(hidden)


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    sequences = torch.randn(BATCH * 200, STEPS, FEATURES)
    targets = sequences.mean((1, 2)).unsqueeze(1)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, target in zip(sequences.split(BATCH), targets.split(BATCH), strict=True):
            loss = nn.functional.mse_loss(model(rows), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
