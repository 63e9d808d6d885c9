"""Collects facts about the host, picks those that must match for results to be comparable, and makes the knobs' HostContext."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from autotune.harness.cores import CGROUP, CPUINFO, OWN_CGROUP, folders, instruction_sets, num_cores, read
from autotune.harness.protocol import RankResult
from autotune.knobs.base import HostContext
from autotune.machine.gpus import gpus
from autotune.machine.nvml import session
from autotune.machine.topology import as_host_context, topology
from autotune.machine.visible import visible_gpus
from autotune.masking import Secrets

CXX = ("g++", "clang++", "c++")  # one of them compiles torch.compile's kernels for the CPU
# For cgroup v2 and v1: the files with the memory limit and with the memory in use, and the line of memory.stat that says how
# much of the memory in use is a cache of files that were not read lately.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

# Prefixes of the environment variables that are recorded.
RECORDED = (
    "CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE",
    "OMP_", "OPENBLAS_", "PYTHONHASHSEED", "PYTORCH_", "TOKENIZERS_PARALLELISM", "TORCH_", "TORCHINDUCTOR_", "TRITON_",
)  # fmt: skip


def host_facts() -> dict[str, Any]:
    """Returns facts about this host as the tuner's process sees it, as values that JSON can hold.

    Keys: hostname, cpu_model, num_cores (effective), num_cpus, memory_bytes (at most the cgroup's limit), isa, kernel, python,
    has_compiler (C++), gpus ([] without NVML), topology, environment (variables with a prefix in RECORDED).
    """
    text = read(CPUINFO)
    with session():  # initialises the driver once for both calls
        devices, connections = gpus(), topology()
    memory_bytes = int(psutil.virtual_memory().total)
    return {
        "hostname": platform.node(),
        "cpu_model": cpu_model(text),
        "num_cores": num_cores(),
        "num_cpus": psutil.cpu_count() or 1,
        "memory_bytes": min(memory_bytes, memory_limit_bytes() or memory_bytes),
        "isa": instruction_sets(text),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "has_compiler": any(shutil.which(name) for name in CXX),
        "gpus": devices,
        "topology": connections,
        "environment": recorded(os.environ),
    }


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that can change how fast a program trains. Others may hold secrets, so they are left out."""
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED)}
    return dict(Secrets().document(found))


def memory_limit_bytes(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> int | None:
    """Returns the smallest memory limit of this process's cgroup and its ancestors; None if there is none."""
    return min((limit for limit, _ in _memory_limits(cgroup, own)), default=None)


def memory_left_bytes(cgroup: str = CGROUP, own: str = OWN_CGROUP) -> int | None:
    """Returns how much more memory the limits of this process's cgroup and its ancestors allow; None if there is no limit."""
    return min((max(0, limit - used) for limit, used in _memory_limits(cgroup, own)), default=None)


def _memory_limits(cgroup: str, own: str) -> Iterator[tuple[int, int]]:
    """Yields (limit, used) in bytes for each cgroup with a memory limit. Cached files not read lately do not count as used."""
    for folder in folders(cgroup, own, "memory"):
        for limit_file, used_file, idle in MEMORY_FILES:
            limit, used, stat = (read(os.path.join(folder, name)) for name in (limit_file, used_file, "memory.stat"))
            if limit.isdigit() and int(limit) < 2**60:  # cgroup v1 writes a huge number for "no limit"
                found = re.search(rf"^{idle} (\d+)$", stat, re.MULTILINE)
                yield int(limit), max(0, int(used if used.isdigit() else 0) - int(found[1] if found else 0))


def cpu_model(cpuinfo: str) -> str:
    """Returns the CPU's name from the text of /proc/cpuinfo; the architecture if the text has no name, as on Arm."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts that must match for results to be comparable: CPU, cores, instruction sets, GPUs, device, torch."""
    return {
        "cpu_model": facts.get("cpu_model"),
        "num_cores": facts.get("num_cores"),
        "isa": sorted(facts.get("isa") or []),
        "gpus": sorted(str(gpu.get("name")) for gpu in facts.get("gpus") or []),
        "device_name": facts.get("device_name"),
        "torch": facts.get("torch"),
    }


def host_context(
    facts: dict[str, Any],
    baseline: RankResult | None = None,
    *,
    is_recipe: bool,
    device: str = "auto",
    is_node: bool = False,
) -> HostContext:
    """Returns the context that the knobs' rules use.

    Args:
        facts: `host_facts()`.
        baseline: rank 0's result of the baseline trial; None before that trial, when only the host's facts are known.
        is_recipe: whether a built-in recipe is tuned.
        device: `device.kind`, used only without a baseline.
        is_node: whether `facts` describe a node of a cluster. Such facts list only GPUs that trials may use, so this process's
            CUDA_VISIBLE_DEVICES is ignored. Used only without a baseline.
    """
    if baseline is None:
        visible = visible_gpus(facts["gpus"], {} if is_node else os.environ) if facts.get("gpus") else []
        has_cuda = device == "cuda" or (device == "auto" and bool(visible))
        seen: dict[str, Any] = {"device": "cuda" if has_cuda else "cpu", "has_compiler": facts.get("has_compiler", True)}
        seen["compute_capability"] = visible[0].get("compute_capability") if has_cuda and visible else None
    else:
        seen = baseline.facts
    capability = seen.get("compute_capability")
    observed = baseline.observed if baseline else {}
    num_nodes = seen.get("num_nodes")
    num_ranks = math.ceil(baseline.world_size / (num_nodes or 1)) if baseline else 1  # per machine
    return HostContext(
        num_cores=max(1, int(facts["num_cores"]) // num_ranks),
        has_cuda=seen.get("device") == "cuda",
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        cpu_isa=frozenset(seen.get("isa") or facts.get("isa") or []),
        has_compiler=bool(seen.get("has_compiler", True)),
        observed={key: value for key, value in observed.items() if isinstance(value, bool | int | float | str)},
        not_applicable=dict(baseline.applicability) if baseline else {},
        num_numa_nodes=int(seen.get("num_numa_nodes") or 1),
        num_local_ranks=int(seen.get("num_local_ranks") or 1),
        is_recipe=is_recipe,
        world_size=baseline.world_size if baseline else None,
        num_nodes=num_nodes,
        collectives=str(seen.get("collectives") or ""),
        nccl=tuple(seen["nccl"]) if seen.get("nccl") else None,
        topology=as_host_context(facts.get("topology") or {}),
    )
