"""Resolves the search space for a machine and a program, and samples it with Optuna.

Seeds are the initial configurations, which an expert would try first.
"""

from __future__ import annotations

from dataclasses import replace

import optuna
import pytest

from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE
from autotune.records import Tier
from autotune.space import Choice, IntInterval, ResolvedSpace, SearchSpace, resolve

CPU = HostContext(
    num_cores=2,
    cpu_isa=frozenset({"avx512_bf16"}),
    observed={"loader.batch_size": 32, "loader.num_workers": 0, "threads.intra": 2, "loader.prefetch_factor": None},
    is_recipe=True,
)
GPU = replace(CPU, num_cores=16, has_cuda=True, compute_capability=(9, 0))
EVERYTHING = SearchSpace(domains=dict.fromkeys(CATALOGUE))


@pytest.fixture(autouse=True)
def _silent() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def cpu_space(**changes: object) -> ResolvedSpace:
    return resolve(replace(EVERYTHING, **changes), CPU, passed={})


def test_every_domain_contains_the_baseline_even_if_its_value_is_unusual() -> None:
    odd = {"loader.batch_size": 37, "loader.num_workers": 5, "precision.amp": "fp16", "threads.intra": 7}
    space = resolve(EVERYTHING, replace(CPU, observed=odd), passed={})
    for key, value in odd.items():
        assert space.domains[key].contains(value)
        assert space.baseline[key] == value
    stretched = resolve(SearchSpace(domains={"loader.num_workers": IntInterval(1, 4, log=True)}), CPU, passed={})
    assert stretched.domains["loader.num_workers"] == IntInterval(0, 4, log=False)


def test_knobs_that_cannot_be_changed_are_dropped_with_a_reason() -> None:
    machine = replace(CPU, not_applicable={"layout.channels_last": "no 4-D weights"}, has_compiler=False)
    space = resolve(replace(EVERYTHING, tiers=Tier.numerics, pinned={"loader.num_workers": 1}), machine, passed={})
    assert space.dropped["layout.channels_last"] == "no 4-D weights"
    assert "no CUDA device" in space.dropped["loader.pin_memory"]
    assert "tiers=numerics" in space.dropped["loader.batch_size"]
    assert "compiler" in space.dropped["compile.mode"]
    assert space.dropped["loader.num_workers"] == "pinned"
    assert not set(space.dropped) & set(space.domains)
    assert set(space.dropped) | set(space.domains) == set(CATALOGUE)


def test_single_value_knobs_and_permanently_inactive_knobs_are_dropped() -> None:
    no_bf16 = resolve(EVERYTHING, replace(CPU, cpu_isa=frozenset()), passed={})
    assert "worth trying" in no_bf16.dropped["precision.amp"]
    without = cpu_space(pinned={"loader.num_workers": 0})
    assert "has no effect" in without.dropped["loader.prefetch_factor"]


def test_pinned_values_are_in_the_baseline_and_do_not_count_as_changes() -> None:
    space = cpu_space(pinned={"loader.num_workers": 1, "env.FOO": "1"})
    assert space.baseline["loader.num_workers"] == 1
    assert space.baseline["env.FOO"] == "1"
    assert space.baseline["loader.prefetch_factor"] == 2  # active, because the baseline has a worker
    assert space.changed(space.baseline) == {}


def test_command_line_knob_is_searched_even_if_the_harness_cannot_set_it() -> None:
    machine = replace(CPU, not_applicable={"loader.batch_size": "a batch sampler makes the batches"})
    space = resolve(EVERYTHING, machine, passed={"loader.batch_size": 24})
    assert space.baseline["loader.batch_size"] == 24
    assert space.domains["loader.batch_size"].contains(24)


def test_only_active_knobs_are_suggested() -> None:
    space = cpu_space()
    without = space.suggest(optuna.trial.FixedTrial({**first_values(space), "loader.num_workers": 0}))
    assert "loader.prefetch_factor" not in without
    with_workers = space.suggest(optuna.trial.FixedTrial({**first_values(space), "loader.num_workers": 2}))
    assert with_workers["loader.prefetch_factor"] == 2


