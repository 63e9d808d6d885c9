"""Parses CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None if it is not set, so that every GPU is visible.

    Like CUDA, stops at the first invalid entry: "" shows no GPU, "0,-1,1" only GPU 0 (CUDA programming guide, "CUDA
    Environment Variables").
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if not entry.isdigit() and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found


def visible_gpus(gpus: list[dict[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Args:
        gpus: every GPU of the machine, from `machine.gpus.gpus()`.
        environment: the environment. If its entries are not GPUs of that list, such as instances of MIG, all are returned.
    """
    entries = visible_devices(environment)
    if not entries:
        return gpus if entries is None else []
    found = [
        gpu
        for entry in entries
        for number, gpu in enumerate(gpus)
        if entry == str(number) or (entry.startswith("GPU-") and str(gpu["uuid"]).startswith(entry))
    ]
    return found or gpus
