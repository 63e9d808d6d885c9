"""Limits and measures this process's memory, and collects facts about its interpreter, torch and device."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import state
from .cores import CPUINFO, instruction_sets, read
from .knobs import affinity, memory
from .protocol import whole_number

LOOK_S = 0.05  # seconds between two readings of the allocator's counters; a block of steps (blocks.py) takes at least as long
SAMPLE_S = 1.0  # seconds between two readings of this process's memory
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A GPU counts as training if this process's memory on it is at least this share of the process's memory on its fullest GPU
# (memory that the allocator has reserved). Less does not count: many programs reserve a little on the first GPU by mistake.
FULL_FRAC = 0.1
# Variables in which launchers pass (number of all processes, number on this machine): torchrun and similar, Open MPI.
WORLD_SIZES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
# If one of these is set, `affinity.ranks_of_host` returns how many ranks share cores. torchrun sets LOCAL_WORLD_SIZE, which is
# this number. Open MPI and Slurm set the others. They usually give each rank its own cores, so the number is 1.
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_NUM_TASKS")


def limit_memory(spec: Any) -> None:
    """Limits this process's memory when it trains on the CPU; workers inherit the limit. See `MemoryWatch.begin` for GPUs."""
    if spec.memory_limit_bytes and spec.device != "cuda":
        _limit_data(int(spec.memory_limit_bytes))


def _limit_data(limit: int) -> None:
    # RLIMIT_AS would limit address space instead, of which importing torch alone reserves more than a small limit allows.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class MemoryWatch:
    """Records this process's peak memory: the allocator's peak on CUDA, the sampled data segment (and the stack) on the CPU."""

    def __init__(self) -> None:
        self._peak_data_bytes = 0
        self._cuda: Any = None
        self._index: Optional[int] = None
        self._is_counted = False  # see `memory.is_counted`
        self._movement = (0, 0)
        self._next_look_s = self._next_sample_s = 0.0
        self._retries_before = 0  # number of retries when the window opened

    def begin(self, device: str, index: Optional[int], *, limit_bytes: Optional[int]) -> None:
        """Limits the memory of the training devices; called when training begins. `TrialContext` defines device and index."""
        if device == "cuda":
            import torch

            self._cuda, self._index, self._is_counted = torch.cuda, index, memory.is_counted(index)
            if limit_bytes:
                memory.limit_devices(1.0, limit_bytes, index)
        elif limit_bytes:
            _limit_data(limit_bytes)

    def look(self, now_s: float) -> None:
        """Samples the data segment, at most once a second: reading it costs a tenth of a millisecond."""
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_S
            self.sample()

    def sample(self) -> None:
        """Reads the data segment's size, because the kernel does not keep its peak."""
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb", buffering=0) as file:
            self._peak_data_bytes = max(self._peak_data_bytes, int(file.read(256).split()[5]) * PAGE_BYTES)

    def movement(self) -> Tuple[int, int]:
        """Returns (a number that rises while the allocator grows, number of the allocator's retries so far).

        Retries rise while memory is short. Both numbers are read at most twenty times a second, because reading them costs
        tens of microseconds.
        """
        if not self._is_counted:
            return self._movement
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            stats = self._cuda.memory_stats_as_nested_dict(self._index)
            reserved = stats["reserved_bytes"]["all"]  # bytes: these also rise with expandable segments and cudaMallocAsync
            self._movement = int(reserved["allocated"] + reserved["peak"]), int(stats.get("num_alloc_retries", 0))
        return self._movement

    def open_window(self) -> None:
        """Notes the number of retries as the window opens."""
        if self._is_counted:
            self._retries_before = int(self._cuda.memory_stats(self._index).get("num_alloc_retries", 0))

    def summary(self) -> Dict[str, Any]:
        """Returns {"kind", "peak_bytes", "peak_reserved_bytes", "capacity_bytes", "alloc_retries"}.

        Unknown values are None. The retries are those since the window opened.
        """
        unknown: Dict[str, Any] = dict.fromkeys(("peak_bytes", "peak_reserved_bytes", "alloc_retries"))
        cuda = self._cuda
        if cuda is None:
            self.sample()
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            capacity = None if limit == resource.RLIM_INFINITY else limit
            return {**unknown, "kind": "cpu", "peak_bytes": self._peak_data_bytes or None, "capacity_bytes": capacity}
        if not self._is_counted:
            return {**unknown, "kind": "cuda", "capacity_bytes": cuda.get_device_properties(self._index).total_memory}
        # A program that trains on several GPUs fails as soon as one of them is full. So the fullest one is reported.
        fullest = max(range(cuda.device_count()), key=cuda.max_memory_reserved)
        return {
            "kind": "cuda",
            "peak_bytes": cuda.max_memory_allocated(fullest),
            "peak_reserved_bytes": cuda.max_memory_reserved(fullest),
            "capacity_bytes": cuda.get_device_properties(fullest).total_memory,
            "alloc_retries": int(cuda.memory_stats(self._index).get("num_alloc_retries", 0)) - self._retries_before,
        }


