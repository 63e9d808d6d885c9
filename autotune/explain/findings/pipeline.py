"""Rules for the input pipeline: which stage is slow, and whether workers are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.explain.evidence import Evidence
from autotune.explain.findings.finding import Finding, Without
from autotune.explain.gains import Gain, Saved, gain_of
from autotune.harness.explain.documents import (
    COLLATE,
    DECODE,
    HANDOVER,
    INPUT,
    ITEM,
    MAIN,
    PIN,
    READ,
    TRANSFORM,
    WORKER,
    Line,
    Stage,
)
from autotune.quantities import percent_text, step_time_text

DECODING, AUGMENTATION, COLLATING, STORAGE = "slow decode", "slow augmentation", "slow collate", "slow storage"
WORKERS = "too few workers"
CAUSES = (DECODING, AUGMENTATION, COLLATING, STORAGE, WORKERS)
NUM_WORKERS, THREADS = "loader.num_workers", "threads.intra"
LEAST_BLOCKED_FRAC = 0.1  # a stage's wait for storage is a separate cause if it takes at least this share of a sample's work
WAITS_FRAC = 0.05  # the loader counts as fast enough if a step waits for input for less than this share of its time
BEHIND_FRAC = 0.75  # the loader may limit the rate if making a step's samples takes at least this share of a step's time
# If workers limit the rate and share the training thread's cores, they use this share of the time that the thread gives up.
FOR_WORKERS_FRAC = 0.5
# After a cost of the loader is removed, the loader's predicted seconds are multiplied by LOADER_TIMES, and the training
# thread's predicted seconds by ALONE_TIMES: (highest, likeliest, lowest).
LOADER_TIMES = (1.3, 1.0, 0.85)
ALONE_TIMES = (1.15, 0.9, 0.75)  # a thread that does not have to wait finds its caches warm; measured 0.8 to 0.9
# Share of a cost that remains after its remedy: at most, usually, at least. Decoded inputs still have to be read, a faster
# decoder still decodes, and vectorised code still computes.
REMAINING = {DECODING: (0.5, 0.2, 0.0), AUGMENTATION: (0.5, 0.1, 0.0), COLLATING: (0.4, 0.1, 0.0), STORAGE: (0.5, 0.1, 0.0)}
MAX_NAMED = 3  # maximum number of transforms that a finding names
MOST_FRAC = 0.5  # a part can be measured by skipping stages if it is at least this share of all work that is then skipped
# If decoding takes less than this share of the time of the data set's own code, all of this code counts as augmentation. If
# augmentation takes less, all of it counts as decoding.
LEAST_SHARE = 0.1
MAX_WORKERS = 1_000_000  # more than any machine has; limits the numbers in damaged documents
ENOUGH = 1.1  # number of workers to suggest, as a multiple of the number that just keeps up with the training thread
DECODES = re.compile(r"decod|jpe?g|png|imread|Image\.open|frombytes|decompress|unpack|from_buffer|zlib|gzip", re.IGNORECASE)
READS = re.compile(r"\bread|open\(|fetch|download|\brecv|request|np\.load|mmap|seek\(|sleep\(|storage", re.IGNORECASE)
CODE = {
    DECODING: "store decoded or smaller inputs, or use a faster decoder",
    AUGMENTATION: "vectorise it, precompute it, or run it on the device",
    COLLATING: "stack tensors once (torch.stack); avoid Python loops and copies in collate_fn",
    STORAGE: "read larger pieces, cache what fits the memory, or use faster storage",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Work of the input pipeline that has one cause, in seconds per sample.

    Attributes:
        cause: the finding's cause, if the part takes too long.
        where: place in the code, or name of the stage.
        what: names of the stages as one text; for several transforms, also the seconds of each.
        stages: names of the stages.
        cpu_s: seconds on a CPU.
        blocked_s: seconds in which it waits for storage, the network or the end of a sleep, but not for a CPU.
    """

    cause: str
    where: str
    what: str
    stages: tuple[str, ...]
    cpu_s: float
    blocked_s: float

    @property
    def work_s(self) -> float:
        """Seconds of the part, without the time in which a worker waited for a busy core."""
        return self.cpu_s + self.blocked_s


