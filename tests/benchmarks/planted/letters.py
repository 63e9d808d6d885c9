"""Trains a small transformer that predicts the next letter."""

import torch
from meter import Meter, options
from torch import Tensor, nn

LETTERS, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 256, 4, 3, 128, 16


class Block(nn.Module):
    """Attention and a feed-forward network, normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.joined, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        queries, keys, values = self.joined(self.before(rows)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        return rows + self.feed(self.between(rows))


class Model(nn.Module):
    """Vectors of letters and places, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.letters(text) + self.places.weight))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    texts = torch.randint(0, LETTERS, (BATCH * 40, CONTEXT + 1))
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for text in texts.split(BATCH):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                guesses = model(text[:, :-1])
            loss = nn.functional.cross_entropy(guesses.float().flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            if meter.add(len(text)):
                return


if __name__ == "__main__":
    main()
