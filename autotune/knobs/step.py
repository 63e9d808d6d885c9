"""Knobs of the optimizer step, and the rules for batch size and accumulation under a fixed global batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune import shapes
from autotune.knobs.base import HostContext, Knob, observed_int
from autotune.knobs.loader import BATCH_SIZE, MAX_BATCH_CPU, MAX_BATCH_CUDA
from autotune.records import Knobs, KnobValue, Tier

METRICS_SYNC = "step.metrics_sync_interval"
MAX_ACCUMULATION = 1024
SELDOM, MAX_INTERVAL = 100, 1_000_000  # steps between two readings of metrics: the interval to try, and the longest allowed
MAX_HALVINGS = 7  # how often the global batch may be halved: batches of less than 1/128 of it would measure only overhead

ACCUMULATION = Knob(
    key="step.accumulation",
    tier=Tier.training,
    default=1,
    domain=lambda _: [1, 2, 4, 8],
    bounds=lambda _: (1, MAX_ACCUMULATION),
    brief="batches to one optimizer step",
    phrase="accumulation {}",
    in_code="(loss / {value!r}).backward(), and clip, step and zero_grad at every {value!r}th iteration only",
    summary=(
        "Number of batches, k, whose gradients are accumulated for one optimizer step. Only every k-th iteration of the "
        "program clips, steps and clears gradients, and each loss is divided by k. So the k batches act as one, except that "
        "batch normalisation sees them one by one. With train.global_batch=N, k is derived from the batch size and not "
        "searched. Without train.global_batch, accumulation changes the optimisation as a larger batch does. A program that "
        "already accumulates gradients itself then accumulates k times as many batches."
    ),
    helps=(
        "A batch too large for memory: activations are those of one small batch. Optimizers whose update is expensive compared "
        "with a small batch: it runs once in k iterations. Ranks under DistributedDataParallel: gradients and buffers are "
        "exchanged for the k-th batch only, as under `no_sync`. In the first two updates they are exchanged for every batch, "
        "because autotune then still checks whether the program reads or changes gradients itself."
    ),
    hurts=(
        "k times the launches for the same samples: a large batch that fits in memory is faster. The program still counts "
        "each batch as an iteration. So a maximum number of steps, or a learning-rate schedule stepped at each iteration, ends "
        "after as many batches as before, with 1/k of the updates. "
        "Up to k-1 batches at the very end go unused. Not applicable to programs that use several "
        "optimizers or LBFGS, or that clear or clip gradients by hand."
    ),
)


METRICS_SYNC_INTERVAL = Knob(
    key=METRICS_SYNC,
    tier=Tier.exact,
    is_outside_graphs=True,
    default=1,
    # SELDOM is worth trying if the program's own interval is shorter.
    domain=lambda c: [SELDOM] if c.has_cuda and observed_int(c, METRICS_SYNC) < SELDOM else [],
    bounds=lambda _: (1, MAX_INTERVAL),
    examples=(1, SELDOM),
    usual_gain=0.02,
    usual_spread=0.1,
    brief="steps between readings of metrics",
    in_code="loss.item() and the like every {value!r}th iteration only",
    summary=(
        "The minimum number of steps between two readings of losses and metrics from the device. In a Trainer of transformers, "
        "it sets `logging_steps` and, above 1, turns off `logging_nan_inf_filter`, which reads the loss of every step. In "
        "Lightning's Trainer, it sets `log_every_n_steps` and the progress bar's refresh rate. In a recipe, it sets the steps "
        "between two lines of output. Your own loop takes it as an argument: `--log-interval {step.metrics_sync_interval=10}`."
    ),
    helps="Steps of a few milliseconds on a GPU: each reading waits until the device has finished all its work.",
    hurts=(
        "Logs have fewer lines, so code that depends on them (a callback that stops the training) sees fewer values. A loss "
        "that is not finite is logged as it is. On a CPU there is no device to wait for, so nothing is gained: the knob is not "
        "searched there."
    ),
)

KNOBS = [ACCUMULATION, METRICS_SYNC_INTERVAL]
HELD = (BATCH_SIZE.key, ACCUMULATION.key)  # `train.global_batch` fixes the product of these two


def tier_of(knob: Knob, *, is_held: bool) -> Tier:
    """Returns a knob's tier. Under a fixed global batch, batch size and accumulation are `numerics`.

    Each step still uses the same samples, but sums are taken in another order. Batch normalisation, and losses that do not
    average over samples, see smaller batches. So losses are compared with the baseline's before a value may win.

    Args:
        knob: the knob.
        is_held: whether `train.global_batch` is set.
    """
    return Tier.numerics if is_held and knob.key in HELD else knob.tier


def derived(knobs: Knobs, *, held: int) -> Knobs:
    """Returns a configuration with the accumulation for a global batch of `held` samples: 8 for batch size 32 and 256."""
    return {**knobs, ACCUMULATION.key: held // int(knobs[BATCH_SIZE.key])}


def own_accumulation(batches_per_step: Any, baseline: Knobs) -> int:
    """Returns how many batches per step the program itself accumulates; 1 if unknown.

    Args:
        batches_per_step: as detected in the baseline.
        baseline: the baseline's configuration, in which the knob may be pinned or set to reach `train.global_batch`.
    """
    by_knob = max(1, int(baseline.get(ACCUMULATION.key, 1)))
    # Rounded, because a batch that the loader fetched ahead adds a fraction.
    return max(1, round(batches_per_step / by_knob)) if shapes.number(batches_per_step) else 1


def dividing(held: int, asked: Iterable[KnobValue] | None, host_context: HostContext) -> list[KnobValue]:
    """Returns the batch sizes that divide `held`, ascending.

    Args:
        held: fixed product of batch size and accumulation, in samples.
        asked: the candidates; None for `held`, its half, its quarter and so on, up to the larger of the device's cap and the
            program's own batch size.
        host_context: the machine and the program.
    """
    own = observed_int(host_context, BATCH_SIZE.key)
    most = max(own, MAX_BATCH_CUDA if host_context.has_cuda else MAX_BATCH_CPU)
    halvings = [held // 2**n for n in range(MAX_HALVINGS + 1) if held % 2**n == 0]
    values = [value for value in halvings if value <= most] if asked is None else [int(value) for value in asked]
    return list(sorted({value for value in values if 0 < value <= held and held % value == 0}))
