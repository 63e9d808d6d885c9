"""Finds what limits a trial, for example the input pipeline, from the trial's measurements."""

from __future__ import annotations

from autotune.explained import signed
from autotune.harness.protocol import SHARED
from autotune.quantities import number_text, percent_text
from autotune.records import TrialRecord
from autotune.wording import communication_text

HIGH_WAIT_FRAC, MODERATE_WAIT_FRAC = 0.20, 0.05  # limits of common profilers for the share of a step spent waiting for input
HIGH_EXPOSED_FRAC, MODERATE_EXPOSED_FRAC = 0.15, 0.03  # limits for the share of a step that exposed communication takes
BUSY_FRAC = 0.8  # if kernels run for a smaller share of the time, the GPU probably waits for the host to launch them
LEAST_GAIN_FRAC = 0.03  # if an infinitely fast loader gains less than this, a trial is not input-bound, not even partly

Finding = dict[str, str]


def diagnose(record: TrialRecord, *, device: str | None = None) -> list[Finding]:
    """Returns what limits a trial: input, host, device or communication; [] if the numbers are missing.

    Args:
        record: the winner, or the baseline if no trial was better.
        device: "cuda" or "cpu", where the program trains; None if unknown.
    """
    if not record.value:
        return []
    return _ranked([*_of_input(record, device), *_of_ranks(record, device)])


def _ranked(found: list[Finding]) -> list[Finding]:
    """Returns the findings, the most important first. Leaves out "device-bound" if there is any other finding.

    If communication or the slowest rank limits a trial, "device-bound" is wrong, and its note that a faster loader gains little
    is a distraction.
    """
    rank = {"input-bound": 0, "communication-bound": 1, "shared cores": 2, "ranks out of step": 3, "partly input-bound": 4}
    ordered = sorted(found, key=lambda finding: rank.get(finding["finding"], 5))
    if len(ordered) > 1:
        ordered = [finding for finding in ordered if finding["finding"] != "device-bound"]
    return ordered


def _of_input(record: TrialRecord, device: str | None) -> list[Finding]:
    if not record.value or record.data_wait_frac is None or record.loader_rate is None:  # no loader_rate: no DataLoader
        return []
    if _shares_cores(record, device):
        # Waiting time means little if workers and step share the cores. In a measurement, one worker on two cores slowed the
        # step from 58 to 42 samples/s, although the step hardly ever waited. An infinitely fast loader would have gained 36 %.
        return [
            _finding(
                "shared cores",
                _evidence(record),
                "Loader workers and the step share the CPU's cores, so the time that the step waits for input does not "
                "show what a faster loader would gain. For a recipe, data=synthetic shows it.",
            )
        ]
    gain_frac = free_loader_gain_frac(record)
    if gain_frac is None:
        return []
    bound, evidence = f"an infinitely fast loader would give at most {signed(gain_frac)}", _evidence(record)
    # On a GPU, the training thread may load data and wait for it while the GPU still works through its queue.
    if record.data_wait_frac >= MODERATE_WAIT_FRAC and gain_frac < LEAST_GAIN_FRAC:
        return [_of_device(record, device, f"The step waits for its input, yet {bound}.")]
    if record.data_wait_frac >= HIGH_WAIT_FRAC:
        return [_finding("input-bound", evidence, f"Speed up the input pipeline: {bound}.")]
    if record.data_wait_frac >= MODERATE_WAIT_FRAC:
        return [_finding("partly input-bound", evidence, f"The input pipeline still costs time: {bound}.")]
    return [_of_device(record, device, f"The input pipeline keeps up: {bound}.")]


def _of_device(record: TrialRecord, device: str | None, why: str) -> Finding:
    """Returns the finding for a trial that is not limited by its input: the device limits it, or the host that feeds a GPU.

    Measured on an H100 with resnet18, batch 32 and bf16: kernels ran for 31 % of the time, because the training thread took
    longer to launch them than the GPU took to run them.
    """
    busy_frac = record.metrics.get("gpu.utilisation_frac")
    if device != "cuda" or busy_frac is None or busy_frac >= BUSY_FRAC:
        return _finding("device-bound", _evidence(record), why)
    evidence = f"{_evidence(record)}, a kernel runs on the GPU {percent_text(busy_frac)} of the time"
    advice = "The GPU waits for the host to launch kernels. A larger batch or compile.mode=reduce-overhead shortens this wait."
    return _finding("host-bound", evidence, advice)


def _of_ranks(record: TrialRecord, device: str | None) -> list[Finding]:
    """Returns the findings on communication between ranks and on stragglers."""
    if not record.ranks:
        return []
    found, communication = [], record.ranks["communication"] or {}
    exposed_frac = communication.get("exposed_frac") or 0.0
    if exposed_frac >= MODERATE_EXPOSED_FRAC:
        name = "communication-bound" if exposed_frac >= HIGH_EXPOSED_FRAC else "partly communication-bound"
        evidence = f"trial {record.number}: {communication_text(record.ranks).removeprefix('communication: ')}"
        advice = "Exchange gradients less often (a larger batch) or more cheaply (the knobs of parallel.*)."
        found.append(_finding(name, evidence, advice))
    if slow := record.ranks["stragglers"]:
        who = f"rank{'s' if len(slow) > 1 else ''} {', '.join(map(str, slow))}"
        evidence = f"trial {record.number}: {who} {'take' if len(slow) > 1 else 'takes'} "
        evidence += f"up to {percent_text(record.ranks['skew_frac'])} of a step longer than the fastest rank, which waits"
        cores = ", cores and device" if device != "cpu" else " and cores"
        gpu = ", at its GPU" if device != "cpu" else ""
        advice = f"Give every rank the same work{cores}: look at the slow rank's data{gpu} and what else uses its cores."
        found.append(_finding("ranks out of step", evidence, advice))
    return found


def free_loader_gain_frac(record: TrialRecord) -> float | None:
    """Returns the gain from an infinitely fast loader, device rate / throughput - 1; None if the device rate is unknown."""
    if not record.value or not record.device_rate:
        return None
    return max(0.0, record.device_rate / record.value - 1)


def _shares_cores(record: TrialRecord, device: str | None) -> bool:
    if record.regime:
        return record.regime == SHARED
    return device == "cpu" and bool(record.knobs.get("loader.num_workers"))  # records of older versions have no regime


def _evidence(record: TrialRecord) -> str:
    parts = [f"trial {record.number}: {number_text(record.value, digits=4)} {record.unit}/s"]
    if record.device_rate:
        parts.append(f"device alone {number_text(record.device_rate, digits=4)}")
    if record.loader_rate:
        parts.append(f"loader {number_text(record.loader_rate, digits=4)}")
    if record.data_wait_frac is not None:
        parts.append(f"waits for input {percent_text(record.data_wait_frac)} of a step's time")
    return ", ".join(parts)


def _finding(finding: str, evidence: str, advice: str) -> Finding:
    return {"finding": finding, "evidence": evidence, "advice": advice}
