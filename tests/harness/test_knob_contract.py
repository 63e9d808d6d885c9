"""The contract of every knob: each of two values is applied in a real process and read back there."""

import json
from typing import Any

import pytest

from autotune.harness.knobs.loader import has_in_order
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from autotune.knobs.catalogue import CATALOGUE
from tests.harness.conftest import Trial

# knob -> two values. They are read back from the loader that yields, the weights' strides, the optimizer's flags, or torch's
# settings. For pin_memory, cudnn_benchmark and matmul, only the setting is checked: its effect on speed needs a GPU.
CONTRACT: dict[str, tuple[Any, Any]] = {
    "loader.batch_size": (8, 32),
    "loader.num_workers": (1, 2),
    "loader.prefetch_factor": (3, 4),
    "loader.pin_memory": (True, False),
    "loader.persistent_workers": (True, False),
    "loader.multiprocessing_context": ("forkserver", "fork"),
    "loader.in_order": (False, True) if has_in_order() else (True, True),  # before torch 2.6, a loader keeps the order
    "loader.sharing_strategy": ("file_system", "file_descriptor"),
    "precision.amp": ("bf16", "off"),
    "precision.matmul": ("high", "highest"),
    "layout.channels_last": (True, False),
    "optimizer.implementation": ("fused", "foreach"),
    "backend.cudnn_benchmark": (True, False),
    "optimizer.set_to_none": (False, True),
    "step.accumulation": (2, 1),
    "threads.intra": (2, 1),
    "threads.interop": (3, 2),
    "threads.omp": (2, 1),
    "threads.mkl": (2, 1),
    # Environment variables, read back in the process. NCCL's use of them needs GPUs and has not been measured yet.
    "nccl.algo": ("allreduce:tree", "Ring"),
    "nccl.proto": ("Simple", "^LL128"),
    "nccl.min_nchannels": (4, 8),
    "nccl.max_nchannels": (16, 32),
    "nccl.nthreads": (256, 512),
    "nccl.buffsize": (1048576, 8388608),
    "nccl.p2p_level": ("LOC", "SYS"),
    "nccl.nvls": (False, True),
    "nccl.ib_disable": (True, False),
    "nccl.ib_hca": ("=mlx5_0", "^=mlx5_1"),
    "nccl.socket_ifname": ("=eth0", "^docker"),
    "nccl.cross_nic": (0, 1),
}
# Tested in test_blocks.py, whose model has blocks. The last knob needs a GPU, so its test fakes the CUDA runtime.
BLOCKS = {
    "memory.activation_checkpointing": (True, False),
    "backend.sdpa": ("flash", "math"),
    "backend.l2_fetch_granularity": (128, 64),
}
# These need a GPU; test_memory.py and test_transfer.py test them on fakes.
ON_FAKES = {"memory.allocator", "memory.fraction", "loader.non_blocking", "loader.device_prefetch"}
# These need a library, ranks or a second core; test_memory.py, test_affinity.py, test_metrics.py and test_float8.py test them.
ELSEWHERE = {
    "precision.float8",
    *("memory.malloc", "threads.affinity", "loader.own_cores"),
    "step.metrics_sync_interval",
}
COSTLY = {  # in separate tests
    "compile.mode": ("default", "off"), "compile.dynamic": ("true", "auto"), "compile.scope": ("blocks", "model"),
}  # fmt: skip

# Tested with two ranks: knob -> (two values, a key of the program's report, what the program reports for each value).
OF_RANKS: dict[str, tuple[tuple[Any, Any], str, tuple[Any, Any]]] = {
    "parallel.bucket_cap_mb": ((1, 100), "buckets", (4, 1)),
    "parallel.static_graph": ((True, False), "is_static", (True, False)),
    "parallel.gradient_as_bucket_view": ((True, False), "is_view", (True, False)),
    "parallel.gradient_compression": (("bf16", "off"), "is_rounded", (True, False)),
}


# Tested in test_sharding.py with two ranks that shard a model: knob -> (two values, a key of the program's report, what it
# reports for each value). `share` is the part of a weight that a rank keeps, `gathers` the number of all-gathers in a step.
OF_SHARES = {
    "parallel.strategy": (("fsdp", "ddp"), "share", (0.5, 1.0)),
    "parallel.reshard_after_forward": ((True, False), "gathers", (7, 4)),
}


def test_every_knob_has_a_row() -> None:
    assert {*CONTRACT, *COSTLY, *BLOCKS, *ON_FAKES, *ELSEWHERE, *OF_RANKS, *OF_SHARES} == set(CATALOGUE)


@pytest.mark.parametrize("which", [0, 1])
def test_each_value_takes_effect_and_is_read_back(trial: Trial, which: int) -> None:
    asked = {key: values[which] for key, values in CONTRACT.items()}
    environment = {name: text for key, value in asked.items() for name, text in CATALOGUE[key].environment(value).items()}
    # One of the two starts in a new interpreter, whose libraries read the variables when they are loaded.
    found = trial("basic.py", knobs=asked, mode="inspect", env=environment, is_fresh=not which).result()
    assert {key: (report.status, report.observed) for key, report in found.knobs.items()} == {
        key: (APPLIED, value) for key, value in asked.items()
    }


@pytest.mark.parametrize(("mode", "is_compiled"), [pytest.param("default", True, marks=pytest.mark.thorough), ("off", False)])
def test_compilation_creates_graphs_only_if_it_is_on(trial: Trial, mode: str, is_compiled: bool) -> None:
    found = trial("basic.py", knobs={"compile.mode": mode, "compile.dynamic": "true"}, mode="inspect").result()
    assert found.knobs["compile.mode"].status == APPLIED
    assert found.knobs["compile.dynamic"].status == (APPLIED if is_compiled else NOT_APPLICABLE)
    assert (found.compiled["graphs"] > 0) == is_compiled


@pytest.mark.parametrize("which", [0, 1])
def test_each_value_takes_effect_in_every_rank(trial: Trial, which: int) -> None:
    asked = {key: values[which] for key, (values, _, _) in OF_RANKS.items()}
    elsewhere = {"env.NCCL_ALGO": "Ring", "env.NCCL_PROTO": "LL", "threads.intra": 2}
    run = trial("wrapped.py", ranks=2, knobs={**asked, **elsewhere}, mode="inspect", env={"NCCL_ALGO": "Ring"})
    for rank in (0, 1):
        found, seen = run.result(rank).knobs, json.loads((run.folder / f"seen{rank}.json").read_text())
        assert {key: (found[key].status, found[key].observed) for key in asked} == {
            key: (APPLIED, value) for key, value in asked.items()
        }
        assert {name: seen[name] for _, name, _ in OF_RANKS.values()} == {
            name: effects[which] for _, name, effects in OF_RANKS.values()
        }
        assert [found[key].status for key in elsewhere] == [APPLIED, OVERRIDDEN, APPLIED]  # NCCL_PROTO was not set before
        assert (seen["environment"], seen["threads"]) == ("Ring", 2)
