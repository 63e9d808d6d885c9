"""Defines the interface of all passes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ..context import TrialContext

MEAN_STEPS = 50  # `mean_step_s` averages at most this many steps: the last ones of `Window.plain_s`


def mean_step_s(steps_s: List[float]) -> Optional[float]:
    """Returns the mean duration of the last steps, given the seconds of each step; None without steps."""
    last = steps_s[-MEAN_STEPS:]
    return sum(last) / len(last) if last else None


class Pass:
    """One way of observing the program's steps. A subclass overrides `begin`, `step_done`, `leave_out` and `finish`.

    Attributes:
        which: name of the pass: LINES, TRACE or MEMORY.
        is_over: whether the pass has observed enough.
        notes: what could not be measured, and why.
    """

    which = ""

    def __init__(self, context: TrialContext) -> None:
        self.context = context
        self.is_over = False
        self.notes: List[str] = []

    def begin(self) -> None:
        """Called after the last step of the warm-up, in the training thread."""

    def step_done(self) -> None:
        """Called after each step in the passes TRACE and MEMORY, and after only some of the steps in the pass LINES."""

    def leave_out(self, samples: float, wait_s: float) -> None:
        """Called if the program has evaluated its model since the last step. The time since that step then does not count.

        If epochs are short, the call comes as the next epoch begins. Otherwise it comes at the end of the step that contains
        the evaluation, before `step_done`.

        Args:
            samples: training samples since the last step.
            wait_s: seconds that the program waited for the loader since the last step.
        """

    def finish(self) -> Any:
        """Stops observing and returns the document; None if there is nothing to report."""

    def tried(self, note: str, measure: Callable[[], Dict[str, float]]) -> Dict[str, float]:
        """Returns what `measure` returns. If `measure` raises, for example for lack of memory, adds a note and returns {}."""
        try:
            return measure()
        except Exception as error:
            self.notes.append(f"{note}: not known: {type(error).__name__}: {error}")
            return {}
