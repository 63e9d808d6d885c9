"""What is known to run out of memory: configurations that did so in earlier studies, and those that take as much or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.knobs.catalogue import is_knob, knob
from autotune.records import Kind, Knobs, KnobValue, Outcome, TrialRecord

BATCH = "loader.batch_size"
# What takes more memory the larger it is: of the device the batch alone, of the host what its workers hold as well.
DEVICE_GROWING, HOST_GROWING = (BATCH,), (BATCH, "loader.num_workers", "loader.prefetch_factor")
# What changes the memory of a sample, and must be the same for one configuration to tell of another; a program may read a
# variable and be another one.
ALIKE, ALIKE_GROUPS = ("precision.amp", "compile.mode"), ("memory.", "parallel.", "env.")
ELSEWHERE = -1  # number of a trial that is none of this study's


class Frontier:
    """Answers for configurations that are not worth trying, since they ran out of memory elsewhere.

    Args:
        out: "out_of_memory" of `inheritance.inherit`.
    """

    def __init__(self, out: Sequence[dict[str, Any]]) -> None:
        self._out = [(entry["knobs"], TrialRecord(
            number=ELSEWHERE,
            kind=Kind.search,
            knobs=entry["knobs"],
            changed={},
            outcome=Outcome(entry["outcome"]),
            reason=f"it, or less, ran out of memory in {entry['study']}, trial {entry['trial']}",
        )) for entry in out]  # fmt: skip

    def beyond(self, knobs: Knobs) -> TrialRecord | None:
        """Returns a record of having run out of memory for a configuration that would; None for any other."""
        for out, record in self._out:
            if dominates(knobs, out, is_host=record.outcome is Outcome.host_oom):
                return record
        return None


def dominates(knobs: Knobs, out: Knobs, *, is_host: bool) -> bool:
    """Returns whether a configuration takes at least the memory that another one did.

    Without a batch size in both it has to be the same configuration.

    Args:
        knobs: full configuration.
        out: the other.
        is_host: whether memory of the host is meant, of which loader workers take their part.
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
