"""Maps a known message, from a log or an exception, to a trial's outcome, given the other facts about the trial's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.harness.protocol import RankResult
from autotune.log_messages import (
    DEVICE_OOM,
    HOST_OOM,
    NO_INPUT,
    NO_TERMINAL,
    SHARED_MEMORY,
    SUSPECTED_OOM,
    TOO_MANY_FILES,
    WORKER_DIED,
    WORKER_KILLED,
)
from autotune.records import Knobs, Outcome

Verdict = tuple[Outcome, str]

NEAR_CAP_FRAC = 0.9  # an ambiguous failure counts as out of memory if more than this share of the memory was in use


@dataclass(kw_only=True)
class Facts:
    """Everything the classification uses, as plain values.

    Attributes:
        exit_code: exit status of the first process, if it ended by itself.
        signal: name of the signal that ended the first process, "SIGSEGV"; None if there was none, or if autotune sent it.
        cause: why the trial was over: "result", "exit", "deadline", "stopped" or "lost".
        phase: last known phase.
        results: rank results of this trial.
        problems: results that could not be used, one sentence each.
        log_tail: end of standard error.
        stdout_tail: end of standard output.
        stop_reason: why the trial was stopped, or what was lost; "" otherwise.
        deadline: the limit that passed, in words; "" otherwise.
        shut_out: why no Python process of the trial loaded the harness; "" if a process did, or if unknown.
        hang: what the processes were doing when the deadline passed, in words; "" if not examined.
        oom_kills: number of processes of autotune's cgroup that the kernel killed for memory during the trial.
        is_harness_seen: whether the harness left any sign: a progress line or a result.
        num_steps: optimizer steps seen.
        loaded: a checkpoint from which the program continued a training; "" if it loaded none.
        asked: knobs that the harness had to apply or to check.
        mode: the spec's mode; only "measure" must yield a rate.
        device_used_frac: largest share of device memory seen in use; None when unknown.
        memory_limit_bytes: the user's memory cap for one process; None for none.
        excused: names of faults for which no trial fails, because the unchanged program has them, too: "loss" (a loss is not
            finite; failures.LOSS) and "scaling" (a gradient scaler skips steps because gradients overflow; failures.SCALING).
    """

    exit_code: int | None = None
    signal: str | None = None
    cause: str = "exit"
    phase: str = "spawn"
    results: Sequence[RankResult] = ()
    problems: Sequence[str] = ()
    log_tail: str = ""
    stdout_tail: str = ""
    stop_reason: str = ""
    deadline: str = ""
    shut_out: str = ""
    hang: str = ""
    oom_kills: int = 0
    is_harness_seen: bool = False
    num_steps: int = 0
    loaded: str = ""
    asked: Knobs = field(default_factory=dict)
    mode: str = "measure"
    device_used_frac: float | None = None
    memory_limit_bytes: int | None = None
    excused: frozenset[str] = frozenset()


def verdict_of(text: str, line: str, facts: Facts) -> Verdict | None:
    """Returns the verdict for a known message in `text`, with a reason that quotes `line`; None for any other text."""
    if DEVICE_OOM.search(text):
        return Outcome.device_oom, line
    if SHARED_MEMORY.search(text):
        return Outcome.host_oom, f"shared memory (/dev/shm) ran out: {line}"
    if HOST_OOM.search(text):
        return Outcome.host_oom, line
    if WORKER_KILLED.search(text) and facts.oom_kills:
        return Outcome.host_oom, f"the kernel killed {facts.oom_kills} process(es) for memory: {line}"
    if WORKER_DIED.search(text):
        return Outcome.crash, f"a loader worker died: {line}"
    if SUSPECTED_OOM.search(text):
        return _suspected_memory(line, facts)
    if TOO_MANY_FILES.search(text):
        return Outcome.error, f"{line} (open files ran out; raise the hard limit, see `ulimit -Hn`)"
    if NO_INPUT.search(text):
        return Outcome.error, (
            f"{line} (a trial has no standard input. Give the program its answer as an argument, or from a file: "
            "-- sh -c 'python train.py < answers.txt')"
        )
    return None


def advised(line: str, text: str) -> str:
    """Returns `line`, with advice if `text`, the end of a traceback, shows that the program looked for its terminal."""
    if NO_TERMINAL.search(text) is None:
        return line
    return f"{line} (a trial has no terminal. Give the program one: -- script -qec 'python train.py' /dev/null)"


def _suspected_memory(line: str, facts: Facts) -> Verdict:
    """Returns out of memory if memory was nearly full, else a crash: the message alone can mean either."""
    shares = _memory_in_use(facts)
    if not shares:
        return Outcome.crash, f"{line} (whether memory was short is not known)"
    used_frac, outcome = max(shares)
    if used_frac <= NEAR_CAP_FRAC:
        return Outcome.crash, f"{line} (memory was not short)"
    return outcome, f"{line} (with {min(1.0, used_frac):.0%} of the memory in use)"


def _memory_in_use(facts: Facts) -> list[tuple[float, Outcome]]:
    """Returns each known (peak use as a share of the memory or its limit, outcome if it runs out): [(0.97, device_oom)]."""
    shares = [] if facts.device_used_frac is None else [(facts.device_used_frac, Outcome.device_oom)]
    for memory in (result.memory for result in facts.results):
        peak, capacity = memory.get("peak_reserved_bytes") or memory.get("peak_bytes"), memory.get("capacity_bytes")
        if peak and capacity:
            shares.append((peak / capacity, Outcome.host_oom if memory.get("kind") == "cpu" else Outcome.device_oom))
    return shares
