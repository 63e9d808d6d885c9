"""Domain, block and expert rules on machines that differ from this one."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from autotune.export.in_code import loader_keys
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.records import Knobs

CPU = HostContext(num_cores=2)
GPU = HostContext(num_cores=2, has_cuda=True, compute_capability=(9, 0))
HOPPER = HostContext(num_cores=16, has_cuda=True, compute_capability=(9, 0))
VOLTA = replace(HOPPER, compute_capability=(7, 0))
PASCAL = replace(HOPPER, compute_capability=(6, 1))


def at_batch(machine: HostContext, batch_size: int) -> HostContext:
    return replace(machine, observed={"loader.batch_size": batch_size})


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (at_batch(CPU, 32), [16, 32, 64, 128]),
        (at_batch(CPU, 1), [1, 2, 4, 8]),
        (at_batch(CPU, 512), [256, 512]),
        (at_batch(HOPPER, 100), [50, 100, 200, 400, 800]),
        (at_batch(HOPPER, 256), [128, 256, 512, 1024]),
        (replace(at_batch(CPU, 64), not_applicable={"loader.batch_size=128": "an epoch has only 100 samples"}), [32, 64]),
        (replace(at_batch(HOPPER, 32), is_recipe=True), [16, 32, 64, 128, 256, 512, 1024]),
    ],
)
def test_batch_sizes_are_halves_and_doubles_of_the_programs_batch_size(machine: HostContext, expected: list[int]) -> None:
    assert knob("loader.batch_size").domain(machine) == expected


@pytest.mark.parametrize(("cores", "expected"), [(1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 4, 6, 8])])
def test_number_of_workers_goes_up_to_the_number_of_cores(cores: int, expected: list[int]) -> None:
    assert knob("loader.num_workers").domain(replace(CPU, num_cores=cores)) == expected


@pytest.mark.parametrize(
    "key",
    ["loader.pin_memory", "memory.allocator", "memory.fraction", "backend.cudnn_benchmark", "precision.matmul"],
)
def test_knobs_of_cuda_are_blocked_on_the_cpu_with_the_reason(key: str) -> None:
    assert "no CUDA device" in str(knob(key).blocked(CPU))
    assert knob(key).blocked(HOPPER) is None


def test_fused_is_tried_only_if_the_optimizer_has_it() -> None:
    without = replace(CPU, not_applicable={"optimizer.implementation=fused": "RMSprop has no fused implementation"})
    implementation = knob("optimizer.implementation")
    assert ("fused" in implementation.domain(CPU), implementation.expert(CPU)) == (True, "fused")
    assert (implementation.domain(without), implementation.expert(without)) == (["default", "foreach"], "default")


@pytest.mark.parametrize(
    ("machine", "observed", "expected"),
    [
        (CPU, {}, ["default", "foreach", "fused"]),
        (HOPPER, {}, ["default", "fused"]),
        (HOPPER, {"optimizer.implementation": "foreach"}, ["foreach", "fused"]),
        (HOPPER, {"parallel.strategy": "fsdp"}, ["default", "foreach", "fused"]),
    ],
    ids=["cpu", "gpu", "own-foreach", "fsdp"],
)
def test_foreach_is_not_tried_where_torch_chooses_it_by_default(
    machine: HostContext, observed: Knobs, expected: list[str]
) -> None:
    assert knob("optimizer.implementation").domain(replace(machine, observed=observed)) == expected


@pytest.mark.parametrize(("cores", "own", "expected"), [(16, 0, 8), (16, 12, 12), (32, 64, 8), (4, 8, 3)])
def test_expert_keeps_more_workers_of_the_program_if_each_has_a_core(cores: int, own: int, expected: int) -> None:
    machine = replace(HOPPER, num_cores=cores, observed={"loader.num_workers": own})
    assert knob("loader.num_workers").expert(machine) == expected


def test_tf32_and_bf16_need_ampere() -> None:
    assert "needs 8.0" in str(knob("precision.matmul").blocked(VOLTA))
    assert knob("precision.amp").domain(VOLTA) == ["off", "fp16"]
    assert knob("precision.amp").expert(VOLTA) == "fp16"
    replicated = replace(VOLTA, compute_capability=(9, 0), not_applicable={"precision.amp=bf16": "nn.DataParallel"})
    assert knob("precision.amp").domain(replicated) == ["off", "fp16"]
    assert "needs 7.0" in str(knob("precision.amp").blocked(replace(VOLTA, compute_capability=(6, 1))))
    assert knob("precision.amp").expert(HOPPER) == "bf16"


@pytest.mark.parametrize(
    ("isa", "expert", "domain"),
    [
        ({"avx512f"}, None, ["off"]),  # measured: bf16 without a bf16 instruction is 2.4 times slower than float32
        ({"avx512f", "avx512_bf16"}, "bf16", ["off", "bf16"]),
        ({"amx_bf16"}, "bf16", ["off", "bf16"]),
    ],
)
def test_bf16_on_a_cpu_needs_an_instruction_for_it(isa: set[str], expert: str | None, domain: list[str]) -> None:
    machine = replace(CPU, cpu_isa=frozenset(isa))
    assert knob("precision.amp").expert(machine) == expert
    assert knob("precision.amp").domain(machine) == domain


def test_compile_needs_a_compiler_and_cuda_graph_modes_need_cuda() -> None:
    compile_mode = knob("compile.mode")
    assert "no C++ compiler" in str(compile_mode.blocked(replace(CPU, has_compiler=False)))
    assert compile_mode.domain(CPU) == ["off", "default"]
    assert compile_mode.domain(HOPPER) == ["off", "default", "reduce-overhead", "max-autotune"]
    assert compile_mode.is_costly


@pytest.mark.parametrize(
    ("knobs", "expected"), [({"loader.num_workers": 0}, False), ({"loader.num_workers": 2}, True), ({}, False)]
)
def test_knobs_of_workers_are_inactive_without_workers(knobs: Knobs, expected: bool) -> None:
    assert knob("loader.prefetch_factor").is_active(knobs) is expected
    assert knob("loader.persistent_workers").is_active(knobs) is expected


def test_knobs_of_workers_are_blocked_where_the_program_allows_no_workers() -> None:
    machine = replace(CPU, not_applicable={"loader.num_workers": "its data set ignores get_worker_info"})
    assert "get_worker_info" in str(knob("loader.prefetch_factor").blocked(machine))
    with_workers = replace(machine, observed={"loader.num_workers": 4})
    assert knob("loader.prefetch_factor").blocked(with_workers) is None


def test_omp_threads_are_set_in_the_environment() -> None:
    assert knob("threads.omp").environment(4) == {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, []),
        (replace(CPU, num_numa_nodes=2), ["none", "numa"]),
        (replace(CPU, num_local_ranks=2), ["none", "compact"]),
        (replace(CPU, num_local_ranks=4, num_numa_nodes=2), ["none", "compact", "numa"]),
    ],
)
def test_only_affinities_that_differ_on_the_machine_are_tried(machine: HostContext, expected: list[str]) -> None:
    affinity = knob("threads.affinity")
    assert (affinity.domain(machine) if affinity.blocked(machine) is None else []) == expected


def test_another_malloc_is_tried_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr("autotune.knobs.malloc.installed", lambda: found)
    assert knob("memory.malloc").domain(CPU) == ["glibc", "glibc_keep"]
    assert not knob("memory.malloc").needs_fresh_start("glibc_keep")
    assert knob("memory.malloc").domain(GPU) == ["glibc"]
    assert [knob("memory.malloc").expert(each) for each in (CPU, GPU)] == ["glibc_keep", None]
    assert knob("memory.malloc").expert(replace(CPU, observed={"memory.malloc": "jemalloc"})) is None
    assert knob("memory.malloc").domain(replace(CPU, observed={"memory.malloc": "glibc_keep"})) == ["glibc_keep"]
    found["jemalloc"] = "/usr/lib/libjemalloc.so.2"
    assert knob("memory.malloc").needs_fresh_start("jemalloc")
    assert knob("memory.malloc").domain(CPU) == ["glibc", "glibc_keep", "jemalloc"]
    assert knob("memory.malloc").environment("jemalloc")["LD_PRELOAD"].startswith("/usr/lib/libjemalloc.so.2")


def test_in_order_is_active_only_with_several_workers() -> None:
    assert [knob("loader.in_order").is_active({"loader.num_workers": n}) for n in (0, 1, 2)] == [False, False, True]


def test_own_cores_need_a_second_core_and_workers() -> None:
    own_cores = knob("loader.own_cores")
    assert "one core" in str(own_cores.blocked(replace(CPU, num_cores=1)))
    assert own_cores.blocked(replace(CPU, num_cores=2)) is None
    assert [own_cores.is_active({"loader.num_workers": n}) for n in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("ddp", [True, True, False]), ("fsdp", [False, False, True]), (None, [True, True, True])]
)
def test_knobs_of_ddp_and_of_fsdp_exclude_each_other(strategy: str | None, expected: list[bool]) -> None:
    knobs: Knobs = {} if strategy is None else {"parallel.strategy": strategy}
    keys = ("parallel.bucket_cap_mb", "layout.channels_last", "parallel.reshard_after_forward")
    assert [knob(key).is_active(knobs) for key in keys] == expected


def test_longer_metrics_interval_is_tried_only_on_a_gpu() -> None:
    assert knob("step.metrics_sync_interval").domain(CPU) == []
    assert knob("step.metrics_sync_interval").domain(HOPPER) == [100]
    assert knob("step.metrics_sync_interval").domain(replace(HOPPER, observed={"step.metrics_sync_interval": 500})) == []


@pytest.mark.parametrize(
    ("machine", "domain", "expert"),
    [
        (replace(CPU, cpu_isa=frozenset({"avx2"})), ["off"], "off"),
        (replace(HOPPER, compute_capability=(7, 5)), ["off", "fp16"], "fp16"),
        (PASCAL, ["off"], "off"),
    ],
)
def test_autocast_in_bf16_may_be_replaced_where_it_is_emulated(machine: HostContext, domain: list[str], expert: str) -> None:
    found, amp = replace(machine, observed={"precision.amp": "bf16"}), knob("precision.amp")
    assert (amp.blocked(found), amp.domain(found), amp.expert(found)) == (None, domain, expert)


@pytest.mark.parametrize("machine", [HOPPER, replace(CPU, cpu_isa=frozenset({"avx512_bf16"}))])
def test_autocast_in_a_fast_format_is_left_to_the_program(machine: HostContext) -> None:
    own = replace(machine, observed={"precision.amp": "bf16"})
    assert knob("precision.amp").blocked(own) == "the program enters autocast(bf16) itself"
    by_policy = replace(own, not_applicable={"precision.amp": "a policy of FSDP"})
    assert knob("precision.amp").blocked(by_policy) is None  # the reason of the program itself counts


def test_knobs_that_are_arguments_of_the_dataloader_are_exported_as_such() -> None:
    arguments = inspect.signature(DataLoader.__init__).parameters
    assert loader_keys(CATALOGUE) == [key for key in CATALOGUE if key.startswith("loader.") and knob(key).name in arguments]
