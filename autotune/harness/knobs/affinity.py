"""Binds the training process and its loader's workers to cores (threads.affinity, loader.own_cores).

The process is bound before torch is imported, so that torch makes one thread for each core. A launcher's agent may be bound to
some cores, too, and its ranks inherit these. So an environment variable contains the cores that the job had before, and each
rank chooses from these.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

from ..context import TrialContext
from ..cores import numbers_of, read
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport, whole_number
from .base import KnobHandler

AFFINITY, OWN_CORES = "threads.affinity", "loader.own_cores"
KEYS = (AFFINITY, OWN_CORES)
NONE, COMPACT, NUMA = "none", "compact", "numa"
CORES_VARIABLE = "AUTOTUNE_CORES"  # "0,1,2,3": the cores of the first process of the command
SYSTEM, NVIDIA = "/sys", "/proc/driver/nvidia/gpus"

ONE_NODE = "all cores belong to one NUMA node"
ONE_RANK = "only one process trains on this host, so it may use all cores anyway"
NO_WORKERS = "the loader has no workers that could be bound to separate cores"
TOO_FEW = "there are too few cores for each process to have separate ones"


class Core(NamedTuple):
    """A logical core and its location. When sorted, cores that share a cache, or are hyperthreads of one core, are adjacent."""

    node: int
    package: int
    core: int
    number: int


def place(value: str, cores: List[Core], rank: int, num_ranks: int, *, gpu_node: Optional[int]) -> Tuple[List[Core], int, str]:
    """Returns the cores of one rank and its workers, how many ranks share them, and why `value` is not applied ("" if it is).

    For "compact", 8 cores and rank 1 of 2, that is (cores[4:8], 1, "").

    Args:
        value: value of threads.affinity.
        cores: the available cores.
        rank: rank of this process among those on this host.
        num_ranks: number of training processes on this host.
        gpu_node: NUMA node of this rank's GPU; None if there is none or it is not known.
    """
    nodes = sorted({core.node for core in cores})
    if value == NUMA and len(nodes) > 1:
        is_known = gpu_node in nodes
        chosen = gpu_node if is_known else nodes[rank % len(nodes)]
        # If the GPU's node is not known, ranks are assigned to nodes round-robin; else all are assumed to share the GPU's node.
        num_sharing = num_ranks if is_known else len(range(rank % len(nodes), num_ranks, len(nodes)))
        return [core for core in cores if core.node == chosen], max(1, num_sharing), ""
    if value == COMPACT and num_ranks > 1 and len(cores) >= num_ranks:
        return cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks], 1, ""
    problems = {NUMA: ONE_NODE, COMPACT: ONE_RANK if num_ranks < 2 else TOO_FEW}
    return cores, num_ranks, problems.get(value, "")


def part(cores: List[Core], num_workers: int) -> Tuple[List[Core], List[Core], str]:
    """Returns the cores of the training process, those of its workers, and why they are not separate ("" if they are).

    The workers get one core each, but together never more than half of the cores.

    Args:
        cores: the cores of the training process and its workers together.
        num_workers: number of workers on these cores; 0 while it is not known.
    """
    if not num_workers or len(cores) < 2:
        return cores, cores, TOO_FEW if num_workers else NO_WORKERS
    first = len(cores) - min(num_workers, len(cores) // 2)
    return cores[:first], cores[first:], ""


def _numbers(cores: List[Core]) -> FrozenSet[int]:
    return frozenset(core.number for core in cores)


class AffinityBinder(KnobHandler):
    """Binds this process when constructed, and determines the cores of its workers."""

    keys = KEYS

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._knobs, self._num_workers = self.asked, 0
        self._own: FrozenSet[int] = frozenset()
        self._workers: FrozenSet[int] = frozenset()
        self._num_sharing = 1
        self._problems: Dict[str, str] = {}
        self.is_asked = bool(self._knobs)
        if self.is_asked:
            self._bind()

    def _bind(self) -> None:
        # Binds all existing threads; threads started later inherit the binding.
        rank, num_ranks = ranks_of_host(os.environ)
        node = gpu_node(os.environ, rank) if self._context.spec.device != "cpu" else None
        cores = cores_of(SYSTEM, allowed(os.environ))
        os.environ[CORES_VARIABLE] = ",".join(str(core.number) for core in cores)
        mine, self._num_sharing, problem = place(self._knobs.get(AFFINITY, NONE), cores, rank, num_ranks, gpu_node=node)
        self._problems = {AFFINITY: problem}
        own = workers = mine
        if self._knobs.get(OWN_CORES):
            own, workers, self._problems[OWN_CORES] = part(mine, self._num_workers * self._num_sharing)
        self._own, self._workers = _numbers(own), _numbers(workers)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended, or the job no longer has these cores
                os.sched_setaffinity(int(thread), self._own)

    def on_activate(self) -> None:
        """Binds this process again if its cores have changed since the last binding."""
        if self.is_asked and os.sched_getaffinity(0) != self._own:
            self._bind()

    def workers_start(self, num_workers: int, *, may_train: bool) -> Optional[FrozenSet[int]]:
        """Returns the cores to which workers about to start must bind themselves; None if they inherit theirs.

        If their loader does not train, the division of the cores stays as it is: persistent workers of the training loader may
        still be bound to their cores.
        """
        if not (self.is_asked and self._knobs.get(OWN_CORES) and num_workers):
            return None
        if may_train:
            self._num_workers = num_workers
            self._bind()
        return None if self._problems[OWN_CORES] else self._workers

    @property
    def num_cores(self) -> Optional[float]:
        """Cores of this process and its workers, divided by the ranks that share them; None if nothing is bound."""
        return len(self._own | self._workers) / self._num_sharing if self.is_asked else None

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report for each knob, read back from this process and from its loader's workers."""
        if not self.is_asked:
            return {}
        missed = self._missed(self._context.loaders.starts.living())
        reports = {}
        for key, value in self._knobs.items():
            if self._problems.get(key):
                reports[key] = KnobReport(NOT_APPLICABLE, self._problems[key], NONE if key == AFFINITY else False)
            else:
                reports[key] = KnobReport(OVERRIDDEN, missed) if missed else KnobReport(APPLIED, "", value)
        return reports

    def _missed(self, workers: List[Any]) -> str:
        wanted = [(os.getpid(), "the training process", self._own)]
        wanted += [(worker.pid, "a loader's worker", self._workers) for worker in workers]
        for pid, name, cores in wanted:
            with contextlib.suppress(ProcessLookupError):
                found = os.sched_getaffinity(pid)
                if found != cores:
                    return f"cores {_text(cores)} were requested, but {name} runs on {_text(found)}"
        return ""


