"""Converts a recorded measurement to what a launcher returns: how the processes ended, and the ranks' results."""

from __future__ import annotations

from typing import Any

from autotune.failures import Facts
from autotune.harness.protocol import KnobReport, RankResult, Window
from autotune.launchers.base import Ended
from autotune.replay.table import Measurement
from autotune.trials.finite import NOT_FINITE


def ended_of(measurement: Measurement, *, trial: int, nonce: str) -> Ended:
    """Returns the end of a recorded trial as the answer to another trial.

    Args:
        measurement: the recorded trial.
        trial: number of the trial to answer.
        nonce: nonce of the trial to answer.
    """
    ended = measurement.ended
    return Ended(
        exit_code=ended.get("exit_code"),
        signal=ended.get("signal"),
        cause=ended.get("cause", "exit"),
        phase=ended.get("phase", "steady"),
        results=[_result(raw, trial, nonce) for raw in measurement.results],
        problems=[],
        seconds=measurement.seconds,
        evidence=dict(ended.get("evidence", {})),
    )


def facts_of(ended: Ended) -> Facts:
    """Returns the facts that the outcome is decided from; only knobs with a report are checked."""
    return Facts(
        exit_code=ended.exit_code,
        signal=ended.signal,
        cause=ended.cause,
        phase=ended.phase,
        results=ended.results,
        deadline=str(ended.evidence.get("deadline", "")),
        shut_out=str(ended.evidence.get("shut_out", "")),
        oom_kills=int(ended.evidence.get("oom_kills") or 0),
        is_harness_seen=bool(ended.evidence.get("is_harness_seen")),
        num_steps=int(ended.evidence.get("num_steps", 0)),
        asked={},
        excused=frozenset(ended.evidence.get(NOT_FINITE) or ()),
    )


def _result(raw: dict[str, Any], trial: int, nonce: str) -> RankResult:
    values = dict(raw)
    values["window"] = Window(**raw["window"]) if raw.get("window") else None
    values["knobs"] = {key: KnobReport(**report) for key, report in raw.get("knobs", {}).items()}
    if raw.get("error"):
        values["error"] = {"type": "", "message": "", "traceback": "", **raw["error"]}
    return RankResult(**{"trial": trial, "nonce": nonce, "pid": 0, **values})
