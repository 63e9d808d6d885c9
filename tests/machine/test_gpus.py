"""GPUs through a fake of NVML, so no GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.machine import gpus as gpus_module
from autotune.machine.gpus import cuda_uuids, gpus, has_gpu_driver
from autotune.machine.topology import topology
from autotune.machine.visible import visible_gpus
from autotune.monitors.nvml import NoDevice, open_device
from tests.machine.fakes import fake_nvml, refuse

ABLE = {"has_energy_counter": True, "has_power_reading": True}


def test_the_facts_of_a_gpu_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_nvml(nvmlDeviceGetCudaComputeCapability=(9, 0))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    known = {"name": "NVIDIA H200", "uuid": "GPU-1", "memory_bytes": 141 * 10**9, "compute_capability": [9, 0]}
    assert gpus()[1] == {**known, "driver": "580.1", **ABLE}
    assert len(fake.shutdowns) == 1


def unlike(monkeypatch: pytest.MonkeyPatch, by_cuda: list[str]) -> None:
    names = ["Tesla T4", "NVIDIA A100", "NVIDIA H200"]
    fake = fake_nvml(nvmlDeviceGetCount=3, nvmlDeviceGetName=lambda handle: names[handle])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus_module, "cuda_uuids", lambda: by_cuda)


@pytest.mark.parametrize(
    ("by_cuda", "environment", "index", "expected"),
    [
        (["GPU-2", "GPU-1", "GPU-0"], {}, 0, ["GPU-2", "GPU-1", "GPU-0"]),
        (["GPU-2", "GPU-1", "GPU-0"], {"CUDA_VISIBLE_DEVICES": "0"}, 0, ["GPU-2"]),
        (["GPU-2", "GPU-1", "GPU-0"], {"CUDA_VISIBLE_DEVICES": "2,0"}, 1, ["GPU-2"]),
        (["GPU-2", "GPU-1", "GPU-0"], {}, 1, ["GPU-1", "GPU-2"]),  # trials get CUDA_DEVICE_ORDER=PCI_BUS_ID
        (["GPU-2", "GPU-0", "GPU-1"], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 1, ["GPU-0", "GPU-1"]),
        (["GPU-2", "GPU-1", "GPU-0"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, ["GPU-0", "GPU-1", "GPU-2"]),
        (["GPU-2", "GPU-1"], {}, 0, ["GPU-2", "GPU-1", "GPU-0"]),  # CUDA does not use the first
        ([], {}, 0, ["GPU-0", "GPU-1", "GPU-2"]),  # CUDA does not answer
    ],
)
def test_unlike_gpus_have_the_numbers_that_cuda_gives_them(
    monkeypatch: pytest.MonkeyPatch, by_cuda: list[str], environment: dict[str, str], index: int, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    unlike(monkeypatch, by_cuda)
    assert [gpu["uuid"] for gpu in visible_gpus(gpus(), environment, index)] == expected


CUDA = """
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDeviceGetCount(int *num) { *num = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 7 + number; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 16 * device, 16); return 0; }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler for a fake of CUDA's driver")
@pytest.mark.parametrize(
    ("status", "expected"),
    [(0, ["GPU-70707070-7070-7070-7070-707070707070", "GPU-80808080-8080-8080-8080-808080808080"]), (100, [])],
)
def test_cuda_driver_is_asked_for_the_uuids_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, expected: list[str]
) -> None:
    (tmp_path / "cuda.c").write_text(CUDA)
    words = ["cc", "-shared", "-fPIC", f"-DSTATUS={status}", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
    subprocess.run(words, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert cuda_uuids() == expected


def test_facts_that_a_gpu_does_not_report_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetMemoryInfo=refuse, nvmlDeviceGetUUID=refuse))
    unknown = dict.fromkeys(("uuid", "memory_bytes", "compute_capability"))
    assert gpus()[0] == {"name": "NVIDIA H200", **unknown, "driver": "580.1", **ABLE}


def test_gpu_name_that_is_not_valid_text_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def garbage(_: object) -> str:
        return b"\xf8\xf8".decode()  # as nvidia-ml-py does with what version 555 of the driver returns under WSL

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetName=garbage))
    assert [(gpu["name"], gpu["uuid"]) for gpu in gpus()] == [(None, "GPU-0"), (None, "GPU-1")]


@pytest.mark.parametrize(
    ("question", "fact"),
    [("nvmlDeviceGetTotalEnergyConsumption", "has_energy_counter"), ("nvmlDeviceGetPowerUsage", "has_power_reading")],
)
def test_missing_energy_counter_or_power_reading_is_reported(monkeypatch: pytest.MonkeyPatch, question: str, fact: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{question: refuse}))
    assert [gpu[fact] for gpu in gpus()] == [False, False]


def test_gpu_divided_by_mig_has_no_energy_or_power_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetMigMode=lambda handle: [handle, 1]))
    assert [(gpu["has_energy_counter"], gpu["has_power_reading"]) for gpu in gpus()] == [(True, True), (False, False)]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{broken: refuse}))
    assert gpus() == []


def test_without_the_nvml_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == []


FOREIGN = {
    "no function of NVML": "version = '1.0'",
    "fails when it is imported": "raise ValueError('Python 2 only')",
    "ends Python when it is imported": "raise SystemExit(1)",
    "other errors": """
def nvmlInit(): pass
def nvmlShutdown(): raise OSError("gone")
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): raise ValueError("bytes are wanted")
""",
}


@pytest.mark.parametrize("body", FOREIGN.values(), ids=FOREIGN)
def test_other_packages_named_pynvml_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    (tmp_path / "pynvml.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert gpus() == []
    assert topology(tmp_path)["gpus"] == []
    for uuid in (None, "GPU-1"):
        assert type(open_device(uuid=uuid)) is NoDevice


@pytest.mark.parametrize("name", ["nvidiactl", "kfd", "dxg"])
def test_driver_is_detected_by_its_device_file(tmp_path, name):
    (tmp_path / "nvme0").touch()
    assert not has_gpu_driver(tmp_path)
    (tmp_path / name).touch()
    assert has_gpu_driver(tmp_path)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-ab1", "GPU-ab2", "GPU-c3"]),
        ("2,0", ["GPU-c3", "GPU-ab1"]),
        ("GPU-c", ["GPU-c3"]),
        ("GPU-ab,GPU-ab2", [None, "GPU-ab2"]),
        ("MIG-1,1", [None, "GPU-ab2"]),
        ("0,7,1", ["GPU-ab1"]),
        ("0,\u00b2,1", ["GPU-ab1"]),
        ("9" * 5000, []),
        ("", []),
    ],
)
def test_visible_gpus_are_those_in_cuda_visible_devices(visible: str | None, expected: list[str | None]) -> None:
    gpus = [{"uuid": uuid} for uuid in ("GPU-ab1", "GPU-ab2", "GPU-c3")]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.get("uuid") for gpu in visible_gpus(gpus, environment)] == expected
