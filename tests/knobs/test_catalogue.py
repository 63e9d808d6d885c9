"""The contract of every knob: it is documented and typed, and has a domain of allowed values on every host."""

from __future__ import annotations

import itertools

import pytest

from autotune.errors import BadInput
from autotune.knobs import malloc
from autotune.knobs.base import HostContext, Knob, Topology
from autotune.knobs.catalogue import CATALOGUE, clashes, knob
from autotune.knobs.step import tier_of
from autotune.knobs.values import value_of
from autotune.records import Tier

PROCESSOR_OR_ONE_GPU = [
    HostContext(
        num_cores=cores, has_cuda=cuda, compute_capability=(capability if cuda else None), cpu_isa=isa, is_recipe=recipe
    )
    for cores, cuda, capability, isa, recipe in itertools.product(
        (1, 2, 3, 8, 192), (False, True), ((7, 0), (8, 0), (9, 0)), (frozenset(), frozenset({"avx512_bf16"})), (False, True)
    )
]
SWITCHED = Topology(
    num_gpus=8,
    paths=frozenset({"NV"}),
    has_nvswitch=True,
    adapters=("mlx5_0", "mlx5_1"),
    interfaces=("eth0", "eth1"),
)
ON_PCIE = Topology(num_gpus=4, paths=frozenset({"PIX", "PXB", "NODE", "SYS"}), interfaces=("eth0",))
SEVERAL_GPUS = [
    HostContext(
        num_cores=12, has_cuda=True, compute_capability=(9, 0), num_numa_nodes=2, num_local_ranks=topology.num_gpus,
        world_size=nodes * topology.num_gpus, num_nodes=nodes, collectives="cpu:gloo,cuda:nccl", nccl=version,
        topology=topology,
    )
    for topology, nodes, version in itertools.product((SWITCHED, ON_PCIE), (1, 2), ((2, 21, 5), (2, 27, 3)))
]  # fmt: skip
MACHINES = [*PROCESSOR_OR_ONE_GPU, *SEVERAL_GPUS]
KNOBS = [*CATALOGUE.values(), knob("env.MALLOC_ARENA_MAX")]


@pytest.fixture(params=KNOBS, ids=lambda found: found.key)
def each(request: pytest.FixtureRequest) -> Knob:
    return request.param


def test_every_knob_is_documented(each: Knob) -> None:
    for text in (each.summary, each.helps, each.hurts, each.start_cost):
        assert text.strip()
    assert len(each.summary) > 40
    assert each.summary.endswith(".")
    assert each.helps.endswith(".")
    assert each.hurts.endswith(".")


def test_every_domain_holds_only_allowed_values_and_no_value_twice(each: Knob) -> None:
    machines = [machine for machine in MACHINES if each.blocked(machine) is None]
    assert machines
    for machine in machines:
        values = each.domain(machine)
        assert [value_of(each, value, machine) for value in values] == values
        assert len(set(map(repr, values))) == len(values)


def test_every_expert_value_is_allowed(each: Knob) -> None:
    for machine in MACHINES:
        value = each.expert(machine)
        assert value is None or value_of(each, value, machine) == value


def test_variables_set_by_a_value_are_declared_and_belong_to_one_knob(each: Knob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "installed", lambda: {"jemalloc": "/lib/libjemalloc.so.2"})
    set_by_values = {name for machine in MACHINES for value in each.domain(machine) for name in each.environment(value)}
    assert set_by_values <= {*each.variables}
    for name in each.variables:
        assert clashes([each.key, f"env.{name}", "env.OTHER"]) == [(f"env.{name}", each.key)]
        assert [other.key for other in CATALOGUE.values() if name in other.variables] == [each.key]


def test_every_reason_against_a_knob_is_a_sentence(each: Knob) -> None:
    reasons = {each.blocked(machine) for machine in MACHINES} - {None}
    assert all(len(reason) > 10 for reason in reasons)


def test_every_default_is_among_the_choices(each: Knob) -> None:
    assert not each.choices or each.default in each.choices


def test_keys_consist_of_a_group_and_a_name() -> None:
    assert all(key == found.key and key.count(".") == 1 for key, found in CATALOGUE.items())


def test_only_the_samples_per_step_change_the_training_unless_they_are_held_fixed() -> None:
    training = ["loader.batch_size", "step.accumulation"]
    assert [key for key, found in CATALOGUE.items() if found.tier is Tier.training] == training
    assert [tier_of(CATALOGUE[key], is_held=True) for key in training] == [Tier.numerics, Tier.numerics]
    assert tier_of(CATALOGUE["loader.num_workers"], is_held=True) is Tier.exact


def test_error_for_an_unknown_knob_suggests_the_nearest_key() -> None:
    with pytest.raises(BadInput, match=r"Did you mean 'loader\.num_workers'"):
        knob("loader.num_worker")
