"""Host facts, the facts that must match for a comparison of results, and the host context."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from autotune.harness.cores import instruction_sets
from autotune.harness.protocol import RankResult
from autotune.machine import comparable, host_context, host_facts
from autotune.machine.facts import cpu_model, recorded

CPUINFO = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8480\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd sve sve2 svebf16 bf16\n"


def baseline(**facts: object) -> RankResult:
    return RankResult(
        trial=0,
        nonce="n",
        rank=0,
        world_size=1,
        pid=1,
        status="measured",
        facts=facts,
        observed={"loader.batch_size": 32, "loader.prefetch_factor": None},
        applicability={"layout.channels_last": "no 4-D weights"},
    )


def test_facts_of_this_host_are_plain_json() -> None:
    facts = host_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["num_cores"] >= 1
    assert facts["memory_bytes"] > 2**28
    assert isinstance(facts["gpus"], list)
    assert {"links", "adapters", "interfaces", "numa_nodes"} <= set(facts["topology"])


def test_instruction_sets_and_model_are_read_from_cpuinfo() -> None:
    assert instruction_sets(CPUINFO) == ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]
    assert cpu_model(CPUINFO) == "Intel(R) Xeon(R) Platinum 8480"
    assert instruction_sets(ARM) == ["asimd", "sve", "sve2", "bf16", "sve_bf16"]
    assert instruction_sets("") == []
    assert cpu_model("")


def test_comparability_depends_only_on_cpu_model_its_cores_gpus_and_torch() -> None:
    facts = {"cpu_model": "x", "num_cores": 2, "isa": ["a", "b"], "gpus": [{"name": "g"}], "torch": "2.14", "hostname": "one"}
    same = {**facts, "hostname": "two", "isa": ["b", "a"], "kernel": "7"}
    assert comparable(facts) == comparable(same)
    for change in ({"cpu_model": "y"}, {"num_cores": 4}, {"isa": ["a"]}, {"gpus": []}, {"torch": "2.15"}):
        assert comparable({**facts, **change}) != comparable(facts)
    assert comparable({})


def test_cores_are_divided_among_ranks() -> None:
    several = replace(baseline(device="cpu"), world_size=3)
    assert host_context({"num_cores": 8}, several, is_recipe=True).num_cores == 2
    assert host_context({"num_cores": 2}, several, is_recipe=True).num_cores == 1


def test_cores_of_a_machine_are_divided_among_its_own_ranks() -> None:
    on_two = replace(baseline(device="cuda", num_nodes=2), world_size=8)
    assert host_context({"num_cores": 64}, on_two, is_recipe=False).num_cores == 16


def test_host_context_comes_from_the_process_of_the_program() -> None:
    result = baseline(device="cuda", compute_capability=[9, 0], isa=["amx_bf16"], has_compiler=False)
    found = host_context({"num_cores": 4, "isa": ["avx2"]}, result, is_recipe=False)
    assert found.has_cuda
    assert found.compute_capability == (9, 0)
    assert found.cpu_isa == {"amx_bf16"}
    assert not found.has_compiler
    assert found.observed == {"loader.batch_size": 32}
    assert found.not_applicable == {"layout.channels_last": "no 4-D weights"}


def test_host_context_shows_how_the_processes_communicate() -> None:
    result = baseline(device="cuda", num_nodes=2, collectives="cpu:gloo,cuda:nccl", nccl=[2, 27, 3])
    found = host_context({"num_cores": 4, "topology": {"gpus": [{}, {}], "links": [["X", "NV18"], ["NV18", "X"]]}}, result,
                          is_recipe=False)  # fmt: skip
    assert (found.world_size, found.num_nodes, found.nccl) == (1, 2, (2, 27, 3))
    assert found.collectives == "cpu:gloo,cuda:nccl"
    assert (found.topology.num_gpus, found.topology.paths) == (2, {"NV"})


def test_host_context_can_be_built_from_a_failed_baseline() -> None:
    found = host_context({"num_cores": 4, "isa": ["avx2"]}, RankResult(0, "n", 0, 1, 1, "failed"), is_recipe=True)
    assert not found.has_cuda
    assert found.cpu_isa == {"avx2"}
    assert found.has_compiler


@pytest.mark.parametrize(("device", "has_cuda"), [("auto", True), ("cpu", False), ("cuda", True)])
def test_host_context_before_the_baseline_uses_only_host_facts(device: str, has_cuda: bool) -> None:
    found = host_context({"num_cores": 4, "gpus": [{"name": "g"}]}, is_recipe=True, device=device)
    assert found.has_cuda is has_cuda


@pytest.mark.parametrize(
    ("visible", "has_cuda", "capability"), [("1", True, (6, 1)), ("0,1", True, (9, 0)), ("2", False, None), ("", False, None)]
)
def test_host_context_before_the_baseline_is_of_the_first_visible_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str, has_cuda: bool, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [{"name": "g", "compute_capability": each} for each in ([9, 0], [6, 1])]
    found = host_context({"num_cores": 4, "gpus": gpus}, is_recipe=False)
    assert (found.has_cuda, found.compute_capability) == (has_cuda, capability)


def test_collecting_facts_imports_neither_torch_nor_mlflow() -> None:
    code = "import sys, autotune.machine as m; m.host_facts(); sys.exit(bool({'torch', 'mlflow', 'optuna'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_variables_that_affect_speed_are_recorded() -> None:
    found = recorded(
        {"OMP_NUM_THREADS": "4", "HF_TOKEN": "hf_x", "HOME": "/root", "CUDA_TOKEN": "abc", "NCCL_X": "http://a:b@c"}
    )
    assert found == {"CUDA_TOKEN": "***", "NCCL_X": "http://***@c", "OMP_NUM_THREADS": "4"}
