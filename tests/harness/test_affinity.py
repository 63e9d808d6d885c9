"""Which process is bound to which cores: the plan on made-up machines, and the kernel's view on this one."""

import json
import os
import sys
from pathlib import Path

import pytest

from autotune.harness.knobs import affinity
from autotune.harness.knobs.affinity import AFFINITY, OWN_CORES, Core, part, place
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial
from tests.harness.contexts import context

# Two sockets with two cores each and two hyperthreads per core. As on Linux, the second hyperthreads get the last numbers.
TWO_SOCKETS = sorted(Core(number // 2 % 2, number // 2 % 2, number % 2, number) for number in range(8))
CORES = sorted(os.sched_getaffinity(0))


def numbers(cores: list[Core]) -> set[int]:
    return {core.number for core in cores}


def placed(value: str, rank: int, num_ranks: int, gpu_node: int | None = None) -> tuple[set[int], int]:
    cores, num_sharing, problem = place(value, TWO_SOCKETS, rank, num_ranks, gpu_node=gpu_node)
    assert not problem
    return numbers(cores), num_sharing


def test_compact_binds_each_rank_to_neighbouring_cores_with_their_hyperthreads() -> None:
    assert [placed("compact", rank, 4)[0] for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert placed("compact", 1, 2) == ({2, 3, 6, 7}, 1)


def test_numa_binds_to_the_node_of_the_gpu_or_assigns_nodes_in_turn() -> None:
    first, second = {0, 1, 4, 5}, {2, 3, 6, 7}
    assert placed("numa", 0, 1, gpu_node=1) == (second, 1)
    assert [placed("numa", rank, 3) for rank in range(3)] == [(first, 2), (second, 1), (first, 2)]


@pytest.mark.parametrize(("num_workers", "workers"), [(1, {7}), (3, {6, 3, 7}), (32, {2, 6, 3, 7})])
def test_each_worker_gets_its_own_core_up_to_half_of_all_cores(num_workers: int, workers: set[int]) -> None:
    own, others, problem = part(TWO_SOCKETS, num_workers)
    assert (numbers(others), numbers(own), problem) == (workers, set(range(8)) - workers, "")


@pytest.mark.parametrize(
    ("value", "cores", "num_ranks", "problem"),
    [
        ("none", TWO_SOCKETS, 1, ""),
        ("compact", TWO_SOCKETS, 1, affinity.ONE_RANK),
        ("compact", TWO_SOCKETS[:1], 2, affinity.TOO_FEW),
        ("numa", TWO_SOCKETS[:4], 1, affinity.ONE_NODE),
    ],
)
def test_binding_without_effect_leaves_all_cores_and_gives_the_reason(
    value: str, cores: list[Core], num_ranks: int, problem: str
) -> None:
    assert place(value, cores, 0, num_ranks, gpu_node=None) == (cores, num_ranks, problem)


def test_workers_of_an_evaluation_do_not_move_the_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setenv(affinity.CORES_VARIABLE, "")
    monkeypatch.setattr(affinity, "cores_of", lambda *_: TWO_SOCKETS)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(set(cores)))
    binder = affinity.AffinityBinder(context({OWN_CORES: True}, "cpu"))
    assert binder.workers_start(1, may_train=False) is None  # an evaluation before the training begins
    assert (binder.workers_start(4, may_train=True), bound[-1]) == ({2, 6, 3, 7}, {0, 4, 1, 5})
    bound.clear()
    assert binder.workers_start(1, may_train=False) == {2, 6, 3, 7}
    assert bound == []


def test_cores_are_not_split_without_workers_or_with_a_single_core() -> None:
    assert part(TWO_SOCKETS, 0) == (TWO_SOCKETS, TWO_SOCKETS, affinity.NO_WORKERS)
    assert part(TWO_SOCKETS[:1], 2)[2] == affinity.TOO_FEW


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_cores_in_sysfs_are_read_in_order_of_neighbourhood(tmp_path: Path) -> None:
    for node, numbers in ((0, "0-1,4-5"), (1, "2,3,6-7")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", numbers)
    for core in TWO_SOCKETS:
        topology = tmp_path / f"devices/system/cpu/cpu{core.number}/topology"
        write(topology / "physical_package_id", str(core.package))
        write(topology / "core_id", str(core.core))
    assert affinity.cores_of(str(tmp_path), frozenset(range(8))) == TWO_SOCKETS
    assert affinity.cores_of(str(tmp_path / "nothing"), frozenset({1, 0})) == [Core(0, 0, 0, 0), Core(0, 0, 0, 1)]


@pytest.mark.parametrize(
    ("visible", "rank", "node"),
    [
        (None, 0, 0),
        (None, 1, 1),
        ("1", 0, 1),
        ("GPU-aa", 0, 0),
        ("1,0", 1, 0),
        ("", 0, None),
        ("0,-1,1", 1, 0),
        ("GPU-bb", 3, 1),
        ("7", 1, None),
        (None, 2, None),
        ("7", 0, None),
    ],
)
def test_numa_node_of_the_gpu_of_a_rank_is_found_without_cuda(
    tmp_path: Path, visible: str | None, rank: int, node: int | None
) -> None:
    for node_of_it, (address, uuid) in enumerate((("0000:17:00.0", "GPU-aa"), ("0000:B3:00.0", "GPU-bb"))):
        write(tmp_path / "driver" / address / "information", f"GPU UUID: {uuid}")
        write(tmp_path / "sys/bus/pci/devices" / address.lower() / "numa_node", str(node_of_it))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    given = {"system": str(tmp_path / "sys"), "driver": str(tmp_path / "driver")}
    assert affinity.gpu_node(environment, rank, **given) == node


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1),
    ],
)
def test_numa_node_of_a_number_among_unlike_gpus_is_unknown_unless_it_counts_by_bus(
    tmp_path: Path, environment: dict[str, str], node: int | None
) -> None:
    for number, (uuid, model) in enumerate((("GPU-aa", "Tesla T4"), ("GPU-bb", "NVIDIA A100"))):
        write(tmp_path / f"driver/0000:0{number}:00.0/information", f"Model: {model}\nGPU UUID: {uuid}")
        write(tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0/numa_node", str(number))
    assert affinity.gpu_node(environment, 0, system=str(tmp_path / "sys"), driver=str(tmp_path / "driver")) == node


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")
def test_kernel_shows_workers_and_training_steps_on_separate_cores(trial: Trial) -> None:
    run = trial("workers.py", "workers=1", knobs={OWN_CORES: True}, mode="inspect", env={"OMP_NUM_THREADS": ""}, is_fresh=True)
    found = run.result()
    assert (found.knobs[OWN_CORES].status, found.knobs[OWN_CORES].observed) == (APPLIED, True)
    seen = json.loads((run.folder / "worker0.json").read_text())["cores"]
    assert len(seen) == 1
    own = sorted({*CORES} - {*seen})
    assert f"trained on cores {own} by threads {len(own)}\n" in run.stdout


@pytest.mark.thorough
@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")
def test_rank_gets_its_own_block_of_cores_even_if_its_launcher_was_bound(trial: Trial) -> None:
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", affinity.CORES_VARIABLE: ",".join(map(str, CORES))}
    bound = ["taskset", "-c", str(CORES[0]), sys.executable]
    run = trial("workers.py", argv=bound, knobs={AFFINITY: "compact"}, mode="inspect", env=environment)
    found = run.result()
    assert (found.knobs[AFFINITY].status, found.facts["num_local_ranks"]) == (APPLIED, 2)
    seen = json.loads((run.folder / "worker0.json").read_text())["cores"]
    assert len(seen) == len(CORES) - len(CORES) // 2
    assert f"trained on cores {seen} by" in run.stdout


@pytest.mark.thorough
def test_program_that_binds_itself_during_training_is_reported_as_overridden(trial: Trial) -> None:
    run = trial("workers.py", "bind=1", "workers=0", knobs={AFFINITY: "none", OWN_CORES: True}, mode="inspect", is_fresh=True)
    reports = run.result().knobs
    assert reports[AFFINITY].status == (OVERRIDDEN if len(CORES) > 1 else APPLIED)
    assert (reports[OWN_CORES].status, reports[OWN_CORES].observed) == (NOT_APPLICABLE, None)
