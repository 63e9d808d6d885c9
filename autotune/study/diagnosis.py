"""One honest sentence on what holds a configuration back, from its own rates."""

from __future__ import annotations

from autotune.records import TrialRecord
from autotune.wording import number_text

HIGH_WAIT_FRAC, MODERATE_WAIT_FRAC = 0.20, 0.05  # thresholds of the trusted profilers

Finding = dict[str, str]


def diagnose(record: TrialRecord, *, device: str | None = None) -> list[Finding]:
    """Returns what binds a trial: its input or its device; nothing when the rates to tell are missing.

    Args:
        record: the winner, or the baseline when nothing was better.
        device: "cuda" or "cpu", where the program trains; None unknown.
    """
    gain_frac = free_loader_gain_frac(record)
    if gain_frac is None or record.data_wait_frac is None:
        return []
    evidence = _evidence(record)
    if device == "cpu" and record.knobs.get("loader.num_workers"):
        # Measured: one worker on two cores slowed the step from 58 to 42 samples/s and hardly ever let it wait, where a free
        # loader would have given 36 % more. Waiting does not tell there; without workers it does.
        return [
            _finding(
                "shared cores",
                evidence,
                "Loader workers and the step share the CPU's cores: how long the step waits for input does not tell what a "
                "faster loader would give. data=synthetic does, for a recipe.",
            )
        ]
    bound = f"with an infinitely fast loader at most +{gain_frac:.0%}"
    if record.data_wait_frac >= HIGH_WAIT_FRAC:
        return [_finding("input-bound", evidence, f"Speed up the input pipeline: {bound}.")]
    if record.data_wait_frac >= MODERATE_WAIT_FRAC:
        return [_finding("partly input-bound", evidence, f"The input pipeline still costs time: {bound}.")]
    return [_finding("device-bound", evidence, f"The input pipeline keeps up: {bound}.")]


def free_loader_gain_frac(record: TrialRecord) -> float | None:
    """Returns D / throughput - 1, what an infinitely fast loader would add; None when D is unknown."""
    if not record.value or not record.device_rate:
        return None
    return max(0.0, record.device_rate / record.value - 1)


def _evidence(record: TrialRecord) -> str:
    rate, device_rate = number_text(record.value, digits=4), number_text(record.device_rate, digits=4)
    parts = [f"trial {record.number}: {rate} {record.unit}/s, device alone {device_rate}"]
    if record.loader_rate:
        parts.append(f"loader {number_text(record.loader_rate, digits=4)}")
    wait = f"waits for input {record.data_wait_frac:.0%} of the time" if record.data_wait_frac is not None else ""
    return ", ".join([*parts, wait] if wait else parts)


def _finding(finding: str, evidence: str, advice: str) -> Finding:
    return {"finding": finding, "evidence": evidence, "advice": advice}
