"""Knobs of torch.utils.data.DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.knobs.base import LOADER_ARGUMENT, HostContext, Knob, no_cuda, observed_int, up_to
from autotune.records import Knobs, KnobValue, Tier

MAX_BATCH_CUDA, MAX_BATCH_CPU = 1024, 128  # largest batches to try; larger ones on a CPU gain nothing and take seconds per step
WORKER_STEPS = [0, 1, 2, 4, 6, 8, 12, 16, 24, 32]  # more workers rarely help one process: pipes and the pinning thread saturate


def batch_sizes(host_context: HostContext) -> list[KnobValue]:
    """Returns half the program's batch size, the batch size itself and its doublings, if there are enough samples for them.

    With a GPU and a batch size of 64, these are [32, 64, 128, 256, 512]. The doublings end at 8 times the
    program's batch size, or at the device's cap if that is smaller. In a recipe, they end at the cap.
    """
    own = observed_int(host_context, BATCH_SIZE.key)
    cap = max(own, MAX_BATCH_CUDA if host_context.has_cuda else MAX_BATCH_CPU)
    highest = cap if host_context.is_recipe else min(cap, own * 8)
    doublings = [own * 2**n for n in range(11)]
    enough = [size for size in doublings if f"{BATCH_SIZE.key}={size}" not in host_context.not_applicable]
    return up_to(highest, [max(1, own // 2), *enough])


def has_workers(knobs: Knobs) -> bool:
    """Returns whether the loader has any workers."""
    return int(knobs.get(NUM_WORKERS.key, 0)) > 0


def expert_workers(host_context: HostContext) -> KnobValue:
    """Returns the number of workers that an expert would start with.

    That is 8, but at most one less than there are cores. If the program itself has more than 8 workers, and there is a core for
    each of them and for the step, its number stays.
    """
    spare = max(0, host_context.num_cores - 1)
    own = host_context.observed.get(NUM_WORKERS.key)
    return own if isinstance(own, int) and 8 < own <= spare else min(8, spare)


def without_workers(host_context: HostContext) -> str | None:
    """Returns why worker knobs cannot be set if the program has no workers and allows none; else None."""
    if int(host_context.observed.get(NUM_WORKERS.key, 0) or 0) > 0:
        return None
    return host_context.not_applicable.get(NUM_WORKERS.key)


def _of_workers(
    key: str, *, is_active: Callable[[Knobs], bool] = has_workers, in_code: str = LOADER_ARGUMENT, **more: Any
) -> Knob:
    """Returns a knob of what the workers do. By default, it is an argument of DataLoader and acts if there is any worker."""
    return Knob(
        key=key, tier=Tier.exact, is_outside_graphs=True, blocked=without_workers, is_active=is_active, in_code=in_code, **more
    )


BATCH_SIZE = Knob(
    key="loader.batch_size",
    tier=Tier.training,
    default=1,
    domain=batch_sizes,
    examples=(32, 64, 128),
    bounds=lambda _: (1, 2**20),
    brief="samples of a step, on each rank",
    phrase="batch {}",
    in_code=LOADER_ARGUMENT,
    summary=(
        "Samples that one rank's loader hands to one training step. It changes the optimisation itself: larger batches mean "
        "fewer, less noisy steps in an epoch. A winner with another batch size trains differently until you re-tune the "
        "learning rate (scaling it in proportion, with warm-up, is the usual start) or keep the global batch by accumulation."
    ),
    helps=(
        "A GPU that waits between small kernels: every kernel launch, optimizer update and gradient all-reduce is paid once a "
        "step, and larger matrices fill more of the device. Double until samples/s stops rising; multiples of 8 (bf16, fp16) "
        "keep Tensor Cores in use."
    ),
    hurts=(
        "Activations grow in proportion, until the device runs out of memory. Past the device's saturation point nothing is "
        "gained. On a CPU large batches do not fit in the caches and can be slower. Very large batches may generalise worse."
    ),
    start_cost="none; with compile.mode on, each batch size may compile anew",
)

NUM_WORKERS = Knob(
    key="loader.num_workers",
    tier=Tier.exact,
    is_outside_graphs=True,
    default=0,
    domain=lambda c: up_to(c.num_cores, WORKER_STEPS),
    bounds=lambda c: (0, max(16, 4 * c.num_cores)),  # more than four workers per core only cost memory
    expert=expert_workers,
    brief="processes that load data",
    phrase="workers {}",
    in_code=LOADER_ARGUMENT,
    summary=(
        "Processes that read, decode and augment batches ahead of the training loop. With 0 the training process does "
        "this itself, between the steps. Sample order stays the same; random augmentation draws from per-worker seeds."
    ),
    helps=(
        "The device is idle while the loop waits for data (`show` prints the share). The number needed is about 1.1 x device "
        "rate x seconds of work per sample: 4 to 8 for each GPU with JPEG images. Raise it until the wait vanishes, no further."
    ),
    hurts=(
        "Training on a CPU: workers take cores from the step itself, and 0 often wins. Each worker copies the dataset object "
        "and holds prefetch_factor batches in shared memory (/dev/shm in containers is often 64 MiB). For tiny in-memory "
        "datasets, passing batches between processes costs more than the workers save. Not applicable to a data set that has a "
        "random generator of its own (all workers would draw the same numbers) or an open file (workers would share its "
        "position), unless the loader has a worker_init_fn. Not applicable, either, if the data set or the collate function "
        "puts the batches on the GPU, if the program changes the data set or sampler between batches, or if an IterableDataset "
        "does not call get_worker_info() (every worker would yield all of its data)."
    ),
    start_cost="0.1 s to several seconds at every epoch's start (each worker is started anew unless persistent_workers is on)",
)

PREFETCH_FACTOR = _of_workers(
    "loader.prefetch_factor",
    default=2,
    domain=lambda _: [2, 4, 8],
    bounds=lambda _: (1, 64),
    usual_spread=0.05,
    brief="batches ready in each worker",
    phrase="prefetch {}",
    summary="Batches that each worker keeps ready. It needs loader.num_workers > 0.",
    helps="Some batches take far longer to make than others (mixed image sizes, cold network storage): a deeper queue helps.",
    hurts=(
        "If a loader is too slow on average, only more workers help. Host and shared memory grow by workers x factor x batch "
        "bytes, and so does pinned memory."
    ),
    start_cost="the queue is filled once an epoch",
)

PIN_MEMORY = Knob(
    key="loader.pin_memory",
    tier=Tier.exact,
    is_outside_graphs=True,
    default=False,
    blocked=no_cuda,
    expert=lambda _: True,
    usual_gain=0.03,
    usual_spread=0.08,
    brief="batches in page-locked memory",
    in_code=LOADER_ARGUMENT,
    summary="Copies each batch into page-locked host memory, by a thread of the training process, before it goes to the GPU.",
    helps=(
        "Transfers from page-locked memory are about twice as fast, and only they can overlap with computation "
        "(`.to(device, non_blocking=True)` in the program)."
    ),
    hurts=(
        "The pinning thread takes part of a core and can become the bottleneck with many small tensors. Page-locked memory is "
        "not given back to the host. Without non_blocking copies the gain is small. Not applicable to batches that are on the "
        "GPU already."
    ),
    start_cost="a CUDA context and one thread, under 0.1 s",
)

PERSISTENT_WORKERS = _of_workers(
    "loader.persistent_workers",
    default=False,
    expert=lambda _: True,
    usual_gain=0.01,
    usual_spread=0.06,
    brief="workers live on between epochs",
    summary=(
        "Keeps workers and their dataset copies alive between epochs instead of starting them anew. It needs "
        "loader.num_workers > 0."
    ),
    helps="Short epochs, slow-to-open datasets, many workers: the pause at every epoch's start goes away.",
    hurts=(
        "Changes that the main process makes to the dataset between epochs (a curriculum, a new epoch number) do not reach the "
        "workers. Where autotune sees such a change, it starts new workers. In your own code, do the same. The workers keep "
        "their memory during validation, too."
    ),
)

MULTIPROCESSING_CONTEXT = _of_workers(
    "loader.multiprocessing_context",
    default="fork",
    default_text="fork; from Python 3.14 on, forkserver",
    choices=("fork", "forkserver", "spawn"),
    domain=lambda _: ["fork", "forkserver"],  # spawn gives the same workers as forkserver, but starts them more slowly
    usual_spread=0.05,
    brief="how workers are started",
    phrase="workers by {}",
    summary=(
        "How workers are started: as copies of the training process (fork), as copies of a small process that has imported the "
        "program once (forkserver), or as new interpreters (spawn). It needs loader.num_workers > 0."
    ),
    helps=(
        "forkserver and spawn: workers begin with little memory. They suit a training process of many gigabytes or threads, "
        "where fork takes long to copy page tables, keeps the parent's memory in use or deadlocks (OpenMP, gRPC, CUDA used in "
        "the data set)."
    ),
    hurts=(
        "forkserver and spawn send a pickled copy of the data set to each worker and import the program's main module there, "
        "so both must work. Each worker has its own copy of memory that forked workers would share. Not applicable if the data "
        "set cannot be pickled, or the main module has no test of its `__name__`. Workers added to a program without workers "
        "are forked under every version of Python, unless the program sets another way to start processes."
    ),
    start_cost=(
        "the imports of the program: with forkserver once; with spawn in every worker, and again at every epoch unless the "
        "workers are persistent"
    ),
)

IN_ORDER = _of_workers(
    "loader.in_order",
    default=True,
    is_active=lambda knobs: int(knobs.get(NUM_WORKERS.key, 0)) > 1,  # a single worker cannot change the order
    usual_spread=0.06,
    brief="batches in the sampler's order",
    summary=(
        "Whether batches are handed over in the sampler's order (true), even if one takes long to make, or in the order in "
        "which they are finished (false). Each epoch has the same samples. It needs two workers or more."
    ),
    helps=(
        "false: some batches take far longer than others (large files, cold storage), and the loop waits for one while others "
        "are ready."
    ),
    hurts=(
        "false: the order of batches differs from run to run, and batches that are slow to make come later in the epoch. It is "
        "set to false only for a loader that shuffles: a loader that does not shuffle may need its order. Needs torch 2.6."
    ),
)

SHARING_STRATEGY = _of_workers(
    "loader.sharing_strategy",
    default="file_descriptor",
    choices=("file_descriptor", "file_system"),
    domain=lambda _: ["file_descriptor", "file_system"],
    usual_spread=0.05,
    brief="how workers hand tensors over",
    phrase="shared by {}",
    in_code="torch.multiprocessing.set_sharing_strategy({value!r})",
    summary=(
        "torch.multiprocessing.set_sharing_strategy: how a worker's tensors reach the training process through shared memory, "
        "as open files (file_descriptor) or by name (file_system). It needs loader.num_workers > 0."
    ),
    helps=(
        "file_system: batches of very many tensors, each of which otherwise costs an open file and a connection, until the "
        "program fails with 'too many open files'."
    ),
    hurts=(
        "file_system: a helper process (torch_shm_manager) has to clear away what a killed program leaves in /dev/shm. If the "
        "helper is killed, too, the files stay."
    ),
)


def without_second_core(host_context: HostContext) -> str | None:
    """Returns why workers and step cannot have separate cores (one core, or no workers); None if they can."""
    if host_context.num_cores < 2:
        return "one core: workers and step have to share it"
    return without_workers(host_context)


OWN_CORES = Knob(
    key="loader.own_cores",
    tier=Tier.exact,
    default=False,
    blocked=without_second_core,
    is_active=has_workers,
    is_before_torch=True,  # torch counts the cores while it is loaded
    usual_spread=0.15,
    brief="own cores for workers and step",
    in_code={
        True: "os.sched_setaffinity in the program and in worker_init_fn, or `autotune apply`",
        False: "do not bind the workers to cores",
    },
    summary=(
        "Binds the loader's workers and the training process to separate cores. The workers get one core each, but together "
        "at most half of the cores that threads.affinity leaves. It needs loader.num_workers > 0."
    ),
    helps="Workers that compute all the time no longer interrupt the thread that launches the kernels, or the step on a CPU.",
    hurts=(
        "Neither side can use cores that the other leaves idle. torch gets as many threads as the step has cores, unless a "
        "threads.* knob sets another number."
    ),
)


def is_pinned(knobs: Knobs) -> bool:
    """Returns whether batches are in page-locked memory."""
    return knobs.get(PIN_MEMORY.key) is True


NON_BLOCKING = Knob(
    key="loader.non_blocking",
    tier=Tier.exact,
    is_outside_graphs=True,
    default=False,
    blocked=no_cuda,
    is_active=is_pinned,
    expert=lambda _: True,
    usual_gain=0.02,
    usual_spread=0.06,
    brief="copies to the GPU do not wait",
    in_code={True: "batch.to(device, non_blocking=True)", False: "batch.to(device)"},
    summary=(
        "Makes the program's own `batch.to(device)` and `.cuda()` return while the copy is under way (non_blocking=True), for "
        "tensors that a loader has handed over. It needs loader.pin_memory."
    ),
    helps="The training process queues the step's kernels while the batch is copied, instead of waiting for the copy.",
    hurts=(
        "A program that writes into a batch on the host right after moving it, with NumPy say, would change what is copied. "
        "If the knob is set to false, the program's own non_blocking=True is ignored. If the knob is not set, the program's "
        "argument applies. Not applicable to a loader that writes each batch into the tensors of the batch before. Not "
        "measured on a GPU yet."
    ),
)

DEVICE_PREFETCH = Knob(
    key="loader.device_prefetch",
    tier=Tier.exact,
    is_outside_graphs=True,
    default=False,
    blocked=no_cuda,
    is_active=is_pinned,
    usual_gain=0.02,
    usual_spread=0.08,
    brief="next batch copied a step ahead",
    in_code={True: "copy the next batch on a stream of its own, or `autotune apply`", False: "copy each batch when it is used"},
    summary=(
        "Fetches one batch ahead and copies it to the device on a side stream. Only tensors that the program was seen to move "
        "are copied. The program's own `batch.to(device)` then returns the finished copy. It needs loader.pin_memory."
    ),
    helps=(
        "Large batches on a slow link: the copy overlaps with the step before. With non_blocking alone the step still waits "
        "for its copy."
    ),
    hurts=(
        "The device holds one batch more. The program gets a batch only after the loader has made the next one too, so it "
        "waits longer for a slow loader. With loader.num_workers=0 the order of random numbers between data set and model "
        "changes. Not applicable to a loader that writes each batch into the tensors of the batch before, or if the program "
        "changes its data set or sampler between batches. Not measured on a GPU yet."
    ),
)


KNOBS = [
    BATCH_SIZE, NUM_WORKERS, PREFETCH_FACTOR, PIN_MEMORY, PERSISTENT_WORKERS, MULTIPROCESSING_CONTEXT, IN_ORDER,
    SHARING_STRATEGY, OWN_CORES, NON_BLOCKING, DEVICE_PREFETCH,
]  # fmt: skip
