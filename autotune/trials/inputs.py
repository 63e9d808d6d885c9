"""Defines the inputs of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.clock import Clock
from autotune.config.claim import Verify
from autotune.config.command import CommandTemplate
from autotune.config.schema import StudyConfig
from autotune.launchers.base import Launcher
from autotune.masking import Secrets
from autotune.monitors.cpu import CpuMonitor
from autotune.monitors.nvml import DeviceMonitor
from autotune.run_dir import StudyFolder
from autotune.space import SearchSpace
from autotune.trials.events import Searching, Tracking


@dataclass(kw_only=True)
class StudyInputs:
    """Everything a study needs to know.

    Attributes:
        title: name of what is tuned, as shown to the user: the recipe's name or the command line.
        config: the composed configuration.
        yaml: `config` as text, with interpolations unresolved; written to config.yaml.
        space: what the user asked to search.
        command: the program.
        launcher: starts the trials.
        machine: `machine.host_facts()`.
        start_tracking: starts the process that copies the study folder to the tracker; None for no tracking.
        device: monitor of the device that trials run on; None to open the configured one.
        cpu: monitor of the CPU; None to watch the processes of this machine.
        versions: versions of autotune and its libraries; the program's torch is added from the baseline.
        secrets: what must not be written anywhere.
        clock: source of time.
        began_s: `clock.monotonic()` when the command began, from which the budget counts; None for the start of the study.
        poll_s: pause between two polls of a running trial.
        verify: the claim to verify; None to search.
        search: makes a replacement for `proposals.Search`, used in replays; None for `proposals.Search` itself.
        is_recording: whether configurations are recorded according to `config.record` instead of searched.
    """

    title: str
    config: StudyConfig
    yaml: str
    space: SearchSpace
    command: CommandTemplate
    launcher: Launcher
    machine: dict[str, Any]
    start_tracking: Callable[[StudyFolder], Tracking | None] | None = None
    device: DeviceMonitor | None = None
    cpu: CpuMonitor | None = None
    versions: dict[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets.known)
    clock: Clock = field(default_factory=Clock)
    began_s: float | None = None
    poll_s: float = 0.1
    verify: Verify | None = None
    is_recording: bool = False
    search: Callable[..., Searching] | None = None  # called with the study's session
