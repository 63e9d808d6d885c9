"""Decides which time limit a trial has passed, if any."""

from __future__ import annotations

from autotune.launchers.base import Deadlines
from autotune.launchers.progress_file import ProgressFile
from autotune.quantities import number_text

STARTING = ("spawn", "import", "init", "first_batch")
MOVING_S = 2.0  # a trial whose progress is not older than this does not hang: it is only slow, or never gets steady


def passed(deadlines: Deadlines, progress: ProgressFile, *, started_s: float, now_s: float) -> str:
    """Returns the limit that has passed, in words: "compile: it did not finish within 300 s"; "" if none has."""
    phase = progress.phase
    if phase in STARTING:
        what, limit_s, since_s = f"start: no training step began (last phase: {phase})", deadlines.start_s, started_s
    elif phase == "compile":
        what, limit_s, since_s = "compile: it did not finish", deadlines.compile_s, progress.entered_s["compile"]
    else:
        what, limit_s, since_s = f"step: nothing moved in phase {phase}", deadlines.step_s, progress.changed_s
    if now_s - since_s > limit_s:
        return f"{what} within {number_text(limit_s)} s"
    if now_s - started_s > deadlines.total_s:
        steps = ", still making steps" if is_moving(progress, now_s=now_s) else ""
        return f"total: the trial was not over within {number_text(deadlines.total_s)} s (last phase: {phase}{steps})"
    return ""


def is_moving(progress: ProgressFile, *, now_s: float) -> bool:
    """Returns whether a trial, past start and compilation, has made progress in the last MOVING_S."""
    return progress.phase not in (*STARTING, "compile") and now_s - progress.changed_s <= MOVING_S
