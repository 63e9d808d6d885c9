"""Rules for the input pipeline: which stage is slow, and whether workers are missing."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding, ms, percent
from autotune.explain.gains import Gain, Saved, gain_of
from autotune.explain.places import named, place_of
from autotune.harness.explain.documents import COLLATE, DECODE, HANDOVER, INPUT, ITEM, MAIN, PIN, READ, WORKER, Line, Stage
from autotune.records import KnobValue

DECODING, AUGMENTATION, COLLATING, STORAGE = "slow decode", "slow augmentation", "slow collate", "slow storage"
WORKERS = "too few workers"
NUM_WORKERS = "loader.num_workers"
BLOCKED_FRAC = 0.5  # of a stage's seconds: it waits for storage rather than computes
WAITS_FRAC = 0.05  # of a step that waits for input: less is not worth a look
BEHIND_FRAC = 0.75  # of a step in which the workers make its samples: the loader may set the pace
ENOUGH = 1.1  # times the work per step that workers should be able to do
DECODES = re.compile(r"decod|jpe?g|png|imread|Image\.open|frombytes|decompress|unpack|from_buffer|zlib|gzip", re.IGNORECASE)
READS = re.compile(r"\bread|open\(|fetch|download|\brecv|request|np\.load|mmap|seek\(|sleep\(|storage", re.IGNORECASE)
CODE = {
    DECODING: "store decoded or smaller inputs, or use a faster decoder",
    AUGMENTATION: "vectorise it, precompute it, or do it on the device",
    COLLATING: "stack tensors once (torch.stack); leave out Python loops and copies in collate_fn",
    STORAGE: "read larger pieces, cache what fits the memory, or use faster storage",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds of the input pipeline that have one cause, a sample: wall, on a CPU, blocked; and where."""

    cause: str
    where: str
    what: str
    seconds: float
    cpu_s: float

    @property
    def blocked_s(self) -> float:
        """Seconds neither on a CPU nor waiting for one."""
        return max(0.0, self.seconds - self.cpu_s)


def stage_costs(evidence: Evidence, cause: str) -> Iterator[Finding]:
    """Yields a finding for the part of the input pipeline that has this cause."""
    for part in parts(evidence) if evidence.lines else ():
        if part.cause == cause:
            yield _finding(evidence, part)


def parts(evidence: Evidence) -> list[Part]:
    """Returns what the input pipeline's time goes to, the most first; stages of one cause are one part."""
    found: dict[str, list[tuple[Stage, float]]] = {}
    for stage in stages(evidence):
        blocked_s = _blocked_s(stage)
        cause = _cause(stage, evidence, is_blocked=blocked_s > BLOCKED_FRAC * stage.seconds)
        found.setdefault(cause, []).append((stage, blocked_s))
    made = [_part(evidence, cause, costs) for cause, costs in found.items()]
    return sorted(made, key=lambda part: -part.seconds)


def stages(evidence: Evidence) -> list[Stage]:
    """Returns the stages that make a sample, in workers or, without any, in the training thread."""
    where = WORKER if evidence.num_workers else MAIN
    return [stage for stage in evidence.first.stages if stage.where == where and stage.name not in (HANDOVER, PIN)]


def service_s(evidence: Evidence) -> float:
    """Returns the seconds that making one sample takes."""
    return math.fsum(stage.seconds for stage in stages(evidence))


def supply_s(evidence: Evidence) -> float:
    """Returns the seconds in which the workers make a step's samples, were the step to wait for nothing else."""
    rate = evidence.record.loader_rate
    ranks = max(1, len(evidence.lines))
    samples = evidence.first.samples / max(1, evidence.first.steps)
    by_rate_s = samples * ranks / rate if rate else 0.0
    return max(by_rate_s, service_s(evidence) * evidence.batch / max(1, evidence.num_workers))


def is_behind(evidence: Evidence) -> bool:
    """Returns whether the step waits because the loader is slow, and not just while it takes a finished batch."""
    if evidence.wait_s < WAITS_FRAC * evidence.step_s:
        return False
    return not evidence.num_workers or supply_s(evidence) >= BEHIND_FRAC * evidence.step_s


