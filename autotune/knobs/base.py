"""Defines a knob on the tuner's side: key, tier, domain, applicability and documentation.

The other half, which sets and verifies a knob inside the training process, is in `harness/knobs/`. The key joins the two.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.quantities import DASH
from autotune.records import Knobs, KnobValue, Tier


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How GPUs and machines are connected, as far as the knobs' rules need to know.

    Attributes:
        num_gpus: GPUs in this machine, including GPUs that are hidden from the program.
        paths: kinds of path between pairs of GPUs, named as in `nvidia-smi topo -m` without counts: "NV", "PIX", "PXB",
            "PHB", "NODE", "SYS".
        has_nvswitch: whether the GPUs are connected through NVSwitches.
        adapters: InfiniBand and RoCE adapters with an active port.
        interfaces: network interfaces that are up and may reach another machine.
    """

    num_gpus: int = 0
    paths: frozenset[str] = frozenset()
    has_nvswitch: bool = False
    adapters: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostContext:
    """What a knob's rules may depend on: this machine, and the program as the baseline trial found it.

    Attributes:
        num_cores: effective CPU cores for one process of the program: min(affinity, cgroup quota), divided by the number of
            the program's ranks on this machine.
        has_cuda: whether the program's process sees a CUDA device.
        compute_capability: (major, minor) of the device; None on the CPU.
        cpu_isa: relevant CPU instruction sets: "avx2", "avx512_bf16", "amx_bf16", ...
        has_compiler: whether torch.compile can work for this device (CPU: a C++ compiler; CUDA: triton and a C compiler).
        observed: knob key -> the program's own value, as observed in the baseline.
        not_applicable: knob key -> why the knob does not apply, as the harness reported in the baseline.
        num_numa_nodes: NUMA nodes that the program's cores belong to.
        num_local_ranks: processes that train together on this host.
        is_recipe: whether a built-in recipe is tuned (autotune then chooses its batch size and workers).
        world_size: processes that train together; None before the baseline has run.
        num_nodes: machines that these processes run on; None before the baseline has run.
        collectives: torch.distributed backends, such as "cpu:gloo,cuda:nccl"; "" if unknown.
        nccl: NCCL version; None without NCCL, or before the baseline has run.
        topology: how the GPUs of this machine are connected.
    """

    num_cores: int
    has_cuda: bool = False
    compute_capability: tuple[int, int] | None = None
    cpu_isa: frozenset[str] = frozenset()
    has_compiler: bool = True
    observed: Knobs = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)
    num_numa_nodes: int = 1
    num_local_ranks: int = 1
    is_recipe: bool = False
    world_size: int | None = None
    num_nodes: int | None = None
    collectives: str = ""
    nccl: tuple[int, ...] | None = None
    topology: Topology = field(default_factory=Topology)


def no_seed(_: HostContext) -> KnobValue | None:
    """Returns None: an expert would not start with a particular value."""
    return None


OTHER = None  # in `Knob.in_code`: matches any value that has no entry of its own
LOADER_ARGUMENT = "DataLoader(..., {name}={value!r})"
DDP_ARGUMENT = "DistributedDataParallel(..., {name}={value!r})"


def value_text(value: KnobValue | None) -> str:
    """Returns a knob's value as YAML text: `true`, `bf16`, `64`; a dash for None."""
    if value is None:
        return DASH
    return str(value).lower() if isinstance(value, bool) else str(value)


