"""Makes the findings about the host: cores, memory, limits, kernel settings."""

from __future__ import annotations

import functools
from typing import Any

from autotune.machine.checks.finding import Finding, Status
from autotune.machine.probes.engines import NOT_AN_ADDRESS
from autotune.quantities import bytes_text, number_text

_finding = functools.partial(Finding, "host")
GIB = 1 << 30
# Less free shared memory than this gives a warning, since loader workers pass whole batches through it. A container of Docker
# has 64 MiB by default.
SHARED_MEMORY_BYTES = GIB
# A limit of open files below this gives a warning: torch's loaders pass tensors as open files, and a few workers that
# prefetch many tensors exhaust the usual 1,024.
OPEN_FILES = 4096
# If more swap than this is in use, memory was short at some time. A smaller amount does not show that, because the kernel swaps
# some memory out even while memory is free.
SWAP_BYTES = 256 << 20


def check_host(found: dict[str, Any], problem: str = "") -> list[Finding]:
    """Returns the findings about the host from the host probe's document. `problem`: why there is no document, or ""."""
    if problem:
        return [_finding("host", f"the host could not be examined: {problem}", Status.skipped)]
    return [
        _cores(found),
        _finding("memory", f"{bytes_text(found['memory_bytes'])}, {bytes_text(found['available_bytes'])} of it free"),
        _swap(found),
        _shared_memory(found.get("shared_memory")),
        _memlock(found),
        _open_files(found),
        _huge_pages(found.get("huge_pages") or ""),
        _slurm(found.get("slurm")),
        _ray(found.get("ray")),
    ]


def _cores(found: dict[str, Any]) -> Finding:
    cores, cpus, affine, quota = (found[name] for name in ("num_cores", "num_cpus", "num_affine", "quota_cores"))
    text = f"{cores} effective"
    if quota is not None and quota < affine:
        text += f": the cgroup's quota is {number_text(quota)} of {affine} CPUs"
        if "OMP_NUM_THREADS" in found["variables"]:  # the user has already limited the threads
            return _finding("cores", text)
        cost = "torch starts as many threads as there are CPUs, and the quota throttles all of them"
        return _finding("cores", text, Status.warning, cost, f"export OMP_NUM_THREADS={cores}   # or tune threads.intra")
    if affine < cpus:
        text += f": this shell may run on {affine} of {cpus} CPUs"
    return _finding("cores", text)


def _swap(found: dict[str, Any]) -> Finding:
    used, total = found["swap_used_bytes"], found["swap_bytes"]
    if not total:
        return _finding("swap", "none")
    text = f"{bytes_text(used)} of {bytes_text(total)} in use"
    if used < SWAP_BYTES:
        return _finding("swap", text)
    cost = "swapped-out memory is read back from the disk in the middle of a step"
    return _finding("swap", text, Status.warning, cost, "sudo swapoff -a && sudo swapon -a   # once enough memory is free")


def _shared_memory(found: dict[str, Any] | None) -> Finding:
    name, command = "shared memory", "docker run --shm-size=8g ...   # or: sudo mount -o remount,size=8G /dev/shm"
    if not found or not found["is_writable"]:
        text = "no /dev/shm" if not found else "/dev/shm cannot be written by this user"
        cost = "loader workers cannot hand over a batch: every num_workers above 0 fails"
        return _finding(name, text, Status.error, cost, command if not found else "sudo chmod 1777 /dev/shm")
    text = f"/dev/shm {bytes_text(found['bytes'])}, {bytes_text(found['free_bytes'])} free"
    if found["free_bytes"] >= SHARED_MEMORY_BYTES:
        return _finding(name, text)
    cost = "loader workers hand batches over through it: when it is full, they end with a bus error"
    is_full = found["bytes"] >= SHARED_MEMORY_BYTES
    return _finding(name, text, Status.warning, cost, "ls -lS /dev/shm   # leftover files" if is_full else command)


def _memlock(found: dict[str, Any]) -> Finding:
    limit = found["memlock_bytes"]
    if limit is None:
        return _finding("locked memory", "unlimited")
    text = f"{bytes_text(limit)} at most"
    if not found.get("adapters"):
        return _finding("locked memory", f"{text}, enough without InfiniBand")
    cost = "InfiniBand locks what it transfers: NCCL fails to register its buffers, or falls back to TCP"
    command = "ulimit -l unlimited   # in a container: docker run --ulimit memlock=-1 ..."
    return _finding("locked memory", text, Status.warning, cost, command)


def _open_files(found: dict[str, Any]) -> Finding:
    soft, hard = found["open_files"], found["max_open_files"]
    if soft is None or soft >= OPEN_FILES:
        return _finding("open files", "unlimited" if soft is None else f"{soft:,} at most")
    cost = "every tensor that a loader worker hands over is an open file: 'Too many open files' ends the program"
    can_raise = hard is None or hard >= OPEN_FILES
    if can_raise:
        cost += "; autotune raises the limit for trials, but not for your own runs"
    command = f"ulimit -n {min(hard or 65_536, 65_536)}" if can_raise else "sudo prlimit --pid $$ --nofile=65536"
    return _finding("open files", f"{soft:,} at most", Status.warning, cost, command)


def _huge_pages(setting: str) -> Finding:
    name = "huge pages"
    if not setting:
        return _finding(name, "the kernel has none", Status.skipped)
    if setting != "never":
        return _finding(name, f"transparent huge pages: {setting}")
    cost = "training on a CPU uses 4 KiB pages even for large tensors; training on a GPU is not affected"
    command = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return _finding(name, "transparent huge pages are off", Status.warning, cost, command)


def _slurm(found: dict[str, Any] | None) -> Finding:
    """Returns the finding about the engine of launcher=slurm."""
    if found is None:
        return _finding("Slurm", "not installed", Status.skipped)
    if problem := found["problem"]:
        text, cost = f"installed, but its controller does not answer ({problem})", "launcher=slurm does not work"
        return _finding("Slurm", text, Status.warning, cost, "scontrol ping")
    return _finding("Slurm", f"its controller answers; partitions: {', '.join(found['partitions']) or 'none'}")


def _ray(found: dict[str, Any] | None) -> Finding:
    """Returns the finding about the engine of launcher=ray."""
    if found is None:
        return _finding("Ray", "not installed", Status.skipped)
    version, address = found["version"], found["address"]
    if not address:
        return _finding("Ray", f"{version}, no cluster runs here", Status.skipped)
    if (problem := found["problem"]) == NOT_AN_ADDRESS:
        text, cost = f"{version}, but RAY_ADDRESS={address} is {problem}", "launcher=ray refuses this address"
        return _finding("Ray", text, Status.warning, cost, "unset RAY_ADDRESS   # or: export RAY_ADDRESS=HOST:PORT")
    if problem:
        text, cost = f"{version}, but the cluster at {address} does not answer ({problem})", "launcher=ray does not work"
        return _finding("Ray", text, Status.warning, cost, "ray status   # or: unset RAY_ADDRESS")
    return _finding("Ray", f"{version}, its cluster at {address} answers")
