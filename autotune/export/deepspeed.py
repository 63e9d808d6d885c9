"""Exports DeepSpeed's ds_config.json: batch size per device, accumulation and precision. The script sets the rest."""

from __future__ import annotations

from autotune.export.document import Document, Row, expressed
from autotune.export.winner import Winner

BATCH_SIZE, MICRO_BATCH = "loader.batch_size", "train_micro_batch_size_per_gpu"
# autotune measured autocast with float32 weights. DeepSpeed offers this as torch_autocast since version 0.16.9.
ROWS: dict[str, Row] = {
    BATCH_SIZE: lambda value, winner: winner.per_device(MICRO_BATCH, value),  # DeepSpeed starts a process for each GPU
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
NO_BATCH = f"The batch size of a GPU is unknown, but DeepSpeed needs it: add {MICRO_BATCH}."


def document(winner: Winner) -> Document:
    """Returns the winner as DeepSpeed's configuration. Includes the batch size if known, since DeepSpeed requires it."""
    settings, left_out = expressed(winner, ROWS)
    own = winner.full.get(BATCH_SIZE)
    if MICRO_BATCH not in settings and isinstance(own, int):
        settings = {**(winner.per_device(MICRO_BATCH, own) or {}), **settings}
    notes = [OWN, *([OTHER_BF16] if winner.active.get("precision.amp") == "bf16" else [])]
    if MICRO_BATCH not in settings:
        notes.append(NO_BATCH)
    return Document(settings=settings, usage=USAGE, left_out=left_out, notes=notes)