def _blocked_s(stage: Stage) -> float:
    if stage.blocked_s is not None:
        return stage.blocked_s
    return max(0.0, stage.seconds - stage.cpu_s) if stage.cpu_s is not None else 0.0


def _cause(stage: Stage, evidence: Evidence, *, is_blocked: bool) -> str:
    if stage.name == COLLATE:
        return COLLATING
    if is_blocked or stage.name == READ:
        return STORAGE
    if stage.name == DECODE:
        return DECODING
    if stage.name != ITEM:
        return AUGMENTATION
    seconds: dict[str, float] = {DECODING: 0.0, STORAGE: 0.0, AUGMENTATION: 0.0}
    for line in _item_lines(evidence, stage):
        seconds[_cause_of_line(line)] += line.self_s
    for other in stages(evidence):  # what is timed apart is not the item's own
        apart = {DECODE: DECODING, READ: STORAGE}.get(other.name)
        if apart:
            seconds[apart] -= other.seconds * evidence.batch
    return max(seconds, key=lambda cause: seconds[cause]) if any(value > 0 for value in seconds.values()) else AUGMENTATION


def _cause_of_line(line: Line) -> str:
    words = f"{line.text} {line.function} {line.callee}"
    if DECODES.search(words):
        return DECODING
    return STORAGE if READS.search(words) else AUGMENTATION


def _item_lines(evidence: Evidence, stage: Stage) -> list[Line]:
    """Returns the program's own lines that make an item, most seconds first, without those of stages timed apart."""
    apart = [other for other in stages(evidence) if other.name != ITEM and other.function]
    lines = [line for line in evidence.own_lines(stage.where) if line.phase == INPUT]
    return [line for line in lines if not any(_is_of(line, other) for other in apart)]


def _part(evidence: Evidence, cause: str, costs: Sequence[tuple[Stage, float]]) -> Part:
    top = max(costs, key=lambda cost: cost[0].seconds)[0]
    line = _top_line(evidence, top)
    where = place_of(line, evidence.cwd) if line else named(top.file, top.line, evidence.cwd) if top.file else top.name
    seconds = math.fsum(stage.seconds for stage, _ in costs)
    cpu_s = math.fsum(min(stage.seconds - blocked_s, _known(stage.cpu_s, stage.seconds)) for stage, blocked_s in costs)
    return Part(
        cause=cause, where=where, what=", ".join(stage.name for stage, _ in costs), seconds=seconds, cpu_s=max(0.0, cpu_s)
    )


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _top_line(evidence: Evidence, stage: Stage) -> Line | None:
    """Returns the program's own line that took the most time in a stage; None if the stage is a library's."""
    if stage.name == ITEM:
        return next(iter(_item_lines(evidence, stage)), None)
    lines = [line for line in evidence.own_lines(stage.where) if line.phase == INPUT]
    if stage.name in (READ, DECODE):
        pattern = READS if stage.name == READ else DECODES
        return next((line for line in lines if pattern.search(f"{line.text} {line.function} {line.callee}")), None)
    return next((line for line in lines if _is_of(line, stage)), None)


def _is_of(line: Line, stage: Stage) -> bool:
    is_there = os.path.basename(line.file) == os.path.basename(stage.file)
    return is_there and bool(stage.function) and line.function.rpartition(".")[2] == stage.function.rpartition(".")[2]


def _finding(evidence: Evidence, part: Part) -> Finding:
    service, batch = service_s(evidence), evidence.batch
    blocked = f", {percent(part.blocked_s / part.seconds)} of it waiting" if part.blocked_s > 0.2 * part.seconds else ""
    waits = f"the step waits {percent(evidence.wait_s / evidence.step_s)} of its time for input"
    return Finding(
        cause=part.cause,
        where=part.where,
        evidence=f"{part.what}: {ms(part.seconds)} of {ms(service)} a sample{blocked}; {waits}",
        gain=gain_without(evidence, wall_s=part.seconds * batch, cpu_s=part.cpu_s * batch),
        basis="stage times of the workers and the step's waiting"
        if evidence.num_workers
        else "stage times in the training thread",
        code=CODE[part.cause],
    )


