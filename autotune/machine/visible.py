"""Which GPUs CUDA_VISIBLE_DEVICES shows."""

from __future__ import annotations

from collections.abc import Mapping


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the entries of CUDA_VISIBLE_DEVICES: numbers or UUIDs; None where it is not set, and every GPU can be seen.

    The list ends where CUDA's does, at the first entry that cannot be one: "" shows none, "0,-1,1" the first alone
    (CUDA programming guide, "CUDA Environment Variables").
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
