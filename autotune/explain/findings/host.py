"""Rules for what the training thread does besides computing: fetching numbers, logs, metrics, garbage collection, Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autotune.explain.evidence import Evidence
from autotune.explain.findings.busy import idle_s
from autotune.explain.findings.finding import Finding, Without
from autotune.explain.gains import Saved
from autotune.explain.places import file_of, is_in_inner_loop, is_tensor_work
from autotune.harness.explain.documents import BACKWARD, FORWARD, FUNCTION, INPUT, OPTIMIZER, OTHER, Line, Site

ITEM, LOGGING, METRICS, COLLECTION, PYTHON = (
    "item in the step", "logging in the step", "metrics in the step", "garbage collection", "Python in the step",
)  # fmt: skip
NUMBERS = re.compile(r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bfloat\(|\bint\(|\bbool\(|\.nonzero\(|synchronize\(")
# How names of mathematical functions continue after "log": log1p, logits, log_softmax.
LOGARITHMS = (
    r"(1p|2|10|its?|in|istic|sumexp|addexp|space|normal"
    r"|_?(softmax|sigmoid|probs?|sum_?exp|likelihood|lik|det|var|std|cosh|density|odds|normal))"
)
LOGS = re.compile(
    r"fsync|\.flush\(|\.write\(|\bprint\(|\blogg?(er|ing)?\.\w+\("
    r"|(?<!\btorch\.)(?<!\bmath\.)(?<!\bnp\.)(?<!\bnumpy\.)(?<!\bF\.)\blog(?!\(\)|" + LOGARITHMS + r"(_|\())\w*\("
    r"|add_scalar|add_histogram|wandb\.|mlflow\.|json\.dump|pickle\.dump|torch\.save|\bopen\(",
    re.IGNORECASE,
)
LOG_LIBRARIES = ("/logging/", "/tensorboard", "/wandb/", "/mlflow/", "/json/", "/tqdm/", "/csv.py")
LOGGERS = re.compile(  # matches names of functions that log
    r"(^|[._])(?!log" + LOGARITHMS + r"(_|$))(log|logs|write|report|record|dump|print)(_\w+)?$", re.IGNORECASE
)
SCORES = re.compile(  # matches neither "symmetric" nor "process"
    r"(?<![a-z])metric|(?-i:Metric)|torchmetrics|accuracy|topk|confusion|f1_score|(?<![a-z])roc(?![a-z])|auroc|auc\b"
    r"|argmax|argsort|bincount|sklearn",
    re.IGNORECASE,
)
# Tensor operations that rank scores. Outside of the model, they compute metrics.
TENSOR_SCORES = re.compile(r"\btorch\.(argmax|argsort|sort|topk|bincount|histc)\b")
# A finding needs at least this many numbers fetched per step. Fetching one, the loss, is usual and costs nothing on a CPU.
LEAST_CALLS = 2
# A sampled share may be wrong by NOISE_TIMES standard errors plus OFF_FRAC of a step: the sampler has errors besides noise.
NOISE_TIMES = 2.0
OFF_FRAC = 0.02
FREED_FRAC = 0.35  # removing work may save this additional share of its seconds, because it frees caches and cores
MOST_FRAC = 0.8  # a function can be skipped if lines of one cause take at least this share of its time
# A line trains if at least this share of its time is in INPUT, BACKWARD or OPTIMIZER. Then its function has to run. A smaller
# share may be an error: a sample taken while the phase changes may get the wrong phase, as one of 240 samples did.
STRAY_FRAC = 0.1
# If slow lines with several causes take most of a function's time, they all get one cause (see `_purpose`). If the causes are
# LOGGING and PYTHON, all lines get LOGGING if the LOGGING lines take at least this share of their time.
PURPOSE_FRAC = 0.25
COMPREHENSIONS = re.compile(r"(\.<locals>\.<(genexpr|listcomp|setcomp|dictcomp)>)+$")
MODULE = "<module>"  # `Line.function` of lines outside of functions
LOOP_FRAC = 0.9  # a function that takes a larger share of a step contains the training loop
REMAINING = (0.4, 0.1, 0.0)  # share of a cost that its remedy leaves: at most, usually, at least
CODE = {
    ITEM: "keep the values on the device, and fetch them all at once every N steps",
    LOGGING: "log every N steps, without flushing to the disk each time, or from another thread",
    METRICS: "compute metrics every N steps, or on the device",
    COLLECTION: "remove gc.collect(); call gc.freeze() before the loop, or gc.disable() and collect every N steps",
    PYTHON: "replace the loop with tensor operations, run it every N steps, or move it to the loader's workers",
}


def costs(evidence: Evidence, cause: str) -> Iterator[Finding]:
    """Yields a finding for each function with lines that cost time in the step for the given cause."""
    for inside in _functions(evidence):
        lines: dict[str, list[Line]] = {}
        for line in inside:
            why = cause_of(line, evidence)
            lines.setdefault(why, []).append(line if why == ITEM else _without_waits(line, evidence))
        found = {each: lines[each] for each in (ITEM, LOGGING, METRICS, PYTHON) if each in lines}
        together = [line for each in found.values() for line in each]
        if len(found) > 1 and _is_whole(evidence, inside, together):  # the function has one purpose, so its lines get one cause
            found = {_purpose(found): together}
        if cause in found:
            yield _finding(evidence, cause, found[cause], inside)
        elif cause == COLLECTION and cause in lines:
            yield _finding(evidence, cause, lines[cause], inside)


def _functions(evidence: Evidence) -> list[list[Line]]:
    """Returns the program's lines in the training thread by function; a comprehension belongs to the function around it.

    Leaves out lines in which a library trains, such as `trainer.fit(model)`: the program cannot change what costs time there.
    """
    groups: dict[tuple[str, str], list[Line]] = {}
    phases: dict[tuple[str, int], set[str]] = {}  # (file, line) -> phases in which the line takes time by itself
    found = evidence.own_lines()
    for line in found:
        if line.self_s:
            phases.setdefault((line.file, line.line), set()).add(line.phase)
    for line in found:
        if not phases.get((line.file, line.line), set()) >= {BACKWARD, OPTIMIZER}:
            groups.setdefault((line.file, function_of(line)), []).append(line)
    return list(groups.values())


def function_of(line: Line) -> str:
    """Returns the function that a line is in: "Log.write" for "Log.write.<locals>.<genexpr>"."""
    return COMPREHENSIONS.sub("", line.function)


def _purpose(found: Mapping[str, Sequence[Line]]) -> str:
    """Returns one cause for all lines of a function: the cause with the most seconds. Seconds of PYTHON count a third."""
    seconds = {cause: math.fsum(line.self_s for line in lines) for cause, lines in found.items()}
    return max(seconds, key=lambda cause: seconds[cause] * (1.0 if cause != PYTHON else PURPOSE_FRAC / (1 - PURPOSE_FRAC)))


def collections(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the cyclic garbage collector takes time, whether the program or Python starts it."""
    called = max(costs(evidence, COLLECTION), key=lambda finding: finding.gain.mid, default=None)
    seconds = evidence.first.gc_s
    if seconds:
        yield Finding(
            cause=COLLECTION,
            where=called.where if called else "garbage collector",
            evidence=f"{evidence.first.gc_count:.2g} collections per step take {evidence.of_step(seconds)}",
            gain=evidence.gain(_saved(evidence, seconds, (), share_error=0.0), "floor"),
            basis="the seconds that the collector reports",
            code=CODE[COLLECTION],
        )
    elif called:
        yield called


