"""Trains a recurrent network that predicts the tide."""

import torch
from meter import Meter, options
from torch import Tensor, nn

FEATURES, HIDDEN, STEPS, BATCH = 32, 256, 48, 128


class Tides(nn.Module):
    """Two recurrent layers and a head on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(FEATURES, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.layers(sequences)[0][:, -1])


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = Tides()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    sequences = torch.randn(BATCH * 12, STEPS, FEATURES)
    heights = sequences[:, -4:].mean((1, 2)).unsqueeze(1)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, height in zip(sequences.split(BATCH), heights.split(BATCH), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                guess = model(rows)
            loss = nn.functional.mse_loss(guess.float(), height)
            loss.backward()
            optimizer.step()
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
