"""Exports arguments of Lightning's Trainer, for LightningCLI or `Trainer(**kwargs)`, and DataLoader arguments to copy."""

from __future__ import annotations

from autotune.export.document import Document, Row, expressed
from autotune.export.in_code import loader_arguments, loader_keys
from autotune.export.winner import Winner

PRECISIONS = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
ROWS: dict[str, Row] = {
    "precision.amp": lambda value, _: {"precision": PRECISIONS[value]},
    "step.accumulation": lambda value, _: {"accumulate_grad_batches": value},
    "step.metrics_sync_interval": lambda value, _: {"log_every_n_steps": value},
    "backend.cudnn_benchmark": lambda value, _: {"benchmark": value},
}
USAGE = [
    "Load: python main.py fit --config FILE (LightningCLI),",
    '      or Trainer(**yaml.safe_load(open("FILE"))["trainer"]).',
]
APART = "The Trainer owns no DataLoader: pass these to yours, DataLoader(dataset, shuffle=True, ...), in train_dataloader()."


def document(winner: Winner) -> Document:
    """Returns the winner as arguments of the Trainer."""
    loader = loader_arguments(winner.active)
    settings, left_out = expressed(winner, ROWS, skip=loader_keys(winner.active))
    return Document(
        settings={"trainer": settings},
        usage=USAGE,
        apart={APART: loader} if loader else {},
        left_out=left_out,
    )
