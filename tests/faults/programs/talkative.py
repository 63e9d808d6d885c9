"""A training script that prints its environment and its arguments, and repeats them in an exception."""

import os
import sys
import time

import torch
from torch import nn


class Talkative(Exception):
    pass


def everything() -> str:
    return "\n".join(
        [repr(dict(os.environ)), *(f"{name} {value}" for name, value in os.environ.items()), repr(sys.argv), *sys.argv]
    )


if __name__ == "__main__":
    print(everything(), flush=True)
    print(everything(), file=sys.stderr, flush=True)
    with open(os.path.join(os.environ["WANDB_DIR"], "run.wandb"), "w", encoding="utf-8") as file:
        file.write(everything())
    mode = os.environ.get("MODE", "")
    model, x = nn.Linear(8, 3), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        time.sleep(0.008 if mode else 0.004)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if step == 20 and mode == "raise":
            raise Talkative(os.environ["HF_TOKEN"], sys.argv, everything()[:1500])
