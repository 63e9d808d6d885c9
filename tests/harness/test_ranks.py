"""Two real ranks over gloo: which settings reach each rank, and the measured cost of communication."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.harness import ranks
from autotune.harness.knobs.module import COMPILE, COMPILES_ITSELF
from autotune.harness.knobs.parallel import ParallelKnobs
from autotune.harness.protocol import NOT_APPLICABLE, OVERRIDDEN
from autotune.harness.ranks import Communication, await_end
from autotune.harness.window import Window
from autotune.ranks import STRAGGLER_FRAC, joined
from tests.harness.conftest import RULES, Trial
from tests.harness.contexts import context

EPOCH, LESS = 8, 3  # steps in an epoch of wrapped.py, and how many fewer rank 1 has there


@pytest.mark.thorough
def test_slow_rank_is_named_and_waiting_for_it_is_not_counted_as_communication(trial: Trial) -> None:
    run = trial("wrapped.py", "slow", ranks=2)
    results = [run.result(rank) for rank in (0, 1)]
    found = joined(results)
    assert found["stragglers"] == [1]
    assert found["skew_frac"] > STRAGGLER_FRAC
    waits_s = [entry["exposed_s"] for entry in found["by_rank"]]
    assert waits_s[0] > 0.03  # of the 0.05 s that rank 1 works longer
    assert found["communication"]["exposed_s"] == waits_s[1] < waits_s[0]
    assert found["communication"]["gradient_bytes"] == 4 * 2 * (512 * 1024 + 1024 + 1024 * 512 + 512)
    assert found["communication"]["bandwidth_bytes_per_s"] > 0
    assert all(result.communication["num_steps"] >= 2 for result in results)


def test_ranks_with_unequal_data_end_at_the_same_step(trial: Trial) -> None:
    run = trial("wrapped.py", "uneven", ranks=2, mode="parity", max_steps=20)
    results = [run.result(rank) for rank in (0, 1)]
    assert [result.status for result in results] == ["measured", "measured"]
    whole, less = (result.steps["samples"] for result in results)
    assert set(whole) == {4}
    epoch = [4] * (EPOCH - LESS) + [0] * LESS
    assert less == (3 * epoch)[1 : 1 + len(whole)]  # the first step's samples are not kept


def test_a_model_that_is_compiled_before_it_is_wrapped_counts_as_compiled(trial: Trial) -> None:
    found = trial("wrapped.py", "compiled", ranks=2, mode="inspect").result()
    assert found.observed[COMPILE] == found.detected["compile"] == "default"
    assert found.applicability[COMPILE] == COMPILES_ITSELF


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("hook", OVERRIDDEN, "the program has a communication hook of its own (allreduce_hook)"),
        ("bare", NOT_APPLICABLE, "no module is wrapped in DistributedDataParallel"),
    ],
)
def test_compression_that_cannot_be_applied_is_reported_with_the_reason(
    trial: Trial, word: str, status: str, reason: str
) -> None:
    run = trial("wrapped.py", word, ranks=2, knobs={"parallel.gradient_compression": "bf16"}, mode="inspect")
    for rank in (0, 1):
        found = run.result(rank)
        report = found.knobs["parallel.gradient_compression"]
        assert (report.status, report.reason) == (status, reason)
        assert found.applicability["parallel.gradient_compression"] == reason


def test_wrapper_without_timers_reports_no_communication_and_does_not_fail() -> None:
    class Wrapper:  # as with torch's Python reducer
        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            raise AttributeError("reducer")

    wrapper, wrappers = Wrapper(), ParallelKnobs(context())
    wrappers.add(wrapper)
    communication = Communication(wrappers)
    communication.begin(is_compiled=False)
    assert (communication.is_looking, communication.summary(), communication.probe()) == (False, {}, False)


class Work:
    """A fake NCCL collective, which is finished at the third query."""

    def __init__(self, done_at: int = 3) -> None:
        self.done_at, self.num_asked = done_at, 0
        self.waited: list[object] = []

    def is_completed(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= self.done_at

    def wait(self, timeout: object = None) -> None:
        self.waited.append(timeout)


def test_collective_on_a_gpu_is_timed_without_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    await_end(work, "cuda")
    assert (work.num_asked, work.waited) == (3, [None])  # no timeout: with one, NCCL's wait() polls and sleeps
    monkeypatch.setattr(ranks, "PROBE_S", 0.01)
    with pytest.raises(RuntimeError, match="has not ended"):
        await_end(Work(done_at=10**9), "cuda")
    on_cpu = Work()
    await_end(on_cpu, "cpu")
    assert len(on_cpu.waited) == 1
    assert on_cpu.waited[0] is not None


def test_compression_that_this_build_of_torch_lacks_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+.")

    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", refuse)
    wrapper, knobs = nn.Linear(2, 2), ParallelKnobs(context({"parallel.gradient_compression": "bf16"}))
    wrapper._comm_hooks, wrapper.process_group = [], None  # type: ignore[assignment]
    knobs._compress(wrapper)
    report = knobs.verify()["parallel.gradient_compression"]
    assert report.status == NOT_APPLICABLE
    assert "NCCL 2.10" in report.reason


@pytest.mark.parametrize(("rank", "is_joint", "limit_per_s"), [(0, False, 50.0), (1, False, None), (1, True, None)])
def test_only_rank_0_ends_a_window_early(rank: int, is_joint: bool, limit_per_s: float | None) -> None:
    trial = context(
        rank=rank,
        world_size=2,
        peers=SimpleNamespace(is_joint=is_joint),
        phases=SimpleNamespace(enter=lambda _: None),
        loaders=SimpleNamespace(num_workers=lambda: 0),
        spec={"rules": RULES, "cycle": None, "race_below_per_s": 100.0, "promote_above_per_s": None},
    )
    window = Window(trial)
    window.first_step()
    assert window.meter is not None
    assert window.meter._race_below_per_s == limit_per_s
    assert window.meter._is_led is (rank > 0 and not is_joint)