def earlier_text(value: KnobValue | None) -> str:
    """Returns the text of the value that a knob had before a change; "not set" for None."""
    return "not set" if value is None else value_text(value)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One tunable setting.

    Attributes:
        key: dotted key, "loader.num_workers".
        tier: what it changes besides speed.
        default: value in a program that does not set it (the library's own default).
        default_text: the default in words, if it depends on what the program runs on; "" if it does not.
        domain: values worth a trial on this host, ascending for numbers; the search space adds the baseline's own value. A bool
            knob needs none: both of its values are tried.
        choices: allowed values of a str knob; empty = any.
        numbers: allowed numbers, ascending; empty = any within the bounds.
        bounds: smallest and largest number allowed on this host; None = no bound on that side.
        examples: values shown in the documentation if the domain is empty, or depends on the program or on what is installed;
            () to show the domain.
        blocked: why the knob cannot be set on this host; None if it can.
        expert: value that an expert would start with on this host; None for no preference.
        is_active: whether the knob has an effect, given the other knobs' values (prefetch_factor needs workers).
        environment: environment variables that a value sets; the launcher sets them before the interpreter starts.
        variables: the variables that any of the values may set; env.NAME cannot set one of them in the same study.
        set_later: the variables whose effect the harness can also produce in a process that runs already.
        is_before_torch: whether the knob must be set before torch is imported although it is not an environment variable.
        is_unknown: whether the knob may change results in spite of its tier; if so, losses are compared before a value may win.
        is_costly: whether each value costs a compilation; such a knob is tried only with the best values of the other knobs.
        is_outside_graphs: whether torch.compile makes the same graphs, for the same shapes, with every value of the knob. If
            two configurations differ only in such knobs, the second one finds the first one's graphs in the compile cache.
        start_costs: value -> its compilation time as a multiple of the cheapest value's; 1 for values that are not listed.
        usual_gain: the search's prior mean of a value's effect on the logarithm of the rate. It is used for the expert's value
            or, if there is none, for every value but the default.
        usual_spread: the search's prior spread: how much the logarithm of the rate usually varies with the knob's values.
        step_spread: used if each choice does more of the same than the choice before it, as in (off, default, maximum). It is
            the search's prior spread of the difference between neighbouring choices. None if the choices have no such order.
        brief: a few words for the overview, where key, tier and brief must fit in 80 columns.
        phrase: format of a value in a list of changes, such as "batch {}". If it is "", the last part of the key stands before
            the value.
        phrases: other texts for some values in such a list, such as {"off": "fp32"}.
        in_code: how a training script sets the knob: a line with "{value!r}" for the value, or value -> line, with OTHER for
            all remaining values.
        summary, helps, hurts, start_cost: documentation, printed by `autotune knobs NAME`.
    """

    key: str
    tier: Tier
    default: KnobValue
    default_text: str = ""
    domain: Callable[[HostContext], list[KnobValue]] = lambda _: [False, True]
    choices: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    examples: tuple[KnobValue, ...] = ()
    bounds: Callable[[HostContext], tuple[float | None, float | None]] = lambda _: (None, None)
    blocked: Callable[[HostContext], str | None] = lambda _: None
    expert: Callable[[HostContext], KnobValue | None] = no_seed
    is_active: Callable[[Knobs], bool] = lambda _: True
    environment: Callable[[Any], dict[str, str]] = lambda _: {}
    variables: tuple[str, ...] = ()
    set_later: tuple[str, ...] = ()
    is_before_torch: bool = False
    is_unknown: bool = False
    is_costly: bool = False
    is_outside_graphs: bool = False
    start_costs: Mapping[KnobValue, float] = field(default_factory=dict)
    usual_gain: float = 0.0
    usual_spread: float = 0.3
    step_spread: float | None = None
    brief: str
    phrase: str = ""
    phrases: Mapping[KnobValue, str] = field(default_factory=dict)
    in_code: str | Mapping[KnobValue | None, str] = ""
    summary: str
    helps: str
    hurts: str
    start_cost: str = "none"

    @property
    def name(self) -> str:
        """The last part of the key: "num_workers"."""
        return self.key.rpartition(".")[2]

    @property
    def type(self) -> builtins.type:
        """Type of the values: bool, int, float or str."""
        return type(self.default)

    def phrase_of(self, value: KnobValue) -> str:
        """Returns a value in one to three words: "bf16", "batch 64", "no pin_memory", "buckets 25 MiB"."""
        if value in self.phrases:
            return self.phrases[value]
        if isinstance(value, bool) and not self.phrase:
            return self.name if value else f"no {self.name}"
        return (self.phrase or f"{self.name} {{}}").format(value_text(value))

    def code_of(self, value: KnobValue) -> str:
        """Returns the line that sets a value in a training script; "" if there is none."""
        lines: Mapping[KnobValue | None, str] = {OTHER: self.in_code} if isinstance(self.in_code, str) else self.in_code
        return lines.get(value, lines.get(OTHER, "")).format(value=value, name=self.name)

    def needs_fresh_start(self, value: KnobValue) -> bool:
        """Returns whether a trial with this value must start in a fresh interpreter.

        Libraries read some settings only while they load, for example environment variables for thread counts, a preloaded
        allocator or NCCL. These must be set before torch is imported. All other knobs are set after that import.
        """
        return self.is_before_torch or not self.environment(value).keys() <= {*self.set_later}


# --- rules that several knobs share ---

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
