"""Parses CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.harness.protocol import whole_number

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # with ORDER=BUS, CUDA numbers GPUs by place on the bus, as NVML does
NUMBER = "cuda_number"  # key in a GPU's facts: the GPU's number in CUDA, where it may differ from NVML's (`machine.gpus.gpus`)


def are_unlike(gpus: Sequence[Mapping[str, Any]]) -> bool:
    """Whether GPUs are of several kinds. CUDA numbers such GPUs by speed, unless ORDER is set to BUS."""
    return len({(gpu.get("name"), gpu.get("memory_bytes")) for gpu in gpus}) > 1


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None if it is not set, which makes every GPU visible.

    Like CUDA, stops at the first entry that is neither a number nor a UUID: "" makes no GPU visible, "0,-1,1" only GPU 0
    (CUDA programming guide, "CUDA Environment Variables"). Does not check that the GPUs exist; `visible_gpus` does.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return None
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if whole_number(entry) is None and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found


def entries_from(index: int, num: int, environment: Mapping[str, str]) -> list[str]:
    """Returns up to `num` entries of CUDA_VISIBLE_DEVICES from position `index` on; `num` GPU numbers if it is not set."""
    visible, wanted = visible_devices(environment), range(index, index + num)
    return [str(number) for number in wanted] if visible is None else visible[wanted.start : wanted.stop]


def visible_gpus(gpus: Sequence[Mapping[str, Any]], environment: Mapping[str, str], index: int = 0) -> list[dict[str, Any]]:
    """Returns the GPUs that a program may use from `device.index` on. {} stands for an entry that identifies no GPU.

    The GPUs are in the order of CUDA_VISIBLE_DEVICES. Like CUDA, stops at the first number beyond the last GPU. If the variable
    is not set, the GPUs are in CUDA's order. They are in bus order instead if `index` is above 0 and ORDER is not set, because
    trials then run with ORDER=BUS (see `trials.settings.device_environment`).

    Args:
        gpus: all GPUs in NVML's order, as `machine.gpus.gpus` returns them.
        environment: its CUDA_VISIBLE_DEVICES may hold numbers, UUIDs or the beginnings of UUIDs.
        index: `device.index`, the position of the first GPU to return.
    """
    visible = visible_devices(environment)
    by_bus = [{name: value for name, value in gpu.items() if name != NUMBER} for gpu in gpus]
    if visible is None and index and ORDER not in environment:
        return by_bus[index:]
    numbers = [gpu.get(NUMBER, place) for place, gpu in enumerate(gpus)]
    by_number = [by_bus[place] for place in sorted(range(len(gpus)), key=numbers.__getitem__)]
    if visible is None:
        return by_number[index:]

    def is_there(entry: str) -> bool:
        number = whole_number(entry)
        return number is None or not gpus or number < len(gpus)

    def named(entry: str) -> dict[str, Any]:
        if (number := whole_number(entry)) is not None:
            return dict(by_number[number]) if gpus else {}
        found = [gpu for gpu in by_bus if str(gpu.get("uuid")).startswith(entry)]
        return dict(found[0]) if len(found) == 1 else {}

    return [named(entry) for entry in itertools.takewhile(is_there, visible)][index:]
