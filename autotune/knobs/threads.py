"""Knobs of CPU threads."""

from __future__ import annotations

from typing import Any

from autotune.knobs.base import HostContext, Knob, up_to
from autotune.records import KnobValue, Tier


def thread_counts(host_context: HostContext) -> list[KnobValue]:
    """Returns 1, half the effective cores and all of them."""
    return up_to(host_context.num_cores, [1, max(1, host_context.num_cores // 2), host_context.num_cores])


def thread_bounds(host_context: HostContext) -> tuple[int | None, int | None]:
    """Returns the bounds of a thread count. Some machines report only half of their cores, so twice the number is allowed."""
    return 1, max(8, 2 * host_context.num_cores)


def _threads(key: str, *, variable: str = "", **others: Any) -> Knob:
    """Returns the knob of a number of threads, set by the environment variable if one is given. With 0, the library decides."""
    set_by: dict[str, Any] = {"environment": lambda value: {variable: str(value)}, "variables": (variable,)} if variable else {}
    return Knob(key=key, tier=Tier.exact, default=0, domain=thread_counts, bounds=thread_bounds, **set_by, **others)


INTRA = _threads(
    "threads.intra",
    brief="CPU threads of one operator",
    phrase="threads {}",
    in_code="torch.set_num_threads({value!r})",
    summary="torch.set_num_threads: CPU threads of the training process that share one operator (intra-op parallelism).",
    helps=(
        "Training on a CPU in a container: torch counts the host's cores, not the quota, and too many threads fight over too "
        "few cores. On a GPU machine fewer threads leave cores to the loader's workers."
    ),
    hurts="Fewer threads than cores slow down training on a CPU, and decoding in the training process (num_workers=0).",
)

OMP = _threads(
    "threads.omp",
    variable="OMP_NUM_THREADS",
    brief="OMP_NUM_THREADS",
    phrase="OMP {}",
    summary=(
        "OMP_NUM_THREADS, read once when OpenMP loads: the initial thread count of torch, of NumPy and SciPy built with OpenMP "
        "and of OpenCV, in the training process and in everything it starts."
    ),
    helps="Libraries other than torch oversubscribe the cores, or a launcher (torchrun) set it to 1, too few for CPU work.",
    hurts=(
        "For torch itself it sets the same number as threads.intra, which takes precedence: tune one of the two. Too few "
        "threads slow down NumPy preprocessing."
    ),
)

INTEROP = _threads(
    "threads.interop",
    brief="operators side by side on the CPU",
    in_code="torch.set_num_interop_threads({value!r})",
    summary=(
        "torch.set_num_interop_threads: CPU threads that run independent operators side by side (inter-op parallelism), such "
        "as TorchScript's forks and what C++ extensions launch."
    ),
    helps="Scripted models with branches that are forked (torch.jit.fork); fewer threads leave cores to the operators.",
    hurts="Eager training runs one operator after the other and hardly uses these threads: there the knob changes nothing.",
)

MKL = _threads(
    "threads.mkl",
    variable="MKL_NUM_THREADS",
    brief="MKL_NUM_THREADS",
    phrase="MKL {}",
    summary=(
        "MKL_NUM_THREADS, read once when MKL loads: threads of its matrix products, FFTs and solvers, in torch and in NumPy "
        "and SciPy where they are built with MKL."
    ),
    helps="NumPy or SciPy in the data set computes with MKL and oversubscribes the cores together with torch's own threads.",
    hurts=(
        "torch built with MKL also uses this number for all of its operators. Of the three knobs, threads.intra has "
        "precedence, then threads.mkl, then threads.omp: tune only one of them."
    ),
)


def affinities(host_context: HostContext) -> list[KnobValue]:
    """Returns the bindings that make a difference on this machine."""
    ways = {"none": True, "compact": host_context.num_local_ranks > 1, "numa": host_context.num_numa_nodes > 1}
    return [way for way, differs in ways.items() if differs]


def without_choice(host_context: HostContext) -> str | None:
    """Returns why no binding would make a difference; None if one would."""
    if len(affinities(host_context)) > 1:
        return None
    return "one process on one NUMA node: it has all cores with any binding"


AFFINITY = Knob(
    key="threads.affinity",
    tier=Tier.exact,
    default="none",
    choices=("none", "compact", "numa"),
    domain=affinities,
    is_before_torch=True,  # torch counts the cores while it is loaded
    blocked=without_choice,
    brief="binding of processes to cores",
    phrase="affinity {}",
    in_code={
        "none": "bind to no cores",
        "compact": "taskset -c CORES for each rank, or `autotune apply`",
        "numa": "numactl --cpunodebind=NODE, or `autotune apply`",
    },
    summary=(
        "Binds the training process and its loader's workers to cores: `compact` gives each rank of a host a block of "
        "neighbouring cores; `numa` keeps each rank on one NUMA node, that of its GPU if known. `none` leaves the choice to "
        "the kernel."
    ),
    helps=(
        "Several sockets or ranks: memory stays near the cores (and the GPU) that use it, and threads do not migrate. "
        "Offered only where there is more than one NUMA node or rank."
    ),
    hurts=(
        "A bound process cannot use idle cores elsewhere: on a CPU, `numa` leaves the other nodes without work. torch starts "
        "as many threads as it has cores left, unless a threads.* knob sets another number. Not measured on a machine with "
        "several NUMA nodes yet."
    ),
)

KNOBS = [INTRA, INTEROP, OMP, MKL, AFFINITY]
