"""Knobs of number formats."""

from __future__ import annotations

from autotune.knobs.base import OTHER, HostContext, Knob, below, below_ampere, has_fast_bf16, no_cuda
from autotune.records import KnobValue, Tier

FLOAT8_CORES = (8, 9)  # first compute capability with float8 Tensor Cores (Ada)
FP16_INSTRUCTIONS = frozenset({"avx512_fp16", "amx_fp16"})
TENSOR_CORES = (7, 0)  # first compute capability with float16 Tensor Cores (Volta)


def amp_expert(host_context: HostContext) -> KnobValue | None:
    """Returns the 16-bit format that the device multiplies fast; "off" if it only emulates the program's format; else None."""
    if has_fast_bf16(host_context) and "precision.amp=bf16" not in host_context.not_applicable:
        return "bf16"
    if host_context.has_cuda and below(host_context, TENSOR_CORES, "Volta") is None:
        return "fp16"
    return "off" if _is_emulated(host_context) else None


def amp_blocked(host_context: HostContext) -> str | None:
    """Returns why autocast is not searched: no Tensor Cores, or the program itself uses autocast in a format that is fast here.

    None if autocast is searched. It is also searched on CPUs without fast bf16, and wherever the device only emulates the
    program's own format.
    """
    if _is_emulated(host_context):
        return None
    own = host_context.observed.get("precision.amp", "off")
    if own != "off" and "precision.amp" not in host_context.not_applicable:
        return f"the program enters autocast({own}) itself"
    return below(host_context, TENSOR_CORES, "Volta")


def _is_emulated(host_context: HostContext) -> bool:
    """Returns whether the program computes in a format that the device only emulates: bf16 on a T4, or on a CPU with AVX2.

    torch.cuda.is_bf16_supported() is true there, too, so programs that ask torch choose bf16.
    """
    own = host_context.observed.get("precision.amp")
    if own == "fp16":
        return not host_context.has_cuda and not host_context.cpu_isa & FP16_INSTRUCTIONS
    return own == "bf16" and not has_fast_bf16(host_context)


AMP = Knob(
    key="precision.amp",
    tier=Tier.numerics,
    default="off",
    choices=("off", "bf16", "fp16"),
    domain=lambda here: list(dict.fromkeys(["off", amp_expert(here) or "off"])),
    blocked=amp_blocked,
    expert=amp_expert,
    usual_gain=0.35,
    usual_spread=0.35,
    step_spread=0.08,
    brief="16-bit autocast: bf16 or fp16",
    phrase="{}",
    phrases={"off": "fp32"},
    in_code={
        "off": "no autocast",
        "bf16": "torch.autocast(device.type, dtype=torch.bfloat16) around the model's call",
        "fp16": "torch.autocast(device.type, dtype=torch.float16) around the model's call, and a GradScaler for the loss",
    },
    summary=(
        "Automatic mixed precision: forward passes run under torch.autocast, so matrix products and convolutions compute in "
        "bfloat16 or float16 while weights, optimizer state, losses and reductions stay in float32. bf16 has float32's range. "
        "Under fp16, the loss is scaled, so that small gradients do not vanish. The program's steps then go through a "
        "GradScaler, which unscales before clipping, skips a step that overflowed and finds the scale by itself. If the "
        "program itself enters autocast in another format, the trial's format replaces it. Such programs are searched only "
        "where the device emulates their format."
    ),
    helps=(
        "Usually the largest single gain. Tensor Cores (compute capability 8.0 and newer), AMX (Intel Sapphire Rapids and "
        "newer) and AVX-512 BF16 (AMD Zen 4 and newer) compute at 2 to 16 times float32's rate. Activations take half the "
        "memory. fp16 is tried only on GPUs without bf16 (V100, T4) and with nn.DataParallel on several GPUs, which computes "
        "in float16 even if autocast is given bfloat16."
    ),
    hurts=(
        "bf16 has 8 bits of mantissa: losses differ in the third digit, and sums that the program itself computes in bf16 can "
        "stop growing. Models of many tiny operators pay more for casts than they gain. Convolutions gain fully only "
        "with layout.channels_last. A frozen module that the program calls outside the model that trains, such as a teacher, "
        "stays in float32 unless the program itself calls it under autocast. "
        "CPUs without a bf16 instruction emulate it and are slower than with float32. fp16 overflows beyond 65504, so the "
        "first steps are skipped until the loss scale is found. fp16 is not applicable to programs that use several optimizers "
        "or LBFGS, or that scale, clip or change gradients by hand."
    ),
)


