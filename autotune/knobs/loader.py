"""Knobs of torch.utils.data.DataLoader."""

from __future__ import annotations

from autotune.knobs.base import Circumstances, Knob
from autotune.knobs.ranges import no_cuda, observed_int, up_to
from autotune.records import Knobs, KnobValue, Tier

MAX_BATCH_CUDA, MAX_BATCH_CPU = 1024, 128  # on a CPU a larger batch gains nothing and makes each step seconds long
WORKER_STEPS = [0, 1, 2, 4, 6, 8, 12, 16, 24, 32]  # one process rarely gains beyond 32: pipes and the pin thread saturate


def batch_sizes(circumstances: Circumstances) -> list[KnobValue]:
    """Returns half the program's batch and its doublings: up to 8 x, for our own recipes up to what the device is good for."""
    own = observed_int(circumstances, BATCH_SIZE.key, otherwise=1)
    cap = max(own, MAX_BATCH_CUDA if circumstances.has_cuda else MAX_BATCH_CPU)
    highest = cap if circumstances.is_recipe else min(cap, own * 8)
    doublings = [own * 2**n for n in range(11)]
    return up_to(highest, [max(1, own // 2), *doublings])


def worker_counts(circumstances: Circumstances) -> list[KnobValue]:
    """Returns 0, 1, 2, 4, ... up to the effective cores."""
    return up_to(circumstances.num_cores, WORKER_STEPS)


def worker_bounds(circumstances: Circumstances) -> tuple[int | None, int | None]:
    """Returns the bounds of a worker count: more than four a core only take memory from each other."""
    return 0, max(16, 4 * circumstances.num_cores)


def has_workers(knobs: Knobs) -> bool:
    """Returns whether the loader has workers at all."""
    return int(knobs.get(NUM_WORKERS.key, 0)) > 0


def without_workers(circumstances: Circumstances) -> str | None:
    """Returns why knobs of workers cannot be turned: the program has none and allows none."""
    if int(circumstances.observed.get(NUM_WORKERS.key, 0) or 0) > 0:
        return None
    return circumstances.not_applicable.get(NUM_WORKERS.key)


BATCH_SIZE = Knob(
    key="loader.batch_size",
    tier=Tier.training,
    type=int,
    default=1,
    domain=batch_sizes,
    bounds=lambda _: (1, 2**20),
    summary=(
        "Samples that one rank's loader hands to one training step. It changes the optimisation itself: fewer, less noisy "
        "steps an epoch. A winner with another batch size trains differently until you re-tune the learning rate (scaling it "
        "in proportion, with warm-up, is the usual start) or hold the global batch by accumulation."
    ),
    helps=(
        "A GPU that waits between small kernels: every kernel launch, optimizer update and gradient all-reduce is paid once a "
        "step, and larger matrices fill more of the device. Double until samples/s stops rising; multiples of 8 (bf16, fp16) "
        "keep Tensor Cores in use."
    ),
    hurts=(
        "Memory grows in proportion with activations and ends in out-of-memory. Past the device's saturation point nothing is "
        "gained. On a CPU large batches fall out of the caches and can be slower. Very large batches may generalise worse."
    ),
    start_cost="none; with compile.mode on, each batch size may compile anew",
)

NUM_WORKERS = Knob(
    key="loader.num_workers",
    tier=Tier.exact,
    type=int,
    default=0,
    domain=worker_counts,
    bounds=worker_bounds,
    expert=lambda c: min(8, max(0, c.num_cores - 1)),
    summary=(
        "Processes that read, decode and augment batches ahead of the training loop. 0 does it in the training process, "
        "between the steps. Sample order stays the same; random augmentation draws from per-worker seeds."
    ),
    helps=(
        "The device is idle while the loop waits for data (`show` prints the share). Needed are about 1.1 x device rate x "
        "seconds of work per sample, so 4 to 8 a GPU for JPEG pipelines. Raise until the wait vanishes, no further."
    ),
    hurts=(
        "Training on a CPU: workers take cores from the step itself, and 0 often wins. Each worker copies the dataset object "
        "and holds prefetch_factor batches in shared memory (/dev/shm in containers is often 64 MiB). Tiny in-memory datasets "
        "lose to the cost of passing batches between processes."
    ),
    start_cost="0.1 s to several seconds at every epoch's start (each worker is started anew unless persistent_workers)",
)

PREFETCH_FACTOR = Knob(
    key="loader.prefetch_factor",
    tier=Tier.exact,
    type=int,
    default=2,
    domain=lambda _: [2, 4, 8],
    bounds=lambda _: (1, 64),
    blocked=without_workers,
    is_active=has_workers,
    summary="Batches that each worker keeps ready. It means something only with loader.num_workers > 0.",
    helps="Batches that take very different times to make (mixed image sizes, cold network storage): a deeper queue evens out.",
    hurts=(
        "It cannot lift a loader that is too slow on average: add workers for that. Host and shared memory grow by "
        "workers x factor x batch bytes, pinned memory too."
    ),
    start_cost="the queue is filled once an epoch",
)

PIN_MEMORY = Knob(
    key="loader.pin_memory",
    tier=Tier.exact,
    type=bool,
    default=False,
    domain=lambda _: [False, True],
    blocked=no_cuda,
    expert=lambda _: True,
    summary="Copies each batch into page-locked host memory, by a thread of the training process, before it goes to the GPU.",
    helps=(
        "Transfers from page-locked memory are about twice as fast, and only they can overlap with computation "
        "(`.to(device, non_blocking=True)` in the program)."
    ),
    hurts=(
        "The pin thread costs one core's share and can become the bottleneck with many small tensors; page-locked memory is "
        "taken from the host for good. Without non_blocking copies the gain is small."
    ),
    start_cost="a CUDA context and one thread, under 0.1 s",
)

PERSISTENT_WORKERS = Knob(
    key="loader.persistent_workers",
    tier=Tier.exact,
    type=bool,
    default=False,
    domain=lambda _: [False, True],
    blocked=without_workers,
    is_active=has_workers,
    expert=lambda _: True,
    summary=(
        "Keeps workers and their dataset copies alive between epochs instead of starting them anew. It means something only "
        "with loader.num_workers > 0."
    ),
    helps="Short epochs, slow-to-open datasets, many workers: the pause at every epoch's start goes away.",
    hurts=(
        "Changes the main process makes to the dataset between epochs (a curriculum, a new epoch number) do not reach the "
        "workers. Memory of the workers is held during validation too."
    ),
)

KNOBS = [BATCH_SIZE, NUM_WORKERS, PREFETCH_FACTOR, PIN_MEMORY, PERSISTENT_WORKERS]
