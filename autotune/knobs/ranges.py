"""Rules that several knobs share: number ranges for this machine, and reasons that block a knob."""

from __future__ import annotations

from autotune.knobs.base import HostContext
from autotune.records import KnobValue

AMPERE = (8, 0)  # first compute capability with TF32 and fast bf16

# On a CPU, bf16 pays off only with an instruction that multiplies bf16 pairs. Measured with resnet18 training on two cores:
# 16.8 -> 56.8 images/s with AMX, 22.7 -> 45.0 with avx512_bf16 (Zen 5), but 16.8 -> 6.9 on AVX-512 without such an instruction.
BF16_INSTRUCTIONS = frozenset({"amx_bf16", "avx512_bf16", "avx10_2", "sve_bf16", "bf16"})


def no_cuda(host_context: HostContext) -> str | None:
    """Returns why a CUDA-only knob cannot be set here; None if it can."""
    return None if host_context.has_cuda else "no CUDA device: no effect on a CPU"


def below_ampere(host_context: HostContext) -> str | None:
    """Returns why a knob that needs compute capability 8.0 cannot be set here; None if it can."""
    return no_cuda(host_context) or below(host_context, AMPERE, "Ampere")


def below(host_context: HostContext, needed: tuple[int, int], name: str) -> str | None:
    """Returns why a knob that needs this compute capability cannot be set on the GPU; None if it can, or if there is no GPU."""
    capability = host_context.compute_capability
    if not host_context.has_cuda or capability is None or capability >= needed:
        return None
    return f"compute capability {capability[0]}.{capability[1]}: this setting needs {needed[0]}.{needed[1]} ({name}) or newer"


def has_fast_bf16(host_context: HostContext) -> bool:
    """Returns whether the device multiplies bf16 in hardware."""
    if host_context.has_cuda:
        return host_context.compute_capability is not None and host_context.compute_capability >= AMPERE
    return bool(host_context.cpu_isa & BF16_INSTRUCTIONS)


def up_to(limit: int, values: list[int]) -> list[KnobValue]:
    """Returns the distinct values between 0 and `limit`, ascending."""
    return list(sorted({value for value in values if 0 <= value <= limit}))


def observed_int(host_context: HostContext, key: str) -> int:
    """Returns the program's own value of an int knob; 1 if the baseline reported no usable value."""
    value = host_context.observed.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
