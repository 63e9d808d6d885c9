"""Trains a compiled network on sequences that come in groups of one length."""

import random

import torch
import torch._dynamo
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
FEATURES, WIDTH, BATCH, GROUP = 32, 96, 8, 60
SHORTEST, LONGEST = 24, 320


class Mixer(nn.Module):
    """Layers along the features, a mean along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), *layers)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.layers(sequences).mean(1))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1_000
    model = Mixer()
    # the hosts have no C++ compiler; static shapes unless told
    compiled = torch.compile(model, backend="aot_eager", dynamic=REVISION == 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    choose = random.Random(0)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        lengths = list(range(SHORTEST, LONGEST))
        choose.shuffle(lengths)
        for length in lengths:
            sequences = torch.randn(BATCH, length, FEATURES)
            for _ in range(GROUP):
                loss = nn.functional.mse_loss(compiled(sequences), sequences.mean((1, 2)).unsqueeze(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if meter.add(len(sequences)):
                    return


if __name__ == "__main__":
    main()
