"""Knobs that change how the same model is executed: memory layout, compilation, optimizer, cuDNN, activations."""

from __future__ import annotations

from autotune.knobs.base import OTHER, HostContext, Knob, below_ampere, no_cuda
from autotune.knobs.parallel import FSDP, STRATEGY, has_wrapper
from autotune.records import KnobValue, Tier

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def compile_blocked(host_context: HostContext) -> str | None:
    """Returns why torch.compile cannot work here; None if it can."""
    if host_context.has_compiler:
        return None
    if host_context.has_cuda:
        return "no working Triton or C compiler: torch.compile cannot build its kernels"
    return "no C++ compiler: torch.compile cannot build its kernels (install g++ or clang)"


CHANNELS_LAST = Knob(
    key="layout.channels_last",
    tier=Tier.numerics,
    default=False,
    expert=lambda _: True,
    is_active=has_wrapper,
    usual_gain=0.08,
    usual_spread=0.2,
    brief="channels as fastest dimension",
    in_code={
        True: "model.to(memory_format=torch.channels_last), and the same for batches of images",
        False: "leave model and batches in the default memory format",
    },
    summary=(
        "Stores 4-D weights and image batches with the channel as the fastest dimension (NHWC in memory; shapes in the program "
        "stay NCHW)."
    ),
    helps=(
        "Convolutional networks with precision.amp=bf16: Tensor Core, AMX and oneDNN kernels need this layout. Without it, "
        "every convolution transposes its input. CNNs run 1.1 to 2 times as fast, on CPUs even faster."
    ),
    hurts=(
        "Float32 CNNs gain little; on older GPUs they can be slower. Operators without a channels_last kernel copy back and "
        "forth. `.view()` on activations can fail where `.reshape()` would not. Models without convolutions are unaffected."
    ),
    start_cost="one copy of the weights",
)

COMPILE_MODE = Knob(
    key="compile.mode",
    tier=Tier.numerics,
    default="off",
    choices=("off", "default", *CUDA_GRAPH_MODES),
    # Modes built on CUDA graphs and Triton are worth a trial only on CUDA.
    domain=lambda c: ["off", "default", *(CUDA_GRAPH_MODES if c.has_cuda else ())],
    blocked=compile_blocked,
    is_costly=True,
    start_costs={"reduce-overhead": 1.2, "max-autotune": 4.0},
    usual_gain=0.08,
    usual_spread=0.25,
    step_spread=0.15,
    brief="torch.compile, and how",
    phrase="compile {}",
    phrases={"off": "eager"},
    in_code={"off": "leave the model uncompiled", OTHER: "model.compile(mode={value!r})"},
    summary=(
        "torch.compile of the trained modules: Python is traced into graphs, pointwise operators are fused and code is "
        "generated (Triton on CUDA, C++ on the CPU). `reduce-overhead` adds CUDA graphs, which replay a whole step's launches "
        "at once; `max-autotune` also benchmarks matrix kernels while compiling."
    ),
    helps=(
        "Many small pointwise operators (normalisation, activation), or a GPU that waits for Python to launch its kernels; "
        "typically 1.1 to 1.5 times as fast. `reduce-overhead` suits small batches, `max-autotune` long runs with fixed shapes."
    ),
    hurts=(
        "Shapes that keep changing cause recompilations; past torch's limit, the model runs eagerly. Data-dependent control "
        "flow breaks graphs. CUDA graphs keep their memory pool to the end, and a step's outputs cannot be read after the next "
        "step. Models that are one big convolution after another gain nothing. Fused operations round differently."
    ),
    start_cost="20 s to several minutes at the first step; max-autotune takes longest",
)


IMPLEMENTATION = "optimizer.implementation"


def _has_fused(here: HostContext) -> bool:
    """Whether the program's optimizer has a fused implementation, as far as the baseline has shown."""
    return f"{IMPLEMENTATION}=fused" not in here.not_applicable


def _implementations(here: HostContext) -> list[KnobValue]:
    """Returns the implementations that differ here.

    On CUDA, torch's default is foreach (`_default_to_fused_or_foreach` in torch.optim), except for FSDP2's sharded parameters.
    """
    own, fused = here.observed.get(IMPLEMENTATION), ["fused"] if _has_fused(here) else []
    is_foreach = here.has_cuda and here.observed.get(STRATEGY.key) != FSDP
    if not is_foreach:
        return ["default", "foreach", *fused]
    return ["foreach" if own == "foreach" else "default", *fused]


