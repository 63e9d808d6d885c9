"""NCCL's knobs are offered if they matter for the topology, and otherwise refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.errors import BadInput
from autotune.harness.knobs import nccl as harness_nccl
from autotune.knobs.base import HostContext, Topology
from autotune.knobs.catalogue import knob
from autotune.knobs.nccl import KNOBS, VARIABLES
from autotune.space import SearchSpace, resolve
from tests.harness.contexts import context

CPU = HostContext(num_cores=2)
NETWORK = {"adapters": ("mlx5_0", "mlx5_1"), "interfaces": ("eth0", "eth1")}
HGX = Topology(num_gpus=8, paths=frozenset({"NV"}), has_nvswitch=True, **NETWORK)
PCIE = Topology(num_gpus=4, paths=frozenset({"PXB", "NODE", "SYS"}), interfaces=("eth0",))
HOPPERS = HostContext(
    num_cores=64, has_cuda=True, compute_capability=(9, 0), world_size=8, num_nodes=1, collectives="cpu:gloo,cuda:nccl",
    nccl=(2, 27, 3), topology=HGX,
)  # fmt: skip
TWO_NODES = replace(HOPPERS, world_size=16, num_nodes=2)
CARDS = replace(HOPPERS, compute_capability=(8, 9), world_size=4, topology=PCIE)
EVERYWHERE = {"nccl.algo", "nccl.proto", "nccl.min_nchannels", "nccl.max_nchannels", "nccl.nthreads", "nccl.buffsize"}


def offered(machine: HostContext) -> set[str]:
    return {found.key for found in KNOBS if found.blocked(machine) is None}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, set()),
        (replace(HOPPERS, world_size=1), set()),
        (replace(HOPPERS, collectives="cpu:gloo,cuda:gloo"), set()),
        (HOPPERS, EVERYWHERE | {"nccl.nvls"}),
        (CARDS, EVERYWHERE | {"nccl.p2p_level"}),
        (TWO_NODES, {*VARIABLES} - {"nccl.p2p_level"}),
        (replace(CARDS, num_nodes=2, world_size=8), EVERYWHERE | {"nccl.p2p_level"}),
        (replace(HOPPERS, topology=Topology()), EVERYWHERE),  # NVML does not report the topology
        (replace(HOPPERS, world_size=None, num_nodes=None, collectives=""), {*VARIABLES} - {"nccl.p2p_level"}),
    ],
)
def test_knob_is_offered_only_if_it_matters_for_the_topology(machine: HostContext, expected: set[str]) -> None:
    assert offered(machine) == expected


@pytest.mark.parametrize(
    ("key", "machine", "reason"),
    [
        ("nccl.algo", CPU, "no CUDA device"),
        ("nccl.algo", replace(HOPPERS, world_size=1), "one process trains"),
        ("nccl.algo", replace(HOPPERS, collectives="gloo"), "communicate through gloo"),
        ("nccl.algo", replace(HOPPERS, world_size=None, topology=Topology(num_gpus=1)), "only one GPU is seen"),
        ("nccl.p2p_level", HOPPERS, "all GPUs are connected by NVLink"),
        ("nccl.p2p_level", replace(CARDS, topology=replace(PCIE, num_gpus=1)), "fewer than two GPUs"),
        ("nccl.p2p_level", replace(CARDS, topology=replace(PCIE, paths=frozenset())), "not known"),
        ("nccl.nvls", CARDS, "no NVSwitch"),
        ("nccl.nvls", replace(HOPPERS, compute_capability=(8, 0)), "compute capability 8.0: this setting needs 9.0"),
        ("nccl.ib_disable", HOPPERS, "one machine"),
        ("nccl.ib_disable", replace(TWO_NODES, topology=PCIE), "no InfiniBand"),
        ("nccl.ib_hca", replace(TWO_NODES, topology=replace(HGX, adapters=("mlx5_0",))), r"one adapter (mlx5_0)"),
        ("nccl.socket_ifname", replace(TWO_NODES, topology=PCIE), "one network interface (eth0)"),
        ("nccl.cross_nic", replace(TWO_NODES, topology=PCIE), "one network adapter"),
    ],
)
def test_knob_that_cannot_matter_is_blocked_with_a_reason(key: str, machine: HostContext, reason: str) -> None:
    assert reason in str(knob(key).blocked(machine))


def test_values_for_an_older_nccl_do_not_name_collectives() -> None:
    algo = knob("nccl.algo").domain
    assert algo(HOPPERS) == ["allreduce:ring", "allreduce:tree", "allreduce:nvls"]
    assert algo(TWO_NODES) == ["allreduce:ring", "allreduce:tree", "allreduce:nvlstree"]
    assert algo(CARDS) == ["allreduce:ring", "allreduce:tree"]
    assert algo(replace(HOPPERS, nccl=(2, 21, 5))) == ["Ring", "Tree", "NVLS"]


def test_each_p2p_level_includes_further_pairs_of_gpus() -> None:
    assert knob("nccl.p2p_level").domain(CARDS) == ["LOC", "PXB", "PHB", "SYS"]


def test_domains_name_the_adapters_and_interfaces_of_the_machine() -> None:
    assert knob("nccl.ib_hca").domain(TWO_NODES) == ["=mlx5_0", "=mlx5_1", "=mlx5_0,mlx5_1"]
    assert knob("nccl.socket_ifname").domain(TWO_NODES) == ["=eth0", "=eth1"]


def test_each_knob_sets_one_variable_that_harness_and_tuner_agree_on() -> None:
    assert {found.key for found in KNOBS} == {*VARIABLES}
    assert harness_nccl.VARIABLES == VARIABLES
    machine = replace(TWO_NODES, topology=replace(HGX, paths=frozenset({"NV", "SYS"})))
    for found in KNOBS:
        for value in found.domain(machine):
            assert list(found.environment(value)) == [VARIABLES[found.key]]
    assert knob("nccl.nvls").environment(False) == {"NCCL_NVLS_ENABLE": "0"}
    assert knob("nccl.cross_nic").environment(0) == {"NCCL_CROSS_NIC": "0"}
    assert knob("nccl.algo").environment("auto") == {}
    assert knob("nccl.nthreads").environment(0) == {}


def test_variable_of_an_nccl_knob_is_refused_as_an_env_knob() -> None:
    for key, variable in VARIABLES.items():
        with pytest.raises(BadInput, match=f"Use {key}, which is this variable"):
            knob(f"env.{variable}")
    assert knob("env.NCCL_DEBUG")


def test_value_that_the_user_has_set_is_the_baseline() -> None:
    machine = replace(HOPPERS, observed={"nccl.algo": "^tree", "nccl.nthreads": 256})
    space = resolve(SearchSpace(domains={"nccl.algo": None, "nccl.nthreads": None}), machine, passed={})
    assert space.baseline == {"nccl.algo": "^tree", "nccl.nthreads": 256}
    assert space.domains["nccl.algo"].contains("^tree")
    assert not space.domains["nccl.algo"].contains("auto")
    assert not space.domains["nccl.nthreads"].contains(0)


def test_minimum_of_channels_above_the_maximum_is_inactive() -> None:
    is_active = knob("nccl.min_nchannels").is_active
    assert is_active({})
    assert is_active({"nccl.min_nchannels": 8, "nccl.max_nchannels": 0})
    assert is_active({"nccl.min_nchannels": 8, "nccl.max_nchannels": 8})
    assert not is_active({"nccl.min_nchannels": 8, "nccl.max_nchannels": 4})


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_process_reports_only_the_variables_that_are_set(no_variables: pytest.MonkeyPatch) -> None:
    assert harness_nccl.NcclKnobs(context()).observe() == {}
    no_variables.setenv("NCCL_NVLS_ENABLE", "2")
    no_variables.setenv("NCCL_CROSS_NIC", "0")
    no_variables.setenv("NCCL_IB_HCA", "^=mlx5_3")
    assert harness_nccl.NcclKnobs(context()).observe() == {"nccl.nvls": True, "nccl.cross_nic": 0, "nccl.ib_hca": "^=mlx5_3"}


@pytest.mark.parametrize(
    ("asked", "variable", "status"),
    [
        ({"nccl.algo": "Ring"}, "Ring", "applied"),
        ({"nccl.algo": "Ring"}, "Tree", "overridden by the program"),
        ({"nccl.algo": "Ring"}, None, "overridden by the program"),
        ({"nccl.algo": "auto"}, None, "applied"),
        ({"nccl.algo": "auto"}, "Ring", "overridden by the program"),
    ],
)
def test_value_that_is_not_in_the_variable_is_reported_as_overridden(
    no_variables: pytest.MonkeyPatch, asked: dict[str, str], variable: str | None, status: str
) -> None:
    if variable:
        no_variables.setenv("NCCL_ALGO", variable)
    report = harness_nccl.NcclKnobs(context(asked)).verify()["nccl.algo"]
    assert report.status == status
    assert ("NCCL_ALGO" in report.reason) == (status != "applied")


def test_number_that_leaves_the_choice_to_nccl_is_called_auto():
    assert [knob("nccl.buffsize").phrase_of(value) for value in (0, 1 << 20)] == ["NCCL buffsize auto", "NCCL buffsize 1048576"]
    assert knob("nccl.nvls").phrase_of(False) == "NCCL nvls false"