def stage_costs(evidence: Evidence, cause: str) -> Iterator[Finding]:
    """Yields a finding for each part of the input pipeline that has this cause."""
    for part in parts(evidence):
        if part.cause == cause:
            yield _finding(evidence, part)


def parts(evidence: Evidence) -> list[Part]:
    """Returns the parts of the input pipeline's work, the largest first.

    The parts are decoding, storage, collating, augmentation in the data set's own code, all transforms of libraries together,
    and each transform of the program.
    """
    found: dict[tuple[str, str], list[tuple[Stage, float, float]]] = {}
    least_s = LEAST_BLOCKED_FRAC * service_s(evidence)
    for stage in stages(evidence):
        cpu_s, blocked_s = _work(stage)
        is_apart = blocked_s >= max(least_s, LEAST_BLOCKED_FRAC * (cpu_s + blocked_s))
        for cause, share in _shares(stage, evidence).items():
            costs = (stage, share * cpu_s, 0.0 if is_apart else share * blocked_s)
            found.setdefault((cause, _part_key(stage)), []).append(costs)
        if is_apart:
            found.setdefault((STORAGE, ""), []).append((stage, 0.0, blocked_s))
    made = [_part(evidence, cause, costs) for (cause, _), costs in found.items()]
    return sorted(made, key=lambda part: -part.work_s)


def _part_key(stage: Stage) -> str:
    """Returns the key by which stages with the same cause are combined into one part."""
    if not stage.name.startswith(TRANSFORM):
        return ""
    return stage.name if stage.function else TRANSFORM


def stages(evidence: Evidence) -> list[Stage]:
    """Returns the stages that make a sample: those in the workers or, if there are no workers, in the training thread."""
    where = WORKER if evidence.num_workers else MAIN
    return [stage for stage in evidence.first.stages if stage.where == where and stage.name not in (HANDOVER, PIN)]


def service_s(evidence: Evidence) -> float:
    """Returns the seconds of work that one sample takes."""
    return math.fsum(math.fsum(_work(stage)) for stage in stages(evidence))


def _work(stage: Stage) -> tuple[float, float]:
    """Returns the seconds per sample that a stage spends on a CPU, and the seconds per sample in which it is blocked."""
    cpu_s = stage.seconds if stage.cpu_s is None else stage.cpu_s
    return cpu_s, max(0.0, stage.seconds - cpu_s) if stage.blocked_s is None else stage.blocked_s


def supply_s(evidence: Evidence) -> float:
    """Returns the seconds that the workers need to make a step's samples if nothing delays them."""
    rate = evidence.record.loader_rate
    by_rate_s = evidence.samples / rate if rate else 0.0
    by_stages_s = math.fsum(stage.seconds for stage in stages(evidence)) * evidence.made / max(1, evidence.num_workers)
    return max(by_rate_s, by_stages_s)


def is_behind(evidence: Evidence) -> bool:
    """Returns whether the step waits because the loader is slow, and not only to receive a finished batch."""
    if evidence.wait_s < WAITS_FRAC * evidence.step_s:
        return False
    return not evidence.num_workers or supply_s(evidence) >= BEHIND_FRAC * evidence.step_s