def _text(cores: Any) -> str:
    """Returns core numbers in the form "0-3,8"."""
    parts: List[List[int]] = []
    for number in sorted(cores):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def ranks_of_host(environment: Mapping[str, str]) -> "tuple[int, int]":
    """Returns (rank among the training processes of this host, their number) from the launcher; (0, 1) without one."""
    try:
        rank, num_ranks = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, num_ranks) if 0 <= rank < num_ranks else (0, 1)


def allowed(environment: Mapping[str, str]) -> FrozenSet[int]:
    """Returns the cores that this job may use."""
    given = [whole_number(word) for word in environment.get(CORES_VARIABLE, "").split(",")]
    return frozenset(core for core in given if core is not None) or frozenset(os.sched_getaffinity(0))


def cores_of(system: str, numbers: FrozenSet[int]) -> List[Core]:
    """Returns the cores with these numbers as the kernel describes them in `system`, sorted by location."""
    nodes: Dict[int, int] = {}
    for path in glob.glob(f"{system}/devices/system/node/node[0-9]*/cpulist"):
        node = int(os.path.basename(os.path.dirname(path))[len("node") :])
        nodes.update(dict.fromkeys(numbers_of(read(path)), node))

    def fact(number: int, name: str) -> int:
        text = read(f"{system}/devices/system/cpu/cpu{number}/topology/{name}")
        return int(text) if text.isdigit() else 0

    return sorted(
        Core(nodes.get(number, 0), fact(number, "physical_package_id"), fact(number, "core_id"), number) for number in numbers
    )


def gpu_node(environment: Mapping[str, str], rank: int, *, system: str = SYSTEM, driver: str = NVIDIA) -> Optional[int]:
    """Returns the NUMA node of the GPU that a rank will use, without touching CUDA; None if that is not known.

    Args:
        environment: may restrict the visible GPUs, by index or UUID.
        rank: rank of this process on this host, which is the index of its GPU among the visible ones.
        system: folder in which the kernel describes its devices.
        driver: folder in which the driver lists its GPUs, in CUDA's order for GPUs of the same model.
    """
    gpus = sorted(glob.glob(f"{driver}/*/information"))
    models = {line for path in gpus for line in read(path).splitlines() if line.startswith("Model:")}
    has_numbers = len(models) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"  # else CUDA's numbers are unknown
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found: List[str] = []
        for word in map(str.strip, visible.split(",")):
            index = whole_number(word)
            if index is not None and not has_numbers:
                return None
            same = gpus[index : index + 1] if index is not None else [path for path in gpus if word and word in read(path)]
            if not same:
                break  # CUDA ignores the first entry that is not a GPU, and all entries after it
            found += same
        gpus = found
    elif not has_numbers:
        return None
    rank = 0 if len(gpus) == 1 else rank  # all ranks share a single GPU, or a launcher shows each rank its own
    if rank >= len(gpus):
        return None
    address = os.path.basename(os.path.dirname(gpus[rank])).lower()
    text = read(f"{system}/bus/pci/devices/{address}/numa_node")
    return int(text) if text.isdigit() else None  # -1 means unknown


def facts() -> Dict[str, int]:
    """Returns {"num_numa_nodes" (of this job's cores), "num_local_ranks" (training processes on this host)}."""
    nodes = {core.node for core in cores_of(SYSTEM, allowed(os.environ))}
    return {"num_numa_nodes": max(1, len(nodes)), "num_local_ranks": ranks_of_host(os.environ)[1]}
