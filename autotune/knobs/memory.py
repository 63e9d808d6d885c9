"""Knobs of memory: the GPU memory allocator and its limit, and the host memory allocator."""

from __future__ import annotations

import os

from autotune.harness.protocol import KEEPING
from autotune.knobs import malloc
from autotune.knobs.base import HostContext, Knob, no_cuda
from autotune.records import KnobValue, Tier

# Value of the knob -> configuration of torch's CUDA allocator.
CONFIGURATIONS = {
    "default": "",
    "expandable_segments": "expandable_segments:True",
    "max_split_256": "max_split_size_mb:256",
    "roundup_8": "roundup_power2_divisions:8",
    "collect_80": "garbage_collection_threshold:0.8",
    "cuda_malloc_async": "backend:cudaMallocAsync",
}
# Both variables are set: torch before 2.9 reads only the first, and 2.9 and 2.10 read some options from it (pytorch #183387).
CONFIGURATION_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configuration(value: str) -> dict[str, str]:
    """Returns the variables that configure torch's CUDA allocator, which reads them when it is first used."""
    text = CONFIGURATIONS[value]
    return dict.fromkeys(CONFIGURATION_VARIABLES, text) if text else {}


ALLOCATOR = Knob(
    key="memory.allocator",
    tier=Tier.exact,
    is_outside_graphs=True,
    default="default",
    choices=tuple(CONFIGURATIONS),
    domain=lambda _: ["default", "expandable_segments", "roundup_8"],
    blocked=no_cuda,
    environment=configuration,
    variables=CONFIGURATION_VARIABLES,
    usual_spread=0.08,
    brief="how torch keeps GPU memory",
    phrase="allocator {}",
    in_code={"default": "leave PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF unset"},
    summary=(
        "How torch's CUDA allocator keeps memory. expandable_segments grows its segments instead of adding others. "
        "max_split_256 leaves blocks above 256 MB whole. roundup_8 rounds sizes up to one of eight steps between two powers of "
        "two. collect_80 frees unused blocks once 80 % of the memory that the process may take is in use. It only works after "
        "a call of torch.cuda.set_per_process_memory_fraction, which autotune makes with the value of memory.fraction or, if "
        "it is not set, 1.0 (less if device.memory_limit asks for it). cuda_malloc_async leaves allocation to the driver. Set "
        "as PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF before the program starts."
    ),
    helps=(
        "Batches whose shapes differ (text, detection): memory becomes fragmented, the allocator retries (num_alloc_retries) "
        "or a batch that should fit does not. expandable_segments is the first to try."
    ),
    hurts=(
        "With fixed shapes, the allocator changes little. Rounding takes more memory. Collecting costs time near the limit. "
        "expandable_segments and cuda_malloc_async do not suit every way of sharing CUDA memory between processes. Not "
        "measured on a GPU yet."
    ),
)

FRACTION = Knob(
    key="memory.fraction",
    tier=Tier.exact,
    default=1.0,
    domain=lambda _: [],  # a limit makes nothing faster: a user who needs one knows its value
    examples=(0.5, 0.8),
    bounds=lambda _: (0.01, 1.0),
    blocked=no_cuda,
    brief="share of the GPU's memory to take",
    phrase="memory {}",
    in_code="torch.cuda.set_per_process_memory_fraction({value!r})",
    summary=(
        "torch.cuda.set_per_process_memory_fraction: the share of the device's memory that the training process may take, from "
        "its first optimizer step on. If device.memory_limit is lower, it takes precedence."
    ),
    helps="Another program needs part of the device's memory: the training is measured with the rest only.",
    hurts="Near the limit unused memory is freed and allocated again; above the limit the trial runs out of memory.",
)


def _mallocs(here: HostContext) -> list[KnobValue]:
    if here.observed.get("memory.malloc") == malloc.GLIBC_KEEP:
        # The user has set glibc's variables. No trial unsets them, so plain glibc cannot be tried.
        return [malloc.GLIBC_KEEP, *malloc.installed()]
    keeping = [] if here.has_cuda else [malloc.GLIBC_KEEP]  # with a GPU, large blocks are in GPU memory: not worth a trial
    return [malloc.GLIBC, *keeping, *malloc.installed()]


def _expert_malloc(here: HostContext) -> KnobValue | None:
    is_plain = here.observed.get("memory.malloc", malloc.GLIBC) == malloc.GLIBC
    return malloc.GLIBC_KEEP if is_plain and not here.has_cuda else None


MALLOC = Knob(
    key="memory.malloc",
    tier=Tier.exact,
    is_outside_graphs=True,
    default=malloc.GLIBC,
    choices=(malloc.GLIBC, malloc.GLIBC_KEEP, *malloc.LIBRARIES),
    domain=_mallocs,
    examples=(malloc.GLIBC, malloc.GLIBC_KEEP),
    expert=_expert_malloc,
    environment=lambda value: malloc.variables_for(value, os.environ, malloc.installed()),
    variables=("LD_PRELOAD", *KEEPING),
    set_later=tuple(KEEPING),
    # Seven networks on two cores, glibc_keep: 1.01x to 1.22x (`python -m tests.benchmarks.allocator`).
    usual_gain=0.07,
    usual_spread=0.1,
    brief="allocator of host memory",
    phrase="{}",
    phrases={malloc.GLIBC_KEEP: "keep freed memory"},
    in_code={
        malloc.GLIBC: "preload no other allocator (LD_PRELOAD)",
        malloc.GLIBC_KEEP: " ".join(f"{name}={text}" for name, text in KEEPING.items()) + " before Python starts",
        "jemalloc": "LD_PRELOAD=libjemalloc.so.2 before Python starts, where it is installed",
        "tcmalloc": "LD_PRELOAD=libtcmalloc_minimal.so.4 before Python starts, where it is installed",
    },
    summary=(
        "The allocator of host memory, in the training process and in everything it starts. `glibc` is the C library's own. "
        "`glibc_keep` is the same, but keeps freed memory instead of returning it to the kernel (MALLOC_MMAP_MAX_=0 and a "
        "large MALLOC_TRIM_THRESHOLD_). `jemalloc` and `tcmalloc` are preloaded (LD_PRELOAD) where they are installed (Debian "
        "and Ubuntu: libjemalloc2, libtcmalloc-minimal4)."
    ),
    helps=(
        "Training and decoding on a CPU: large blocks that come and go each step, many threads at once. glibc returns large "
        "blocks to the kernel and requests them again in the next step, at the cost of a page fault for each 4 KiB."
    ),
    hurts=(
        "Memory kept for reuse makes processes larger: with glibc_keep, up to twice as large if the shapes of batches differ. "
        "autotune returns freed memory to the kernel before workers are forked. If you set the variables yourself "
        "(`export --format env`), workers that are forked in later epochs also hold what their parent kept. A GPU that does "
        "all of the work leaves little to gain."
    ),
)

KNOBS = [ALLOCATOR, FRACTION, MALLOC]
