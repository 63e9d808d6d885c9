"""Detects a faulty device by sticky CUDA errors in several configurations in a row.

A sticky error makes every later CUDA call of the process fail, so the trial is repeated once in a fresh process. Even if the
repeat fails, too, the cause is often the configuration or the program. So the device is tested only after two different
configurations have failed on it in this way without a success in between. The test is a small computation without the program.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.config.schema import LOCAL
from autotune.harness.protocol import Spec
from autotune.launchers.base import Deadlines, Ended, Launch, Launcher
from autotune.machine.visible import visible_gpus
from autotune.records import Outcome, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.trials.inputs import StudyInputs
from autotune.trials.settings import device_environment

# Messages of the CUDA runtime (driver_types.h), NVML and the kernel after which the context or the device is unusable.
STICKY = re.compile(
    r"CUDA error: (?:an illegal memory access was encountered|device-side assert triggered|unspecified launch failure"
    r"|misaligned address|an illegal instruction was encountered|invalid program counter|hardware stack error"
    r"|operation not supported on global/shared address space|the launch timed out and was terminated"
    r"|uncorrectable (?:ECC|NVLink) error[^\n]*|unknown error|no CUDA-capable device is detected"
    r"|CUDA-capable device\(s\) is/are busy or unavailable)"
    r"|cudaError(?:IllegalAddress|Assert|LaunchFailure|LaunchTimeout|ECCUncorrectable|HardwareStackError|NvlinkUncorrectable)"
    r"|GPU has fallen off the bus|GPU is lost|NVRM: Xid[^\n]*"
)
FAILED = frozenset({Outcome.error, Outcome.crash, Outcome.timeout})
NUM_STRIKES = 2  # number of different configurations that must fail with a sticky error before the device is tested
PROBE_S = 60.0
CUT_OFF = ("stopped", "lost")  # causes of an end that says nothing about the device: ended from outside, or supervisor lost
PROBE = """
import sys
import torch
matrix = torch.full((1024, 1024), 0.5, device=sys.argv[1])
total = float((matrix @ matrix).double().sum())
sys.exit(None if total == 1024**3 / 4 else f"a matrix product is wrong: its sum is {total}, not {1024**3 / 4}")
"""


def sticky_fault(record: TrialRecord) -> str:
    """Returns the message of the sticky CUDA error that ended a trial; "" if it ended otherwise."""
    if record.outcome not in FAILED:
        return ""
    error = record.evidence.get("error") or {}
    found = STICKY.search(f"{record.reason}\n{error.get('message', '')}\n{record.evidence.get('log_tail', '')}")
    return found[0] if found else ""


class Quarantine:
    """Counts sticky errors, and tests the device when there are too many.

    Attributes:
        advice: what the user may do about a faulty device; the last words of the message that `note` returns.

    Args:
        probe: computes something on the device in a fresh process; returns "" if that works, else what went wrong.
        device: returns how messages name the device that a trial ran on: "device 0 (NVIDIA H100, GPU-...)".
        advice: see above.
    """

    def __init__(self, probe: Callable[[TrialRecord], str], *, device: Callable[[TrialRecord], str], advice: str) -> None:
        self.advice = advice
        self._probe, self._device = probe, device
        self._strikes: dict[str, dict[frozenset[tuple[str, object]], tuple[int, str]]] = {}  # slot -> {changes: (trial, error)}

    def note(self, record: TrialRecord) -> str:
        """Records a trial, after its last attempt; returns why the device must not be used any more, "" if it may."""
        strikes = self._strikes.setdefault(record.slot, {})
        if record.outcome.has_value:
            strikes.clear()
        if not (fault := sticky_fault(record)):
            return ""
        strikes[frozenset(record.changed.items())] = (record.number, fault)
        if len(strikes) < NUM_STRIKES:
            return ""
        trials = ", ".join(f"{number:04d} ({what})" for number, what in strikes.values())
        strikes.clear()
        if not (failure := self._probe(record)):
            return ""
        found = f"trials {trials} failed, then a simple computation, too: {failure}"
        return f"{self._device(record)} is faulty: {found}. {self.advice}"


def quarantine(inputs: StudyInputs, folder: StudyFolder, executable: Callable[[], str | None]) -> Quarantine:
    """Returns the quarantine of a study's device.

    Args:
        inputs: the study's inputs.
        folder: the study's folder.
        executable: returns the program's own interpreter, or None while it is unknown: the device then counts as working.
    """
    index, num = inputs.config.device.index, len(_gpus(inputs, 0))
    others = [str(n) for n in range(num) if n != index and inputs.config.launcher == LOCAL and not inputs.launcher.beside()]
    elsewhere = f", or tune on another device: device.index={others[0]} (one of {', '.join(others)})" if others else ""
    return Quarantine(
        lambda record: _probe(inputs, folder, record, executable()),
        device=lambda record: _device_of(inputs, record),
        advice=f"Look for Xid errors in `nvidia-smi -q` and `dmesg`, have the device reset, then resume{elsewhere}",
    )


def _gpus(inputs: StudyInputs, index: int) -> Sequence[Mapping[str, Any]]:
    return visible_gpus(inputs.machine.get("gpus") or [], os.environ, index)


def _device_of(inputs: StudyInputs, record: TrialRecord) -> str:
    if slot := _launcher_of(inputs, record).slot:
        return _named(f"the device of slot {slot.name}", slot.gpus)
    index = inputs.config.device.index
    words = [str(gpu[key]) for gpu in _gpus(inputs, index)[:1] for key in ("name", "uuid") if gpu.get(key)]
    return _named(f"device {index}", words)


def _named(what: str, words: Sequence[str]) -> str:
    return f"{what} ({', '.join(words)})" if words else what


def _launcher_of(inputs: StudyInputs, record: TrialRecord) -> Launcher:
    """Returns the launcher of the slot that a trial ran on, so that the suspect device is tested and no other."""
    slots = (one for one in inputs.launcher.beside() if one.slot and one.slot.name == record.slot)
    return next(slots, inputs.launcher)


def _probe(inputs: StudyInputs, folder: StudyFolder, record: TrialRecord, executable: str | None) -> str:
    if executable is None:
        return ""
    kind = "cpu" if inputs.config.device.kind == "cpu" else "cuda"
    place = folder.path.resolve() / "probes" / f"{record.number:04d}"
    launch = Launch(
        argv=[executable, "-c", PROBE, kind],
        cwd=inputs.command.cwd,
        env=device_environment(inputs.config.device, gpus=inputs.machine.get("gpus") or ()),
        folder=place,
        spec=Spec(trial=record.number, nonce=secrets.token_hex(8), folder=str(place), mode="inspect"),
        deadlines=Deadlines(start_s=PROBE_S, total_s=PROBE_S),
    )
    launcher = _launcher_of(inputs, record)
    running = launcher.start(launch)
    try:
        while (ended := running.poll()) is None:
            if launcher.why_waiting():  # the suspect's node is lost, and the queue may be long
                return ""
            inputs.clock.sleep(inputs.poll_s)
    finally:
        running.stop("the device's probe was interrupted")
    return _failure(ended)


def _failure(ended: Ended) -> str:
    if ended.exit_code == 0 or ended.cause in CUT_OFF:
        return ""
    if ended.cause == "deadline":
        return f"no answer within {PROBE_S:g} s"
    last = str(ended.evidence.get("log_tail", "")).strip().rpartition("\n")[2].strip()
    return last or ended.signal or f"exit status {ended.exit_code}"