def limited_by_loader(evidence: Evidence, finding: Finding) -> Finding:
    """Returns a finding that is not about the input, with the gain that is left if the loader's workers limit the rate.

    If the workers limit the rate, a step with less work only waits longer for its input, unless the workers get the cores that
    become free. Free cores help workers only while they compute. A step that does not wait for input yet cannot become shorter
    than the time that the workers need for its samples. This time is known if workers and steps do not share cores.
    """
    if not evidence.num_workers or (evidence.is_shared and not is_behind(evidence)):
        return finding
    step_s, gain = evidence.step_s, finding.gain
    low, mid, high = (step_s * max(0.0, each / (1 + each)) for each in (gain.low, gain.mid, gain.high))
    if is_behind(evidence):
        is_used = evidence.is_shared and not evidence.is_cuda
        low, mid = 0.0, mid * FOR_WORKERS_FRAC * _computed_frac(evidence) if is_used else 0.0
    else:
        rest_s = max(0.0, step_s - supply_s(evidence))
        low, mid = min(low, rest_s), min(mid, rest_s)
    gain = gain_of(step_s, (low, mid, high), gain.kind)
    without = finding.without and replace(finding.without, gain=replace(gain, kind=finding.without.gain.kind))
    return replace(finding, gain=gain, without=without)


def _computed_frac(evidence: Evidence) -> float:
    """Returns the share of the workers' work that is done on a CPU; 1 if nothing is known of it."""
    work = [_work(stage) for stage in stages(evidence)]
    whole_s = math.fsum(map(math.fsum, work))
    return math.fsum(cpu_s for cpu_s, _ in work) / whole_s if whole_s else 1.0


def _shares(stage: Stage, evidence: Evidence) -> dict[str, float]:
    """Returns the share that each cause has in a stage's work: {DECODING: 0.8, AUGMENTATION: 0.2}.

    The data set's own code may decode and augment. Its work is split between the two in proportion to their lines' seconds.
    """
    if stage.name != ITEM:
        return {{READ: STORAGE, DECODE: DECODING, COLLATE: COLLATING}.get(stage.name, AUGMENTATION): 1.0}
    seconds = {DECODING: 0.0, AUGMENTATION: 0.0}
    for line in _item_lines(evidence, stage):
        cause = _cause_of_line(line)
        if cause in seconds:
            seconds[cause] += line.self_s
    for other in stages(evidence):  # library work with a stage of its own is also in the lines that call it: subtract it here
        if other.name == DECODE or (other.name.startswith(TRANSFORM) and not other.function):
            seconds[DECODING if other.name == DECODE else AUGMENTATION] -= other.seconds * evidence.made
    whole = math.fsum(max(0.0, each) for each in seconds.values())
    large = {cause: each / whole for cause, each in seconds.items() if each > 0 and each >= LEAST_SHARE * whole}
    return {cause: share / sum(large.values()) for cause, share in large.items()} or {AUGMENTATION: 1.0}


def _cause_of_line(line: Line) -> str:
    words = f"{line.text} {line.function} {line.callee}"
    if DECODES.search(words):
        return DECODING
    return STORAGE if READS.search(words) else AUGMENTATION


def _item_lines(evidence: Evidence, stage: Stage) -> list[Line]:
    """Returns the program's lines that make an item, most seconds first, except lines of stages that are timed separately."""
    apart = [other for other in stages(evidence) if other.name != ITEM and other.function]
    lines = [line for line in evidence.own_lines(stage.where) if line.phase == INPUT]
    return [line for line in lines if not any(_is_of(line, other) for other in apart)]


def _part(evidence: Evidence, cause: str, costs: Sequence[tuple[Stage, float, float]]) -> Part:
    top = max(costs, key=lambda cost: cost[1] + cost[2])[0]
    line = _top_line(evidence, top, cause)
    where = evidence.place_of(line) if line else evidence.place(top.file, top.line) if top.file else top.name
    return Part(
        cause=cause,
        where=where,
        what=_names({stage.name: cpu_s + blocked_s for stage, cpu_s, blocked_s in costs}),
        stages=tuple(dict.fromkeys(stage.name for stage, _, _ in costs)),
        cpu_s=math.fsum(cpu_s for _, cpu_s, _ in costs),
        blocked_s=math.fsum(blocked_s for _, _, blocked_s in costs),
    )


