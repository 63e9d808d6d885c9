"""A typical script for Accelerate; prints the settings that `accelerate launch` has read from its configuration file."""

import json
import os

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
with accelerator.autocast():
    dtype = str(torch.nn.functional.linear(torch.randn(8, 4), torch.randn(2, 4)).dtype)
dynamo = accelerator.state.dynamo_plugin
print(
    json.dumps(
        {
            "mixed_precision": accelerator.mixed_precision,
            "device": accelerator.device.type,
            "num_processes": accelerator.num_processes,
            "dynamo": [dynamo.backend.value, dynamo.mode],
            "model": type(model).__name__,
            "dtype": dtype,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        }
    )
)
