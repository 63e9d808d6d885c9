"""Who is bound to which cores: planned on machines that are made up, seen by the kernel on this one."""

import json
import os
from pathlib import Path

import pytest

from autotune.harness import affinity
from autotune.harness.affinity import Core, plan
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial

# Two sockets of two cores of two hyperthreads, numbered as Linux does: the second hyperthreads last.
TWO_SOCKETS = sorted(Core(number // 2 % 2, number // 2 % 2, number % 2, number) for number in range(8))
NOWHERE = {"gpu_node": None, "num_workers": 0}
CORES = sorted(os.sched_getaffinity(0))


def bound(value: str, rank: int, num_ranks: int, **given: int | None) -> tuple[set[int], set[int], int]:
    found = plan(value, TWO_SOCKETS, rank, num_ranks, **{**NOWHERE, **given})  # type: ignore[arg-type]
    assert not found.problem
    return set(found.own), set(found.workers), found.num_sharing


def test_compact_gives_each_rank_neighbours_with_their_hyperthreads() -> None:
    assert [bound("compact", rank, 4)[0] for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert bound("compact", 1, 2) == ({2, 3, 6, 7}, {2, 3, 6, 7}, 1)


def test_numa_takes_the_gpu_s_node_else_one_after_the_other() -> None:
    first, second = {0, 1, 4, 5}, {2, 3, 6, 7}
    assert bound("numa", 0, 1, gpu_node=1) == (second, second, 1)
    assert [bound("numa", rank, 3) for rank in range(3)] == [(first, first, 2), (second, second, 1), (first, first, 2)]


def test_split_keeps_workers_off_the_step_s_cores_but_never_takes_more_than_half() -> None:
    assert bound("split", 0, 1, num_workers=1) == ({0, 4, 1, 5, 2, 6, 3}, {7}, 1)
    assert bound("split", 0, 1, num_workers=32)[1] == {2, 6, 3, 7}
    assert bound("split", 1, 2, num_workers=1) == ({2, 6, 3}, {7}, 1)


@pytest.mark.parametrize(
    ("value", "cores", "num_ranks", "num_workers", "problem"),
    [
        ("compact", TWO_SOCKETS, 1, 0, affinity.ONE_RANK),
        ("compact", TWO_SOCKETS[:1], 2, 0, affinity.TOO_FEW),
        ("numa", TWO_SOCKETS[:4], 1, 0, affinity.ONE_NODE),
        ("split", TWO_SOCKETS, 1, 0, affinity.NO_WORKERS),
        ("split", TWO_SOCKETS[:1], 1, 4, affinity.TOO_FEW),
    ],
)
def test_what_would_change_nothing_says_so_and_leaves_all_cores(
    value: str, cores: list[Core], num_ranks: int, num_workers: int, problem: str
) -> None:
    found = plan(value, cores, 0, num_ranks, gpu_node=None, num_workers=num_workers)
    assert (found.problem, found.own) == (problem, {core.number for core in cores})


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_kernel_s_description_is_read_in_order_of_neighbourhood(tmp_path: Path) -> None:
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
    [(None, 0, 0), (None, 1, 1), ("1", 0, 1), ("GPU-aa", 0, 0), ("1,0", 1, 0), ("", 0, None), (None, 2, None), ("7", 0, None)],
)
def test_a_rank_s_gpu_is_found_on_its_node_without_cuda(
    tmp_path: Path, visible: str | None, rank: int, node: int | None
) -> None:
    for place, (address, uuid) in enumerate((("0000:17:00.0", "GPU-aa"), ("0000:B3:00.0", "GPU-bb"))):
        write(tmp_path / "driver" / address / "information", f"GPU UUID: {uuid}")
        write(tmp_path / "sys/bus/pci/devices" / address.lower() / "numa_node", str(place))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    given = {"system": str(tmp_path / "sys"), "driver": str(tmp_path / "driver")}
    assert affinity.gpu_node(environment, rank, **given) == node


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")
def test_workers_and_step_are_seen_by_the_kernel_on_cores_of_their_own(trial: Trial) -> None:
    run = trial("workers.py", "workers=1", knobs={affinity.KEY: "split"}, mode="inspect", env={"OMP_NUM_THREADS": ""})
    found = run.result()
    assert (found.knobs[affinity.KEY].status, found.knobs[affinity.KEY].observed) == (APPLIED, "split")
    assert json.loads((run.folder / "worker0.json").read_text())["cores"] == CORES[-1:]
    assert f"trained on cores {CORES[:-1]} by threads {len(CORES) - 1}\n" in run.stdout


@pytest.mark.thorough
def test_a_program_that_binds_itself_while_it_trains_is_told(trial: Trial) -> None:
    run = trial("workers.py", "bind=1", knobs={affinity.KEY: "none"}, mode="inspect")
    assert run.result().knobs[affinity.KEY].status == (OVERRIDDEN if len(CORES) > 1 else APPLIED)


@pytest.mark.thorough
def test_ranks_get_blocks_of_their_own_though_their_agent_was_bound_before(trial: Trial) -> None:
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", affinity.CORES_VARIABLE: ",".join(map(str, CORES))}
    run = trial("workers.py", knobs={affinity.KEY: "compact"}, mode="inspect", env=environment)
    report = run.result().knobs[affinity.KEY]
    assert report.status == (APPLIED if len(CORES) > 1 else NOT_APPLICABLE)
    assert f"trained on cores {CORES[len(CORES) // 2 :]}" in run.stdout