def _names(work_s: dict[str, float]) -> str:
    """Returns the names of stages, the slowest first, or for several transforms "transforms (Resize 2.10 ms, Flip 1.00 ms)"."""
    names = sorted(work_s, key=lambda name: -work_s[name])
    if len(names) == 1 or not names[0].startswith(TRANSFORM):
        return ", ".join(names)
    shown = [f"{name.removeprefix(f'{TRANSFORM}: ')} {step_time_text(work_s[name])}" for name in names[:MAX_NAMED]]
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return f"transforms ({', '.join(shown + more)})"


def _top_line(evidence: Evidence, stage: Stage, cause: str) -> Line | None:
    """Returns the program's own line that took the most time in a stage; None if the stage is a library's."""
    lines = [line for line in evidence.own_lines(stage.where) if line.phase == INPUT]
    if stage.name in (ITEM, READ, DECODE):
        alike = [line for line in _item_lines(evidence, stage) if _cause_of_line(line) == cause]
        return next(iter(alike or (_item_lines(evidence, stage) if stage.name == ITEM else [])), None)
    return next((line for line in lines if _is_of(line, stage)), None)


def _is_of(line: Line, stage: Stage) -> bool:
    names = (each.function.rpartition(".")[2] for each in (line, stage))
    return line.file == stage.file and bool(stage.function) and len({*names}) == 1


def _finding(evidence: Evidence, part: Part) -> Finding:
    made, blocked_frac = evidence.made, part.blocked_s / part.work_s if part.work_s else 0.0
    blocked = f", {percent_text(blocked_frac)} of it waiting" if blocked_frac > LEAST_BLOCKED_FRAC else ""
    work, whole = step_time_text(part.work_s), step_time_text(service_s(evidence))
    return Finding(
        cause=part.cause,
        where=part.where,
        evidence=f"{part.what}: {work} of {whole} per sample{blocked}; {_input_text(evidence)}",
        gain=gain_without(evidence, REMAINING[part.cause], work_s=part.work_s * made, cpu_s=part.cpu_s * made),
        basis=_basis(evidence),
        code=CODE[part.cause],
        without=_without(evidence, part),
        unskippable="samples of an iterable data set cannot be used again" if _is_of_stream(evidence, part) else "",
    )


def _is_of_stream(evidence: Evidence, part: Part) -> bool:
    return evidence.first.is_stream and bool({ITEM, READ} & {*part.stages})


def _without(evidence: Evidence, part: Part) -> Without | None:
    """Returns how to measure the program without a part; None if most of the work that would be skipped is other work.

    Opening a file, and the data set's own code, can be skipped only by skipping the whole sample, which skips other work, too.
    A remedy would not remove this other work, so `remaining` includes it.
    """
    if _is_of_stream(evidence, part):
        return None
    skipped = (ITEM,) if {ITEM, READ} & {*part.stages} else part.stages
    inside = [one for one in stages(evidence) if one.name in skipped or (ITEM in skipped and one.name != COLLATE)]
    cpu_s = math.fsum(_work(one)[0] for one in inside)
    work_s = cpu_s + math.fsum(_work(one)[1] for one in inside)
    share = part.work_s / work_s if work_s else 0.0
    if share < MOST_FRAC:
        return None
    made, is_limiting = evidence.made, evidence.num_workers and not evidence.is_shared and is_behind(evidence)
    gain = gain_without(evidence, (0.0, 0.0, 0.0), work_s=work_s * made, cpu_s=cpu_s * made)
    most, usual, least = (1 - (1 - left) * min(share, 1.0) for left in REMAINING[part.cause])
    return Without(
        stages=skipped,
        gain=replace(gain, kind="predicted"),
        remaining=(most, usual, least),
        limiting=work_s / service_s(evidence) if is_limiting else None,
    )


def _basis(evidence: Evidence) -> str:
    if not evidence.num_workers:
        return "stage times in the step"
    cores = ", and the cores that the workers take from training" if evidence.is_shared else ""
    return f"stage times in the workers, the step's waits{cores}"


