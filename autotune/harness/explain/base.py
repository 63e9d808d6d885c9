"""Defines the interface of all passes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ..context import TrialContext

MEAN_STEPS = 50  # number of steps that `mean_step_s` uses: the last of `Window.plain_s`


def mean_step_s(steps_s: List[float]) -> Optional[float]:
    """Returns the mean duration of the last steps, given the seconds of each step; None without steps."""
    last = steps_s[-MEAN_STEPS:]
    return sum(last) / len(last) if last else None


class Pass:
    """One way of observing the program's steps. A subclass overrides all methods; they are called in this order.

    Attributes:
        which: LINES, TRACE or MEMORY.
        is_over: whether it has observed enough.
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
        """Called after each step in the passes TRACE and MEMORY; in the pass LINES, after only some of the steps."""

    def leave_out(self, samples: float, wait_s: float) -> None:
        """Called if the program evaluated its model since the last step: the time since that step does not count.

        If epochs are short, it is called as the next epoch begins; otherwise at the end of the step that contains the
        evaluation, before `step_done`.

        Args:
            samples: training samples since the last step.
            wait_s: seconds that the program waited for the loader since the last step.
        """

    def finish(self) -> Any:
        """Stops observing and returns the document; None if there is nothing to report."""

    def tried(self, note: str, measure: Callable[[], Dict[str, float]]) -> Dict[str, float]:
        """Returns what `measure` returns; if that fails, for lack of memory for example, adds a note and returns {}."""
        try:
            return measure()
        except Exception as error:
            self.notes.append(f"{note}: not known: {type(error).__name__}: {error}")
            return {}
