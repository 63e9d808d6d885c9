"""What a study is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.clock import Clock
from autotune.config.claim import Verify
from autotune.config.command import CommandTemplate
from autotune.config.hidden import HiddenValues
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
        title: what is tuned, for people: the recipe's name or the command line.
        config: the composed configuration.
        yaml: the same as text, interpolations unresolved; written to config.yaml.
        space: what the user asked to search.
        command: the program.
        launcher: starts the trials.
        machine: `machine.host_facts()`.
        start_tracking: starts the process that copies the study folder to the tracker; None tracks nothing.
        device: monitor of the device that trials run on; None opens the configured one.
        cpu: monitor of the processor; None watches the processes of this machine.
        versions: versions of autotune and its libraries; the program's torch is added from the baseline.
        hidden: what the stand-ins for secret knob values stand for.
        secrets: what must be written nowhere.
        clock: time.
        began_s: when the command began, by `clock.monotonic()`: its budget counts from there; None for when the study is run.
        poll_s: pause between two looks at a running trial.
        verify: the claim to verify; None searches.
        search: makes what searches instead of `proposals.Search`, the rivals it is judged by in replays; None for that.
        is_recording: whether configurations are recorded, as `config.record` says, instead of searched.
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
    hidden: HiddenValues = field(default_factory=HiddenValues)
    secrets: Secrets = field(default_factory=Secrets.known)
    clock: Clock = field(default_factory=Clock)
    began_s: float | None = None
    poll_s: float = 0.1
    verify: Verify | None = None
    is_recording: bool = False
    search: Callable[..., Searching] | None = None  # given the study's session
