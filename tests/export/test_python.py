"""The exported Python source runs in a script, and sets every knob."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.export import python
from autotune.export.formats import render
from autotune.export.winner import winner
from autotune.knobs.catalogue import CATALOGUE

ALL = {
    "loader.batch_size": 8,
    "loader.num_workers": 2,
    "loader.prefetch_factor": 4,
    "loader.pin_memory": False,
    "loader.persistent_workers": True,
    "precision.amp": "bf16",
    "precision.matmul": "high",
    "precision.float8": "off",
    "layout.channels_last": True,
    "compile.mode": "reduce-overhead",
    "compile.dynamic": "auto",
    "compile.scope": "model",
    "optimizer.implementation": "fused",
    "optimizer.set_to_none": True,
    "backend.cudnn_benchmark": True,
    "backend.sdpa": "flash",
    "backend.l2_fetch_granularity": 128,
    "memory.activation_checkpointing": True,
    "step.accumulation": 2,
    "threads.intra": 1,
    "threads.omp": 2,
    "loader.multiprocessing_context": "fork",
    "loader.in_order": False,
    "loader.sharing_strategy": "file_system",
    "loader.non_blocking": False,
    "loader.device_prefetch": False,
    "threads.interop": 3,
    "threads.mkl": 2,
    "loader.own_cores": True,
    "threads.affinity": "compact",
    "memory.allocator": "default",
    "memory.fraction": 0.9,
    "memory.malloc": "glibc_keep",
    "step.metrics_sync_interval": 50,
    "parallel.strategy": "ddp",
    "parallel.reshard_after_forward": True,  # has no effect with DDP
    "parallel.bucket_cap_mb": 50,
    "parallel.static_graph": True,
    "parallel.gradient_as_bucket_view": True,
    "parallel.gradient_compression": "bf16",
    "nccl.algo": "allreduce:tree",
    "nccl.proto": "Simple",
    "nccl.min_nchannels": 8,
    "nccl.max_nchannels": 16,
    "nccl.nthreads": 256,
    "nccl.buffsize": 8388608,
    "nccl.p2p_level": "SYS",
    "nccl.nvls": False,
    "nccl.ib_disable": True,
    "nccl.ib_hca": "=mlx5_0",
    "nccl.socket_ifname": "=eth0",
    "nccl.cross_nic": 1,
}
# The workers of this script must be forked: it has no guard, so spawned workers would import it and train.
UNGUARDED = """
import multiprocessing
multiprocessing.set_start_method("forkserver", force=True)  # the default from Python 3.14 on
import torch
from torch.utils.data import DataLoader
import best
print(sum(int(batch.sum()) for batch in DataLoader(torch.arange(9), shuffle=True, **best.LOADER)))
"""
ON_CUDA = "    torch.cuda.set_per_process_memory_fraction(0.9)\n"  # needs a GPU


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs the script with an exported best.py next to it, and returns what the script observed."""

    def _run(text, *, is_compiled):
        (tmp_path / "best.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "2"}
        environment |= {} if is_compiled else {"TORCHDYNAMO_DISABLE": "1"}
        script = Path(__file__).with_name("user_script.py")
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return _run


def test_every_knob_is_exported_as_python(changed):
    assert set(ALL) == set(CATALOGUE), "a new knob: add it here, to user_script.py and to autotune/export/python.py"
    text = render(changed(ALL), "python", None).text
    assert "\n#   export OMP_NUM_THREADS=2\n" in text
    assert "\n#   export NCCL_NVLS_ENABLE=0\n" in text
    assert "autotune knobs" not in text


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_script_that_imports_the_exported_file_uses_all_knobs(changed, run, is_compiled):
    text = render(changed(ALL), "python", None).text
    assert ON_CUDA in text
    seen = run(text.replace(ON_CUDA, ""), is_compiled=is_compiled)
    assert seen["others"] == [False, "fork", "file_system", 3]
    assert seen["before"] == [2, "highest", False]
    assert (seen["threads"], seen["matmul"], seen["benchmark"]) == (1, "high", True)
    assert seen["loader"] == [8, 2, 4, True]
    assert (seen["weights"], seen["images"]) == (True, True)
    assert (seen["output"], seen["is_compiled"], seen["fused"]) == ("torch.bfloat16", True, True)
    assert seen["wrapped"] == [50, True, True, ["bf16_compress_hook"]]
    assert seen["loss"] > 0


def test_long_value_of_a_variable_to_copy_is_not_cut(changed):
    value = ":".join(f"/opt/folder{number}" for number in range(30))
    assert f"\n#   export SEARCHED={value}\n" in render(changed({"env.SEARCHED": value}), "python", None).text


def test_fsdp_settings_are_exported(changed):
    text = render(changed({"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False}), "python", None).text
    assert "fully_shard(block) for each block" in text
    assert "reshard_after_forward=False" in text


def test_values_that_turn_features_off_are_exported(changed):
    off = {"precision.amp": "off", "layout.channels_last": False, "compile.mode": "off", "optimizer.implementation": "default"}
    text = python.render(winner(changed(off), None)).text
    assert "enabled=False" in text
    assert "contiguous_format" in text
    assert "model.compile(" not in text
    assert "OPTIMIZER = {}" in text
    compile(text, "best.py", "exec")


def test_blocks_are_compiled_one_by_one(changed):
    text = render(changed({"compile.mode": "default", "compile.scope": "blocks"}), "python", None).text
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    names: dict[str, Any] = {}
    exec(compile(text, "best.py", "exec"), names)
    names["prepare"](model)
    assert model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.layers)


@pytest.mark.parametrize(
    ("mode", "dynamic", "said"),
    [
        ("default", "true", "model.compile(dynamic=True)"),
        ("max-autotune", "false", "model.compile(mode='max-autotune', dynamic=False)"),
        ("default", "auto", "model.compile()"),
    ],
)
def test_dynamic_shapes_of_compile_are_exported_as_measured(changed, mode, dynamic, said):
    summary = changed({"compile.mode": mode, "compile.dynamic": dynamic})
    assert f"    {said}\n" in render(summary, "python", None).text
    expected = {"true": "dynamic=True)", "false": "dynamic=False)", "auto": "dynamic=None)"}[dynamic]
    assert expected in render(summary, "env", None).text


def test_float8_skips_the_layers_that_the_trial_skipped(changed):
    text = render(changed({"precision.float8": "tensorwise"}), "python", None).text
    line = next(line for line in text.splitlines() if "convert_to_float8_training" in line)
    kept = eval(line[line.index("lambda") : line.rindex(")")], {"torch": torch})
    layers = nn.Linear(32, 48), nn.Linear(32, 50_257), nn.Linear(30, 32), nn.MultiheadAttention(32, 2).out_proj
    assert [kept(layer, "") for layer in layers] == [True, False, False, False]


def test_importing_the_exported_file_changes_nothing(changed):
    text = render(changed({"threads.intra": 1, "env.A": "x'\n\"y"}), "python", None).text
    names: dict[str, object] = {}
    exec(compile(text.replace("import torch\n", ""), "best.py", "exec"), names)
    assert names["BEST"] == {"threads.intra": 1, "env.A": "x'\n\"y"}


def test_exported_loader_forks_workers_if_the_trial_had_to_fork_them(forked, tmp_path):
    (tmp_path / "best.py").write_text(render(forked, "python", None).text)
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "36\n"), done.stderr
