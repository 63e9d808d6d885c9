"""Rules out configurations that ran out of memory in earlier studies, and all that need at least as much memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.knobs.catalogue import is_knob, knob
from autotune.records import Kind, Knobs, KnobValue, Outcome, TrialRecord

BATCH = "loader.batch_size"
# Knobs whose larger values need more memory: the batch size on a device; on the host, also the knobs of loader workers.
DEVICE_GROWING, HOST_GROWING = (BATCH,), (BATCH, "loader.num_workers", "loader.prefetch_factor")
# Knobs that change the memory per sample. Two configurations are comparable only if these knobs are equal. Environment
# variables are among them, since a program may read them.
ALIKE, ALIKE_GROUPS = ("precision.amp", "compile.mode", "backend.sdpa"), ("memory.", "parallel.", "env.")
ELSEWHERE = -1  # trial number that stands for a trial of another study


class Frontier:
    """The configurations that ran out of memory in earlier studies.

    Args:
        out: the entries that `earlier_studies.inherit` returns under "out_of_memory".
    """

    def __init__(self, out: Sequence[dict[str, Any]]) -> None:
        self._out = [(entry["knobs"], TrialRecord(
            number=ELSEWHERE,
            kind=Kind.search,
            knobs=entry["knobs"],
            changed={},
            outcome=Outcome(entry["outcome"]),
            reason=f"the same or a smaller configuration ran out of memory in {entry['study']}, trial {entry['trial']}",
        )) for entry in out]  # fmt: skip

    def beyond(self, knobs: Knobs) -> TrialRecord | None:
        """Returns a record of the failure that rules out a configuration; None if there is none."""
        able = (record for out, record in self._out if dominates(knobs, out, is_host=record.outcome is Outcome.host_oom))
        return next(able, None)


def dominates(knobs: Knobs, out: Knobs, *, is_host: bool) -> bool:
    """Whether a configuration needs at least as much memory as another one.

    If one of them has no batch size, returns True only if the two are equal.

    Args:
        knobs: full configuration.
        out: full configuration of the other one, which ran out of memory.
        is_host: whether the other one ran out of host memory, which loader workers use as well.
    """
    if BATCH not in knobs or BATCH not in out:
        return knobs == out
    growing = HOST_GROWING if is_host else DEVICE_GROWING
    alike = {key for key in (*knobs, *out) if key in ALIKE or key.startswith(ALIKE_GROUPS)}
    if any(_value(knobs, key) != _value(out, key) for key in alike):
        return False
    return all(_number(knobs, key) >= _number(out, key) for key in growing)


def _value(knobs: Knobs, key: str) -> KnobValue | None:
    return knobs.get(key, knob(key).default if is_knob(key) else None)


def _number(knobs: Knobs, key: str) -> float:
    value = knobs.get(key, 0)
    return float(value) if isinstance(value, int | float) else 0.0
