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
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(data, 16, shuffle=True))
if WHEN == "late":
    autotune.apply("best.yaml")
dtypes = set()
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    dtypes.add(str(out.dtype))
    nn.functional.cross_entropy(out, y).backward()
    optimizer.step()
    autotune.trial_step()
heavy = [name for name in ("optuna", "mlflow", "hydra", "omegaconf", "scipy") if name in sys.modules]
print(json.dumps({"batch": len(x), "omp": os.environ.get("OMP_NUM_THREADS"), "heavy": heavy, "dtypes": sorted(dtypes)}))
