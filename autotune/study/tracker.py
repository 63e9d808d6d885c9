"""Starts the process that copies a study to MLflow, and waits for it when the study ends."""

from __future__ import annotations

import contextlib
import subprocess

from autotune.run_dir import StudyFolder
from autotune.trackers.sync import incomplete
from autotune.trials.events import Listener, Tracking
from autotune.trials.inputs import StudyInputs
from autotune.trials.interrupts import Interrupts

# At its end, a study without a time budget waits at most DRAIN_S seconds for the tracker. A complete study with a budget waits
# as long as the budget lasts, but at least BUDGETED_DRAIN_S and at most DRAIN_S. An incomplete study with a budget waits
# BUDGETED_DRAIN_S. A wait that may be longer than BUDGETED_DRAIN_S is announced after SILENT_S.
DRAIN_S, BUDGETED_DRAIN_S, SILENT_S = 60.0, 5.0, 3.0
LETTING_GO_S = 5.0  # longest wait for the tracker's process to exit after it was terminated


class Tracker:
    """The tracker's process of a study; none is started if the study is not tracked.

    Args:
        inputs: the inputs of the study.
        folder: the study's folder.
        listener: receives notices.
        interrupts: the user's interrupts; an interrupt ends the wait.
    """

    def __init__(self, inputs: StudyInputs, folder: StudyFolder, listener: Listener, interrupts: Interrupts) -> None:
        self._inputs, self._folder, self._listener, self._interrupts = inputs, folder, listener, interrupts
        self._process: Tracking | None = None

    def start(self) -> None:
        """Starts the process. A failure to start it does not fail the study."""
        try:
            self._process = self._inputs.start_tracking(self._folder) if self._inputs.start_tracking else None
        except OSError as error:  # no process can be started, or the disk is full
            self._listener.notice(incomplete(self._folder, f"it could not be started ({error.strerror})"))

    def wait(self, left_s: float | None) -> None:
        """Waits for the process, which exits once it has copied the final summary; notifies the user of an incomplete copy.

        Args:
            left_s: seconds of the budget that may be used; None without a budget.
        """
        if self._process and (why := self._drained(self._process, left_s)):
            self._listener.notice(incomplete(self._folder, why))

    def terminate(self) -> None:
        """Ends the process after a fault of the study."""
        if self._process:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(timeout=LETTING_GO_S)

    def _drained(self, process: Tracking, left_s: float | None) -> str:
        """Waits for the process; returns why its copy is incomplete, or ""."""
        drain_s = min(DRAIN_S, max(BUDGETED_DRAIN_S, DRAIN_S if left_s is None else left_s))
        try:
            self._interrupts.hear_again()
            code = self._awaited(process, drain_s)
        except OSError as error:  # no process can be started, or the folder is gone
            return f"it could not be started again ({error.strerror})"
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"not done {drain_s:.0f} s after the study's end"
        except KeyboardInterrupt:
            process.terminate()
            return "skipped"
        return f"see {self._folder.path / 'tracking.log'}" if code else ""

    def _awaited(self, process: Tracking, drain_s: float) -> int:
        """Waits for the process, and tells the user if that takes a while; returns its exit status."""
        if drain_s <= BUDGETED_DRAIN_S:
            return process.wait(timeout=drain_s)
        try:
            return process.wait(timeout=SILENT_S)
        except subprocess.TimeoutExpired:
            left_s = drain_s - SILENT_S
            process.hurry()
            self._listener.waiting(f"waiting for the copy in MLflow, for at most {left_s:.0f} s more; Ctrl-C skips it")
            return process.wait(timeout=left_s)
