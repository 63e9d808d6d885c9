"""How a training script sets each knob by itself: what stands beside a knob that a format cannot express."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.knobs.catalogue import knob
from autotune.knobs.environment import PREFIX
from autotune.records import Knobs, KnobValue
from autotune.wording import value_text

LOADER = "loader."
PARALLEL, COMPRESSION = "parallel.", "parallel.gradient_compression"
WRAPPER = ("parallel.bucket_cap_mb", "parallel.static_graph", "parallel.gradient_as_bucket_view")  # arguments of DDP
# About loaders, but no argument of theirs.
BESIDE_LOADER = (
    *("loader.sharing_strategy", "loader.own_cores", "loader.non_blocking", "loader.device_prefetch"),
    "loader.uint8_transfer",
)
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
    ("parallel.gradient_compression", "off"): "register no communication hook",
    ("parallel.strategy", "ddp"): "DistributedDataParallel(model)",
    ("parallel.strategy", "fsdp"): "fully_shard(block) for each block, then fully_shard(model), of torch.distributed.fsdp",
    ("loader.non_blocking", True): "batch.to(device, non_blocking=True)",
    ("loader.non_blocking", False): "batch.to(device)",
    ("loader.device_prefetch", True): "copy the next batch on a stream of its own, or `autotune apply`",
    ("loader.device_prefetch", False): "copy each batch when it is used",
    ("loader.uint8_transfer", True): "do ToTensor's division and Normalize after images.to(device), or `autotune apply`",
    ("loader.uint8_transfer", False): "convert and normalise in the data set's transforms",
    ("memory.allocator", "default"): "leave PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF unset",
    ("memory.malloc", "glibc"): "preload no other allocator (LD_PRELOAD)",
    ("memory.malloc", "jemalloc"): "LD_PRELOAD=libjemalloc.so.2 before Python starts, where it is installed",
    ("memory.malloc", "tcmalloc"): "LD_PRELOAD=libtcmalloc_minimal.so.4 before Python starts, where it is installed",
    ("threads.affinity", "none"): "bind to no cores",
    ("threads.affinity", "compact"): "taskset -c CORES for each rank, or `autotune apply`",
    ("threads.affinity", "numa"): "numactl --cpunodebind=NODE, or `autotune apply`",
    ("loader.own_cores", True): "os.sched_setaffinity in the program and in worker_init_fn, or `autotune apply`",
    ("loader.own_cores", False): "bind workers to no cores of their own",
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
    "parallel.gradient_compression": "model.register_comm_hook(None, bf16_compress_hook), of ddp_comm_hooks.default_hooks",
    "step.metrics_sync_interval": "loss.item() and the like every {value!r}th iteration only",
    "parallel.reshard_after_forward": "fully_shard(block, reshard_after_forward={value!r}), each block",
    "threads.intra": "torch.set_num_threads({value!r})",
    "threads.interop": "torch.set_num_interop_threads({value!r})",
    "memory.fraction": "torch.cuda.set_per_process_memory_fraction({value!r})",
    "loader.sharing_strategy": "torch.multiprocessing.set_sharing_strategy({value!r})",
}


def how(key: str, value: KnobValue) -> str:
    """Returns how a script sets a knob, in a line."""
    if variables := knob(key).environment(value):
        return f"before Python starts: {' '.join(f'{name}={text}' for name, text in variables.items())} (--format env)"
    if key in loader_keys([key]):
        return f"DataLoader(..., {key.removeprefix(LOADER)}={value!r})"
    if key in WRAPPER:
        return f"DistributedDataParallel(..., {key.removeprefix(PARALLEL)}={value!r})"
    text = IN_CODE.get((key, value)) or BY_KEY.get(key) or f"`autotune knobs {key}`"
    return text.format(value=value)


def loader_keys(knobs: Iterable[str]) -> list[str]:
    """Returns those of some knobs that are arguments of the DataLoader."""
    return [key for key in knobs if key.startswith(LOADER) and key not in BESIDE_LOADER]


def loader_arguments(knobs: Knobs) -> Knobs:
    """Returns the DataLoader's arguments, by their names."""
    return {key.removeprefix(LOADER): knobs[key] for key in loader_keys(knobs)}


def setting(key: str, value: KnobValue) -> str:
    """Returns a knob and its value as they are typed: "threads.intra=2", a variable's name and value for `env.NAME`."""
    return f"{key.removeprefix(PREFIX)}={value_text(value)}"
