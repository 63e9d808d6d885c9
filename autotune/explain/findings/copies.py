"""Rules for copies of batches to the GPU: the host waits for them, or the GPU does nothing else in the meantime."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import idle_s
from autotune.explain.findings.finding import Finding
from autotune.harness.explain.documents import TRANSFER

# Settings for copies to a GPU; the second and the third need the first.
PINNED, NOT_WAITING, AHEAD = "loader.pin_memory", "loader.non_blocking", "loader.device_prefetch"
SAVED_FRAC = (0.0, 0.7, 1.0)  # share of the time of the copies that is saved: at least, usually, at most
NOT_CHECKED = "estimate not checked on a GPU yet"
MOST_WAITED_FRAC = 0.5  # if the host waits for this share of the copies' time, only `synchronous_copies` yields a finding


def synchronous_copies(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding for batches copied to the GPU while the host waits: from pageable memory, or without non_blocking."""
    sites = [site for site in evidence.first.syncs if site.kind == "copy"]
    seconds = math.fsum(site.seconds for site in sites)
    if not (evidence.is_cuda and seconds):
        return
    top = max(sites, key=lambda site: site.seconds)
    # A blocking copy first waits until the GPU has done all earlier work, which is not a cost of the copy.
    most_s = min(seconds, idle_s(evidence) + evidence.copying_s)
    knob = NOT_WAITING if evidence.value(PINNED) else PINNED
    yield Finding(
        cause="synchronous copies",
        where=evidence.place_of(top),
        evidence=f"{evidence.of_step(seconds)} in copies to the GPU for which the host waits",
        gain=evidence.gain((frac * most_s for frac in SAVED_FRAC), "bound"),
        basis=f"seconds inside the copies, at most the seconds in which the GPU is idle or copying; {NOT_CHECKED}",
        **evidence.remedy(knob, True, "copy from page-locked memory (pin_memory=True), with .to(device, non_blocking=True)"),
    )


def exposed_copies(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if the GPU computes nothing while a batch is copied to it, although the host does not wait for the copy.

    On a stream that copies and computation share, a copy begins only when the last step has ended, and the next step only when
    the copy has ended.
    """
    operations = evidence.operations[0] if evidence.operations else None
    waited_s = math.fsum(site.seconds for site in evidence.first.syncs if site.kind == "copy")
    if operations is None or not operations.uploading_s or waited_s >= MOST_WAITED_FRAC * operations.uploading_s:
        return
    own = [line for line in evidence.own_lines() if line.phase == TRANSFER]
    most_s = min(operations.uploading_s, operations.busy_s or 0.0)
    code = "copy the next batch on a stream of its own during the step, or copy fewer bytes (images as uint8)"
    yield Finding(
        cause="exposed copies",
        where=evidence.place_of(own[0]) if own else "copies to the GPU",
        evidence=f"the GPU only copies from the host for {evidence.of_step(operations.uploading_s)}",
        gain=evidence.gain((frac * most_s for frac in SAVED_FRAC), "bound"),
        basis=f"copies in the trace during which the GPU does not compute; {NOT_CHECKED}",
        **(evidence.remedy(AHEAD, True, code) if evidence.value(PINNED) else {"code": code}),
    )
