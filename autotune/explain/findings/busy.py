"""Computes how much of a step the device is busy or idle, and what less work for the device would gain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.gains import Gain, Kind
from autotune.harness.explain.documents import BACKWARD, FORWARD
from autotune.records import KnobValue

AMP, COMPILE = "precision.amp", "compile.mode"
COMPUTING = (FORWARD, BACKWARD)
# A step is launch-bound if the GPU waits for the host for at least this share of the step. On a CPU, it is launch-bound if
# calling operators takes at least this share. The time of the input does not count.
LAUNCH_FRAC = 0.6
IDLE_FRAC = 0.2  # if a GPU is idle for a larger share of the step, less work for the GPU may not shorten the step


def computing_phases_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in forward and backward."""
    return math.fsum(evidence.phases_s.get(phase, 0.0) for phase in COMPUTING)


def narrow_type(evidence: Evidence) -> KnobValue | None:
    """Returns the 16-bit type to try: bf16, or fp16 on a GPU without fast bfloat16; None if neither can be set."""
    types = ("bf16", "fp16") if evidence.is_cuda else ("bf16",)
    return next((each for each in types if evidence.may_set(AMP, each)), None)


def traced(evidence: Evidence) -> list[dict[str, Any]]:
    """Returns rank 0's seconds by operator, as in `Operations.by_operator`; [] if unknown, or distorted by the profiler."""
    operations = evidence.operations[0] if evidence.operations else None
    return [] if operations is None or operations.is_distorted else operations.by_operator


def waits_for_host(evidence: Evidence) -> bool:
    """Returns whether a GPU waits for its host so long that less work for the GPU would not shorten the step."""
    return (waiting_frac(evidence) or 0.0) >= LAUNCH_FRAC


def gain_on_device(evidence: Evidence, saved_s: Iterable[float], kind: Kind) -> Gain:
    """Returns the gain if the device computes for `saved_s` seconds less: at least, probably, at most.

    While a GPU is idle, less work does not help. So if it is idle for 10 % of the step, only 90 % of the lower end and of the
    estimate count. If it is idle for more than IDLE_FRAC, the lower end is 0.
    """
    idle, (low, mid, high) = idle_frac(evidence) or 0.0, saved_s
    return evidence.gain((low * (1 - idle) if idle <= IDLE_FRAC else 0.0, mid * (1 - idle), high), kind)


def idle_frac(evidence: Evidence) -> float | None:
    """Returns the share of the step in which the GPU neither computes nor copies nor waits for input; None if unknown."""
    busy_s = evidence.operations[0].busy_s if evidence.operations else None
    return None if busy_s is None else max(0.0, 1 - (busy_s + evidence.copying_s + evidence.input_s) / evidence.step_s)


def waiting_frac(evidence: Evidence) -> float | None:
    """Returns the share of the step in which the GPU waits for its host; None if unknown.

    In this time, it does not compute, copy or communicate, and the program is not waiting for input or for the GPU.
    """
    idle = idle_frac(evidence)
    if idle is None:
        return None
    return max(0.0, idle - (evidence.communicating_s + evidence.operations[0].waited_for_s) / evidence.step_s)


def idle_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in which a GPU does nothing; the whole step if that is not known."""
    # `Lines.device_phases_s` does not show this, because a phase includes the wait for the phase's first kernel.
    busy_s = max((one.busy_s for one in evidence.operations if one.busy_s is not None), default=0.0)
    return max(0.0, evidence.step_s - busy_s - evidence.communicating_s - evidence.copying_s)
