"""How a training script sets each knob by itself: what stands beside a knob that a format cannot express."""

from __future__ import annotations

from autotune.knobs.catalogue import knob
from autotune.knobs.environment import PREFIX
from autotune.records import KnobValue
from autotune.wording import value_text

LOADER = "loader."
COMPILED, EAGER = "model.compile(mode={value!r})", "leave the model uncompiled"
AUTOCAST, NO_AUTOCAST = "torch.autocast(device.type, dtype=torch.bfloat16) around the model's call", "no autocast"
IN_CODE = {
    ("precision.amp", "off"): NO_AUTOCAST,
    ("precision.amp", "bf16"): AUTOCAST,
    ("precision.amp", "fp16"): f"{AUTOCAST.replace('bfloat16', 'float16')}, and a torch.amp.GradScaler for the loss",
    ("layout.channels_last", True): "model.to(memory_format=torch.channels_last), and the same for batches of images",
    ("layout.channels_last", False): "leave model and batches in the default memory format",
    ("compile.mode", "off"): EAGER,
    (
        "memory.activation_checkpointing",
        True,
    ): "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), each block",
    ("memory.activation_checkpointing", False): "leave the blocks without torch.utils.checkpoint",
    ("optimizer.implementation", "default"): "neither fused nor foreach in the optimizer's constructor",
}
BY_KEY = {
    "precision.matmul": "torch.set_float32_matmul_precision({value!r})",
    "compile.mode": COMPILED,
    "compile.dynamic": "torch.compile(..., dynamic={value!r}), None for auto",
    "optimizer.set_to_none": "optimizer.zero_grad(set_to_none={value!r})",
    "optimizer.implementation": "{value}=True in the optimizer's constructor",
    "backend.cudnn_benchmark": "torch.backends.cudnn.benchmark = {value!r}",
    "backend.sdpa": "torch.nn.attention.sdpa_kernel(...) around the model's call: {value}",
    "backend.l2_fetch_granularity": "cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, {value!r}) through ctypes",
    "step.accumulation": "(loss / {value!r}).backward(), and clip, step and zero_grad at every {value!r}th iteration only",
    "threads.intra": "torch.set_num_threads({value!r})",
}


def how(key: str, value: KnobValue) -> str:
    """Returns how a script sets a knob, in a line."""
    if variables := knob(key).environment(value):
        return f"before Python starts: {' '.join(f'{name}={text}' for name, text in variables.items())} (--format env)"
    if key.startswith(LOADER):
        return f"DataLoader(..., {key.removeprefix(LOADER)}={value!r})"
    text = IN_CODE.get((key, value)) or BY_KEY.get(key) or f"`autotune knobs {key}`"
    return text.format(value=value)


def setting(key: str, value: KnobValue) -> str:
    """Returns a knob and its value as they are typed: "threads.intra=2", a variable's name and value for `env.NAME`."""
    return f"{key.removeprefix(PREFIX)}={value_text(value)}"
