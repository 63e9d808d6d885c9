"""Trains a network that passes messages along the bonds of molecules."""

import torch
from meter import Meter, options
from torch import Tensor, nn

NODES, BONDS, WIDTH, ROUNDS, BATCH = 24, 60, 192, 3, 64


class Messages(nn.Module):
    """Rounds of messages from atom to atom, and a head on every molecule's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, WIDTH)
        self.message = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ROUNDS))
        self.update = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(ROUNDS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        state = torch.relu(self.start(atoms))
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(state)
            heard = torch.zeros_like(sent).index_add(0, targets, sent.index_select(0, sources))
            state = torch.relu(update(torch.cat([state, heard], 1)))
        return self.head(state.view(BATCH, NODES, WIDTH).sum(1))


def graphs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns one batch: atoms, the two ends of every bond, and what is to be predicted."""
    offsets = torch.arange(BATCH).repeat_interleave(BONDS) * NODES
    sources, targets = (torch.randint(0, NODES, (BATCH * BONDS,)) + offsets for _ in range(2))
    return torch.randn(BATCH * NODES, 16), sources, targets, torch.randn(BATCH, 1)


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = Messages()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = [graphs() for _ in range(20)]
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for atoms, sources, targets, energies in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                guess = model(atoms, sources, targets)
            loss = nn.functional.mse_loss(guess.float(), energies)
            loss.backward()
            optimizer.step()
            if meter.add(BATCH):
                return


if __name__ == "__main__":
    main()
