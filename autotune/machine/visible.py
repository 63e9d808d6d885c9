"""Parses CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping


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
