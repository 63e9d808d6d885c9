"""Copies, pickles and inspects its model as programs do; prints the findings as JSON."""

import copy
import inspect
import io
import json

import torch
from torch import nn


class Net(nn.Module):
    registered = []

    def __init_subclass__(cls, **kwargs):
        Net.registered.append(cls.__name__)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return self.layer(x) * scale


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


step()
ema = copy.deepcopy(model)
with torch.no_grad():
    for parameter in ema.parameters():
        parameter.zero_()
whole = io.BytesIO()
torch.save(model, whole)
whole.seek(0)
loaded = torch.load(whole, weights_only=False)
shallow = copy.copy(model)
scripted = torch.jit.trace(copy.deepcopy(model).eval(), torch.ones(3, 4), check_trace=False)
seen = {
    "ema_runs_its_own_weights": float(ema(torch.ones(3, 4)).abs().sum()) == 0.0,
    "model_has_its_own_still": float(model(torch.ones(3, 4)).abs().sum()) > 0.0,
    "types": [type(each) is Net for each in (ema, loaded, shallow)],
    "class": model.__class__ is Net,
    "isinstance": isinstance(model, Net),
    "repr": repr(model),
    "signature": str(inspect.signature(model.forward)),
    "state": list(model.state_dict()),
    "own": sorted(model.__dict__),
    "registered": Net.registered,
    "file_has_harness": b"autotune" in whole.getvalue(),
    "traced": tuple(scripted(torch.ones(3, 4)).shape),
}
ema.train()
fed = torch.optim.SGD(ema.parameters(), lr=0.1)
ema(torch.ones(3, 4)).sum().backward()
fed.step()
copy.deepcopy(optimizer).step()
print(json.dumps(seen), flush=True)
while True:
    step()
