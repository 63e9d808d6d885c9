"""Converts a recorded measurement to what a launcher returns: how the processes ended, and the ranks' results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.harness.protocol import RankResult, Spec, result_of
from autotune.known_messages import Facts
from autotune.launchers.base import Ended
from autotune.replay.table import Measurement
from autotune.trials.not_finite import NOT_FINITE


def ended_of(measurement: Measurement, *, trial: int, nonce: str) -> Ended:
    """Returns how a recorded trial ended, as if it were the trial with this number and nonce."""
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
    """Returns the facts that decide the outcome. A requested knob that the harness did not report on counts as applied."""
    facts = ended.facts(Spec(trial=0, nonce="", folder=""))
    return replace(facts, excused=frozenset(ended.evidence.get(NOT_FINITE) or ()))


def _result(raw: dict[str, Any], trial: int, nonce: str) -> RankResult:
    values = {"trial": trial, "nonce": nonce, "pid": 0, **raw}
    if raw.get("error"):
        values["error"] = {"type": "", "message": "", "traceback": "", **raw["error"]}
    return result_of(values, "the measurement")
