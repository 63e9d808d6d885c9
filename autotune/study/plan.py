"""What a study is given, and whom it tells what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autotune.config.claim import Verify
from autotune.config.command import CommandTemplate
from autotune.config.hidden import HiddenValues
from autotune.config.schema import StudyConfig
from autotune.harness.protocol import Progress
from autotune.launchers.base import Launcher
from autotune.masking import Secrets
from autotune.monitors.cpu import CpuMonitor
from autotune.monitors.nvml import DeviceMonitor
from autotune.records import Kind, Knobs, StudyRecord, Summary, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.space import SearchSpace

if TYPE_CHECKING:
    from autotune.study.outlook import Outlook
    from autotune.study.session import Session


class Clock:
    """Time as the study sees it; tests and replays put another in its place."""

    def monotonic(self) -> float:
        """Returns seconds that only grow."""
        return time.monotonic()

    def time(self) -> float:
        """Returns seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


class Tracking(Protocol):
    """The process that copies the study folder to the tracker, as `subprocess.Popen` shows it."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code; raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """Asks it to end."""


class Searching(Protocol):
    """What proposes and measures configurations from the baseline to the finals."""

    def run(self) -> str:
        """Searches and returns why it ended."""


class Listener:
    """Whom the study tells what happens; every method may be left out. Called from the study's thread, in this order.

    `started`, `resumed` when earlier runs of the study have left trials, then for each trial `time_left` (from the second on),
    `trial_started`, `progress` (several times a second) and `trial_ended`; `planned` once before the search, `finals_started`
    before the finals' trials, `attribution_started` among them when the chosen configuration is taken apart; `finished` at the
    end, also after an interrupt and when nothing worked, but not after a fault; `notice` at any time, of tracking also after
    that.
    """

    def started(self, study: StudyRecord) -> None:
        """The study folder is there, no trial has run. Called again when the baseline has shown what can be searched."""

    def resumed(self, trials: Sequence[TrialRecord], spent_s: float) -> None:
        """The study is gone on with.

        Args:
            trials: those that are over, by number.
            spent_s: wall time that they and what lay between them took.
        """

    def planned(self, outlook: Outlook) -> None:
        """The baseline has told what a trial costs: about how many the search will have, and in what time."""

    def time_left(self, outlook: Outlook) -> None:
        """What is left of the study before its next trial."""

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """A trial is launched.

        Args:
            number: its number.
            kind: baseline, search, attribution or final.
            knobs: what it changes.
            why: one line on why it is tried.
        """

    def progress(self, progress: Progress) -> None:
        """Where the running trial stands."""

    def trial_ended(self, trial: TrialRecord) -> None:
        """A trial is over and its record is on disk."""

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """The search is over.

        Args:
            trials: numbers of the trials that will be measured again, the baseline (0) first.
            reserved_s: time the finals may take; None for unlimited.
        """

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """What the chosen configuration changes is put back, knob by knob, to see what each is worth.

        Args:
            trial: number of the chosen trial.
            knobs: keys of the knobs that will be put back, each alone.
            left_s: time this may take; None for unlimited.
        """

    def notice(self, message: str) -> None:
        """One line worth reading: an interrupt was heard, compilation does not fit the budget, ..."""

    def finished(self, summary: Summary) -> None:
        """The verdict is on disk."""


@dataclass(kw_only=True)
class Plan:
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
    search: Callable[[Session], Searching] | None = None