def facts(device: str, index: Optional[int] = None) -> Dict[str, Any]:
    """Returns facts about the program's interpreter, torch and device; None for unknown facts."""
    import torch

    vision, ranks = sys.modules.get("torchvision"), group()
    found: Dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "torchvision": str(vision.__version__) if vision is not None else None,
        "cuda": torch.version.cuda,
        "hostname": socket.gethostname(),
        "device": device,
        "device_name": None,
        "device_uuids": [],
        "compute_capability": None,
        "device_memory_bytes": None,
        "num_threads": torch.get_num_threads(),
        "num_nodes": num_nodes(os.environ),
        "collectives": str(ranks.get_backend_config()) if ranks else None,  # such as "cpu:gloo,cuda:nccl"
        "nccl": None,
        "isa": instruction_sets(read(CPUINFO)),
        "has_compiler": has_compiler(device),
        "startup": dict(state.startup),
        **affinity.facts(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(index)
        found["device_name"] = properties.name
        found["device_uuids"] = [uuid for each in _trained_on(index) if (uuid := _uuid(each))]
        found["compute_capability"] = [properties.major, properties.minor]
        found["device_memory_bytes"] = properties.total_memory
        with contextlib.suppress(Exception):  # a build without NCCL
            found["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def _trained_on(index: Optional[int]) -> List[int]:
    """Returns the indices of the GPUs that train (see FULL_FRAC), first the one with the first trained parameter."""
    from torch import cuda

    own = cuda.current_device() if index is None else index
    reserved = [memory.reserved_bytes(each) or 0 for each in range(cuda.device_count())]
    least = max(1.0, FULL_FRAC * max(reserved, default=0))
    return [own, *(each for each, size in enumerate(reserved) if each != own and size >= least)]


def _uuid(index: int) -> Optional[str]:
    """Returns the UUID by which NVML identifies a device; None if unknown.

    A slice of a GPU (MIG) has its own UUID, which is in the environment. Torch may return the UUID of the whole GPU instead.
    """
    import torch

    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(visible) and visible[index].startswith("MIG-"):
        return visible[index]
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # torch 2.4 has none
    return f"GPU-{uuid}" if uuid is not None else None


def num_nodes(environment: Mapping[str, str]) -> int:
    """Returns the number of machines that train together, from the launcher's variables; 1 without them."""
    for total, local in WORLD_SIZES:
        ranks, per_node = (whole_number(environment.get(name, "")) for name in (total, local))
        if ranks and per_node:
            return -(-ranks // per_node)
    return whole_number(environment.get("SLURM_STEP_NUM_NODES", "")) or 1


def num_local_ranks(context: Any) -> int:
    """Returns how many training processes share the cores that this process may use.

    A rank that srun or mpirun has started usually has cores of its own, so the number is 1. If the program itself starts its
    ranks, or a launcher sets only LOCAL_RANK, the number follows from the size of the process group and the number of nodes.
    """
    launched, is_told = affinity.ranks_of_host(os.environ)[1], any(name in os.environ for name in LOCAL_SIZES)
    if context.is_child or ("LOCAL_RANK" in os.environ and not is_told):
        return max(launched, int(context.world_size) // num_nodes(os.environ))
    return launched


def group() -> Any:
    """Returns torch.distributed, which knows this process's rank and the number of ranks; None without a process group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def has_compiler(device: str) -> bool:
    """Returns whether torch.compile finds what it needs: a C++ compiler for a CPU, triton and a C compiler for CUDA.

    Triton compiles its launchers when they are first used (triton/runtime/build.py). Both compilers need Python's headers.
    """
    names: Tuple[str, ...] = ("CXX", "g++", "clang++", "c++")
    if device == "cuda":
        import importlib.util

        if importlib.util.find_spec("triton") is None:
            return False
        names = ("CC", "gcc", "clang")
    found = any(shutil.which(name) for name in (os.environ.get(names[0], ""), *names[1:]) if name)
    folders = {sysconfig.get_paths()["include"], str(sysconfig.get_config_var("INCLUDEPY"))}
    return found and any(os.path.exists(os.path.join(folder, "Python.h")) for folder in folders)