def cause_of(line: Line, evidence: Evidence) -> str:
    """Returns why a line of the training thread costs time; "" for computation, input and the optimizer."""
    if line.phase in (INPUT, OPTIMIZER):
        return ""
    if "gc.collect" in line.text:
        return COLLECTION
    if LOGS.search(line.text) or any(name in file_of(line.callee, evidence.first) for name in LOG_LIBRARIES):
        return LOGGING
    if _fetches_numbers(line, evidence):
        return ITEM
    if not _is_python(line, evidence):
        return METRICS if line.phase == OTHER and TENSOR_SCORES.search(line.text) else ""
    if SCORES.search(f"{line.text} {line.function} {line.callee}"):
        return METRICS
    return LOGGING if LOGGERS.search(function_of(line)) else PYTHON


def _fetches_numbers(line: Line, evidence: Evidence) -> bool:
    # An `if` that compares tensors (site "bool") counts only on a GPU, where the host waits at it. On a CPU it costs nothing.
    is_called = evidence.is_cuda or bool(NUMBERS.search(line.text))
    sites = [site for site in evidence.first.syncs if _is_at(site, line) and (is_called or site.kind != "bool")]
    if sum(site.count for site in sites) >= LEAST_CALLS:
        return True
    # Fewer calls count only in an inner loop on a CPU. On a GPU, a single one only waits for work that has to be done anyway.
    return not evidence.is_cuda and bool(NUMBERS.search(line.text)) and is_in_inner_loop(line, evidence.first)


def _is_at(site: Site, line: Line) -> bool:
    return site.line == line.line and site.file == line.file


def _without_waits(line: Line, evidence: Evidence) -> Line:
    """Returns a line without the seconds in which it waits for the GPU, because the host does no work in that time."""
    if not evidence.is_cuda:
        return line
    waits = [site.seconds for site in evidence.first.syncs if _is_at(site, line) and site.phase == line.phase]
    return replace(line, self_s=max(0.0, line.self_s - math.fsum(waits)))


