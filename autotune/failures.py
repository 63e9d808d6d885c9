"""Classifies how a trial ended: one outcome and a one-line reason, decided from plain facts.

Evidence is trusted in this order: what a rank wrote about itself, how the first process ended, the deadline that passed, and
only then known messages in the log. The word "error" in a log is no evidence, because healthy programs print it, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from autotune.harness.protocol import APPLIED, UNMEASURABLE, RankResult
from autotune.known_messages import NEAR_CAP_FRAC, Facts, Verdict, advised, verdict_of
from autotune.log_messages import (
    CAPTURE_FAILED,
    CHILD_FAILED,
    CPP_FRAMES,
    CPP_SAID,
    DEVICE_OOM,
    HOST_OOM_CLASSES,
    OOM_CLASSES,
    PARENT_CLASSES,
    PEER_LOST,
    PINNING,
    WORKER_KILLED,
    WORKER_SIGNALS,
    raised_in,
)
from autotune.plain_text import plain, shortened
from autotune.process_ends import ENDED_FOR_MEMORY, Killed, failed_ranks, killed, signal_name
from autotune.quantities import bytes_text
from autotune.ranks import only_first_fetches, pace
from autotune.records import START_PHASES, Knobs, Outcome

MAX_QUOTED_CHARS = 340  # maximum number of characters quoted from the program's own text; autotune's words are never cut
MIN_LOSS_SCALE = 1.0  # at a smaller scale, even unscaled gradients overflow fp16; no program makes its loss smaller on purpose
# A gradient scaler may skip at most this share of the window's steps. A steady scaler skips one step in 2000: the step in which
# it tries a larger scale.
MAX_SKIPPED_FRAC = 0.02
CALIBRATING_SKIPS = 16  # a scaler's calibration skips at most this many steps: it halves the scale from 2**16 down to 1
BUILDING = START_PHASES[:-1]  # phases before the model is called
LAST_FRAME = '\n  File "'  # begins each frame of a traceback; the last frame is the one that raised the exception
LOSS, SCALING = "loss", "scaling"  # kinds of numbers that may turn out infinite or NaN; see Facts.excused

LONGER = "Let it train longer: more epochs, or more data"
UNTRAINED = (
    "no optimizer step was seen: the program imported torch, but no optimizer of torch.optim stepped, nor were parameters "
    "written after backward passes. Give the command that trains, not one that only prepares or evaluates. If its steps cannot "
    "be detected, let it call autotune.trial_step() after each"
)
OVER = (
    "no optimizer step was seen: the program loaded the checkpoint {}, perhaps saved by an earlier trial, and seems to have "
    "found nothing left to train. Let each run of the command start anew"
)
WITHOUT_TORCH = (
    "no Python process of the program imported torch: autotune measures PyTorch training. Give the command that trains; "
    "training inside a container or on another machine cannot be measured"
)
UNLOADED = (
    "harness not loaded: the program ended without a sign of the harness. Python was started with -I or -E, the environment "
    "was cleared on the way, or the command runs no Python. Give the command that trains; leave out -I and -E, "
    "and keep the environment"
)
HARNESS_FAULT = re.compile(r"^autotune: the harness (?:could not start|failed to start).*", re.MULTILINE)
KILLED = " (ended from outside; the kernel reports no kill for memory)"
START_REFUSED = "autotune: the command cannot be started: "


def classify(facts: Facts) -> Verdict:
    """Returns a trial's outcome and a one-line reason; the reason is "" for a plain ok."""
    outcome, reason = _decide(facts)
    note = ""
    if outcome in (Outcome.device_oom, Outcome.host_oom) and facts.memory_limit_bytes:
        early = ", before the model was first called" if facts.phase in BUILDING else ""
        note = f" (under device.memory_limit, {bytes_text(facts.memory_limit_bytes)} a process{early})"
    return outcome, " ".join(reason.split()) + note


def _decide(facts: Facts) -> Verdict:
    if facts.cause == "stopped":
        return Outcome.interrupted, facts.stop_reason or "stopped"
    if facts.cause == "lost":
        return Outcome.crash, facts.stop_reason
    first = root(facts)
    if first is not None and not _is_second_hand(first, facts):
        return _of_exception(first, facts)
    if first is not None and not (_killed(facts).name or facts.cause == "deadline"):
        return _of_lost_peer(first, facts)
    if first is not None:
        return _of_ending(facts)
    if facts.results and not _missing(facts.results):
        return _of_results(facts)
    return _of_ending(facts)


