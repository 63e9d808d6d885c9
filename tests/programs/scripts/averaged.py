"""Keeps two averaged copies of its model, one made before and one during training; both are updated after each step."""

import copy

import journal
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.drop, self.head = nn.Conv2d(3, 8, 3), nn.Dropout(0.1), nn.Linear(8 * 36, 10)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            journal.inside(images, hidden)
        return self.head(self.drop(hidden.relu()).flatten(1))


torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 3, 8, 8), torch.randint(0, 10, (240,)))
loader = DataLoader(data, batch_size=12, shuffle=True)
model = Net()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
late, number = None, 0
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        number += 1
        if number == 4:
            late = copy.deepcopy(model).requires_grad_(False)
        if number > 4:
            for mine, theirs in zip(late.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs.detach(), 0.5)
        if number == 16:
            fresh = [Net().eval() for _ in (average, late)]
            fresh[0].load_state_dict(average.module.state_dict())
            fresh[1].load_state_dict(late.state_dict())
            with torch.no_grad():
                outputs = [(copied.eval()(images), one(images)) for copied, one in zip((average, late), fresh, strict=True)]
                journal.note(copies_are_right=[bool(torch.allclose(a, b, atol=1e-6)) for a, b in outputs])
                journal.note(copies_differ=not torch.equal(outputs[0][0], outputs[1][0]), copy_dtype=str(outputs[1][0].dtype))
        journal.step(loss, len(images), optimizer)
