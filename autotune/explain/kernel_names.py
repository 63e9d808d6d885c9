"""Classifies kernels, runtime calls and operators by their names, as Kineto, CUPTI, cuBLAS, cuDNN and ATen write them.

What cannot be seen from a kernel's name or from the operator that launched it is unknown, and reports show it as unknown.
"""

from __future__ import annotations

import re
from functools import lru_cache

from autotune.harness.explain.documents import INPUT, OPTIMIZER, STEP_PHASES

RANGE = "autotune::"  # the harness names its ranges RANGE + a phase of STEP_PHASES
BITS_16, BITS_32, BITS_UNKNOWN = "compute_16bit", "compute_32bit", "compute_unknown"
YES, NO, UNKNOWN = "yes", "no", "unknown"

COLLECTIVE = re.compile(
    r"^nccl|^rccl|ncclDevKernel|ncclKernel|multimem_\w*(reduce|gather)|cross_device_reduce|(?i:(one|two)_?shot_?all_?reduce)|"
    r"ep::(inter|intra)node|nvshmem|^(nccl|gloo|mpi|ucc|xccl):|^_?c10d(_functional\w*)?::"
)
LAUNCH = re.compile(r"^(cuda|cu|hip)\w*(Launch\w*|Mem(cpy|set)\w*Async)|^(cuda|hip)GraphLaunch")
SYNCHRONISE = re.compile(r"^(cuda|cu|hip)\w*Synchronize|^(cuda|hip)Mem(cpy|set)$|^hipMemcpyWithStream$")
COMPILE = re.compile(r"\(dynamo_timed\)|^_compile\.|^TORCHDYNAMO$|entire_frame_compile|backend_compile|compile_fx")
_LOADER = re.compile(r"^enumerate\(DataLoader\)#")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")

# cuBLAS's nvjet kernels: the first letter is the type of the inputs (h: fp16, o: fp4, q: fp8, t: bf16). The letters after it
# are the types of sums and outputs.
_NAMED_16 = re.compile(
    r"bf16|bfloat16|fp16|(?<![a-z0-9])f16|f16f16|half|hgemm|hmma|h884|h1688|h16816|fp8|e4m3|e5m2|_f16|flash_(fwd|bwd)|"
    r"nvjet_(sm\d+_)?[hoqt]",
    re.IGNORECASE,
)
_NAMED_32 = re.compile(r"sgemm|s1688|dgemm|f32f32|tf32|tfloat32|\bfloat\b|\bdouble\b|fp32|scudnn|_f32|cgemm", re.IGNORECASE)
_TYPES_16 = ("c10::Half", "c10::BFloat16", "c10::Float8", "half", "bfloat16")
_TYPES_32 = ("float", "double")

# Kernels on Tensor Cores: substrings from torch_tb_profiler's tensor_core.py and XProf's kernel_stats_utils.cc, then
# substrings for Hopper and for attention.
_TENSOR_CORE = re.compile(
    r"h884|s884|h1688|s1688|hmma|imma|i8816|16816|161616|c1688|xmma|tensorop|gmma|tmaumma|nvjet|tcgen05|flash_fwd|flash_bwd|"
    r"FlashAttn(Fwd|Bwd)(Sm\d+)?<|compute_attn_ws|fmha_cutlass|cudnn_generated_fort_native_sdpa|cudnn\w*sdpa", re.IGNORECASE,
)  # fmt: skip
# Matrix products and convolutions that run on CUDA cores although Tensor Cores could do them.
_CUDA_CORES = re.compile(
    r"sgemm(?!.*(tensorop|1688))|dgemm|simt|ffma|scudnn|winograd|fft2d|_alg\d_engine|grad_engine|implicit_convolve_sgemm|"
    r"conv2d_grouped|(dgrad|wgrad)2d|conv_depthwise|gcgemm", re.IGNORECASE,
)  # fmt: skip
# Kernels without matrix products.
_NO_MATRIX = re.compile(
    r"elementwise|reduce_kernel|softmax|layer_norm|rms_norm|batch_norm|bn_(fw|bw)|multi_tensor_apply|index|gather|scatter|"
    r"embedding|CatArray|dropout|pool|foreach|cub::|sort|fill|nccl|copy|gemv|im2col|col2im|nchwToNhwc|nhwcToNchw|transpose|"
    r"all_reduce|cublasLt::epilogue|triton_(poi|per|red)_", re.IGNORECASE,
)  # fmt: skip
_MATRIX = re.compile(
    r"(?<!fb)gemm|matmul|conv\dd|fprop|dgrad|wgrad|sdpa|fmha|^_?bmm_|flash_(fwd|bwd)|triton_tem_", re.IGNORECASE
)

_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE)  # kernels that only convert images between layouts