def root(facts: Facts) -> RankResult | None:
    """Returns the result of the rank that caused a failure: the first to fail by itself, not because of another process.

    If all exceptions merely report another process's failure, returns the first. Returns None if no rank raised an exception.
    """
    failed = [result for result in facts.results if result.status == "failed"]
    return min(failed, key=lambda one: (_is_second_hand(one, facts), one.failed_s or 0.0, one.rank), default=None)


# Every rank has a result ---------------------------------------------------------------------------------------------------


def _of_results(facts: Facts) -> Verdict:
    for kind, reason in _overflows(facts):
        if kind not in facts.excused:
            return Outcome.nonfinite, reason
    is_first_alone = only_first_fetches(facts.results)
    for number, result in enumerate(facts.results):
        if reason := _unapplied(result, facts.asked, is_fed=not (number and is_first_alone)):
            return Outcome.invalid, f"{reason}{_rank_note(result, facts)}"
    if facts.mode != "measure":
        return Outcome.ok, ""
    for result in facts.results:
        is_short = pace(result, facts.results[0]) is None
        if facts.exit_code and (is_short or result.status == "ended"):  # sys.exit(3), as hydra does after an exception
            return _of_status(facts)
        if is_short:
            num_steps = _steps_of(result)
            return Outcome.error, f"{_ended_after(num_steps) if num_steps else _untrained(facts)}{_rank_note(result, facts)}"
        if result.window is not None and not (result.throughput_per_s or 0.0) > 0:  # NaN is not a rate, either
            return Outcome.error, f"no usable rate was measured, got {result.throughput_per_s}{_rank_note(result, facts)}"
    for result in facts.results:
        if verdict := _of_window(result, facts):
            return verdict
    return Outcome.ok, ""


def not_finite(facts: Facts) -> dict[str, str]:
    """Returns which numbers were not finite, and since when or how often: {LOSS: "from step 12 on"}; {} if all were finite."""
    skips = [(SCALING, _skipped(result, facts)) for result in facts.results if _skips(result) and _is_lasting(result)]
    found = dict(reversed([*_overflows(facts), *skips]))
    return found | ({LOSS: _since(facts.results)} if LOSS in found else {})