def _input_text(evidence: Evidence) -> str:
    """Returns what the input takes: "input takes 20.0 ms of a step's 102 ms (20 %), 8.00 ms of it in the training loader".

    The last part is left out if other loaders take hardly anything.
    """
    of_training = evidence.input_s - evidence.wait_s > 0.02 * evidence.step_s
    rest = f", {step_time_text(evidence.wait_s)} of it in the training loader" if of_training else ""
    return f"input takes {evidence.of_step(evidence.input_s)}{rest}"


def gain_without(evidence: Evidence, remaining: Saved, *, work_s: float, cpu_s: float) -> Gain:
    """Returns the gain of removing some input work.

    Without workers, the step itself gets shorter. The lower bound subtracts the time that adding workers would save anyway.
    With workers, the slower of loader and training thread limits the rate. If the two share cores, removing work from one
    also frees cores for the other.

    Args:
        evidence: what is known of the configuration.
        remaining: share of the work that a remedy leaves, at most, usually and at least, as in REMAINING.
        work_s: seconds of this work for each step, summed over all workers.
        cpu_s: the part of `work_s` that is spent on a CPU.
    """
    step_s, cores = evidence.step_s, max(1, evidence.host_context.num_cores)
    whole_s = max(service_s(evidence) * evidence.made, work_s, 1e-9)
    if not evidence.num_workers:
        seconds, wanted = work_s / whole_s * _making_s(evidence), _wanted(evidence)
        hidden_s = _saved_by_workers(evidence, wanted)[1] if wanted else 0.0
        least_s = max(0.0, 0.8 * seconds - hidden_s)
        return evidence.gain((least_s, seconds, 1.25 * seconds), "floor" if least_s else "bound")
    freed_s = cpu_s / cores if evidence.is_shared else 0.0
    if not is_behind(evidence):
        return evidence.gain(_saved_by_cores(evidence, remaining, freed_s, work_s / whole_s), "predicted")
    step_s, alone_s = evidence.trial_step_s, _training_alone_s(evidence, freed_s)
    saved_s = (
        max(0.0, step_s - max(step_s * slower * (1 - (1 - frac) * work_s / whole_s), alone))
        for slower, frac, alone in zip(LOADER_TIMES, remaining, alone_s, strict=True)
    )  # the loader limits the rate now, so a step takes as long as the loader
    return gain_of(step_s, saved_s, "predicted")