# Kind of operator, and a pattern of operators' names. The first pattern that matches counts.
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in (
    ("compiled", r"CompiledFxGraph|Torch-Compiled Region|CompiledFunction|^triton_|cpp_fused|inductor_wrapper_call"),
    ("collective", r"^_?c10d(_functional\w*)?::|^(gloo|nccl|mpi|ucc|xccl):|record_param_comms"),
    ("attention", r"scaled_dot_product|flash_attention|_attention|::_?flash_attn|^flash_attn\w*::|^xformers_flash::|"
                  r"FlashAttn\w*Func"),
    ("convolution", r"::\w*conv(olution|\dd|_|$)|thnn_conv|slow_conv"),
    ("matmul", r"::(_?addmm\w*|mm|bmm|baddbmm|addbmm|addmv_?|mv|dot|vdot|matmul|(?!_?upsample)\w*linear\w*|einsum|_int_mm|"
               r"(_scaled)?(_grouped)?_mm|mm_out|_cudnn_rnn\w*|mkldnn_rnn_layer\w*)$"),
    ("normalisation", r"batch_norm|layer_norm|group_norm|instance_norm|rms_norm|(?<!log)_softmax|::softmax"),
    ("pooling", r"pool"),
    ("loss", r"loss|cross_entropy|log_softmax|nll_"),
    ("embedding and indexing", r"embedding|index|gather|scatter|masked_|::take"),
    ("random", r"dropout|bernoulli|::rand|normal_|uniform_|multinomial"),
    ("copy and layout", r"copy|::to$|clone|contiguous|::cat$|::_cat|stack|empty|zero|fill|resize|reshape|view|"
                        r"transpose|::t$|permute|expand|slice|select|detach|as_strided|narrow|split|chunk|squeeze|flatten|ones|"
                        r"full|set_|alias|pin_memory|new_|unbind|repeat|"
                        r"::(item|_local_scalar_dense|is_nonzero)$"),
    ("reduction", r"::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|var|std|arg(max|min)|any|all|prod|cumsum|topk|sort)"),
    ("autograd", r"^autograd::engine|Backward\d+$|AccumulateGrad"),  # "FooBackward" without a number is Python
    ("elementwise", r"^aten::"),
))  # fmt: skip
CUSTOM = "custom operator"
PYTHON = "python"
OPERATOR_KINDS = (*(kind for kind, _ in _KINDS), "optimizer", CUSTOM)


def phase_of_range(name: str) -> int:
    """Returns the index in STEP_PHASES of the phase that a range marks; -1 if it marks none."""
    if name.startswith(RANGE) and name.removeprefix(RANGE) in STEP_PHASES:
        return STEP_PHASES.index(name.removeprefix(RANGE))
    if _OPTIMIZER.search(name):
        return STEP_PHASES.index(OPTIMIZER)
    return STEP_PHASES.index(INPUT) if _LOADER.search(name) else -1


@lru_cache(maxsize=100_000)
def operator_kind(name: str) -> str:
    """Returns an operator's kind, a member of OPERATOR_KINDS; `CUSTOM` if the operator is not ATen's and matches no pattern."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), CUSTOM)


def copy_kind(name: str) -> str:
    """Returns "d2h", "h2d" or "d2d" for a name like "Memcpy DtoH (Device -> Pinned)"; fills and peer copies count as d2d."""
    words = name.lower()
    return "d2h" if "dtoh" in words else "h2d" if "htod" in words else "d2d"


@lru_cache(maxsize=100_000)
def width_of(kernel: str, types: tuple[str, ...] = ()) -> str:
    """Returns the width of the numbers that a kernel computes with: BITS_16 (or fewer), BITS_32 (or more) or BITS_UNKNOWN.

    Args:
        kernel: name of the kernel. If it contains a type, this type decides.
        types: input types of the operator that launched it, as Kineto writes them.
    """
    if _NAMED_16.search(kernel):
        return BITS_16
    if _NAMED_32.search(kernel):
        return BITS_32
    found = [kind for kind in types if kind.startswith((*_TYPES_16, *_TYPES_32))]
    if not found:
        return BITS_UNKNOWN
    return BITS_16 if any(kind.startswith(_TYPES_16) for kind in found) else BITS_32


def converts_layout(kernel: str) -> bool:
    """Whether a kernel only converts images between the layouts NCHW and NHWC, by cuDNN's names for such kernels."""
    return bool(_LAYOUT.search(kernel))


@lru_cache(maxsize=4096)
def tensor_core_used(kernel: str) -> str:
    """Returns whether a kernel runs on Tensor Cores: YES, NO or UNKNOWN."""
    if _CUDA_CORES.search(kernel):
        return NO
    if _TENSOR_CORE.search(kernel):
        return YES
    return NO if _NO_MATRIX.search(kernel) or COLLECTIVE.search(kernel) else UNKNOWN


def computes_in_tf32(kernel: str) -> bool:
    """Whether a kernel computes products of 32-bit numbers on Tensor Cores, which round them to TF32."""
    return tensor_core_used(kernel) == YES and width_of(kernel) == BITS_32


def tensor_core_eligible(kernel: str, operator: str = "") -> str:
    """Returns whether Tensor Cores could do a kernel's work: YES for matrix products, convolutions and attention.

    `operator` is the operator that launched the kernel; "" if it is unknown.
    """
    if _CUDA_CORES.search(kernel) or _TENSOR_CORE.search(kernel):
        return YES
    if _NO_MATRIX.search(kernel) or COLLECTIVE.search(kernel):
        return NO
    if _MATRIX.search(kernel) or operator_kind(operator) in ("matmul", "convolution", "attention"):
        return YES
    return NO if operator else UNKNOWN
