"""Does what many scripts do besides training: parses arguments, makes a folder, handles signals, starts processes, saves."""

import argparse
import os
import signal
import subprocess
import sys

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--batch-size", type=int, default=16)
options = parser.parse_args()
os.makedirs(options.out, exist_ok=True)
os.chdir(options.out)


class Watched(nn.Linear):
    def forward(self, inputs):
        hidden = super().forward(inputs)
        journal.inside(inputs, hidden)
        return hidden


def save_and_quit(number, frame):
    torch.save(model.state_dict(), "interrupted.pt")
    sys.exit(0)


for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, save_and_quit)
words = [sys.executable, "-c", "import os; print(os.getcwd())"]
told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randn(480, 2))
loader = DataLoader(data, batch_size=options.batch_size, shuffle=True)
model = nn.Sequential(Watched(8, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
number = 0
while True:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        number += 1
        journal.step(loss, len(inputs), optimizer)
        if number % 16 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
            torch.save(model, "whole.pt")
            loaded = torch.load("whole.pt", weights_only=False)
            journal.note(
                child_said=told == os.getcwd(),
                handlers=[signal.getsignal(n) is save_and_quit for n in (signal.SIGTERM, signal.SIGUSR1)],
                argv=sys.argv[1:2],
                whole=[type(loaded).__name__, sorted(loaded.state_dict()) == sorted(model.state_dict())],
            )
