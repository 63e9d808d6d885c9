"""How a trial ended, decided from plain facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.harness.protocol import RankResult
from autotune.records import Knobs, Outcome


@dataclass(kw_only=True)
class Facts:
    """Everything the decision looks at, plain values only.

    Attributes:
        exit_code: of the first process, when it ended by itself.
        signal: name of the signal that ended it, "SIGSEGV"; None when none did or when autotune sent it.
        cause: "result", "exit", "deadline" or "stopped": why the trial was over.
        phase: last phase known.
        results: rank results of this trial.
        problems: results that could not be used, one sentence each.
        log_tail: end of standard error.
        stop_reason: why it was stopped; "" otherwise.
        deadline: the limit that passed, in words; "" otherwise.
        oom_kills: how many processes of our cgroup the kernel killed for memory meanwhile.
        is_harness_seen: whether the harness left any sign: a progress line or a result.
        num_steps: optimizer steps seen.
        asked: knobs the harness was asked for, or asked to check.
        mode: the spec's mode.
        device_used_frac: largest share of device memory seen in use; None unknown.
    """

    exit_code: int | None = None
    signal: str | None = None
    cause: str = "exit"
    phase: str = "spawn"
    results: Sequence[RankResult] = ()
    problems: Sequence[str] = ()
    log_tail: str = ""
    stop_reason: str = ""
    deadline: str = ""
    oom_kills: int = 0
    is_harness_seen: bool = False
    num_steps: int = 0
    asked: Knobs = field(default_factory=dict)
    mode: str = "measure"
    device_used_frac: float | None = None


def classify(facts: Facts) -> tuple[Outcome, str]:
    """Returns the outcome and a one-line reason."""
    raise NotImplementedError