def gain_without(evidence: Evidence, *, wall_s: float, cpu_s: float) -> Gain:
    """Returns the gain without some seconds of input work a step, all workers together.

    Without workers the step itself gets shorter. With workers, the step waits for the slower of loader and training thread;
    where both share cores, each also gets the cores that the other leaves.
    """
    step_s, wait_s, cores = evidence.step_s, evidence.wait_s, max(1, evidence.host_context.num_cores)
    if not evidence.num_workers:
        seconds = min(wall_s, max(wait_s, 0.0)) if wait_s else wall_s
        return gain_of(step_s, Saved(low=0.8 * seconds, mid=seconds, high=1.25 * seconds), "floor")
    freed_s = cpu_s / cores if evidence.is_shared else 0.0
    busy_s = max(step_s - wait_s, 0.0)
    if not is_behind(evidence):
        return gain_of(step_s, Saved(low=0.0, mid=0.6 * freed_s, high=1.2 * freed_s), "predicted")
    work_s = max(service_s(evidence) * evidence.batch, wall_s)
    loader_s = step_s * (1 - wall_s / work_s)  # the loader sets the pace now
    left = [max(loader_s * times, busy_s - share * freed_s) for times, share in ((1.2, 0.0), (1.0, 0.5), (0.9, 1.3))]
    low, mid, high = (max(0.0, step_s - seconds) for seconds in left)
    return gain_of(step_s, Saved(low=0.8 * low, mid=mid, high=high), "predicted")


def too_few_workers(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if more loader workers would hide the input's time."""
    if not evidence.lines or not is_behind(evidence):
        return
    have, wanted = evidence.num_workers, _wanted(evidence)
    if wanted is None:
        return
    measured = evidence.effect(NUM_WORKERS, wanted)
    seconds, service = evidence.wait_s, service_s(evidence)
    yield Finding(
        cause=WORKERS,
        where="loader" if have else "training thread",
        evidence=f"{have or 'no'} workers, and the step waits {ms(seconds)} of {ms(evidence.step_s)} for input"
        + (f"; {ms(service)} of work a sample" if service else ""),
        gain=measured or _gain_of_workers(evidence, wanted),
        basis="trials of this study" if measured else "input and the rest of the step side by side, on the cores there are",
        knob=NUM_WORKERS,
        value=wanted,
    )


def _wanted(evidence: Evidence) -> int | None:
    """Returns the number of workers to try: the best that trials know, or what the work needs; None for no more than now."""
    more = [int(value) for value in evidence.domains.get(NUM_WORKERS, ()) if int(value) > evidence.num_workers]
    more = [value for value in more if evidence.may_set(NUM_WORKERS, value)]
    if not more:
        return None
    known = {value: gain.mid for value in more if (gain := evidence.effect(NUM_WORKERS, value))}
    if known:
        return max(known, key=lambda value: known[value])
    needed = math.ceil(ENOUGH * service_s(evidence) * evidence.batch / max(evidence.step_s - evidence.wait_s, 1e-6))
    return min(more, key=lambda value: (value < needed, abs(value - needed)))


def _gain_of_workers(evidence: Evidence, workers: KnobValue) -> Gain:
    """Returns the gain of hiding input work behind the step, whose cores it may share."""
    step_s, wait_s, cores = evidence.step_s, evidence.wait_s, max(1, evidence.host_context.num_cores)
    busy_s = step_s - wait_s
    if evidence.num_workers:
        supply_s = step_s * evidence.num_workers / int(workers)
        return gain_of(step_s, Saved(low=0.0, mid=0.7 * (step_s - max(busy_s, supply_s)), high=wait_s), "predicted")
    cpu_s = min(wait_s, math.fsum(part.cpu_s for part in parts(evidence)) * evidence.batch or wait_s)
    blocked_s = wait_s - cpu_s
    if evidence.is_cuda or cores > 2:
        return gain_of(step_s, Saved(low=0.5 * wait_s, mid=0.9 * wait_s, high=wait_s), "predicted")
    hidden_s = blocked_s + 0.5 * cpu_s  # the training thread's own threads need the cores, too
    return gain_of(step_s, Saved(low=0.6 * blocked_s, mid=0.9 * hidden_s, high=wait_s), "predicted")
