"""A program that calls `autotune.apply` itself: before or after it imports torch, or too late."""

import json
import os
import sys

import autotune

WHEN = sys.argv[1]
if WHEN == "before":
    autotune.apply("best.yaml")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

if WHEN == "after":
    autotune.apply("best.yaml")

data = TensorDataset(torch.randn(48, 8), torch.randint(0, 4, (48,)))
dtypes = set()  # inside the model: what it returns is float32 with any precision
model = nn.Sequential(nn.Linear(8, 4), nn.Identity())
model[1].register_forward_pre_hook(lambda _, inputs: dtypes.add(str(inputs[0].dtype)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(data, 16, shuffle=True))
if WHEN == "late":
    autotune.apply("best.yaml")
for x, y in batches:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    autotune.trial_step()
heavy = [name for name in ("optuna", "mlflow", "hydra", "omegaconf", "scipy") if name in sys.modules]
print(json.dumps({"batch": len(x), "omp": os.environ.get("OMP_NUM_THREADS"), "heavy": heavy, "dtypes": sorted(dtypes)}))
