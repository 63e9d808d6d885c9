"""LBFGS: the optimizer calls the model itself, as often as its line search needs."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        journal.inside(inputs, hidden)
        return self.head(torch.tanh(hidden))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(240, 4), torch.randn(240, 2)), batch_size=12, shuffle=True)
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
while True:
    for inputs, targets in loader:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        journal.step(loss, len(inputs), optimizer)
