"""Exports keys of `transformers.TrainingArguments`, for `HfArgumentParser`'s YAML or JSON file."""

from __future__ import annotations

from typing import Any

from autotune.export.document import Document, Row, expressed
from autotune.export.winner import Winner
from autotune.records import KnobValue

ADAMW = "AdamW"


def _optimizer(value: KnobValue, winner: Winner) -> dict[str, Any] | None:
    """Returns the Trainer's name for AdamW's implementation; None if the Trainer has no name for it."""
    is_torchs_choice = value == "default" or (value == "foreach" and winner.device == "cuda")
    if set(winner.optimizers) != {ADAMW} or not (value == "fused" or is_torchs_choice):
        return None
    return {"optim": "adamw_torch_fused" if value == "fused" else "adamw_torch"}


def _tf32(value: KnobValue, winner: Winner) -> dict[str, Any] | None:
    """Returns the `tf32` setting; None if there is none: the Trainer rejects tf32=True on a CPU and does not know "medium"."""
    return {"tf32": value == "high"} if value == "highest" or (value == "high" and winner.device == "cuda") else None


# All these names exist in TrainingArguments from transformers 4.50 to 5.23.
ROWS: dict[str, Row] = {
    # With several GPUs in one process, the Trainer uses nn.DataParallel, and multiplies the batch size by the number of GPUs.
    "loader.batch_size": lambda value, winner: winner.per_device("per_device_train_batch_size", value),
    "loader.num_workers": lambda value, _: {"dataloader_num_workers": value},
    "loader.prefetch_factor": lambda value, _: {"dataloader_prefetch_factor": value},
    "loader.pin_memory": lambda value, _: {"dataloader_pin_memory": value},
    "loader.persistent_workers": lambda value, _: {"dataloader_persistent_workers": value},
    "precision.amp": lambda value, _: {"bf16": value == "bf16", "fp16": value == "fp16"},  # the Trainer rejects both as true
    "precision.matmul": _tf32,
    "compile.mode": lambda value, _: (
        {"torch_compile": False} if value == "off" else {"torch_compile": True, "torch_compile_mode": value}
    ),
    "optimizer.implementation": _optimizer,
    "memory.activation_checkpointing": lambda value, _: {"gradient_checkpointing": value},
    "step.accumulation": lambda value, _: {"gradient_accumulation_steps": value},
    "step.metrics_sync_interval": lambda value, _: {"logging_steps": value, "logging_nan_inf_filter": value == 1},
    "parallel.bucket_cap_mb": lambda value, _: {"ddp_bucket_cap_mb": value},
}
CONTEXT = (
    "The workers were started by {0}. With transformers 5.15 or later, add the line `dataloader_multiprocessing_context: {0}`."
)
USAGE = [
    'Load: HfArgumentParser(TrainingArguments).parse_yaml_file("FILE") (parse_json_file after `-o FILE.json`),',
    "      or copy the keys into your own file of arguments.",
]


def document(winner: Winner) -> Document:
    """Returns the winner as TrainingArguments."""
    settings, left_out = expressed(winner, ROWS)
    notes = []
    if settings.get("torch_compile") and "tf32" not in settings:  # torch_compile enables TF32 unless tf32 is set
        settings |= _tf32(winner.full.get("precision.matmul", ""), winner) or {}
    if winner.device == "cpu" and settings:
        settings["use_cpu"] = True  # otherwise the Trainer rejects bf16 without a GPU
        notes.append("Measured on a CPU, hence use_cpu: remove it where you train on a GPU.")
    if (method := winner.active.get("loader.multiprocessing_context")) is not None:
        notes.append(CONTEXT.format(method))
    return Document(settings=settings, usage=USAGE, left_out=left_out, notes=notes)