def _is_python(line: Line, evidence: Evidence) -> bool:
    """Whether a line spends its time in Python, in libraries other than torch, or in many small calls of torch."""
    if line.phase == OTHER and is_in_inner_loop(line, evidence.first):
        return True
    if is_tensor_work(line, evidence.first):
        return False
    return is_in_inner_loop(line, evidence.first) or line.phase == OTHER or (line.phase == FORWARD and bool(line.callee))


def _finding(evidence: Evidence, cause: str, lines: Sequence[Line], inside: Sequence[Line]) -> Finding:
    """Returns the finding on some lines of a function.

    Args:
        evidence: what is known of the configuration.
        cause: why the lines cost time; `cause_of` may return another cause for some of them.
        lines: the lines.
        inside: all lines of the function.
    """
    typical = [line for line in lines if cause_of(line, evidence) == cause]
    top, seconds = max(typical, key=lambda line: line.self_s), math.fsum(line.self_s for line in lines)
    also = f", {len(lines)} lines of {function_of(top)}" if len(lines) > 1 else ""
    text = f" `{top.text[:60]}`" if top.text else ""
    first = evidence.first
    finding = Finding(
        cause=cause,
        where=evidence.place_of(top),
        evidence=f"{evidence.of_step(seconds)}{text}{also}",
        gain=evidence.gain(_saved(evidence, seconds, lines, share_error=_share_error(evidence, seconds)), "floor"),
        basis=f"{first.num_samples} stack samples of the training thread in {first.seconds:.1f} s",
        code=CODE[cause],
    )
    file, function = top.file, function_of(top)
    if not function or function == MODULE or not _is_whole(evidence, inside, lines):
        return finding
    if "<" in function:
        kind = "defined inside another function" if "<locals>" in function else "a lambda"
        return replace(finding, unskippable=f"{function} is {kind}")
    return replace(
        finding,
        without=Without(
            stages=(f"{FUNCTION}: {file}: {function}",),
            gain=replace(finding.gain, kind="predicted"),
            remaining=REMAINING,
            function=f"{evidence.shown(file)}: {function}",
        ),
    )


def _is_whole(evidence: Evidence, inside: Sequence[Line], lines: Sequence[Line]) -> bool:
    """Returns whether some lines take most of their function's time, so that skipping the function shows what they cost.

    The function with the training loop runs only once, so it cannot be skipped. Nor can a function that fetches batches,
    computes gradients or calls the optimizer, because without it the program would not train.

    Args:
        evidence: what is known of the configuration.
        inside: all lines of the function.
        lines: some of them.
    """
    whole_s = math.fsum(one.total_s for one in inside if one.function == function_of(one))
    is_most = math.fsum(one.self_s for one in lines) >= MOST_FRAC * whole_s
    return is_most and not _trains(inside) and whole_s <= LOOP_FRAC * evidence.step_s


def _trains(inside: Sequence[Line]) -> bool:
    """Returns whether one of a function's lines fetches batches, computes gradients or calls the optimizer."""
    for number in {one.line for one in inside}:
        lines = [one for one in inside if one.line == number]
        training = [one.total_s for one in lines if one.phase in (INPUT, BACKWARD, OPTIMIZER)]
        if training and math.fsum(training) >= STRAY_FRAC * math.fsum(one.total_s for one in lines):
            return True
    return False


def _share_error(evidence: Evidence, seconds: float) -> float:
    """Returns the standard error of `seconds` as a share of a step, if the seconds are from stack samples."""
    share = min(1.0, seconds / evidence.step_s)
    return math.sqrt(share * (1 - share) / max(1, evidence.first.num_samples))


def _saved(evidence: Evidence, seconds: float, lines: Sequence[Line], *, share_error: float) -> Saved:
    """Returns the seconds that a step saves if the training thread works `seconds` less: at least, probably, at most.

    `lines` are those that take these seconds; () if they are not known. `share_error` is the result of `_share_error`, or 0 if
    the seconds are not from stack samples.
    """
    error_s = (NOISE_TIMES * share_error + OFF_FRAC) * evidence.step_s if share_error else OFF_FRAC * seconds
    slowed_s = max(0.0, evidence.step_s - evidence.trial_step_s)  # what the pass adds to a step, most of it in Python
    least, most = max(0.0, seconds - error_s - slowed_s), seconds * (1 + FREED_FRAC) + error_s
    if evidence.is_cuda:  # the host may run ahead of the device
        most_idle_s = min(idle_s(evidence), _phases_s(evidence, lines))
        return (0.0, min(seconds, most_idle_s), min(most, most_idle_s))
    return (least, seconds, most)


def _phases_s(evidence: Evidence, lines: Sequence[Line]) -> float:
    """Returns the seconds of a step that a GPU spends in the phases of some lines, waiting included; infinity if not known.

    While the GPU is still busy with an earlier phase, the work of the host costs nothing.
    """
    known = evidence.first.device_phases_s
    return math.fsum(known.get(phase, 0.0) for phase in {line.phase for line in lines}) if known and lines else math.inf
