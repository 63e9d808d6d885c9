"""A Python dictionary with, beside each knob, how it is set in code."""

from __future__ import annotations

from autotune.export.winner import Winner
from autotune.knobs.catalogue import knob
from autotune.records import KnobValue

# Knob key -> how a training script sets it; {value} is filled with the Python literal.
IN_CODE = {
    "loader.batch_size": "DataLoader(..., batch_size={value})",
    "loader.num_workers": "DataLoader(..., num_workers={value})",
    "loader.prefetch_factor": "DataLoader(..., prefetch_factor={value})",
    "loader.pin_memory": "DataLoader(..., pin_memory={value})",
    "loader.persistent_workers": "DataLoader(..., persistent_workers={value})",
    "precision.amp": "'bf16': forward and loss under torch.autocast(device.type, dtype=torch.bfloat16); 'off': no autocast",
    "precision.matmul": "torch.set_float32_matmul_precision({value})",
    "layout.channels_last": "model.to(memory_format=torch.channels_last), and the same for the inputs, when True",
    "compile.mode": "model = torch.compile(model, mode={value}), unless 'off'",
    "optimizer.implementation": "'fused' or 'foreach' = True in the optimizer's constructor; neither for 'default'",
    "backend.cudnn_benchmark": "torch.backends.cudnn.benchmark = {value}",
    "threads.intra": "torch.set_num_threads({value})",
}


def render(winner: Winner) -> str:
    """Returns Python source that defines `BEST`."""
    lines = [f"# {line}" for line in winner.headline]
    lines.append("BEST = {")
    lines += [f"    {key!r}: {value!r},  # {_how(key, value)}" for key, value in winner.knobs.items()]
    return "\n".join([*lines, "}", ""])


def _how(key: str, value: KnobValue) -> str:
    variables = knob(key).environment(value)
    if variables:
        return "before Python starts: " + " ".join(f"{name}={text}" for name, text in variables.items())
    return IN_CODE.get(key, f"autotune knobs {key}").format(value=repr(value))
