"""Rules for memory: retries of the GPU's allocator, memory that it reserves but cannot use, page faults on the host."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import idle_frac
from autotune.explain.findings.device import BATCH, gain_of_larger_batch
from autotune.explain.findings.finding import Finding
from autotune.harness.explain.documents import Memory
from autotune.harness.protocol import KEEPING
from autotune.knobs.malloc import GLIBC_KEEP
from autotune.quantities import percent_text

ALLOCATOR, EXPANDABLE = "memory.allocator", "expandable_segments"
OTHER_REMEDY = "a smaller batch, fewer different sizes of tensors, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
MALLOC = "memory.malloc"
OBSERVED_STEPS = 2  # steps of the pass "memory" in which retries are counted
# Seconds of a retry, which waits for the device, returns all cached blocks to the driver and requests them again: at least,
# usually, at most. From the documented cost of cudaMalloc and cudaFree; not measured on a GPU yet.
RETRY_S = (0.0, 0.005, 0.05)
# Seconds of a page fault in a step: at least, usually, at most. With seven networks, glibc_keep saved 0.8 to 1.8 microseconds
# for each page fault that it avoided (`python -m tests.benchmarks.allocator`, two cores of an AMD EPYC).
FAULT_S = (0.5e-6, 1.3e-6, 2.5e-6)
LEAST_UNUSED_FRAC = 0.2  # there is a finding only if at least this share of the reserved memory is unused at the peak
FULL_FRAC = 0.9  # share of the device's memory: if less is reserved, a larger batch fits anyway


def allocator_retries(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each rank whose CUDA allocator runs out of memory and frees its cache within steps."""
    for memory in evidence.memory:
        retries = (memory.alloc_retries or 0) / OBSERVED_STEPS
        if not retries:
            continue
        unused = _unused_frac(memory)
        also = f"; {percent_text(unused)} of the reserved memory is unused" if unused else ""
        yield Finding(
            cause="allocator retries",
            where=f"rank {memory.rank}",
            evidence=f"{retries:.3g} retries per step, each of which waits for the device and frees the cache{also}",
            gain=evidence.gain((min(retries * seconds, evidence.step_s) for seconds in RETRY_S), "bound"),
            basis="usual cost of freeing the cache; not measured on a GPU yet",
            **evidence.remedy(ALLOCATOR, EXPANDABLE, OTHER_REMEDY),
        )


def fragmentation(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if a larger batch does not fit because the CUDA allocator reserves memory that it cannot use."""
    worst = max((one for one in evidence.memory if one.fragmentation_frac), key=_unused_frac, default=None)
    idle = idle_frac(evidence)
    if worst is None or idle is None or worst.alloc_retries:
        return
    unused = _unused_frac(worst)
    reserved_bytes = worst.peak_bytes / max(1 - unused, 1e-3)
    is_full = bool(worst.capacity_bytes) and reserved_bytes >= FULL_FRAC * (worst.capacity_bytes or 0)
    if unused < LEAST_UNUSED_FRAC or not is_full or BATCH in evidence.host_context.not_applicable:
        return
    times = reserved_bytes / worst.peak_bytes
    yield Finding(
        cause="memory fragmentation",
        where=f"rank {worst.rank}",
        evidence=f"{percent_text(unused)} of {reserved_bytes / 1e9:.3g} GB reserved at the peak is unused, and the GPU is full",
        gain=gain_of_larger_batch(idle, times),
        basis=f"a batch {times:.2g} times as large, while the device is idle for {percent_text(idle)} of the step",
        code=f"{ALLOCATOR}={EXPANDABLE}, and then a larger batch",
    )


def page_faults(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if a step on a CPU works in memory that the last step has returned to the kernel."""
    faults = evidence.first.page_faults
    if not faults or evidence.is_cuda:
        return
    code = f"start Python with {' '.join(f'{name}={text}' for name, text in KEEPING.items())}"
    yield Finding(
        cause="page faults",
        where="memory allocator of the host",
        evidence=f"{faults:,.0f} pages per step are requested from the kernel again after they were returned to it",
        gain=evidence.gain((min(faults * seconds, evidence.step_s) for seconds in FAULT_S), "predicted"),
        basis="the usual cost of a page fault",
        **evidence.remedy(MALLOC, GLIBC_KEEP, code),
    )


def _unused_frac(memory: Memory) -> float:
    return memory.fragmentation_frac or 0.0
