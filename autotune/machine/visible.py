"""Parses CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.harness.protocol import whole_number


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs. Returns None if it is not set: then every GPU is visible.

    Like CUDA, stops at the first invalid entry: "" shows no GPU, "0,-1,1" only GPU 0 (CUDA programming guide, "CUDA
    Environment Variables").
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if whole_number(entry) is None and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found


def visible_gpus(gpus: Sequence[Mapping[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the GPUs that a program sees, in the order of CUDA_VISIBLE_DEVICES. A GPU that cannot be identified is {}.

    Like CUDA, stops at the first number beyond the last GPU.

    Args:
        gpus: all GPUs in NVML's order, as `machine.gpus.gpus` returns them. CUDA's numbers follow this order if all GPUs are
            alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
        environment: its CUDA_VISIBLE_DEVICES may hold numbers, UUIDs or the beginnings of UUIDs.
    """
    visible = visible_devices(environment)
    if visible is None:
        return [dict(gpu) for gpu in gpus]

    def is_there(entry: str) -> bool:
        index = whole_number(entry)
        return index is None or not gpus or index < len(gpus)

    def named(entry: str) -> dict[str, Any]:
        if (index := whole_number(entry)) is not None:
            return dict(gpus[index]) if gpus else {}
        found = [gpu for gpu in gpus if str(gpu.get("uuid")).startswith(entry)]
        return dict(found[0]) if len(found) == 1 else {}

    return [named(entry) for entry in itertools.takewhile(is_there, visible)]