OPTIMIZER_IMPLEMENTATION = Knob(
    key=IMPLEMENTATION,
    tier=Tier.numerics,
    is_outside_graphs=True,
    default="default",
    choices=("default", "foreach", "fused"),
    domain=_implementations,
    expert=lambda here: "fused" if _has_fused(here) else "default",
    usual_gain=0.03,
    usual_spread=0.08,
    brief="kernels of the weights' update",
    phrase="{} optimizer",
    in_code={
        "default": "neither fused nor foreach in the optimizer's constructor",
        OTHER: "{value}=True in the optimizer's constructor",
    },
    summary=(
        "Which kernels update the weights: `default` is what torch picks (foreach on CUDA, a loop over parameters on the CPU), "
        "`foreach` batches one operation over many parameters, `fused` does the whole update in one kernel. On CUDA, `foreach` "
        "is tried only with FSDP2, because without FSDP2 it is torch's default."
    ),
    helps="Models with many small parameters, and Adam-like optimizers: the update is bound by launches and memory.",
    hurts=(
        "Not applicable to optimizers without such an implementation (LBFGS, many third-party ones). At its peak, `foreach` "
        "needs memory for one more copy of the gradients. The update is rounded differently in the last bits."
    ),
)

CUDNN_BENCHMARK = Knob(
    key="backend.cudnn_benchmark",
    tier=Tier.numerics,
    default=False,
    blocked=no_cuda,
    expert=lambda _: True,
    usual_gain=0.04,
    usual_spread=0.08,
    brief="cuDNN times its kernels first",
    in_code="torch.backends.cudnn.benchmark = {value!r}",
    summary=(
        "torch.backends.cudnn.benchmark: cuDNN times its convolution kernels at the first call with each shape and keeps the "
        "fastest, instead of choosing by a heuristic."
    ),
    helps="Convolutional networks with fixed input shapes, above all unusual channel counts: 0 to 20 % faster.",
    hurts=(
        "Shapes that vary are benchmarked again and again. The kernel chosen, and with it the last bits of the result, may "
        "differ from run to run. On an almost full GPU, larger workspaces may not fit. Not applicable without convolutions."
    ),
    start_cost="a second or so in the first step of every new shape",
)

COMPILE_DYNAMIC = Knob(
    key="compile.dynamic",
    tier=Tier.numerics,
    default="auto",
    choices=("auto", "true", "false"),
    domain=lambda _: ["auto", "true"],
    is_active=lambda knobs: knobs.get(COMPILE_MODE.key, "off") != "off",
    is_costly=True,
    usual_spread=0.1,
    brief="compiled for any size, or for each",
    in_code={
        "auto": "model.compile(..., dynamic=None)",
        "true": "model.compile(..., dynamic=True)",
        "false": "model.compile(..., dynamic=False)",
    },
    summary=(
        "Whether torch.compile makes kernels for any size (`true`), for each size anew (`false`), or for any size once a size "
        "has changed (`auto`). It needs compile.mode on."
    ),
    helps="Batches whose sizes vary from the first step on (bucketed sequences, mixed images): `true` compiles once.",
    hurts=(
        "Kernels made for one size are faster, so `true` loses time where sizes never change. `false` compiles for every size "
        "until the recompile limit and then runs eagerly. CUDA graphs are still recorded for each size."
    ),
    start_cost="each value is compiled separately",
)

COMPILE_SCOPE = Knob(
    key="compile.scope",
    tier=Tier.numerics,
    default="model",
    choices=("model", "blocks"),
    domain=lambda _: ["model", "blocks"],
    is_active=lambda knobs: knobs.get(COMPILE_MODE.key, "off") not in ("off", *CUDA_GRAPH_MODES),
    is_costly=True,
    usual_spread=0.05,
    brief="whole model, or each block",
    phrase="compiled {}",
    in_code={
        "model": "model.compile(...)",
        "blocks": "for block in model.layers: block.compile(...), for the list that holds the repeated blocks",
    },
    summary=(
        "What torch.compile is applied to: the whole model, or each of its repeated blocks on its own (regional compilation). "
        "A block is a module that has submodules and is directly in a Sequential or ModuleList, but not inside another block. "
        "If blocks have several classes, only the most frequent class is used. Blocks that differ only in their weights share "
        "one compilation. It needs compile.mode=default: with CUDA graphs of single blocks, a validation would overwrite one "
        "block's output before the next block has read it, and torch stops with an error."
    ),
    helps=(
        "Deep models of equal blocks (transformers): `blocks` compiles one block in place of dozens, so the first step comes "
        "several times sooner, and most of the speed of the whole compiled model is kept."
    ),
    hurts=(
        "Nothing is fused across blocks, and what lies outside of them stays eager. Blocks with different shapes, as in "
        "convolutional networks, are compiled separately, and past torch's recompile limit they run eagerly."
    ),
    start_cost="the compilation of one block, if the blocks differ only in their weights",
)

