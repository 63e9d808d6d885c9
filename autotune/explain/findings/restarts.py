"""A rule for loader workers that are started anew for each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding
from autotune.explain.findings.pipeline import service_s
from autotune.explain.gains import gain_of
from autotune.harness.explain.documents import Restarts
from autotune.quantities import step_time_text

CAUSE = "restarted workers"
PERSISTENT = "loader.persistent_workers"
LEAST_FRAC = 0.5  # for the lower end of the gain: share of the estimate that is saved


def restarted_workers(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the training loader starts new workers for each epoch, and epochs are short.

    Persistent workers save the time to start and to end workers. They also make the first batch of an epoch sooner, because
    they have already imported the program and opened its data. The work for that batch remains.
    """
    found = evidence.first.restarts
    if found is None or not found.count or evidence.is_refuted(PERSISTENT, True):
        return
    steps = found.steps_per_epoch or evidence.first.steps / found.count
    start_s, first_s, end_s = (seconds / found.count for seconds in (found.start_s, found.first_s, found.end_s))
    batch_s = service_s(evidence) * evidence.batch
    most_s = start_s + first_s + end_s
    saved_s = most_s - min(first_s, batch_s)
    # The observed steps may contain more starts than usual, or fewer. So the time that starts take in the mean step is replaced
    # by the time that they usually take.
    step_s = evidence.step_s - found.count * most_s / evidence.first.steps + most_s / steps
    yield Finding(
        cause=CAUSE,
        where=f"DataLoader, num_workers={evidence.num_workers}",
        evidence=f"new workers for each epoch of {steps:.0f} steps: {step_time_text(start_s)} to start them, "
        f"{step_time_text(first_s)} until the first batch, {step_time_text(end_s)} to end them",
        gain=gain_of(step_s, (LEAST_FRAC * saved_s / steps, saved_s / steps, most_s / steps), "predicted"),
        basis=f"{found.count} start{'s' * (found.count != 1)} in the observed steps, without the work for the first batch",
        **_remedy(evidence, found),
    )


def _remedy(evidence: Evidence, found: Restarts) -> dict[str, Any]:
    if found.num_remade:
        return {"code": "make the DataLoader once, before the loop over the epochs, with persistent_workers=True"}
    code = "DataLoader(..., persistent_workers=True), if the program does not change its data set between epochs"
    return evidence.remedy(PERSISTENT, True, code)
