"""Makes the findings about connections: between GPUs, to other machines, between CPUs and GPUs."""

from __future__ import annotations

import functools
from typing import Any

from autotune.harness.cores import numbers_of
from autotune.machine.checks.finding import Finding, Status, gpus_text
from autotune.machine.topology import LEGEND, NVLINK, SELF

_finding = functools.partial(Finding, "connections")


def check_connections(gpus: dict[str, Any], host: dict[str, Any]) -> list[Finding]:
    """Returns the findings about connections.

    Args:
        gpus: the GPU probe's document; {} if there is none.
        host: the host probe's document; {} if there is none.
    """
    topology = gpus.get("topology") or {}
    devices = topology.get("gpus") or []
    return [
        *([_paths(topology["links"])] if len(devices) > 1 else []),
        *([_nvlink(devices)] if any(gpu["nvlinks"] for gpu in devices) else []),
        _infiniband(host.get("adapters") or []),
        _numa(host, devices),
    ]


def matrix(links: list[list[str]]) -> list[list[str]]:
    """Returns a table of paths (`topology()["links"]`) with names of rows and columns, as `nvidia-smi topo -m` shows it."""
    names = [f"GPU{index}" for index in range(len(links))]
    return [["", *names], *([name, *row] for name, row in zip(names, links, strict=True))]


def legend(links: list[list[str]]) -> str:
    """Returns what the paths in a table mean: "NV#: # NVLinks, SYS: the link between NUMA nodes"."""
    there = dict.fromkeys(path for row in links for path in row if path != SELF)
    kinds = dict.fromkeys(NVLINK if path.startswith(NVLINK) else path for path in there)
    return ", ".join(f"{kind if kind != NVLINK else 'NV#'}: {LEGEND[kind]}" for kind in kinds)


def _paths(links: list[list[str]]) -> Finding:
    kinds = list(dict.fromkeys(path for row in links for path in row if path != SELF))
    if kinds == ["?"]:
        return _finding("topology", "not known: NVML does not report how the GPUs are connected", Status.skipped)
    how = f"all connected by {kinds[0]}" if len(kinds) == 1 else f"connected by {' or '.join(kinds)}, depending on the pair"
    return _finding("topology", f"{len(links)} GPUs, {how}")


def _nvlink(devices: list[dict[str, Any]]) -> Finding:
    most = max(gpu["nvlinks_active"] for gpu in devices)
    fewer = [index for index, gpu in enumerate(devices) if gpu["nvlinks_active"] < most]
    if not most:
        return _finding("NVLink", "no link is connected: transfers go over PCIe", Status.skipped)
    if fewer:
        counts = ", ".join(f"{devices[index]['nvlinks_active']} of {devices[index]['nvlinks']}" for index in fewer)
        text = f"{gpus_text(fewer)}: {counts} links active, {most} on the others"
        cost = "collectives go at the pace of the GPU with the fewest links (a GPU without an NVLink bridge has none)"
        return _finding("NVLink", text, Status.warning, cost, f"nvidia-smi nvlink --status -i {','.join(map(str, fewer))}")
    return _finding("NVLink", f"{most} links active on every GPU")


def _infiniband(ports: list[dict[str, Any]]) -> Finding:
    active = [port for port in ports if port["is_active"]]
    if not ports:
        return _finding("InfiniBand", "none: other machines are reached by TCP", Status.skipped)
    if not active:
        states = ", ".join(f"{port['name']} {port['state'].lower()}" for port in ports)
        cost = "processes on several machines communicate by TCP"
        return _finding("InfiniBand", f"no port is active: {states}", Status.warning, cost, "ibstat")
    names = ", ".join(f"{port['name']} {port['rate']}" for port in active)
    return _finding("InfiniBand", f"{len(active)} of {len(ports)} ports active: {names}")


def _numa(host: dict[str, Any], devices: list[dict[str, Any]]) -> Finding:
    nodes: dict[str, str] = host.get("numa_nodes") or {}
    if not nodes:
        return _finding("NUMA", "the kernel reports no nodes", Status.skipped)
    mine = set(host.get("cpus") or [])
    where: dict[int, list[int]] = {}
    for index, gpu in enumerate(devices):
        if gpu["numa_node"] is not None:
            where.setdefault(gpu["numa_node"], []).append(index)
    places = [f"node {node} has {gpus_text(indices)}" for node, indices in sorted(where.items())]
    text = "; ".join([f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}", *(places if len(nodes) > 1 else [])])
    far = [node for node in where if str(node) in nodes and mine and mine.isdisjoint(numbers_of(nodes[str(node)]))]
    if far:
        which = gpus_text(sorted(index for node in far for index in where[node]))
        text += f"; this shell's CPU affinity excludes the CPUs next to {which}"
        cost = "loader workers and copies to those GPUs cross the link between the nodes"
        command = f"numactl --cpunodebind={far[0]} --membind={far[0]} autotune run ..."
        return _finding("NUMA", text, Status.warning, cost, command)
    return _finding("NUMA", text)
