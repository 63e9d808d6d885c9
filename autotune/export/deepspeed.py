"""Exports DeepSpeed's ds_config.json: batch size per device, accumulation and precision. The script sets the rest."""

from __future__ import annotations

from autotune.export.document import Document, Row, expressed
from autotune.export.winner import Winner

BATCH_SIZE = "loader.batch_size"
# autotune measured autocast with float32 weights. DeepSpeed offers this as torch_autocast since version 0.16.9.
ROWS: dict[str, Row] = {
    BATCH_SIZE: lambda value, _: {"train_micro_batch_size_per_gpu": value},
    "step.accumulation": lambda value, _: {"gradient_accumulation_steps": value},
    "precision.amp": lambda value, _: (
        {"torch_autocast": {"enabled": False}}
        if value == "off"
        else {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        if value == "bf16"
        else None  # fp16: DeepSpeed's own loss scaling was not measured
    ),
}
USAGE = ['Load: deepspeed.initialize(model=model, optimizer=optimizer, config="FILE")']
OTHER_BF16 = 'Measured with torch_autocast. {"bf16": {"enabled": true}} keeps the weights in bf16, which was not measured.'
OWN = "If you have a configuration of DeepSpeed, add these keys to it: this one has no ZeRO settings."
NO_BATCH = "The batch size of this program is unknown, but DeepSpeed needs it: add train_micro_batch_size_per_gpu."


def document(winner: Winner) -> Document:
    """Returns the winner as DeepSpeed's configuration. Includes the batch size if known, since DeepSpeed requires it."""
    settings, left_out = expressed(winner, ROWS)
    own = winner.full.get(BATCH_SIZE)
    if own and "train_micro_batch_size_per_gpu" not in settings:
        settings = {"train_micro_batch_size_per_gpu": own, **settings}
    notes = [OWN, *([OTHER_BF16] if winner.active.get("precision.amp") == "bf16" else [])]
    if not own:
        notes.append(NO_BATCH)
    return Document(settings=settings, usage=USAGE, left_out=left_out, notes=notes)
