"""Knobs of how ranks keep their replicas in sync: DistributedDataParallel, FSDP2 and gradient averaging."""

from __future__ import annotations

from autotune.knobs.base import DDP_ARGUMENT, OTHER, HostContext, Knob
from autotune.records import Knobs, Tier

DDP, FSDP = "ddp", "fsdp"


def alone(host_context: HostContext) -> str | None:
    """Returns why no gradients are averaged; None if gradients are or may be averaged."""
    return "one process trains: no gradients are averaged" if host_context.world_size == 1 else None


def has_wrapper(knobs: Knobs) -> bool:
    """Returns whether DistributedDataParallel may be in use: True unless FSDP is selected."""
    return knobs.get(STRATEGY.key) != FSDP


STRATEGY = Knob(
    key="parallel.strategy",
    tier=Tier.numerics,
    default=DDP,
    blocked=alone,
    choices=(DDP, FSDP),
    domain=lambda _: [DDP, FSDP],
    brief="whole replicas, or shards (FSDP2)",
    in_code={
        "ddp": "DistributedDataParallel(model)",
        "fsdp": "fully_shard(block) for each block, then fully_shard(model), of torch.distributed.fsdp",
    },
    summary=(
        "How replicas are kept in step. `ddp`: each rank has the whole model, and gradients are averaged. `fsdp`: each rank "
        "keeps a shard of parameters, gradients and optimizer state, and gathers the parameters of a block when it needs them "
        "(FSDP2, `torch.distributed.fsdp.fully_shard`). It works for recipes (`launch.nproc=N`) and for your own program if an "
        "argument sets it: `--strategy {parallel.strategy=ddp}`."
    ),
    helps=(
        "Models whose weights, gradients and optimizer state take much of the memory: with N ranks, each keeps only 1/N of "
        "them, which makes room for a larger batch."
    ),
    hurts=(
        "More communication: parameters are gathered in the forward pass and, unless `parallel.reshard_after_forward` is off, "
        "again in the backward pass. No channels_last (shards are contiguous), no fp16 scaling by autotune. Gradients are "
        "added up in another order, and each rank has its own running statistics of batch normalisation. Checkpoints "
        "contain shards: the program must load them accordingly."
    ),
)

RESHARD_AFTER_FORWARD = Knob(
    key="parallel.reshard_after_forward",
    tier=Tier.exact,
    default=True,
    blocked=alone,
    is_active=lambda knobs: knobs.get(STRATEGY.key) != DDP,  # FSDP may be in use unless DDP is selected
    usual_spread=0.1,
    brief="FSDP2 frees gathered parameters",
    in_code="fully_shard(block, reshard_after_forward={value!r}), each block",
    summary=(
        "For modules that the program shards with FSDP2 (`fully_shard`): true frees the gathered parameters after the forward "
        "pass and gathers them again for the backward pass, false keeps them in between. The outermost module stays as the "
        "program has it."
    ),
    helps="false saves one all-gather of all parameters a step, if the memory suffices; true is what makes large models fit.",
    hurts=(
        "false keeps the whole model on each rank between forward and backward pass, in addition to its shard. It has no "
        "effect on a model that is sharded as a whole or that is not sharded."
    ),
)

BUCKET_CAP_MB = Knob(
    key="parallel.bucket_cap_mb",
    tier=Tier.numerics,
    default=25,
    blocked=alone,
    is_active=has_wrapper,
    domain=lambda _: [5, 25, 100],
    bounds=lambda _: (1, 65_536),
    usual_spread=0.1,
    brief="size of DDP's gradient buckets",
    phrase="buckets {} MiB",
    in_code=DDP_ARGUMENT,
    summary=(
        "DistributedDataParallel(bucket_cap_mb=...): the size, in MiB, of the buckets in which gradients are averaged. Each "
        "bucket is sent as soon as the backward pass has filled it."
    ),
    helps=(
        "Large buckets use the network better and need fewer calls. Small buckets are sent sooner, so the backward pass hides "
        "more of them. Worth tuning where communication is exposed (not hidden): `autotune show` gives the share."
    ),
    hurts=(
        "A single bucket for all gradients is sent only after the backward pass, so it hides nothing. Hundreds of buckets pay "
        "the latency of hundreds of collectives. Gradients are added up in another order. Without DistributedDataParallel "
        "there are no buckets."
    ),
)

STATIC_GRAPH = Knob(
    key="parallel.static_graph",
    tier=Tier.exact,
    default=False,
    blocked=alone,
    is_active=has_wrapper,
    is_unknown=True,  # exact if the graph is static; otherwise gradients are missing
    usual_spread=0.05,
    brief="DDP's graph is always the same",
    in_code=DDP_ARGUMENT,
    summary=(
        "DistributedDataParallel(static_graph=True) promises that the same parameters are used in the same order at every "
        "step. DDP then records in the first step what it would otherwise search for in every step."
    ),
    helps=(
        "Programs with find_unused_parameters=True, which then no longer search the graph at every step; activation "
        "checkpointing under DDP."
    ),
    hurts=(
        "A graph that changes with the data (branches, layers left out at random) trains wrongly or fails. So autotune "
        "compares the training loss with the baseline's before `true` may win. Without unused parameters it gains little."
    ),
)

GRADIENT_AS_BUCKET_VIEW = Knob(
    key="parallel.gradient_as_bucket_view",
    tier=Tier.exact,
    default=False,
    blocked=alone,
    is_active=has_wrapper,
    expert=lambda _: True,
    usual_gain=0.01,
    usual_spread=0.05,
    brief="gradients live in DDP's buckets",
    in_code=DDP_ARGUMENT,
    summary=(
        "DistributedDataParallel(gradient_as_bucket_view=True): `.grad` of a parameter is a view into the bucket that is sent, "
        "not a copy of it."
    ),
    helps="Models whose gradients take much of the memory: saves one copy of all gradients, in memory and in time.",
    hurts="A program that calls `detach_()` on gradients, or puts other tensors in their place, fails.",
)

GRADIENT_COMPRESSION = Knob(
    key="parallel.gradient_compression",
    tier=Tier.numerics,
    default="off",
    blocked=alone,
    is_active=has_wrapper,
    choices=("off", "bf16"),
    domain=lambda _: ["off", "bf16"],
    usual_spread=0.15,
    brief="gradients sent as bf16",
    phrase="gradients {}",
    in_code={
        "off": "register no communication hook",
        OTHER: "model.register_comm_hook(None, bf16_compress_hook), of ddp_comm_hooks.default_hooks",
    },
    summary=(
        "`bf16` sends gradients as bfloat16 (torch's bf16_compress_hook) and adds them up as such: half the bytes between the "
        "ranks. Weights, optimizer and the gradients of each rank stay as they are."
    ),
    helps="Communication that is exposed on a slow connection: several machines on Ethernet, GPUs without NVLink.",
    hurts=(
        "Casting costs time, which is lost where the backward pass already hides the communication. Averaged gradients keep "
        "8 bits of precision. A program with a communication hook of its own keeps that hook."
    ),
)

KNOBS = [STRATEGY, RESHARD_AFTER_FORWARD, BUCKET_CAP_MB, STATIC_GRAPH, GRADIENT_AS_BUCKET_VIEW, GRADIENT_COMPRESSION]
