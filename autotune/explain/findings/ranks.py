"""Rules for several ranks: one rank delays the others, or gradients are exchanged while no rank computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autotune.explain.evidence import Evidence, phases_of
from autotune.explain.findings.finding import Finding
from autotune.explain.gains import Saved
from autotune.harness.explain.documents import BACKWARD, INPUT, MAIN, OPTIMIZER, OTHER, WORKER, Line, Lines

WAITING = (BACKWARD, OPTIMIZER)  # phases in which a rank waits for the others' gradients
COLLECTIVES = "distributed_c10d.py:"  # torch's file of collectives, as in `Line.callee`
SKEW_FRAC = 0.05  # one rank must take longer than the others by at least this share of a step
EXPOSED_FRAC = 0.05  # the exchange of gradients must hold up every rank for at least this share of a step


def skew(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if one rank takes longer than the others, which wait for it."""
    if len(evidence.lines) < 2:
        return
    own_s = [_own_s(lines) for lines in evidence.lines]
    slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
    rest = [seconds for rank, seconds in enumerate(own_s) if rank != slowest]
    excess_s = own_s[slowest] - max(rest)
    if excess_s < SKEW_FRAC * evidence.step_s:
        return
    slow, other = evidence.lines[slowest], evidence.lines[own_s.index(max(rest))]
    phase = max(phases_of(slow), key=lambda name: _more(slow, other, name))
    line = _different_line(slow, other, phase)
    place = f" at {evidence.place_of(line)}" if line else ""
    yield Finding(
        cause="rank skew",
        where=f"rank {slow.rank}{place}",
        evidence=f"rank {slow.rank} takes longer than the others by {evidence.of_step(excess_s)}, mostly in {phase}"
        + (f": `{line.text[:60]}`" if line and line.text else ""),
        gain=evidence.gain(_saved_by_balance(evidence, own_s), "predicted"),
        basis="each rank's step time, without the phases in which it waits for other ranks",
        code="give every rank the same work: split the data evenly, and move work of a single rank out of the step",
    )


def _saved_by_balance(evidence: Evidence, own_s: Sequence[float]) -> Saved:
    """Returns how many seconds shorter a step would be with equal work on all ranks: at least, usually, at most.

    With GPUs, the usual value is the slowest rank's excess over the mean of all ranks. Without GPUs, less is saved, because the
    slowest rank had all cores while the others waited. The upper end is the slowest rank's excess over the mean of the others.
    It assumes that the slowest rank's extra work disappears, and that the other ranks share their work evenly.
    """
    spread_s = max(own_s) - math.fsum(own_s) / len(own_s)
    least, usual = (0.8, 1.0) if evidence.is_cuda else (0.4, 0.7)
    return (least * spread_s, usual * spread_s, spread_s * len(own_s) / (len(own_s) - 1))


def _own_s(lines: Lines) -> float:
    """Returns the seconds per step that a rank needs for its own work, without waiting for others."""
    own_s = math.fsum(seconds for phase, seconds in phases_of(lines).items() if phase not in WAITING) - _called_s(lines)
    exposed_s = lines.communication.get("exposed_s")
    waiting_s = math.fsum(phases_of(lines).get(phase, 0.0) for phase in WAITING)
    return own_s + (max(0.0, waiting_s - exposed_s) if isinstance(exposed_s, int | float) else 0.0)


def _called_s(lines: Lines) -> float:
    """Returns the seconds per step in the program's own collectives, such as `dist.all_reduce(loss)`: a rank waits there."""
    return math.fsum(line.self_s for line in lines.lines if _is_collective(line))


def _is_collective(line: Line) -> bool:
    return line.is_own and line.where == MAIN and line.phase == OTHER and line.callee.startswith(COLLECTIVES)


def _more(slow: Lines, other: Lines, phase: str) -> float:
    return -math.inf if phase in WAITING else phases_of(slow).get(phase, 0.0) - phases_of(other).get(phase, 0.0)


def _different_line(slow: Lines, other: Lines, phase: str) -> Line | None:
    """Returns the program's line that takes the most additional time on the slow rank; None if no line takes longer there.

    If the input is slow and workers make it, the line is one of the workers', because the training thread only waits.
    """
    where = WORKER if phase == INPUT and slow.num_workers else MAIN
    usual = {(line.file, line.line): line.self_s for line in other.lines if line.is_own and line.where == where}
    more = [
        (line.self_s - usual.get((line.file, line.line), 0.0), line)
        for line in slow.lines
        if line.is_own and line.where == where and line.phase not in WAITING and (line.phase == INPUT) == (phase == INPUT)
        if not _is_collective(line)
    ]
    extra_s, top = max(more, key=lambda pair: pair[0], default=(0.0, None))
    return top if extra_s > 0 else None


def communication(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if gradients are exchanged while no rank computes."""
    exposed = [lines.communication.get("exposed_s") for lines in evidence.lines]
    known = [float(seconds) for seconds in exposed if isinstance(seconds, int | float)]
    if len(evidence.lines) < 2 or not known or min(known) < EXPOSED_FRAC * evidence.step_s:
        return
    seconds = min(known)  # the rank that waits least waits only for the exchange; the others also wait for slower ranks
    size = evidence.first.communication.get("gradient_bytes")
    amount = f"{float(size) / 1e6:.3g} MB of " if isinstance(size, int | float) else ""
    yield Finding(
        cause="communication",
        where="gradient all-reduce",
        evidence=f"{evidence.of_step(seconds)} waiting for the exchange of {amount}gradients",
        gain=evidence.gain((0.0, 0.5 * seconds, seconds), "bound"),
        basis="exposed communication of the rank that waits least",
        code="exchange less often (larger batch, accumulation) or fewer bytes (parallel.gradient_compression)",
    )
