import sys
from types import SimpleNamespace

import pytest

from autotune.config.schema import DeviceOptions, LaunchOptions, MeasureOptions, StudyConfig
from autotune.harness.protocol import RankResult
from autotune.study import loop, proposals
from autotune.trials import launching
from autotune.trials.launching import meaningful
from autotune.trials.settings import (
    deadlines,
    device_environment,
    memory_cap_bytes,
    memory_of_process_bytes,
    process_environment,
)
from tests.machine.fakes import FakeNvml, refuse
from tests.study.conftest import RATES

HOST = {"memory_bytes": 2**34, "gpus": []}


@pytest.mark.parametrize(("limit", "expected"), [(None, None), (0.5, 2**33), ("8GiB", 2**33)])
def test_memory_cap_is_given_in_bytes_or_as_a_fraction_of_the_memory(limit, expected):
    assert memory_cap_bytes(DeviceOptions(memory_limit=limit), HOST) == expected


def test_memory_fraction_refers_to_the_gpu_if_there_is_one():
    machine = {"memory_bytes": 2**34, "gpus": [{"memory_bytes": 2**36}]}
    assert memory_cap_bytes(DeviceOptions(memory_limit=0.5), machine) == 2**35


@pytest.mark.parametrize(("kind", "gpu"), [("cpu", {"memory_bytes": 2**36}), ("auto", {"memory_bytes": None}), ("auto", {})])
def test_memory_fraction_refers_to_the_host_if_training_uses_its_memory(kind, gpu):
    machine = {"memory_bytes": 2**34, "gpus": [gpu]}  # a GPU that shares the host's memory reports no size
    assert memory_cap_bytes(DeviceOptions(kind=kind, memory_limit=0.5), machine) == 2**33