def _overflows(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields (LOSS or SCALING, reason to fail the trial) for each rank whose loss or loss scale is not usable."""
    for result in facts.results:
        if _is_loss_not_finite(result):
            yield LOSS, f"the loss is not finite after {_steps_of(result)} steps{_rank_note(result, facts)}"
        if result.scaling is not None and result.scaling["scale"] < MIN_LOSS_SCALE:
            counted = f"; {_skipped(result, facts)}" if result.scaling["skipped"] else ""
            yield SCALING, f"the loss scale fell to {result.scaling['scale']:g}: the gradients overflow{counted}"


def _is_loss_not_finite(result: RankResult) -> bool:
    """Whether the first or the last loss of a rank was NaN or infinite."""
    return result.loss is not None and result.loss.get("is_finite") is False


def _since(results: Sequence[RankResult]) -> str:
    """Returns since when the loss is not finite: "from step 12 on", or "by step 90" if the last recorded loss was finite."""
    curves = [result.loss.get("curve") or [] for result in results if result.loss is not None and _is_loss_not_finite(result)]
    steps = [max((n for n, loss in enumerate(curve, 1) if loss is not None), default=0) + 1 for curve in curves]
    known = [step for step, curve in zip(steps, curves, strict=True) if step <= len(curve)]
    return f"from step {min(known)} on" if known else f"by step {max(map(_steps_of, results))}"


def _skips(result: RankResult) -> bool:
    """Whether a gradient scaler skipped too many steps of the window. Skipped steps are fast, so they inflate the rate."""
    if result.window is None or result.scaling is None:
        return False
    return bool(result.scaling["skipped_in_window"] > max(1, MAX_SKIPPED_FRAC * result.window.steps))


def _is_lasting(result: RankResult) -> bool:
    return bool((result.scaling or {"skipped": 0})["skipped"] > CALIBRATING_SKIPS)


def _of_window(result: RankResult, facts: Facts) -> Verdict | None:
    """Returns the verdict that keeps a rank's rate from winning; None if the rate may win."""
    if result.window is None:
        return None
    if _skips(result) and not (_is_lasting(result) and SCALING in facts.excused):
        return Outcome.nonfinite if _is_lasting(result) else Outcome.unsteady, _skipped(result, facts)
    if retries := result.memory.get("alloc_retries"):
        why = (
            f"memory is thrashing: the allocator freed its cached blocks and allocated them again {retries} times in the window"
        )
        return Outcome.unsteady, f"{why}{_rank_note(result, facts)}"
    if result.window.is_raced:
        return Outcome.raced, result.window.reason
    if not result.window.is_steady:
        return Outcome.unsteady, f"{result.window.reason or 'no steady state was reached'}{_rank_note(result, facts)}"
    return None


def _skipped(result: RankResult, facts: Facts) -> str:
    assert result.scaling is not None
    total, inside = result.scaling["skipped"], result.scaling["skipped_in_window"]
    counted = f"{total} of {_steps_of(result)} optimizer steps, {inside} of them in the window"
    return f"the gradient scaler skipped {counted}{_rank_note(result, facts)}"


def _unapplied(result: RankResult, asked: Knobs, *, is_fed: bool) -> str:
    """Returns the first knob that did not take effect, and why; "" if all did. A missing report counts as not applied.

    Args:
        result: a rank's result.
        asked: the trial's knobs.
        is_fed: whether the rank fetches batches. If not, its reports on knobs of the loader are ignored.
    """
    for key, report in result.knobs.items():
        if report.status != APPLIED and (is_fed or not key.startswith("loader.")):
            value = f"={asked[key]}" if key in asked else ""
            return f"{key}{value}: {report.status}{f': {report.reason}' if report.reason else ''}"
    if result.rank == 0 and (silent := sorted(set(asked) - set(result.knobs))):
        return f"{silent[0]}={asked[silent[0]]}: the harness did not report on it"
    is_compiled = any(key.startswith("compile.") and value not in ("off", False) for key, value in asked.items())
    if is_compiled and result.compiled.get("recompile_limit_hit"):
        return "compile: torch hit its recompile limit and continued eagerly"
    return ""


def _untrained(facts: Facts) -> str:
    return OVER.format(facts.loaded) if facts.loaded else UNTRAINED


def _ended_after(num_steps: int) -> str:
    return f"the program ended after {_num(num_steps)}, too few to measure. {LONGER}"


def _num(steps: int) -> str:
    return f"{steps} optimizer step{'s' if steps != 1 else ''}"


def _steps_of(result: RankResult) -> int:
    return max(len(result.steps.get("end_s") or ()), int(result.detected.get("num_steps") or 0))


# A rank raised an exception ------------------------------------------------------------------------------------------------


def _of_lost_peer(lost: RankResult, facts: Facts) -> Verdict:
    """Returns the verdict if all exceptions only report that another process failed, such as a peer that was killed."""
    raised = {one.rank for one in facts.results if one.status == "failed" and _class_of(one) not in PARENT_CLASSES}
    then = f"; {_quoted(_exception_line(lost))}{_rank_note(lost, facts)}" if lost.rank in raised else ""
    for rank, code, host in failed_ranks(facts.log_tail):
        if rank not in raised and code < 0:
            return _of_signal(Killed(signal_name(-code), True, rank, host), facts)
        if rank not in raised:
            return Outcome.error, f"{_rank_name(rank, host)} ended with exit status {code}{then}"
    for result in facts.results:
        if result.status == "ended":
            ended = f"rank {result.rank} ended by itself after {_num(_steps_of(result))}, the others did not"
            return Outcome.error, f"{ended}{then}"
    return _of_exception(lost, facts)


def _is_second_hand(result: RankResult, facts: Facts) -> bool:
    """Whether a rank's exception only reports the failure of another process."""
    line = _exception_line(result)
    if _class_of(result) in OOM_CLASSES | HOST_OOM_CLASSES or verdict_of(line, line, facts):
        return False
    return _class_of(result) in PARENT_CLASSES or bool(PEER_LOST.search(line))


def _class_of(result: RankResult) -> str:
    return (result.error or {}).get("type", "").rsplit(".", 1)[-1]


def _of_exception(result: RankResult, facts: Facts) -> Verdict:
    error = result.error or {}
    if error.get("type") == UNMEASURABLE:
        return Outcome.error, str(error.get("message"))
    line = f"{_quoted(_exception_text(result))}{_rank_note(result, facts)}"
    if _class_of(result) in OOM_CLASSES:
        return Outcome.device_oom, line
    if _class_of(result) in HOST_OOM_CLASSES:
        return Outcome.host_oom, line
    if CAPTURE_FAILED.search(error.get("message", "")) and DEVICE_OOM.search(error.get("traceback", "")):
        return Outcome.device_oom, f"memory ran out in the capture of a CUDA graph: {line}"
    if _lacks_pinned_memory(result, facts):
        return Outcome.host_oom, f"page-locked memory ran out: {line}"
    if worker := error.get("worker"):  # report its end in torch's words, which `verdict_of` knows
        pid, _, name = worker.partition(", ")
        line = f"DataLoader worker (pid {pid}) is killed by signal: {WORKER_SIGNALS.get(name, name)}, then {line}"
        return verdict_of(line, line, facts) or (Outcome.error, line)
    text = f"{error.get('message', '')}\n{facts.log_tail if WORKER_KILLED.search(error.get('message', '')) else ''}"
    last_frame = error.get("traceback", "").rpartition(LAST_FRAME)[2]
    return verdict_of(text, line, facts) or (Outcome.error, advised(line, f"{last_frame}\n{text}"))


def _lacks_pinned_memory(result: RankResult, facts: Facts) -> bool:
    """Whether torch lacked host memory to pin, rather than device memory for the CUDA context that pinning may create."""
    error = result.error or {}
    is_pinning = PINNING.search(f"{error.get('message', '')}\n{error.get('traceback', '')}")
    is_full = (facts.device_used_frac or 0.0) > NEAR_CAP_FRAC
    return bool(is_pinning and DEVICE_OOM.search(error.get("message", "")) and not is_full)


def _exception_line(result: RankResult) -> str:
    """Returns the last line of a rank's traceback, such as "ValueError: bad shape".

    For an exception that a loader worker raised, it is the last line of the worker's traceback.
    """
    message = plain((result.error or {}).get("message", ""))
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    name = _class_of(result) or "an exception of unknown class"
    return raised_in(message) or (f"{name}: {lines[0]}" if lines else name)


def _exception_text(result: RankResult) -> str:
    """Returns `_exception_line` and the other lines of the exception's message, in which libraries give advice."""
    first, message = _exception_line(result), plain((result.error or {}).get("message", ""))
    lines = list(itertools.takewhile(lambda line: not CPP_FRAMES.match(line), message.strip().splitlines()))
    is_quoted = raised_in(message) or not lines  # a worker's message is its whole traceback, which ends with `first`
    return first if is_quoted else "\n".join([first, *lines[1:]])


def _quoted(text: str) -> str:
    """Returns the program's text for quoting in a sentence: one line, cut at the end of a sentence or word."""
    return shortened(" ".join(plain(text).split()), MAX_QUOTED_CHARS)


# Some rank has no result ---------------------------------------------------------------------------------------------------


def _of_ending(facts: Facts) -> Verdict:
    signal = _killed(facts)
    log = plain(facts.log_tail)
    # If the program exits with 0, messages in the log matter only if a child failed and no process wrote a result.
    is_failed = facts.exit_code != 0 or (CHILD_FAILED.search(log) is not None and not facts.results)
    raised = raised_in(log) if is_failed else ""
    if signal.name in ("SIGKILL", "SIGBUS") and facts.oom_kills:
        rank = "" if signal.rank is None else f", rank {signal.rank} first,"
        return Outcome.host_oom, f"the kernel killed {facts.oom_kills} process(es){rank} for memory in phase {facts.phase}"
    if facts.cause == "deadline":
        return _of_deadline(facts)
    if signal.name:
        return _of_signal(signal, facts, raised or "".join(CPP_SAID.findall(log)[-1:]))
    task = next(iter(failed_ranks(log)), None)
    if task is not None and task.host and PEER_LOST.search(raised):
        return Outcome.error, f"{_rank_name(task.rank, task.host)} ended with exit status {task.code}"
    if raised:
        line = _quoted(raised)
        text = f"{raised}\n{_relevant(log, raised)}"
        last_frame = log[: log.rfind(raised)].rpartition(LAST_FRAME)[2]
        return verdict_of(text, line, facts) or (Outcome.error, advised(line, f"{last_frame}\n{raised}"))
    if facts.results:
        return Outcome.error, "; ".join(facts.problems) or f"no result from rank {_missing(facts.results)[0]}"
    if facts.problems:
        return Outcome.error, "; ".join(facts.problems)
    if facts.exit_code:
        return _of_status(facts)
    return Outcome.error, _unseen(facts)


def _of_signal(signal: Killed, facts: Facts, said: str = "") -> Verdict:
    """Returns the verdict for a process that a signal ended; `said` is the error that it printed last, "" for none."""
    if known := verdict_of(said, _quoted(said), facts):
        return known
    if signal.host and ENDED_FOR_MEMORY.search(facts.log_tail):
        return Outcome.host_oom, f"{_rank_name(signal.rank, signal.host)} was ended for memory, says Slurm"
    quoted = f": {_quoted(said)}" if said and not PEER_LOST.search(said) else ""
    return Outcome.crash, f"{_crash(signal, facts)}{quoted}"


def _of_deadline(facts: Facts) -> Verdict:
    """Returns the verdict for a passed deadline.

    It is out of memory if the log shows that a process ran out of memory, so the others waited for it in vain.
    """
    if facts.shut_out:
        return Outcome.error, f"harness not loaded: {facts.shut_out}"
    limit = facts.deadline or f"a deadline passed in phase {facts.phase}"
    limit += f"; {facts.hang}" if facts.hang else ""
    if WORKER_KILLED.search(facts.log_tail) and facts.oom_kills:
        return Outcome.host_oom, f"the kernel killed {facts.oom_kills} loader worker(s) for memory, then {limit}"
    raised = raised_in(plain(facts.log_tail))
    known = verdict_of(raised, _quoted(raised), facts) if raised else None
    if known and known[0] in (Outcome.device_oom, Outcome.host_oom):
        return known
    return Outcome.timeout, f"{limit}; the log's last exception: {_quoted(raised)}" if raised else limit


def _of_status(facts: Facts) -> Verdict:
    lines = [line.strip() for line in plain(facts.log_tail).splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    last = [*lines[-1:], *own[-1:]][-1] if lines else _last_printed(facts)
    if last.startswith(START_REFUSED):
        return Outcome.error, last.removeprefix("autotune: ")
    last = _quoted(last)
    return verdict_of(facts.log_tail, last, facts) or (Outcome.error, f"exit status {facts.exit_code}: {last}")


def _last_printed(facts: Facts) -> str:
    """Returns "nothing on standard error; last on standard output: Killed": some programs write their errors there."""
    lines = [line.strip() for line in plain(facts.stdout_tail).splitlines() if line.strip()]
    return "nothing on standard error" + (f"; last on standard output: {lines[-1]}" if lines else "")


def _unseen(facts: Facts) -> str:
    if fault := HARNESS_FAULT.search(facts.log_tail):
        return f"harness not loaded: {fault[0].removeprefix('autotune: ')}"
    if not facts.is_harness_seen:
        return UNLOADED
    if facts.phase == "spawn":
        return WITHOUT_TORCH
    if facts.num_steps == 0 and facts.phase in (*START_PHASES, "exit"):
        return f"{_untrained(facts)} (last phase: {facts.phase})"
    return _ended_after(max(1, facts.num_steps))


def _killed(facts: Facts) -> Killed:
    return killed(facts.signal, facts.exit_code, facts.log_tail)


def _crash(signal: Killed, facts: Facts) -> str:
    who = "a process of the program" if signal.is_relayed else "the program"
    if signal.rank is not None:
        who = _rank_name(signal.rank, signal.host)
    hint = {
        "SIGBUS": " (often: shared memory in /dev/shm ran out)",
        "SIGILL": " (an instruction this processor does not have)",
        "SIGKILL": " (ended from outside, or by the kernel for memory)" if signal.host else KILLED,
    }.get(signal.name, "")
    return f"{who} was ended by {signal.name} in phase {facts.phase}{hint}"


def _rank_name(number: int | None, host: str) -> str:
    """Returns "rank 1", or "task 1 on node n2" for a task of srun, which is a rank or a torchrun."""
    return f"task {number} on node {host}" if host else f"rank {number}"


def _relevant(log: str, raised: str) -> str:
    """Returns the log from the exception's line on, since messages may have several lines."""
    return log[max(0, log.rfind(raised)) :]


def _missing(results: Sequence[RankResult]) -> list[int]:
    there = {result.rank for result in results}
    return [rank for rank in range(max((result.world_size for result in results), default=0)) if rank not in there]


def _rank_note(result: RankResult, facts: Facts) -> str:
    """Returns " (rank 3)" if there are several ranks, " (rank 3 on n2)" if they are on several nodes, else ""."""
    if max(r.world_size for r in facts.results) == 1:
        return ""
    return f" (rank {result.rank} on {result.host})" if len({r.host for r in facts.results}) > 1 else f" (rank {result.rank})"
