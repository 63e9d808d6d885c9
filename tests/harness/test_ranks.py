"""Two real ranks over gloo: what reaches each of them, and what they are found to cost each other."""

import pytest

from autotune.harness.knobs.parallel import ParallelKnobs
from autotune.harness.protocol import NOT_APPLICABLE, OVERRIDDEN
from autotune.harness.ranks import Communication
from autotune.ranks import STRAGGLER_FRAC, joined
from tests.harness.conftest import Trial
from tests.harness.contexts import context


@pytest.mark.thorough
def test_a_slow_rank_is_named_and_what_the_others_wait_is_not_called_communication(trial: Trial) -> None:
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("hook", OVERRIDDEN, "the program has a communication hook of its own (allreduce_hook)"),
        ("bare", NOT_APPLICABLE, "no module is wrapped in DistributedDataParallel"),
    ],
)
def test_compression_that_cannot_be_had_says_why(trial: Trial, word: str, status: str, reason: str) -> None:
    run = trial("wrapped.py", word, ranks=2, knobs={"parallel.gradient_compression": "bf16"}, mode="inspect")
    for rank in (0, 1):
        found = run.result(rank)
        report = found.knobs["parallel.gradient_compression"]
        assert (report.status, report.reason) == (status, reason)
        assert found.applicability["parallel.gradient_compression"] == reason


def test_a_wrapper_without_timers_tells_nothing_and_fails_nothing() -> None:
    class Wrapper:  # what torch's reducer in Python leaves of it
        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            raise AttributeError("reducer")

    wrapper, wrappers = Wrapper(), ParallelKnobs(context())
    wrappers.add(wrapper)
    communication = Communication(wrappers)
    communication.begin(is_compiled=False)
    assert (communication.is_looking, communication.summary(), communication.probe()) == (False, {}, False)
