"""Knobs of CPU threads."""

from __future__ import annotations

from autotune.knobs.base import Circumstances, Knob
from autotune.knobs.ranges import up_to
from autotune.records import KnobValue, Tier


def thread_counts(circumstances: Circumstances) -> list[KnobValue]:
    """Returns 1, half the effective cores and all of them."""
    return up_to(circumstances.num_cores, [1, max(1, circumstances.num_cores // 2), circumstances.num_cores])


def thread_bounds(circumstances: Circumstances) -> tuple[int | None, int | None]:
    """Returns the bounds of a thread count: twice the cores, for machines that report half of them."""
    return 1, max(8, 2 * circumstances.num_cores)


INTRA = Knob(
    key="threads.intra",
    tier=Tier.exact,
    type=int,
    default=0,  # the library decides; the baseline reports the number it took
    domain=thread_counts,
    bounds=thread_bounds,
    summary="torch.set_num_threads: CPU threads of the training process that share one operator (intra-op parallelism).",
    helps=(
        "Training on a CPU in a container: torch counts the host's cores, not the quota, and too many threads fight over too "
        "few cores. On a GPU machine fewer threads leave cores to the loader's workers."
    ),
    hurts="Fewer threads than cores slow down CPU training and decoding done in the training process (num_workers=0).",
)

OMP = Knob(
    key="threads.omp",
    tier=Tier.exact,
    type=int,
    default=0,  # unset: the library decides
    domain=thread_counts,
    bounds=thread_bounds,
    environment=lambda value: {"OMP_NUM_THREADS": str(value)},
    summary=(
        "OMP_NUM_THREADS, read once when OpenMP loads: the first thread count of torch, NumPy's and SciPy's OpenMP builds and "
        "OpenCV, in the training process and in everything it starts."
    ),
    helps="Libraries beside torch oversubscribe the cores, or a launcher set 1 (torchrun does) and starves CPU work.",
    hurts=(
        "For torch itself it says the same as threads.intra, which wins: tune one of the two. Too few threads slow down NumPy "
        "preprocessing."
    ),
)

KNOBS = [INTRA, OMP]
