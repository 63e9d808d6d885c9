"""Knobs of NCCL, which carries gradients between GPUs: environment variables that are set before the interpreter starts.

Names, values and defaults follow NCCL's documentation, "Environment Variables"
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, read for 2.31). Most variables are listed
there under debugging, because NCCL chooses values by a model of the machine, and a later version may choose better than a fixed
value. So a knob is offered only if it can matter on this machine's topology, and a result holds only for the study's machine,
model and NCCL version.

NCCL needs GPUs. Tests without a GPU verify that each value reaches every rank's environment and is read back there.
The knobs have not been measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.knobs.base import HostContext, Knob, below, no_cuda
from autotune.records import KnobValue, Tier

AUTO = "auto"  # the variable stays unset: NCCL decides
UNSET = 0  # the same as AUTO, for knobs whose values are numbers

HOPPER = (9, 0)  # first compute capability with NVLink SHARP
# First NCCL that accepts "allreduce:tree". From this version on, a bare "tree" fails for collectives without a tree.
PER_COLLECTIVE = (2, 24)
ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree", "CollnetDirect", "CollnetChain")
# NCCL's level -> kinds of path (as in `nvidia-smi topo -m`) that it allows besides those of the levels before it.
P2P_LEVELS = {"NVL": {"NV"}, "PIX": {"PIX"}, "PXB": {"PXB"}, "PHB": {"PHB", "NODE"}, "SYS": {"SYS"}}
MIB = 1 << 20
MAX_CHANNELS = 64  # 32 before NCCL 2.25


def no_nccl(host_context: HostContext) -> str | None:
    """Returns why this program does not use NCCL; None if it does or may."""
    if reason := no_cuda(host_context):
        return reason
    if host_context.world_size == 1:
        return "one process trains: it does not communicate"
    if host_context.collectives and "nccl" not in host_context.collectives:
        return f"the processes communicate through {host_context.collectives}, not through NCCL"
    if host_context.world_size is None and host_context.topology.num_gpus < 2 and not host_context.topology.adapters:
        return "only one GPU is seen: there is nothing to communicate with"
    return None


def no_peers(host_context: HostContext) -> str | None:
    """Returns why the path between GPUs of one machine does not matter; None if it does."""
    if reason := no_nccl(host_context):
        return reason
    if host_context.topology.num_gpus < 2:
        return "fewer than two GPUs are seen in this machine"
    return None if host_context.topology.paths else "how the GPUs are connected is not known: NVML does not report it"


def no_choice_of_level(host_context: HostContext) -> str | None:
    """Returns why the peer-to-peer level does not matter; None if it does."""
    is_alike = host_context.topology.paths == {"NV"}
    return no_peers(host_context) or ("all GPUs are connected by NVLink, which is used at every level" if is_alike else None)


def no_nvls(host_context: HostContext) -> str | None:
    """Returns why NVLink SHARP is unavailable; None if it is available."""
    if reason := no_peers(host_context):
        return reason
    if not host_context.topology.has_nvswitch:
        return "no NVSwitch: NVLink SHARP computes in the switches"
    return below(host_context, HOPPER, "Hopper")


def one_node(host_context: HostContext) -> str | None:
    """Returns why the network does not matter; None if it does or may."""
    is_one = host_context.num_nodes == 1
    return no_nccl(host_context) or ("one machine: its GPUs do not talk over the network" if is_one else None)


def no_infiniband(host_context: HostContext) -> str | None:
    """Returns why InfiniBand does not matter; None if it does or may."""
    missing = None if host_context.topology.adapters else "no InfiniBand or RoCE adapter with an active port"
    return one_node(host_context) or missing


def one_adapter(host_context: HostContext) -> str | None:
    """Returns why there is no choice of InfiniBand adapters; None if there is."""
    only = host_context.topology.adapters
    return no_infiniband(host_context) or (f"one adapter ({only[0]}): there is no choice" if len(only) < 2 else None)


def one_interface(host_context: HostContext) -> str | None:
    """Returns why there is no choice of network interfaces; None if there is."""
    if reason := one_node(host_context):
        return reason
    there = host_context.topology.interfaces
    return f"one network interface ({there[0] if there else 'none seen'}): there is no choice" if len(there) < 2 else None


def one_nic(host_context: HostContext) -> str | None:
    """Returns why a ring cannot cross adapters; None if it can."""
    if reason := one_node(host_context):
        return reason
    nics = host_context.topology.adapters or host_context.topology.interfaces
    return "one network adapter: NCCL's setting has no effect" if len(nics) < 2 else None


def algorithms(host_context: HostContext) -> list[KnobValue]:
    """Returns the algorithms worth a trial: ring and tree always, NVLS only with NVSwitches.

    From NCCL 2.24 on, a name without a collective ("tree") makes every collective that lacks the algorithm fail. There is no
    tree for a broadcast, for example, and DistributedDataParallel starts with a broadcast. Older versions use a ring instead of
    failing, but do not accept names of collectives ("allreduce:tree").
    """
    names = ["Ring", "Tree"]
    if no_nvls(host_context) is None:
        names.append("NVLSTree" if (host_context.num_nodes or 1) > 1 else "NVLS")
    is_older = host_context.nccl is not None and host_context.nccl < PER_COLLECTIVE
    return [name if is_older else f"allreduce:{name.lower()}" for name in names]


def p2p_levels(host_context: HostContext) -> list[KnobValue]:
    """Returns the levels that make a difference here: "LOC" (no direct reads), and each that adds pairs of GPUs."""
    return ["LOC", *(level for level, paths in P2P_LEVELS.items() if host_context.topology.paths & paths)]


def _nccl(
    key: str, *, default: KnobValue, variable: str = "", blocked: Callable[[HostContext], str | None] = no_nccl, **others: Any
) -> Knob:
    """Returns the knob of one variable.

    The variable's name is `variable` or, by default, NCCL_ plus the last part of the key. If `default` is AUTO or UNSET, this
    value leaves the variable unset.
    """
    name = key.rpartition(".")[2]
    variable = variable or f"NCCL_{name.upper()}"
    unless = default if default in (AUTO, UNSET) and not isinstance(default, bool) else None

    def environment(value: Any) -> dict[str, str]:
        if value == unless:
            return {}
        return {variable: str(int(value)) if isinstance(value, bool) else str(value)}

    return Knob(
        key=key,
        tier=Tier.exact,
        default=default,
        blocked=blocked,
        environment=environment,
        variables=(variable,),
        usual_spread=0.1,
        phrase=f"NCCL {name} {{}}",
        phrases={UNSET: f"NCCL {name} {AUTO}"} if unless == UNSET else {},
        **others,
    )


ALGO = _nccl(
    "nccl.algo",
    default=AUTO,
    choices=(AUTO, *(f"allreduce:{name.lower()}" for name in ALGORITHMS), *ALGORITHMS),
    domain=algorithms,
    brief="ring, tree or NVLS",
    summary=(
        "NCCL_ALGO: which algorithm may carry the gradients. `allreduce:tree` (since NCCL 2.24) applies to all-reduces and "
        "leaves other collectives alone; a bare name, `Tree`, applies to all."
    ),
    helps=(
        "NCCL's model of the machine is wrong for the program's message sizes. Trees have less latency over many ranks, rings "
        "more bandwidth, and NVLS computes the sums in the NVSwitches."
    ),
    hurts=(
        "One algorithm for every size of message is rarely best. Since NCCL 2.24, a bare name ends the program at the first "
        "collective that lacks the algorithm. CollnetDirect and CollnetChain need a network that can compute reductions, and "
        "its plugin."
    ),
)

PROTO = _nccl(
    "nccl.proto",
    default=AUTO,
    choices=(AUTO, "Simple", "LL", "^LL", "^LL128"),
    domain=lambda _: ["Simple", "^LL128"],
    brief="protocols of a transfer",
    summary=(
        "NCCL_PROTO: the protocols of a transfer. `Simple` has the most bandwidth and `LL` the least latency. LL128 has some "
        "of both, but only some hardware supports it. `^` excludes a protocol."
    ),
    helps="Large gradient buckets that NCCL sends by a low-latency protocol, or a bug of one protocol.",
    hurts=(
        "NCCL's documentation advises against setting it, except to exclude a protocol. LL128 corrupts data on hardware that "
        "does not support it. `^LL` lets NCCL use LL128 even there, so `^LL` is tried only if you name it. Small messages "
        "suffer without the low-latency protocols."
    ),
)

MIN_NCHANNELS = _nccl(
    "nccl.min_nchannels",
    default=UNSET,
    domain=lambda _: [4, 8, 16, 32],
    bounds=lambda _: (1, MAX_CHANNELS),
    is_active=lambda knobs: not UNSET < int(knobs.get("nccl.max_nchannels") or 0) < int(knobs.get("nccl.min_nchannels") or 0),
    brief="channels at least",
    summary=(
        "NCCL_MIN_NCHANNELS: the fewest channels that a collective with large messages uses. Each is one CUDA block, on one "
        "of the GPU's multiprocessors."
    ),
    helps="Collectives that do not reach the links' bandwidth while the GPU has multiprocessors to spare.",
    hurts=(
        "Every channel takes a multiprocessor from the backward pass that it overlaps with. "
        "This minimum is not set if nccl.max_nchannels is lower."
    ),
)

MAX_NCHANNELS = _nccl(
    "nccl.max_nchannels",
    default=UNSET,
    domain=lambda _: [2, 4, 8, 16],
    bounds=lambda _: (1, MAX_CHANNELS),
    brief="channels at most",
    summary=(
        "NCCL_MAX_NCHANNELS: the most channels that a collective uses. Each is one CUDA block, on one multiprocessor of the "
        "GPU."
    ),
    helps="Communication is hidden by the backward pass, but NCCL takes multiprocessors that the backward pass needs.",
    hurts="Communication that is not hidden takes longer with fewer channels.",
)

NTHREADS = _nccl(
    "nccl.nthreads",
    default=UNSET,
    domain=lambda _: [128, 256, 512],
    numbers=(64, 128, 256, 512),
    bounds=lambda _: (64, 512),
    brief="threads of a channel",
    summary="NCCL_NTHREADS: CUDA threads of each channel's block, 64, 128, 256 or 512. NCCL itself uses 512 on recent GPUs.",
    helps="Fewer threads leave registers and issue slots to the backward pass. More threads help on GPUs with low clocks.",
    hurts="Fewer threads move fewer bytes. NCCL allows only these four numbers.",
)

BUFFSIZE = _nccl(
    "nccl.buffsize",
    default=UNSET,
    domain=lambda _: [MIB, 2 * MIB, 8 * MIB, 16 * MIB],
    numbers=tuple(1 << power for power in range(10, 31)),
    bounds=lambda _: (1024, 1 << 30),
    brief="bytes of a buffer",
    summary="NCCL_BUFFSIZE: bytes of the buffer between each pair of GPUs, a power of two; NCCL itself uses 4 MiB.",
    helps="Larger buffers: large messages over links with high latency. Smaller buffers: a GPU whose memory is nearly full.",
    hurts="Every channel and peer has a buffer of its own: at 16 MiB each, they take GPU memory from the batch.",
)

P2P_LEVEL = _nccl(
    "nccl.p2p_level",
    default=AUTO,
    choices=(AUTO, "LOC", *P2P_LEVELS),
    domain=p2p_levels,
    blocked=no_choice_of_level,
    is_unknown=True,  # with a bad PCIe setup, direct transfers corrupt data
    brief="how far GPUs read each other",
    summary=(
        "NCCL_P2P_LEVEL: the longest path over which GPUs of one machine read each other's memory directly: none (LOC), NVLink "
        "(NVL), one PCIe switch (PIX), several (PXB), any within a NUMA node (PHB), any (SYS). On longer paths, data go "
        "through the host."
    ),
    helps="GPUs on PCIe, where NCCL is careful: direct transfers across the CPU can be faster or far slower than NCCL assumes.",
    hurts=(
        "Direct transfers through a CPU or an IOMMU that does not support them well are slow, hang or corrupt data. So "
        "autotune compares the training loss with the baseline's before a value may win."
    ),
)

NVLS = _nccl(
    "nccl.nvls",
    variable="NCCL_NVLS_ENABLE",
    default=True,
    domain=lambda _: [True, False],
    blocked=no_nvls,
    brief="sums in the NVSwitches",
    summary="NCCL_NVLS_ENABLE: NVLink SHARP, sums computed in the NVSwitches of Hopper and later. On unless it is turned off.",
    helps="false frees the memory and multiprocessors that NVLink SHARP takes, for models that hide communication anyway.",
    hurts="With false, a large all-reduce within the machine sends more over the NVLinks.",
)

IB_DISABLE = _nccl(
    "nccl.ib_disable",
    default=False,
    blocked=no_infiniband,
    brief="without InfiniBand",
    summary="NCCL_IB_DISABLE: no InfiniBand or RoCE between machines; NCCL falls back to TCP sockets.",
    helps=(
        "A fabric that is slower than the Ethernet of the same hosts, or that disturbs other jobs. Mostly useful to see "
        "whether InfiniBand helps."
    ),
    hurts="Sockets go through the CPU: where InfiniBand works it is much faster.",
)

IB_HCA = _nccl(
    "nccl.ib_hca",
    default=AUTO,
    domain=lambda here: [*(f"={name}" for name in here.topology.adapters), f"={','.join(here.topology.adapters)}"],
    examples=("=mlx5_0", "=mlx5_0,mlx5_1"),
    blocked=one_adapter,
    brief="which InfiniBand adapters",
    summary=(
        "NCCL_IB_HCA: the InfiniBand and RoCE adapters to use, as a list of prefixes of their names. A leading `=` means exact "
        "names, `^` all but these: `=mlx5_0,mlx5_1`, `^=mlx5_2`."
    ),
    helps="Some adapters are for storage, on another network or far from the GPUs, but NCCL uses them too.",
    hurts="Leaving out an adapter loses its bandwidth. The names are this machine's; all machines must have the same.",
)

SOCKET_IFNAME = _nccl(
    "nccl.socket_ifname",
    default=AUTO,
    domain=lambda here: [f"={name}" for name in here.topology.interfaces],
    examples=("=eth0", "^docker"),
    blocked=one_interface,
    brief="which network interfaces",
    summary=(
        "NCCL_SOCKET_IFNAME: the network interfaces for NCCL's start-up and its TCP transport, as a list of prefixes of their "
        "names. A leading `=` means exact names, `^` all but these: `=eth0`, `^docker`."
    ),
    helps="Machines on several networks, if NCCL picks a slow one or one that does not reach the other machines.",
    hurts="If an interface does not reach the other machines, the start times out. All machines must have the same names.",
)

CROSS_NIC = _nccl(
    "nccl.cross_nic",
    default=2,
    domain=lambda _: [0, 1, 2],
    numbers=(0, 1, 2),
    bounds=lambda _: (0, 2),
    blocked=one_nic,
    brief="rings across adapters",
    summary=(
        "NCCL_CROSS_NIC: whether a ring may use different adapters on different machines. 0 forbids it, 1 allows it, and 2 "
        "(NCCL's default) allows it only where NCCL expects it to be faster."
    ),
    helps="0 on networks with a switch for each adapter (rails), 1 where all adapters of a machine share a switch.",
    hurts="The wrong value sends traffic across rails, or keeps NCCL from balancing it over the adapters.",
)

KNOBS = [
    ALGO, PROTO, MIN_NCHANNELS, MAX_NCHANNELS, NTHREADS, BUFFSIZE, P2P_LEVEL, NVLS, IB_DISABLE, IB_HCA, SOCKET_IFNAME,
    CROSS_NIC,
]  # fmt: skip
# Knob -> its variable. These variables are rejected as env.NAME (env.NCCL_ALGO), so that each setting has only one name.
VARIABLES = {knob.key: knob.variables[0] for knob in KNOBS}
