"""Which cores the training process and its loader's workers run on (threads.affinity).

Bound before torch is imported, so that torch makes as many threads as there are cores left; a launch agent may be bound as
well, so the cores there were before travel in the environment and each rank chooses its own from all of them.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional

from .protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

KEY = "threads.affinity"
NONE, COMPACT, NUMA, SPLIT = "none", "compact", "numa", "split"
CORES_VARIABLE = "AUTOTUNE_CORES"  # "0,1,2,3": the cores of the first process of the command
SYSTEM, NVIDIA = "/sys", "/proc/driver/nvidia/gpus"

ONE_NODE = "the cores are all of one NUMA node"
ONE_RANK = "one process trains on this host: all cores are its own"
NO_WORKERS = "the loader has no workers to be kept apart from"
TOO_FEW = "there are fewer cores than processes to be kept apart"


class Core(NamedTuple):
    """One core and where it is; in order, neighbours share caches: hyperthreads of one core come one after the other."""

    node: int
    package: int
    core: int
    number: int


class Binding(NamedTuple):
    """Who runs where.

    Attributes:
        own: cores of the training process.
        workers: cores of its loader's workers.
        num_sharing: processes of the same job that have these cores, this one included.
        problem: why it is not what was asked; "" when it is.
    """

    own: FrozenSet[int]
    workers: FrozenSet[int]
    num_sharing: int
    problem: str = ""


def plan(value: str, cores: List[Core], rank: int, num_ranks: int, *, gpu_node: Optional[int], num_workers: int) -> Binding:
    """Returns who is to run where.

    Args:
        value: of the knob.
        cores: those there are.
        rank: of this process among those on this host.
        num_ranks: training processes on this host.
        gpu_node: NUMA node of this rank's GPU; None where there is none or it is not known.
        num_workers: of the loader; 0 while it is not known.
    """
    everything = Binding(_numbers(cores), _numbers(cores), num_ranks)
    if value == NUMA:
        return _on_one_node(cores, rank, num_ranks, gpu_node) or everything._replace(problem=ONE_NODE)
    block = cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]
    if value == COMPACT:
        if num_ranks < 2:
            return everything._replace(problem=ONE_RANK)
        return Binding(_numbers(block), _numbers(block), 1) if block else everything._replace(problem=TOO_FEW)
    if value == SPLIT:
        if not num_workers or len(block) < 2:
            return everything._replace(problem=TOO_FEW if num_workers else NO_WORKERS)
        first = len(block) - min(num_workers, len(block) // 2)
        return Binding(_numbers(block[:first]), _numbers(block[first:]), 1)
    return everything


def _on_one_node(cores: List[Core], rank: int, num_ranks: int, gpu_node: Optional[int]) -> Optional[Binding]:
    nodes = sorted({core.node for core in cores})
    if len(nodes) < 2:
        return None
    chosen = gpu_node if gpu_node in nodes else nodes[rank % len(nodes)]
    own = _numbers([core for core in cores if core.node == chosen])
    sharing = num_ranks if gpu_node in nodes else len(range(rank % len(nodes), num_ranks, len(nodes)))
    return Binding(own, own, max(1, sharing))


def _numbers(cores: List[Core]) -> FrozenSet[int]:
    return frozenset(core.number for core in cores)


class Binder:
    """Binds this process and tells its workers where to run."""

    def __init__(self, knobs: Mapping[str, Any], device: str) -> None:
        self._value = knobs.get(KEY, NONE)
        self._device = device
        self._num_workers = 0
        self.bound: Optional[Binding] = None
        if KEY in knobs and hasattr(os, "sched_setaffinity"):
            self.bind()

    def bind(self) -> None:
        """Binds every thread there is to the cores of this process; those it starts later inherit them."""
        rank, num_ranks = ranks_of_host(os.environ)
        node = gpu_node(os.environ, rank) if self._device != "cpu" else None
        cores = cores_of(SYSTEM, allowed(os.environ))
        self.bound = plan(self._value, cores, rank, num_ranks, gpu_node=node, num_workers=self._num_workers)
        os.environ[CORES_VARIABLE] = ",".join(str(core.number) for core in cores)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or the cores were taken away from all of us
                os.sched_setaffinity(int(thread), self.bound.own)

    def bind_again(self) -> None:
        """Binds a process that has been bound otherwise since."""
        if self.bound is not None and os.sched_getaffinity(0) != self.bound.own:
            self.bind()

    def workers_start(self, num_workers: int) -> Optional[FrozenSet[int]]:
        """Returns the cores that workers about to be started have to go to by themselves; None where they inherit them."""
        if self._value != SPLIT or self.bound is None or not num_workers:
            return None
        self._num_workers = num_workers
        self.bind()
        return None if self.bound.problem else self.bound.workers

    @property
    def num_cores(self) -> Optional[float]:
        """Cores of this process and its workers, the part of each where several have them; None where nothing is bound."""
        if self.bound is None or self.bound.problem:
            return None
        return len(self.bound.own | self.bound.workers) / self.bound.num_sharing

    def verify(self, workers: List[Any]) -> KnobReport:
        """Returns what became of the knob, read back from this process and from its loader's workers.

        Args:
            workers: processes of the loader that trains.
        """
        if self.bound is None:
            return KnobReport(NOT_APPLICABLE, "this system binds no process to cores")
        if self.bound.problem:
            return KnobReport(NOT_APPLICABLE, self.bound.problem, NONE)
        wanted = [(os.getpid(), "the training process", self.bound.own)]
        wanted += [(worker.pid, "a loader's worker", self.bound.workers) for worker in workers]
        for pid, name, cores in wanted:
            with contextlib.suppress(ProcessLookupError):
                found = os.sched_getaffinity(pid)
                if found != cores:
                    return KnobReport(OVERRIDDEN, f"{name} runs on cores {_text(found)}, {_text(cores)} were asked", None)
        return KnobReport(APPLIED, "", self._value)


def _text(cores: Any) -> str:
    """Returns "0-3,8" of core numbers."""
    parts: List[List[int]] = []
    for number in sorted(cores):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


# --- the machine ---


def ranks_of_host(environment: Mapping[str, str]) -> "tuple[int, int]":
    """Returns (rank among the training processes of this host, how many they are) as the launcher says; (0, 1) without one."""
    try:
        rank, num_ranks = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, num_ranks) if 0 <= rank < num_ranks else (0, 1)


def allowed(environment: Mapping[str, str]) -> FrozenSet[int]:
    """Returns the cores that this job may have."""
    given = environment.get(CORES_VARIABLE, "")
    return frozenset(int(word) for word in given.split(",")) if given else frozenset(os.sched_getaffinity(0))


def cores_of(system: str, numbers: FrozenSet[int]) -> List[Core]:
    """Returns the cores of these numbers in order of neighbourhood, as the kernel describes them below `system`."""
    nodes: Dict[int, int] = {}
    for path in glob.glob(f"{system}/devices/system/node/node[0-9]*/cpulist"):
        node = int(os.path.basename(os.path.dirname(path))[len("node") :])
        nodes.update(dict.fromkeys(numbers_of(_read(path)), node))

    def fact(number: int, name: str) -> int:
        text = _read(f"{system}/devices/system/cpu/cpu{number}/topology/{name}")
        return int(text) if text.isdigit() else 0

    return sorted(
        Core(nodes.get(number, 0), fact(number, "physical_package_id"), fact(number, "core_id"), number) for number in numbers
    )


def numbers_of(text: str) -> List[int]:
    """Returns the numbers of a kernel's list such as "0-3,8"."""
    found: List[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def gpu_node(environment: Mapping[str, str], rank: int, *, system: str = SYSTEM, driver: str = NVIDIA) -> Optional[int]:
    """Returns the NUMA node of the GPU that a rank will use, without touching CUDA; None where that is not known.

    Args:
        environment: which GPUs are visible, by their place or UUID; else all are.
        rank: of this process on this host: it uses the visible GPU of that place.
        system: where the kernel describes its devices.
        driver: where the driver lists its GPUs, in the order in which CUDA counts equal ones.
    """
    gpus = sorted(glob.glob(f"{driver}/*/information"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = []
        for word in filter(None, visible.split(",")):
            same = [path for path in gpus if not word.isdigit() and word in _read(path)]
            found += same or (gpus[int(word) : int(word) + 1] if word.isdigit() else [])
        gpus = found
    if rank >= len(gpus):
        return None
    address = os.path.basename(os.path.dirname(gpus[rank])).lower()
    text = _read(f"{system}/bus/pci/devices/{address}/numa_node")
    return int(text) if text.isdigit() else None  # -1: the machine does not say


def facts() -> Dict[str, int]:
    """Returns {"num_nodes": NUMA nodes that this job's cores are of, "num_ranks": training processes on this host}."""
    if not hasattr(os, "sched_getaffinity"):
        return {"num_nodes": 1, "num_ranks": 1}
    nodes = {core.node for core in cores_of(SYSTEM, allowed(os.environ))}
    return {"num_nodes": max(1, len(nodes)), "num_ranks": ranks_of_host(os.environ)[1]}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
