"""A Lightning module, trained and validated by a Trainer, which calls `training_step` without `__call__`."""

import journal
import lightning
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
        self.net[0].register_forward_hook(lambda net, inputs, out: journal.inside(inputs[0], out) if net.training else None)

    def training_step(self, batch, _):
        images, labels = batch
        outputs = self.net(images)
        journal.note(outputs=str(outputs.dtype))
        loss = nn.functional.cross_entropy(outputs, labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Watch(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, _):
        journal.step(outputs["loss"], len(batch[0]), trainer.optimizers[0])

    def on_validation_start(self, trainer, module):
        journal.away()


class Log(Logger):
    """Records only how many steps lie between two calls of `log_metrics`."""

    name, version, last = "log", 0, 0

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        journal.note(reads_every=step - self.last)
        self.last = step


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 3, 8, 8), torch.randint(0, 10, (320,)))
    quiet = {
        "logger": Log(),
        "log_every_n_steps": 4,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=10**6, accelerator="cpu", check_val_every_n_epoch=8, callbacks=[Watch()], **quiet)
    trainer.fit(Lit(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=32))
