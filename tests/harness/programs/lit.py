"""A Lightning module: training_step goes past `__call__`."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))

    def training_step(self, batch, _):
        x, y = batch
        out = self.net(x)
        assert out.dtype == torch.float32
        return nn.functional.cross_entropy(out, y)

    def validation_step(self, batch, _):
        x, y = batch
        nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(320, 3, 8, 8), torch.randint(0, 10, (320,)))
trainer = lightning.Trainer(
    max_epochs=10**6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Lit(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=16))