SET_TO_NONE = Knob(
    key="optimizer.set_to_none",
    tier=Tier.numerics,
    is_outside_graphs=True,
    default=True,
    domain=lambda _: [True, False],
    usual_spread=0.03,
    brief="gradients dropped, not zeroed",
    in_code="optimizer.zero_grad(set_to_none={value!r})",
    summary=(
        "Whether zero_grad() sets gradients to None (torch's default since 2.0) or fills them with zeros, whatever the program "
        "passes to it. The optimizer skips a parameter whose gradient is None; with zeros, momentum and weight decay still "
        "change it."
    ),
    helps=(
        "`true`: no pass over memory to fill it with zeros, and less memory during the forward pass. `false`: allocations stay "
        "where they are, which can help where memory is fragmented."
    ),
    hurts=(
        "`false` reads and writes every gradient once more in each step. Parameters that get no gradient in some steps train "
        "differently. Not applicable to programs that clear gradients by hand."
    ),
)

ACTIVATION_CHECKPOINTING = Knob(
    key="memory.activation_checkpointing",
    tier=Tier.exact,
    default=False,
    usual_gain=-0.25,
    usual_spread=0.12,
    brief="activations computed again",
    in_code={
        True: "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), each block",
        False: "leave the blocks without torch.utils.checkpoint",
    },
    summary=(
        "Keeps no activations inside the model's repeated blocks: each block's forward is run again in the backward pass, with "
        "the same random numbers (torch.utils.checkpoint, use_reentrant=False). A block is a module that has submodules and is "
        "directly in a Sequential or ModuleList, but not inside another block. If blocks have several classes, only the most "
        "frequent class is used. For models of the transformers library, the library's own switch is used."
    ),
    helps=(
        "A device full of activations (long sequences, large images, deep models): only the activations of one block and those "
        "between blocks are kept, which makes room for a larger batch."
    ),
    hurts=(
        "The blocks' forward pass is computed twice: slower wherever memory was enough. Models without repeated blocks gain "
        "nothing. Random numbers that a block draws by other means than torch's generators are drawn anew. Not applicable to "
        "blocks that change their own state in each forward pass (spectral normalisation, codebooks)."
    ),
)

SDPA = Knob(
    key="backend.sdpa",
    tier=Tier.numerics,
    default="default",
    choices=("default", "flash", "mem_efficient", "cudnn", "math"),
    # On a CPU, torch has a single fused kernel and uses it wherever it can.
    domain=lambda c: ["default", "flash", "mem_efficient", "cudnn"] if c.has_cuda else ["default"],
    blocked=lambda c: below_ampere(c) if c.has_cuda else None,
    usual_spread=0.1,
    brief="kernels of attention",
    in_code="torch.nn.attention.sdpa_kernel(...) around the model's call: {value}",
    summary=(
        "Which kernels may compute torch's scaled_dot_product_attention. `default` leaves the choice to torch. `flash`, "
        "`mem_efficient` and `cudnn` each allow one fused kernel, and the unfused `math` for inputs that this kernel cannot "
        "take. `math` allows no fused kernel."
    ),
    helps="On a GPU: transformers whose head size, sequence length or mask suits another kernel than torch's first choice.",
    hurts=(
        "Each kernel accepts only some inputs (flash: 16 bits, no custom mask). If it accepts none of a program's inputs, "
        "`math` computes everything, with the whole matrix of scores in memory, and the value is not applicable. Sums are "
        "taken in another order."
    ),
)

L2_FETCH_GRANULARITY = Knob(
    key="backend.l2_fetch_granularity",
    tier=Tier.exact,
    default=64,
    domain=lambda _: [32, 64, 128],
    numbers=(32, 64, 128),
    bounds=lambda _: (32, 128),
    blocked=below_ampere,
    usual_spread=0.04,
    brief="bytes fetched on an L2 cache miss",
    in_code="cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, {value!r}) through ctypes",
    summary=(
        "cudaLimitMaxL2FetchGranularity: the most bytes that a miss brings into the GPU's L2 cache, 32, 64 or 128. It is a "
        "hint to the driver, for this process only. It is set when training begins, and then read back."
    ),
    helps="128: memory-bound steps that read long runs of adjacent bytes. 32: scattered reads (embeddings, graphs).",
    hurts="Steps bound by arithmetic do not change. The wrong size wastes bandwidth on bytes that are not read.",
)

KNOBS = [
    CHANNELS_LAST, COMPILE_MODE, COMPILE_DYNAMIC, COMPILE_SCOPE, OPTIMIZER_IMPLEMENTATION, SET_TO_NONE, CUDNN_BENCHMARK, SDPA,
    L2_FETCH_GRANULARITY, ACTIVATION_CHECKPOINTING,
]  # fmt: skip