def matmul_blocked(host_context: HostContext) -> str | None:
    """Returns why the precision of float32 products is not searched here; None if it is.

    On a CPU, `medium` lets oneDNN use bf16 internally. With avx512_bf16, a 512 x 512 product used another kernel but still
    had float32's error. The effect with AMX has not been measured, so the knob is not searched on CPUs.
    """
    if no_cuda(host_context):
        return "no CUDA device: on a CPU `high` changes nothing, and what `medium` does there has not been measured"
    return below_ampere(host_context)


MATMUL = Knob(
    key="precision.matmul",
    tier=Tier.numerics,
    default="highest",
    choices=("highest", "high", "medium"),
    # `medium` currently equals `high` in cuBLAS, so it is allowed but not searched.
    domain=lambda _: ["highest", "high"],
    blocked=matmul_blocked,
    expert=lambda _: "high",
    usual_gain=0.05,
    usual_spread=0.1,
    brief="TF32 in float32 products",
    phrase="matmul {}",
    in_code="torch.set_float32_matmul_precision({value!r})",
    summary=(
        "torch.set_float32_matmul_precision: how precisely float32 matrix products are computed. `highest` is true float32; "
        "`high` lets Tensor Cores use TF32 (float32's range, 10 bits of mantissa); `medium` allows bfloat16 inside."
    ),
    helps="float32 models on Ampere and newer whose time is in linear layers or attention: up to several times faster.",
    hurts=(
        "Products lose about 13 bits: harmless for most training, not for ill-conditioned solvers or second-order optimizers. "
        "Under precision.amp=bf16 little is left in float32, so little is gained. Not applicable if all parameters are in 16 "
        "bits. Convolutions have a switch of their own in cuDNN, on by default."
    ),
)


FLOAT8 = Knob(
    key="precision.float8",
    tier=Tier.numerics,
    default="off",
    choices=("off", "tensorwise", "rowwise"),
    domain=lambda _: ["off", "tensorwise", "rowwise"],
    blocked=lambda here: no_cuda(here) or below(here, FLOAT8_CORES, "Ada, Hopper"),
    usual_spread=0.15,
    brief="linear layers in float8 (torchao)",
    phrase="float8 {}",
    in_code={
        "off": "no convert_to_float8_training",
        OTHER: (
            "torchao.float8.convert_to_float8_training(model, "
            "config=dataclasses.replace(Float8LinearConfig.from_recipe_name({value!r}), pad_inner_dim=True), "
            "module_filter_fn=lambda layer, _: type(layer) is torch.nn.Linear "
            "and layer.in_features % 16 == layer.out_features % 16 == 0), before compiling and DistributedDataParallel"
        ),
    },
    summary=(
        "Linear layers compute their products in 8 bits: torchao's Float8Linear takes the place of each nn.Linear whose sizes "
        "are multiples of 16, with the same parameters. Weights, activations and gradients stay in 16 or 32 bits. They are "
        "scaled and rounded just before a product, with one scale for a whole tensor (`tensorwise`) or for each row "
        "(`rowwise`). torchao has to be installed where the program runs. Not measured on a GPU yet."
    ),
    helps=(
        "Large transformers on H100, H200 and newer, compiled: float8 products have twice the rate of bf16. It pays off from "
        "layer sizes of about 4,096 and batches of thousands of tokens."
    ),
    hurts=(
        "Without compile.mode, scaling and rounding cost more than the products save. Small layers lose, too. Gradients have 2 "
        "bits of mantissa (`tensorwise`) or 3 (`rowwise`, which needs bf16): losses are compared before either may win."
    ),
)

KNOBS = [AMP, MATMUL, FLOAT8]
