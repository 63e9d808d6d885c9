"""What a knob is, for the tuner: key, tier, domain rule, applicability rule, documentation.

The other half, how a knob is set and verified inside the process, is in `harness/knobs/`; the two are joined by the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.quantities import DASH
from autotune.records import Knobs, KnobValue, Tier


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How GPUs and machines are connected, as far as knobs look at it.

    Attributes:
        num_gpus: GPUs of this machine, whether the program may use them or not.
        paths: kinds of path between two of them, by the names of `nvidia-smi topo -m` without counts: "NV", "PIX", "PXB",
            "PHB", "NODE", "SYS".
        has_nvswitch: whether their NVLinks end in switches.
        adapters: InfiniBand and RoCE adapters with an active port.
        interfaces: network interfaces that are up and may lead to another machine.
    """

    num_gpus: int = 0
    paths: frozenset[str] = frozenset()
    has_nvswitch: bool = False
    adapters: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostContext:
    """What a knob's rules may look at: this machine, and this program as the baseline trial found it.

    Attributes:
        num_cores: effective CPU cores, min(affinity, cgroup quota), that one process of the program has for itself.
        has_cuda: whether the program's process sees a CUDA device.
        compute_capability: (major, minor) of the device; None on the CPU.
        device_memory_bytes: memory of one device; None on the CPU.
        cpu_isa: instruction sets that matter: "avx2", "avx512_bf16", "amx_bf16", ...
        has_compiler: whether torch.compile can work for this device (a C++ compiler on the CPU, triton on CUDA).
        observed: knob key -> the program's own value, from the baseline.
        not_applicable: knob key -> reason, from the baseline's harness.
        num_numa_nodes: NUMA nodes that the program's cores are of.
        num_local_ranks: processes that train together on this host.
        is_recipe: whether a built-in recipe is tuned (its batch size and workers are ours to choose).
        world_size: processes that train together; None before the baseline has told.
        num_nodes: machines that they run on; None before the baseline has told.
        collectives: how they communicate, "cpu:gloo,cuda:nccl"; "" unknown.
        nccl: version of NCCL; None without one, or before the baseline has told.
        topology: how this machine is connected.
    """

    num_cores: int
    has_cuda: bool = False
    compute_capability: tuple[int, int] | None = None
    device_memory_bytes: int | None = None
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


def no_reason(_: HostContext) -> str | None:
    """Returns None: the knob can always be turned."""
    return None


def no_seed(_: HostContext) -> KnobValue | None:
    """Returns None: an expert would leave this knob alone."""
    return None


OTHER = None  # in `Knob.in_code`: any value that is not named
LOADER_ARGUMENT = "DataLoader(..., {name}={value!r})"
DDP_ARGUMENT = "DistributedDataParallel(..., {name}={value!r})"


def value_text(value: KnobValue | None) -> str:
    """Returns a knob's value as it is written in YAML: `true`, `bf16`, `64`; a dash for None."""
    if value is None:
        return DASH
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One tunable setting.

    Attributes:
        key: dotted key, "loader.num_workers".
        tier: what it changes besides speed.
        type: bool, int, float or str; what a value must be.
        default: value in a program that says nothing (the library's own default).
        domain: values worth trying on this host, ascending for numbers; the space adds the baseline's own.
        choices: the only values allowed for a str knob; empty = any.
        numbers: the only numbers allowed, ascending; empty = any within the bounds.
        bounds: smallest and largest value allowed for a number here; None = no bound on that side.
        examples: values that its documentation shows, where the domain is empty or follows the program; empty = the domain's.
        blocked: reason why it cannot be turned on this host, None when it can.
        expert: value an expert would start with on this host, None to leave it.
        is_active: whether it has an effect with the other knobs' values (prefetch_factor needs workers).
        environment: environment variables a value stands for; set by the launcher, before the interpreter starts.
        variables: names of all that any value may stand for: env.NAME cannot set the same one beside it.
        is_before_torch: set or read before torch is imported in some other way than by such a variable.
        is_unknown: whether it changes what is computed is not known: losses are compared before a value of it may win.
        is_costly: each value costs a compilation; tried only on the best of the others.
        brief: what it is in a few words, for the overview: with key and tier a line fits a terminal of 80 columns.
        phrase: how a value reads in a list of changes, "batch {}"; "" for the last part of the key and the value.
        off_phrase: how the value "off" reads there, "fp32".
        in_code: how a training script sets it by itself, a line with "{value!r}" for the value; or value -> line, OTHER for the
            values that are not named.
        summary, helps, hurts, start_cost: documentation, printed by `autotune knobs NAME`.
    """

    key: str
    tier: Tier
    type: type
    default: KnobValue
    domain: Callable[[HostContext], list[KnobValue]]
    choices: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    examples: tuple[KnobValue, ...] = ()
    bounds: Callable[[HostContext], tuple[float | None, float | None]] = lambda _: (None, None)
    blocked: Callable[[HostContext], str | None] = no_reason
    expert: Callable[[HostContext], KnobValue | None] = no_seed
    is_active: Callable[[Knobs], bool] = lambda _: True
    environment: Callable[[Any], dict[str, str]] = lambda _: {}
    variables: tuple[str, ...] = ()
    is_before_torch: bool = False
    is_unknown: bool = False
    is_costly: bool = False
    brief: str
    phrase: str = ""
    off_phrase: str = ""
    in_code: str | Mapping[KnobValue | None, str] = ""
    summary: str
    helps: str
    hurts: str
    start_cost: str = "none"

    @property
    def name(self) -> str:
        """The last part of the key: "num_workers"."""
        return self.key.rpartition(".")[2]

    def phrase_of(self, value: KnobValue) -> str:
        """Returns a setting in two words or fewer: "bf16", "batch 64", "channels_last", "no pin_memory"."""
        if value == "off" and self.off_phrase:
            return self.off_phrase
        if isinstance(value, bool) and not self.phrase:
            return self.name if value else f"no {self.name}"
        return (self.phrase or f"{self.name} {{}}").format(value_text(value))

    def code_of(self, value: KnobValue) -> str:
        """Returns the line that sets it in a training script; "" where there is none."""
        lines: Mapping[KnobValue | None, str] = {OTHER: self.in_code} if isinstance(self.in_code, str) else self.in_code
        return lines.get(value, lines.get(OTHER, "")).format(value=value, name=self.name)

    def needs_fresh_start(self, value: KnobValue) -> bool:
        """Returns whether a trial with this value needs an interpreter of its own from the first line on.

        What libraries read as they are loaded (thread counts of OpenMP and MKL, an allocator that is preloaded, NCCL's and any
        other variable) must be there before torch is; all other knobs are turned in the process once torch has been imported.
        """
        return self.is_before_torch or bool(self.environment(value))
