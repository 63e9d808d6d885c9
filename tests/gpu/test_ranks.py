"""Ranks that share one GPU over gloo, and one rank with NCCL: communication is measured, and all ranks end together."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.config.compose import Composed, compose
from autotune.launchers.local import LocalLauncher
from autotune.records import Outcome
from tests.benchmarks.trials import Bench
from tests.gpu.conftest import RULES, Trials

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("ranks_program.py")
Made = Callable[[Composed, dict[str, Any]], Trials]


def command(backend: str, ranks: int) -> Composed:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(PROGRAM), backend]
    return compose([], command=words)


def test_communication_of_two_gloo_ranks_on_one_gpu_is_measured(
    made: Made, record_property: Callable[[str, object], None]
) -> None:
    result = made(command("gloo", 2), {}).baseline.result
    assert result
    record_property("communication", result.communication)
    assert (result.world_size, result.memory["kind"]) == (2, "cuda")
    assert result.communication["exposed_s"] > 0
    assert result.communication["bandwidth_bytes_per_s"] > 0


def test_single_rank_with_nccl_trains_and_reports_nccl(made: Made, record_property: Callable[[str, object], None]) -> None:
    result = made(command("nccl", 1), {}).baseline.result
    assert result
    record_property("NCCL", result.facts["nccl"])
    assert "nccl" in result.facts["collectives"]


def test_trial_ends_with_the_nccl_error_if_two_ranks_share_a_gpu(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    launcher = LocalLauncher()
    try:
        measured = Bench(command("nccl", 2).command, launcher, tmp_path / "trials").measure({}, RULES)
    finally:
        launcher.close()
    record_property("said", f"{measured.outcome}: {measured.reason}")
    assert measured.outcome in (Outcome.error, Outcome.crash)
    assert "uplicate GPU" in measured.reason or "nccl" in measured.reason.lower()
