"""Finds how this machine's GPUs, CPUs and networks are connected, by asking NVML and the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.harness.cores import read
from autotune.knobs.base import Topology
from autotune.machine.nvml import Nvml, session, text_of

SYS = Path("/sys")
SELF, NVLINK, UNKNOWN = "X", "NV", "?"  # how the table of paths shows a GPU itself, NVLinks ("NV4" for four) and unknown paths
# NVML's distance between two GPUs (nvml.h, nvmlGpuTopologyLevel_t) -> its name in `nvidia-smi topo -m`.
PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
LEGEND = {
    "NV": "# NVLinks", "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "host bridges of one NUMA node", "SYS": "the link between NUMA nodes", "?": "not known",
}  # fmt: skip
MAX_NVLINKS = 36  # NVML_NVLINK_MAX_LINKS of nvml.h; for the higher numbers, older drivers return an error
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
ACTIVE = "ACTIVE"  # in the state of a port, "4: ACTIVE"
# Prefixes of interfaces that do not lead to another machine: loopback, containers, bridges, tunnels.
LOCAL_INTERFACES = ("lo", "docker", "veth", "br-", "virbr", "ifb", "dummy", "tun", "tap", "cni", "flannel", "cali", "kube")


def topology(sys: Path = SYS) -> dict[str, Any]:
    """Returns how the parts of this machine are connected, as values that JSON can hold.

    Returns:
        "gpus": a list of {"pci", "numa_node" (None if unknown), "nvlinks" (how many), "nvlinks_active" (how many are up)};
        "links": the table of paths between GPUs that `nvidia-smi topo -m` shows; "has_nvswitch": whether any GPU has an active
        NVLink to an NVSwitch;
        "adapters": InfiniBand and RoCE ports, each {"name", "port", "is_active", "state", "rate", "layer"};
        "interfaces": see `interfaces`; "numa_nodes": see `numa_nodes`.
    """
    with session() as nvml:
        found = _gpus(nvml, sys)
    return {**found, "adapters": adapters(sys), "interfaces": interfaces(sys), "numa_nodes": numa_nodes(sys)}


def as_host_context(found: Mapping[str, Any]) -> Topology:
    """Returns the part of `found`, a result of `topology()`, that knobs use. Older records have {}: nothing is known."""
    links = found.get("links") or []
    paths = {path for row, line in enumerate(links) for column, path in enumerate(line) if column != row}
    return Topology(
        num_gpus=len(found.get("gpus") or []),
        paths=frozenset(NVLINK if path.startswith(NVLINK) else path for path in paths if path != UNKNOWN),
        has_nvswitch=bool(found.get("has_nvswitch")),
        adapters=tuple(dict.fromkeys(port["name"] for port in found.get("adapters") or [] if port.get("is_active"))),
        interfaces=tuple(found.get("interfaces") or []),
    )


def adapters(sys: Path = SYS) -> list[dict[str, Any]]:
    """Returns the ports of the InfiniBand and RoCE adapters known to the kernel; see `topology` for the keys."""
    found = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        state = read(port / "state")
        found.append(
            {
                "name": port.parents[1].name,
                "port": port.name,
                "is_active": ACTIVE in state,
                "state": state.partition(": ")[2] or state,
                "rate": read(port / "rate"),
                "layer": read(port / "link_layer"),
            }
        )
    return found


def interfaces(sys: Path = SYS) -> list[str]:
    """Returns the network interfaces that are up and may lead to another machine."""
    found = sorted(path.name for path in sys.glob("class/net/*") if not path.name.startswith(LOCAL_INTERFACES))
    return [name for name in found if read(sys / "class/net" / name / "operstate") in ("up", "unknown")]


def numa_nodes(sys: Path = SYS) -> dict[str, str]:
    """Returns {number of a NUMA node: its CPUs in the kernel's format}, such as {"0": "0-15,32-47"}."""
    return {path.name.removeprefix("node"): read(path / "cpulist") for path in sys.glob("devices/system/node/node[0-9]*")}


def _gpus(nvml: Nvml, sys: Path) -> dict[str, Any]:
    handles = nvml.handles()
    pcis = [_pci(nvml.ask("nvmlDeviceGetPciInfo", handle)) for handle in handles]
    nvlinks = [_nvlinks(nvml, handle) for handle in handles]
    gpus = [
        {
            "pci": pci,
            "numa_node": _numa_node(sys / "bus/pci/devices" / pci),
            "nvlinks": len(links),
            "nvlinks_active": sum(is_active for is_active, _ in links),
        }
        for pci, links in zip(pcis, nvlinks, strict=True)
    ]
    ends = [[end for is_active, end in links if is_active] for links in nvlinks]
    paths = [
        [SELF if one == other else _path(nvml, handles, one, other, ends, pcis) for other in range(len(handles))]
        for one in range(len(handles))
    ]
    return {"gpus": gpus, "links": paths, "has_nvswitch": any(SWITCH in of_one for of_one in ends)}


def _nvlinks(nvml: Nvml, handle: Any) -> list[tuple[bool, int | str]]:
    """Returns for each NVLink of a GPU (whether it is active, its other end: SWITCH, or a PCI address, "" if unknown)."""
    found: list[tuple[bool, int | str]] = []
    for link in range(MAX_NVLINKS):
        if (state := nvml.ask("nvmlDeviceGetNvLinkState", handle, link)) is None:
            continue
        if nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == SWITCH:
            found.append((bool(state), SWITCH))
        else:
            found.append((bool(state), _pci(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)) if state else ""))
    return found


def _path(nvml: Nvml, handles: list[Any], one: int, other: int, ends: list[list[int | str]], pcis: list[str]) -> str:
    """Returns the path between two GPUs, such as "NV4" or "PIX". `ends`: what the active NVLinks of each GPU lead to."""
    direct = sum(end == pcis[other] for end in ends[one]) if pcis[other] else 0
    through_switches = min(ends[one].count(SWITCH), ends[other].count(SWITCH))
    if count := direct or through_switches:
        return f"{NVLINK}{count}"
    return PATHS.get(nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other]), UNKNOWN)


def _pci(info: Any) -> str:
    """Returns a PCI address in the kernel's format, "0000:1b:00.0", from NVML's "00000000:1B:00.0"; "" if unknown."""
    domain, _, rest = (text_of(getattr(info, "busId", None)) or "").lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return ""


def _numa_node(device: Path) -> int | None:
    text = read(device / "numa_node")
    return int(text) if text.isdigit() else None  # the file has -1 if the firmware does not report the node
