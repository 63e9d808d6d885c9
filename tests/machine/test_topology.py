"""How GPUs are connected, read from a fake NVML and a fake /sys: an HGX board, PCIe cards, and unknown connections."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.machine.topology import as_host_context, topology
from tests.machine.fakes import fake_nvml, refuse

PCI = ["00000000:1B:00.0", "00000000:43:00.0", "00000001:9B:00.0"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def info(address: str) -> SimpleNamespace:
    return SimpleNamespace(busId=address.encode())


def connected(**more: object) -> SimpleNamespace:
    return fake_nvml(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetPciInfo=lambda handle: info(PCI[handle]),
        nvmlDeviceGetNvLinkState=refuse,
        **more,
    )


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    write(tmp_path / "devices/system/node/node0/cpulist", "0-15")
    write(tmp_path / "devices/system/node/node1/cpulist", "16-31")
    write(tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node", "0")
    write(tmp_path / "bus/pci/devices/0001:9b:00.0/numa_node", "1")
    write(tmp_path / "bus/pci/devices/0000:43:00.0/numa_node", "-1")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        write(tmp_path / f"class/infiniband/{name}/ports/1/state", state)
        write(tmp_path / f"class/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)")
        write(tmp_path / f"class/infiniband/{name}/ports/1/link_layer", "InfiniBand")
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "down"), ("docker0", "up"), ("ib0", "up")):
        write(tmp_path / f"class/net/{name}/operstate", state)
    return tmp_path


def test_connections_of_pcie_cards_are_read(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    levels = {(0, 1): 30, (0, 2): 50, (1, 2): 50}
    fake = connected(nvmlDeviceGetTopologyCommonAncestor=lambda one, other: levels[min(one, other), max(one, other)])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = topology(sysfs)
    assert found["links"] == [["X", "PHB", "SYS"], ["PHB", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [0, None, 1]
    assert found["gpus"][2] == {"pci": "0001:9b:00.0", "numa_node": 1, "nvlinks": 0, "nvlinks_active": 0}
    assert found["numa_nodes"] == {"0": "0-15", "1": "16-31"}
    assert [(port["name"], port["is_active"], port["rate"]) for port in found["adapters"]] == [
        ("mlx5_0", True, "400 Gb/sec (4X NDR)"),
        ("mlx5_1", False, "400 Gb/sec (4X NDR)"),
    ]
    assert found["interfaces"] == ["eth0", "ib0"]
    assert json.loads(json.dumps(found)) == found
    seen = as_host_context(found)
    assert (seen.num_gpus, seen.paths, seen.has_nvswitch) == (3, {"PHB", "SYS"}, False)
    assert (seen.adapters, seen.interfaces) == (("mlx5_0",), ("eth0", "ib0"))
    assert len(fake.shutdowns) == 1


def test_nvswitch_board_with_an_inactive_link_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def state(handle: int, link: int) -> int:
        return refuse() if link >= 18 else int((handle, link) != (1, 17))

    fake = connected(nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2)
    fake.nvmlDeviceGetNvLinkState = state
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = topology(tmp_path)
    assert found["links"] == [["X", "NV17", "NV18"], ["NV17", "X", "NV17"], ["NV18", "NV17", "X"]]
    assert found["has_nvswitch"]
    assert [(gpu["nvlinks"], gpu["nvlinks_active"]) for gpu in found["gpus"]] == [(18, 18), (18, 17), (18, 18)]
    assert as_host_context(found).paths == {"NV"}


def test_nvlink_bridge_between_two_of_three_cards_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def state(handle: int, link: int) -> int:
        return 1 if handle < 2 and link < 4 else refuse()

    fake = connected(
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 40,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: info(PCI[1 - handle]),
    )
    fake.nvmlDeviceGetNvLinkState = state
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = topology(tmp_path)
    assert found["links"] == [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]
    assert as_host_context(found).paths == {"NV", "NODE"}


def test_paths_are_unknown_if_nvml_does_not_report_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", connected())
    found = topology(tmp_path)
    assert found["links"][0] == ["X", "?", "?"]
    assert as_host_context(found).paths == frozenset()


@pytest.mark.parametrize("module", [None, fake_nvml(nvmlInit=refuse)])
def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, module: object, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = topology(tmp_path)
    assert (found["gpus"], found["links"], found["adapters"]) == ([], [], [])


def test_record_without_a_topology_has_no_gpus() -> None:
    assert as_host_context({}).num_gpus == 0
