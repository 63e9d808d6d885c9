"""Converts the messages between tuner and agent (node.py) to plain JSON, and back."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from autotune.harness import protocol
from autotune.launchers.base import Deadlines, Ended, Launch
from autotune.monitors.cpu import CpuUse
from autotune.monitors.disturbances import Disturbance
from autotune.monitors.watch import MachineWatch
from autotune.plain_json import from_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """What a node's monitor observed in a trial's measurement window. The attributes are named as in `MachineWatch`."""

    disturbances: list[Disturbance] = dataclasses.field(default_factory=list)
    cpu_use: CpuUse | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    used_frac: float | None = None


def from_launch(launch: Launch, now_s: float) -> dict[str, Any]:
    """Returns a launch as JSON. `spec.end_s` becomes seconds after `now_s`, since monotonic clocks differ between machines."""
    raw = dataclasses.asdict(dataclasses.replace(launch, folder=Path(os.path.abspath(launch.folder))))
    raw["folder"] = str(raw["folder"])
    if launch.spec.end_s is not None:
        raw["spec"]["end_s"] = launch.spec.end_s - now_s
    return raw


def to_launch(raw: dict[str, Any]) -> Launch:
    """Converts the result of `from_launch` back to a launch. Its `spec.end_s` is on this machine's clock.

    Raises:
        KeyError, TypeError, ValueError: the document is invalid.
    """
    if not isinstance(raw["spec"], dict):
        raise TypeError(f"spec: not an object, got {raw['spec']!r}")
    spec = protocol.read_spec(json.dumps(raw["spec"]))
    if spec.end_s is not None:
        spec.end_s += time.monotonic()
    made: dict[str, Any] = {
        "folder": Path(raw["folder"]),
        "spec": spec,
        "deadlines": from_json(raw["deadlines"], Deadlines),
        "warm": tuple(raw["warm"]),
    }
    return Launch(**{**raw, **made})


def to_ended(raw: dict[str, Any]) -> Ended:
    """Converts the result of `dataclasses.asdict` back to an `Ended`."""
    ended = from_json({**raw, "results": []}, Ended)
    return dataclasses.replace(ended, results=[protocol.result_of(result, "the node") for result in raw["results"]])


def from_watch(watch: MachineWatch) -> dict[str, Any]:
    """Returns what a monitor observed during the last trial, as JSON."""
    watched = Watched(
        disturbances=watch.disturbances(), cpu_use=watch.cpu_use, metrics=watch.metrics(), used_frac=watch.used_frac()
    )
    return dataclasses.asdict(watched)