def _making_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in which the training thread itself makes samples, if the loader has no workers.

    The rest of the thread's wait for input goes to the sampler, or to the beginning of an epoch. No stage is part of that, and
    workers would not save it.
    """
    stages_s = math.fsum(stage.seconds for stage in stages(evidence)) * evidence.made
    return min(evidence.wait_s, stages_s) if stages_s else evidence.wait_s


def _saved_by_cores(evidence: Evidence, remaining: Saved, freed_s: float, share: float) -> Saved:
    """Returns the seconds of a step that the training thread saves if the workers use the cores less.

    Applies only if the workers keep up with the training thread.

    Args:
        evidence: what is known of the configuration.
        remaining: as for `gain_without`.
        freed_s: seconds of a step that are freed on each core.
        share: the removed work as a share of the workers' work.
    """
    if not freed_s or evidence.alone_s is None:
        return (0.0, 0.6 * freed_s, 1.2 * freed_s)
    held_up_s = evidence.busy_s - evidence.alone_s
    likely_s, most_s = held_up_s + _received_late_s(evidence), held_up_s + evidence.wait_s
    return (0.0, (1 - remaining[1]) * min(share * likely_s, freed_s), min(share * most_s, 1.2 * freed_s))


def _received_late_s(evidence: Evidence) -> float:
    """Returns the seconds of a step in which the training thread, while it receives batches, waits for a core or a worker."""
    received = (stage for stage in evidence.first.stages if stage.where == MAIN and stage.name == HANDOVER)
    late_s = math.fsum(max(0.0, stage.seconds - stage.cpu_s) for stage in received if stage.cpu_s is not None)
    return min(evidence.wait_s, late_s * evidence.made)


def _training_alone_s(evidence: Evidence, freed_s: float) -> Saved:
    """Returns the seconds of a step in which the training thread would work if the input were ready: most, likely, least.

    Args:
        evidence: what is known of the configuration.
        freed_s: seconds of a step that are freed on each core.
    """
    busy_s, alone_s = evidence.busy_s, evidence.alone_s
    if not evidence.is_shared or alone_s is None:
        freed = (0.0, 0.5 * freed_s, 1.3 * freed_s)
        most_s, likely_s, least_s = (busy_s * times - seconds for times, seconds in zip(ALONE_TIMES, freed, strict=True))
        return (most_s, likely_s, least_s)
    likely_s = max(alone_s, busy_s - freed_s)  # the training thread has only the cores that the workers leave
    return (ALONE_TIMES[0] * busy_s, likely_s, ALONE_TIMES[2] * alone_s)


def too_few_workers(evidence: Evidence) -> Iterable[Finding]:
    """Yields a finding if more loader workers would hide the input's time."""
    have, service, wanted = evidence.num_workers, service_s(evidence), _wanted(evidence)
    if wanted is None or not is_behind(evidence):
        return
    yield Finding(
        cause=WORKERS,
        where=f"DataLoader, num_workers={have}",
        evidence=f"{have or 'no'} worker{'s' * (have != 1)}; {_input_text(evidence)}"
        + (f"; {step_time_text(service)} of work per sample" if service else ""),
        gain=evidence.gain(_saved_by_workers(evidence, wanted), "predicted"),
        basis="input and the rest of the step in parallel, on the available cores",
        knob=NUM_WORKERS,
        value=wanted,
    )


def _wanted(evidence: Evidence) -> int | None:
    """Returns a larger number of workers to try; None if there is none."""
    busy_s = max(evidence.step_s - evidence.wait_s, 1e-6)
    needed = math.ceil(min(ENOUGH * service_s(evidence) * evidence.made / busy_s, MAX_WORKERS))
    return evidence.larger(NUM_WORKERS, evidence.num_workers, needed)


def _saved_by_workers(evidence: Evidence, workers: int) -> Saved:
    """Returns the seconds of a step that more workers save.

    The workers make the input while the step computes. On a CPU they may need the step's cores.
    """
    step_s, wait_s, cores = evidence.step_s, evidence.wait_s, max(1, evidence.host_context.num_cores)
    busy_s, threads = step_s - wait_s, int(evidence.value(THREADS) or cores)
    if evidence.num_workers:
        work_cpu_s = math.fsum(part.cpu_s for part in parts(evidence)) * evidence.made
        by_cores_s = 0.0 if evidence.is_cuda else (busy_s + work_cpu_s) / cores
        least_s = max(busy_s, by_cores_s, step_s * evidence.num_workers / workers)
        return (0.0, 0.7 * max(0.0, step_s - least_s), wait_s)
    wait_s = _making_s(evidence)
    busy_s = step_s - wait_s
    most_s = step_s - max(busy_s, service_s(evidence) * evidence.made / workers)  # the time that this many workers can hide
    cpu_s = min(wait_s, math.fsum(part.cpu_s for part in parts(evidence)) * evidence.made or wait_s)
    blocked_s = wait_s - cpu_s
    has_room = evidence.is_cuda or cores > 2 or threads < cores  # otherwise the step needs the cores, too
    hidden_s = wait_s if has_room else blocked_s + 0.5 * cpu_s
    low_s = 0.6 * (0.8 * wait_s if has_room else blocked_s)
    return (min(low_s, most_s), min(0.9 * hidden_s, most_s), min(wait_s, most_s))