def first_values(space: ResolvedSpace) -> dict[str, object]:
    return {key: domain.values[0] for key, domain in space.domains.items()}


def test_held_knobs_are_not_suggested_by_the_sampler() -> None:
    space = cpu_space()
    trial = optuna.create_study().ask()
    knobs = space.suggest(trial, hold={"compile.mode": "off"})
    assert knobs["compile.mode"] == "off"
    assert "compile.mode" not in trial.params


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_optuna_samples_the_space_with_the_baseline_as_a_known_trial(machine: HostContext) -> None:
    space = resolve(
        replace(EVERYTHING, domains={**EVERYTHING.domains, "loader.num_workers": IntInterval(0, 8)}), machine, passed={}
    )
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=3), direction="maximize")
    params = {key: value for key, value in space.baseline.items() if key in space.domains}
    shown = {key: space.distributions()[key] for key in params}
    study.add_trial(optuna.trial.create_trial(params=params, distributions=shown, value=1.0))
    for _ in range(12):
        trial = study.ask()
        knobs = space.suggest(trial)
        assert all(domain.contains(knobs[key]) for key, domain in space.domains.items() if key in knobs)
        assert all(knobs[key] == value for key, value in trial.params.items())
        study.tell(trial, float(len(space.changed(knobs))))


def test_changed_has_only_differing_knobs_and_tier_is_their_highest() -> None:
    space = cpu_space()
    knobs = {**space.baseline, "loader.num_workers": 1, "loader.prefetch_factor": 2, "layout.channels_last": True}
    assert space.changed(knobs) == {"loader.num_workers": 1, "layout.channels_last": True}
    assert space.tier(space.changed(knobs)) is Tier.numerics
    assert space.tier({}) is Tier.exact
    assert space.tier({"env.FOO": "1"}) is Tier.exact


@pytest.mark.parametrize("machine", [CPU, GPU, replace(CPU, cpu_isa=frozenset()), replace(CPU, num_cores=1)])
def test_seeds_are_distinct_full_configurations_inside_the_domains(machine: HostContext) -> None:
    space = resolve(EVERYTHING, machine, passed={})
    seeds = space.seeds(machine)
    assert 1 <= len(seeds) <= 5
    assert all(why for why, _ in seeds)
    for _, knobs in seeds:
        assert space.changed(knobs)
        assert all(space.domains[key].contains(value) for key, value in knobs.items() if key in space.domains)
        assert knobs == space.active(knobs)
    assert len({repr(sorted(knobs.items())) for _, knobs in seeds}) == len(seeds)


def test_first_seed_uses_bf16_if_supported_and_no_workers_on_a_cpu() -> None:
    _, first = cpu_space().seeds(CPU)[0]
    assert first["precision.amp"] == "bf16"
    assert first["layout.channels_last"] is True
    assert first["loader.num_workers"] == 0
    _, gpu = resolve(EVERYTHING, GPU, passed={}).seeds(GPU)[0]
    assert gpu["loader.num_workers"] == 8
    assert gpu["loader.pin_memory"] is True
    assert gpu["loader.batch_size"] == 32
    no_bf16 = replace(CPU, cpu_isa=frozenset({"avx512f"}))
    assert all(knobs["precision.amp"] == "off" for _, knobs in resolve(EVERYTHING, no_bf16, passed={}).seeds(no_bf16))


def test_seeds_snap_to_the_users_domains() -> None:
    domains = {"loader.num_workers": Choice((4, 6)), "optimizer.implementation": Choice(("default", "foreach"))}
    space = resolve(replace(EVERYTHING, domains=domains), GPU, passed={})
    seeds = [knobs for _, knobs in space.seeds(GPU)]
    assert {knobs["loader.num_workers"] for knobs in seeds} == {6}  # an expert would choose 8
    assert {knobs["optimizer.implementation"] for knobs in seeds} == {"default"}  # an expert would choose "fused"


