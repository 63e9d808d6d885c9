"""Looks for torch's spec before it imports torch, as transformers does; prints what the harness's import hook left behind."""

import importlib.util
import os
import sys

assert importlib.util.find_spec("torch") is not None
assert importlib.util.find_spec("torch") is not None
import torch  # noqa: E402

print("own site:", os.environ.get("OWN_SITE"))
print("plain loader:", "exec_module" not in vars(torch.__spec__.loader))
print("finders left:", sum(getattr(finder, "name", None) == "torch" for finder in sys.meta_path))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
