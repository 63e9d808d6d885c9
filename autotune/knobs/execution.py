"""Knobs of how the same model is executed: memory layout, compilation, optimizer kernels, cuDNN's choice of kernels."""

from __future__ import annotations

from autotune.knobs.base import Circumstances, Knob
from autotune.knobs.ranges import no_cuda
from autotune.records import KnobValue, Tier

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def compile_modes(circumstances: Circumstances) -> list[KnobValue]:
    """Returns the modes worth a trial: those built on CUDA graphs and Triton only on CUDA."""
    return ["off", "default", *CUDA_GRAPH_MODES] if circumstances.has_cuda else ["off", "default"]


def compile_blocked(circumstances: Circumstances) -> str | None:
    """Returns why torch.compile cannot work here."""
    if circumstances.has_compiler:
        return None
    if circumstances.has_cuda:
        return "no working Triton or C compiler: torch.compile cannot build its kernels"
    return "no C++ compiler: torch.compile cannot build its kernels (install g++ or clang)"


CHANNELS_LAST = Knob(
    key="layout.channels_last",
    tier=Tier.numerics,
    type=bool,
    default=False,
    domain=lambda _: [False, True],
    expert=lambda _: True,
    summary=(
        "Stores 4-D weights and image batches with the channel as the fastest dimension (NHWC in memory; shapes in the program "
        "stay NCHW)."
    ),
    helps=(
        "Convolutional networks with precision.amp=bf16: Tensor Core, AMX and oneDNN kernels want this layout, and without it "
        "every convolution transposes. 1.1 to 2 times on CNNs, more on CPUs."
    ),
    hurts=(
        "Float32 CNNs gain little or lose on older GPUs. Operators without a channels_last kernel copy back and forth. "
        "`.view()` on activations can fail where `.reshape()` would not. Models without convolutions are unaffected."
    ),
    start_cost="one copy of the weights",
)

COMPILE_MODE = Knob(
    key="compile.mode",
    tier=Tier.numerics,
    type=str,
    default="off",
    choices=("off", "default", *CUDA_GRAPH_MODES),
    domain=compile_modes,
    blocked=compile_blocked,
    is_costly=True,
    summary=(
        "torch.compile of the trained modules: Python is traced into graphs, pointwise operators are fused and code is "
        "generated (Triton on CUDA, C++ on the CPU). `reduce-overhead` adds CUDA graphs, which replay a whole step's launches "
        "at once; `max-autotune` also benchmarks matrix kernels while compiling."
    ),
    helps=(
        "Many small pointwise operators (normalisation, activation, attention glue), or a GPU starved by Python's launch rate; "
        "typically 1.1 to 1.5 times. `reduce-overhead` suits small batches; `max-autotune` long runs with fixed shapes."
    ),
    hurts=(
        "Shapes that keep changing recompile until the limit and then run eagerly; data-dependent control flow breaks graphs. "
        "CUDA graphs hold their memory pool for good and forbid reading a tensor after the next step. Models that are one big "
        "convolution after another gain nothing. Fused arithmetic rounds differently."
    ),
    start_cost="20 s to several minutes at the first step; max-autotune takes longest",
)

OPTIMIZER_IMPLEMENTATION = Knob(
    key="optimizer.implementation",
    tier=Tier.numerics,
    type=str,
    default="default",
    choices=("default", "foreach", "fused"),
    domain=lambda _: ["default", "foreach", "fused"],
    expert=lambda _: "fused",
    summary=(
        "Which kernels update the weights: `default` is what torch picks (foreach on CUDA, a loop over parameters on the CPU), "
        "`foreach` batches one operation over many parameters, `fused` does the whole update in one kernel."
    ),
    helps="Models of many small parameters and Adam-like optimizers: the update is bound by launches and memory.",
    hurts=(
        "Optimizers without such a version (LBFGS, many third-party ones) are not applicable. `foreach` needs one more copy of "
        "the gradients at its peak. Rounding of the update differs in the last bits."
    ),
)

CUDNN_BENCHMARK = Knob(
    key="backend.cudnn_benchmark",
    tier=Tier.numerics,
    type=bool,
    default=False,
    domain=lambda _: [False, True],
    blocked=no_cuda,
    expert=lambda _: True,
    summary=(
        "torch.backends.cudnn.benchmark: cuDNN times its convolution kernels at the first call of every shape and keeps the "
        "fastest, instead of choosing by a heuristic."
    ),
    helps="Convolutional networks with fixed input shapes, above all unusual channel counts; 0 to 20 %.",
    hurts=(
        "Shapes that vary are benchmarked again and again. The kernel chosen, and with it the last bits of the result, may "
        "differ from run to run. Larger workspaces can tip a full GPU into out-of-memory. No effect without convolutions."
    ),
    start_cost="a second or so in the first step of every new shape",
)

KNOBS = [CHANNELS_LAST, COMPILE_MODE, OPTIMIZER_IMPLEMENTATION, CUDNN_BENCHMARK]