@pytest.mark.parametrize(
    ("visible", "index", "expected"), [(None, 1, 2**35), ("1,0", 0, 2**35), ("1,0", 1, 2**33), ("MIG-1", 0, 2**33)]
)
def test_memory_fraction_refers_to_the_selected_gpu(visible, index, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = {"memory_bytes": 2**40, "gpus": [{"memory_bytes": 2**34}, {"memory_bytes": 2**36}]}
    assert memory_cap_bytes(DeviceOptions(index=index, memory_limit=0.5), machine) == expected


@pytest.mark.parametrize(
    ("visible", "index", "expected"), [(None, 0, 2**35), ("0", 0, 2**35), (None, 1, 2**35), ("0,1", 1, 2**33)]
)
def test_memory_fraction_among_unlike_gpus_refers_to_the_one_that_cuda_selects(visible, index, expected, monkeypatch):
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [{"memory_bytes": 2**34, "cuda_number": 1}, {"memory_bytes": 2**36, "cuda_number": 0}]
    assert memory_cap_bytes(DeviceOptions(index=index, memory_limit=0.5), {"memory_bytes": 2**40, "gpus": gpus}) == expected


@pytest.mark.parametrize(("known", "expected"), [("MIG-1", 2**32), ("MIG-2", 2**33)])
def test_memory_fraction_refers_to_a_mig_slice_if_nvml_knows_it(known, expected, monkeypatch):
    def handle_of(uuid):
        return uuid if uuid == known else refuse()

    memory = SimpleNamespace(total=2**33)
    nvml = FakeNvml(nvmlDeviceGetCount=1, nvmlDeviceGetHandleByUUID=handle_of, nvmlDeviceGetMemoryInfo=memory)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    machine = {"memory_bytes": 2**40, "gpus": [{"memory_bytes": 2**34}]}
    assert memory_cap_bytes(DeviceOptions(memory_limit=0.5), machine) == expected


def test_program_sees_only_the_configured_device():
    assert device_environment(DeviceOptions(kind="cpu")) == {"CUDA_VISIBLE_DEVICES": ""}
    assert device_environment(DeviceOptions(kind="cuda", index=2)) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert device_environment(DeviceOptions()) == {}


def test_each_process_has_its_own_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert device_environment(DeviceOptions(index=1), nproc=2) == {"CUDA_VISIBLE_DEVICES": "5,6"}
    for hidden, left in (("", ""), ("0,-1,1", ""), ("0,1,-1,2", "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device_environment(DeviceOptions(index=1)) == {"CUDA_VISIBLE_DEVICES": left}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_environment(DeviceOptions(index=1), nproc=3) == {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert device_environment(DeviceOptions(), nproc=4) == {}


@pytest.mark.parametrize(
    ("names", "given", "order"),
    [
        (("Tesla T4", "NVIDIA A100"), {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("NVIDIA A100", "NVIDIA A100"), {}, {}),
        (("Tesla T4", "NVIDIA A100"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {}),
        (("Tesla T4", "NVIDIA A100"), {"CUDA_VISIBLE_DEVICES": "0,1"}, {}),  # the user's numbers follow CUDA's order
    ],
)
def test_device_index_among_different_gpus_follows_the_pci_bus_order(monkeypatch, names, given, order):
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    gpus = [{"name": name} for name in names]
    assert device_environment(DeviceOptions(index=1), gpus=gpus) == {"CUDA_VISIBLE_DEVICES": "1", **order}
    assert device_environment(DeviceOptions(), gpus=gpus) == {}


@pytest.mark.parametrize(("nproc", "threads"), [(1, None), (2, "4"), (3, "2"), (16, "1")])
def test_processes_divide_the_cores_unless_the_user_sets_omp_num_threads(nproc, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = StudyConfig(launch=LaunchOptions(nproc=nproc), device=DeviceOptions(kind="cpu"))
    assert process_environment(config, {"num_cores": 8}).get("OMP_NUM_THREADS") == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in process_environment(config, {"num_cores": 8})


def test_phase_limits_come_from_the_configuration():
    found = deadlines(MeasureOptions(start_s=1, compile_s=2, step_s=3), max_s=4.0)
    assert (found.start_s, found.compile_s, found.step_s, found.total_s) == (1, 2, 3, 4.0)
    assert deadlines(MeasureOptions(), max_s=None).total_s >= 3600


@pytest.mark.parametrize(
    ("known", "is_kept"),
    [({}, True), ({"loader.num_workers": 2}, True), ({"loader.num_workers": 0}, False), ({"precision.amp": "bf16"}, True)],
)
def test_pinned_knob_is_left_out_only_if_it_is_known_to_have_no_effect(known, is_kept):
    pinned = {"loader.prefetch_factor": 4}
    assert meaningful(pinned, {**pinned, **known}) == (pinned if is_kept else {})


@pytest.mark.parametrize(
    ("kind", "gpus", "visible", "expected"),
    [
        ("auto", [{}], None, "cuda"),
        ("auto", [{}], "", "auto"),
        ("auto", [], None, "auto"),
        ("cpu", [{}], None, "cpu"),
        ("cuda", [], None, "cuda"),
    ],
)
def test_memory_limit_applies_to_the_gpu_if_there_is_one(kind, gpus, visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launching._kind(kind, {"gpus": gpus}, is_here=True) == expected


def test_memory_limit_applies_to_the_gpu_of_a_node_even_if_a_login_node_hides_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launching._kind("auto", {"gpus": [{}]}, is_here=False) == "cuda"


@pytest.mark.parametrize(
    ("memory", "ranks", "limit", "pinned", "expected"),
    [
        ({"kind": "cpu"}, (4, 1), None, {}, 2**32),  # as in `Goal`, which adds up what the ranks use
        ({"kind": "cpu"}, (8, 2), None, {}, 2**32),  # four on each machine
        ({"kind": "cpu"}, (4, 1), "8GiB", {}, 2**32),  # a limit of each process; together, they have no more than the host
        ({"kind": "cpu"}, (4, 1), "1GiB", {}, 2**30),
        ({"kind": "cpu", "capacity_bytes": 2**31}, (4, 1), None, {}, 2**31),
        ({"kind": "cuda", "capacity_bytes": 2**36}, (4, 1), None, {}, 2**36),  # each rank has its GPU
        ({"kind": "cuda", "capacity_bytes": 2**36}, (1, 1), None, {"memory.fraction": 0.5}, 2**35),
        ({"kind": "cuda", "capacity_bytes": 2**36}, (1, 1), "8GiB", {"memory.fraction": 0.5}, 2**33),
    ],
)
def test_memory_of_a_process_is_its_share_of_the_host_or_the_gpu(memory, ranks, limit, pinned, expected):
    num_ranks, num_nodes = ranks
    first = RankResult(0, "", 0, num_ranks, 1, "measured", unit="samples", memory=memory, facts={"num_nodes": num_nodes})
    config, space = StudyConfig(device=DeviceOptions(memory_limit=limit)), SimpleNamespace(pinned=pinned)
    assert memory_of_process_bytes(SimpleNamespace(config=config, machine=HOST, space=space), first) == expected


def test_forecast_of_memory_uses_the_memory_of_a_process(bench, monkeypatch):
    seen, made = [], proposals.machine_of
    monkeypatch.setattr(loop, "memory_of_process_bytes", lambda inputs, first: 2**32)
    monkeypatch.setattr(proposals, "machine_of", lambda session: seen.append(session.memory_capacity_bytes) or made(session))
    bench(None, RATES, "study.budget.trials=1", minutes=60).run()
    assert seen == [2**32]