def test_larger_batch_of_a_seed_is_the_next_value_of_a_coarse_domain() -> None:
    space = cpu_space(domains={"loader.batch_size": Choice((8, 32, 128, 512)), "precision.amp": Choice(("off", "bf16"))})
    assert [knobs["loader.batch_size"] for _, knobs in space.seeds(CPU)][:2] == [32, 128]


def test_a_space_without_any_knob_has_no_seeds() -> None:
    space = resolve(SearchSpace(), CPU, passed={})
    assert space.seeds(CPU) == []
    assert space.domains == {}


def test_costly_values_exclude_those_of_the_baseline() -> None:
    expected = [("compile.mode", "default"), ("compile.dynamic", "true"), ("compile.scope", "blocks")]
    assert [(key, value) for _, key, value in cpu_space().costly()] == expected
    gpu = resolve(EVERYTHING, GPU, passed={})
    assert [value for _, _, value in gpu.costly()] == ["default", "reduce-overhead", "max-autotune", "true", "blocks"]


def test_domain_of_numbers_does_not_contain_true() -> None:
    assert not Choice((0, 1)).contains(True)
    assert not IntInterval(0, 4).contains(True)


def test_domains_are_written_as_plain_values() -> None:
    space = resolve(SearchSpace(domains={"loader.num_workers": IntInterval(1, 8), "precision.amp": None}), CPU, passed={})
    assert space.as_json() == {
        "loader.num_workers": {"interval": [0, 8], "log": False},
        "precision.amp": {"choice": ["off", "bf16"]},
    }


def test_an_environment_variable_is_searched_over_its_listed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SWITCH", "a")
    space = resolve(SearchSpace(domains={"env.SOME_SWITCH": Choice(("b",)), "env.OTHER": None}), CPU, passed={})
    assert space.domains["env.SOME_SWITCH"].values == ("b", "a")
    assert space.baseline["env.SOME_SWITCH"] == "a"
    assert "env.OTHER" in space.dropped


HELD = SearchSpace(domains={"loader.batch_size": None, "loader.num_workers": None}, is_held=True)
ACCUMULATING = replace(CPU, observed={**CPU.observed, "step.accumulation": 8})


def test_held_global_batch_offers_its_divisors_and_sets_the_accumulation() -> None:
    space = resolve(HELD, ACCUMULATING, passed={})
    assert space.held == 256
    assert space.domains["loader.batch_size"].values == (2, 4, 8, 16, 32, 64, 128)
    knobs = space.active({**space.reference, "loader.batch_size": 64})
    assert knobs["step.accumulation"] == 4
    assert space.changed(knobs) == {"loader.batch_size": 64}
    assert space.tier(space.changed(knobs)) is Tier.numerics
    assert space.baseline["step.accumulation"] == 8


def test_batch_sizes_that_do_not_divide_a_held_global_batch_are_not_offered() -> None:
    for asked in (Choice((16, 48, 64, 100)), IntInterval(10, 70)):
        space = resolve(replace(HELD, domains={"loader.batch_size": asked}), ACCUMULATING, passed={})
        assert space.domains["loader.batch_size"].values == (16, 32, 64)


@pytest.mark.parametrize(
    ("changes", "machine", "reason"),
    [
        ({}, {"not_applicable": {"step.accumulation": "several optimizers step"}}, "gradients cannot be accumulated: several"),
        ({"tiers": Tier.exact}, {}, "its tier is numerics"),
        ({"pinned": {"step.accumulation": 8}}, {}, "leave only one value"),
    ],
)
def test_batch_size_under_a_held_global_batch_is_dropped_with_a_reason(changes: dict, machine: dict, reason: str) -> None:
    space = resolve(replace(HELD, **changes), replace(ACCUMULATING, **machine), passed={})
    assert reason in space.dropped["loader.batch_size"]


def test_accumulation_is_derived_and_not_searched_with_a_held_global_batch() -> None:
    space = resolve(replace(HELD, domains={"step.accumulation": None}), ACCUMULATING, passed={})
    assert "derived" in space.dropped["step.accumulation"]
