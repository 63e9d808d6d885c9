"""Exports the file of `accelerate launch --config_file`. The file cannot hold loader, optimizer and layout settings."""

from __future__ import annotations

from typing import Any

from autotune.export.document import Document, Row, expressed
from autotune.export.winner import Winner
from autotune.knobs.parallel import FSDP, STRATEGY

ROWS: dict[str, Row] = {
    "precision.amp": lambda value, _: {"mixed_precision": "no" if value == "off" else value},
    "compile.mode": lambda value, winner: {"dynamo_config": _dynamo(value, winner)},
    "compile.scope": lambda *_: {},  # part of dynamo_config
}
USAGE = ["Load: accelerate launch --config_file FILE train.py (a FILE ending in .json is written, and read, as JSON)"]
THREADS = "`accelerate launch` sets OMP_NUM_THREADS, often to 1, unless --num_cpu_threads_per_process is given.{}"
SHARDED = (
    "This file does not shard the model. If your own configuration does (FSDP), add these keys to it instead of using this one."
)
SPREAD = (
    "Measured on {0} machines. Run `accelerate launch` on each of them, with --machine_rank (0 to {1}), --main_process_ip and "
    "--main_process_port."
)


def document(winner: Winner) -> Document:
    """Returns the winner as a configuration of `accelerate launch`, with the measured number of processes."""
    settings, left_out = expressed(winner, ROWS)
    omp = winner.active.get("threads.omp")
    is_sharded, num = winner.full.get(STRATEGY.key) == FSDP, winner.num_nodes
    threads = THREADS.format(f" Give --num_cpu_threads_per_process={omp}." if omp else "")
    return Document(
        settings={**_place(winner), **settings},
        usage=USAGE,
        left_out=left_out,
        notes=[threads, *([SHARDED] if is_sharded else []), *([SPREAD.format(num, num - 1)] if num > 1 else [])],
    )


def _dynamo(mode: Any, winner: Winner) -> dict[str, Any]:
    if mode == "off":
        return {"dynamo_backend": "NO"}
    regional = {"dynamo_use_regional_compilation": True} if winner.active.get("compile.scope") == "blocks" else {}
    return {"dynamo_backend": "INDUCTOR", "dynamo_mode": mode, **regional}


def _place(winner: Winner) -> dict[str, Any]:
    """Returns the keys that the launcher requires in a file."""
    is_cpu, is_several = winner.device == "cpu", winner.world_size > 1
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": ("MULTI_CPU" if is_cpu else "MULTI_GPU") if is_several else "NO",
        "num_machines": winner.num_nodes,
        "num_processes": winner.world_size,  # on all machines together
        "use_cpu": is_cpu,
    }
