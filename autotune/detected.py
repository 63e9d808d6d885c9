"""Formats the harness's findings about a program as text, for `inspect`, and for `run` when it cannot measure."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.config.wrapped_commands import program_of
from autotune.harness.protocol import APPLIED, RankResult
from autotune.knobs.base import value_text
from autotune.quantities import bytes_text, number_text
from autotune.records import KnobValue

SOURCES = {"loader": "from the loader's batches", "forward calls": "from the calls of the model"}
NO_LOADER = "no DataLoader of torch feeds the optimizer's steps"


def findings(result: RankResult) -> list[tuple[str, str]]:
    """Returns (label, text) for each fact that rank 0 detected; unknown facts are left out. The trial may have failed."""
    found = result.detected
    lines = [("torch", _torch(result)), ("device", _device(result))]
    if found.get("num_steps"):
        lines += [
            ("trains", _modules(found)),
            ("precision", _precision(found)),
            ("optimizer", ", ".join(_counted(found.get("optimizers") or [])) or _own_steps(found)),
            ("loader", _loader(found)),
            ("step", _step(result)),
            ("memory", bytes_text(result.memory.get("peak_bytes")) if result.memory.get("peak_bytes") else ""),
        ]
    else:
        lines.append(("seen", _seen_without_steps(found)))
    return [line for line in lines if line[1]]


def doubts(result: RankResult) -> list[str]:
    """Returns one sentence for each knob that did not take effect, and for each problem of the harness."""
    reports = {key: report for key, report in result.knobs.items() if report.status != APPLIED}
    lines = [f"{key}: {report.status}{f', {report.reason}' if report.reason else ''}" for key, report in reports.items()]
    return [*lines, *map(str, result.detected.get("harness_problems") or [])]


def missing_processes(result: RankResult, command: list[str]) -> str:
    """Returns why the number of training processes differs from the number that the command asks for.

    Returns "" if the numbers are equal, or if the command asks for no number.
    """
    program, found = program_of(command), result.world_size
    asked = program.num_processes
    if asked is None or asked == found:
        return ""
    words = f"{program.starter} was asked for {asked} process{'es' * (asked != 1)}"
    if found > asked:
        return f"{words}, but {found} train together: a variable such as PET_NNODES or a configuration file asks for more"
    if program.starter.startswith("accelerate") and result.facts.get("device") == "cpu":
        return (
            f"{words}, but {found} trained. On a CPU, `accelerate launch` starts one process; several need MPI "
            f"(--mpirun_hostfile). torchrun --nproc_per_node={asked} starts them"
        )
    found_text = "only one process trains" if found == 1 else f"only {found} train together"
    return f"{words}, but {found_text}: the others did not join the process group of torch.distributed"


def _torch(result: RankResult) -> str:
    facts = result.facts
    words = [str(facts.get("torch") or "")]
    if facts.get("python"):
        words.append(f"Python {facts['python']}, {facts.get('executable')}")
    return ", ".join(filter(None, words))


def _device(result: RankResult) -> str:
    facts = result.facts
    if not facts.get("device"):
        return ""
    name = facts.get("device_name") or facts["device"]
    num_threads = facts.get("num_threads") if facts.get("device") == "cpu" else None
    threads = f", {num_threads} thread{'s' * (num_threads != 1)}" if num_threads else ""
    together = f", {result.ranks_per_batch} of them on each batch" if result.ranks_per_batch > 1 else ""
    processes = "1 process" if result.world_size == 1 else f"{result.world_size} processes that train together{together}"
    return f"{name}{threads}, {processes}"


def _modules(found: dict[str, Any]) -> str:
    names, counts = list(map(str, found.get("modules") or [])), list(found.get("num_parameters") or [])
    words = [f"{name} ({_size(counts[i])})" if i < len(counts) else name for i, name in enumerate(names)]
    wrappers = [str(name) for name in found.get("wrappers") or [] if not any(str(name) in word for word in words)]
    return ", ".join([*words, *wrappers])


def _size(num_parameters: int) -> str:
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if num_parameters >= size:
            return f"{number_text(num_parameters / size)}{name} parameters"
    return _amount(num_parameters, "parameters")


def _amount(number: float, units: str) -> str:
    """Returns a number with its unit: "1 sample", "16 samples", "1,048,576 tokens", "1 backward pass"."""
    unit = units.removesuffix("es" if units.endswith("sses") else "s")
    text = f"{round(number):,}" if number == round(number) else f"{number:,.10g}"
    return f"{text} {unit if number == 1 else units}"


def _precision(found: dict[str, Any]) -> str:
    precision = found.get("precision") or {}
    kinds = ", ".join(map(str, precision.get("parameters") or []))
    autocast, compiled = precision.get("autocast"), found.get("compile")
    words = [
        f"{kinds} parameters" if kinds else "",
        f"computed in {precision['policy']} by a policy" if precision.get("policy") else "",
        f"autocast {value_text(autocast)}" if autocast not in (None, "off") else "no autocast",
        "a gradient scaler" if found.get("grad_scaler") else "",
        "compiled" if compiled not in (None, "off") else "not compiled",
    ]
    return ", ".join(filter(None, words))


def _loader(found: dict[str, Any]) -> str:
    loader = found.get("loader") or {}
    if not loader:
        return NO_LOADER
    length = loader.get("num_samples")
    dataset = str(loader.get("dataset") or "").rpartition(".")[2]
    made = f"made at {near(str(loader.get('site')))}"
    holds = f"{dataset} of {_amount(length, 'samples')}" if isinstance(length, int) else f"{dataset} of unknown length"
    workers = loader.get("loader.num_workers")
    words = [
        holds,
        _setting("batch", loader.get("loader.batch_size")),
        _setting("workers", workers),
        _setting("prefetch", loader.get("loader.prefetch_factor")) if workers else "",
        "pinned" if loader.get("loader.pin_memory") else "",
        "persistent" if loader.get("loader.persistent_workers") else "",
        f"one of {found['num_loaders']}" if (found.get("num_loaders") or 1) > 1 else "",
    ]
    return ", ".join([*filter(None, words), made])


def _setting(name: str, value: KnobValue | None) -> str:
    return "" if value is None else f"{name} {value_text(value)}"


def _step(result: RankResult) -> str:
    """Returns what a step is and roughly how long it takes: "16 samples, from the loader's batches; about 0.17 s"."""
    samples, ends_s = result.steps.get("samples") or [], result.steps.get("end_s") or []
    usual = statistics.median(samples) if samples else None
    source = SOURCES.get(result.unit_source, result.unit_source)
    is_known = bool(usual) and result.unit != "steps"
    what = _amount(usual or 0, result.unit) if is_known else "counts as one: the number of samples is unknown"
    if result.world_size > 1:
        what += " in each process"
    # Rounded: a loader that is one batch ahead has yielded six batches after five steps, 1.2 per step.
    batches = round(result.detected.get("batches_per_step") or 1)
    parts = [f"{what}, {source}" if result.unit != "steps" else what]
    if batches > 1:
        parts.append(f"{batches} batches each")
    if result.detected.get("optimizers") and (seen_by := result.detected.get("steps_seen_by")):
        parts.append(f"detected by {seen_by}")
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
    if gaps_s and (usual_s := statistics.median(gaps_s)) > 0:
        parts.append(f"about {usual_s:.2g} s ({number_text(1 / usual_s)} steps/s, a rough figure after so few steps)")
    return "; ".join(parts)


def _own_steps(found: dict[str, Any]) -> str:
    """Returns how the steps of a program without an optimizer of torch.optim are detected; "" if unknown."""
    source = found.get("steps_seen_by")
    return f"none of torch.optim; steps are detected by {source}" if source else ""


def _seen_without_steps(found: dict[str, Any]) -> str:
    """Returns what is known about a program that never reached an optimizer step."""
    # A program may make its loader anew in every epoch. Such a loader is listed once.
    sites = dict.fromkeys(near(str(site)) for site in found.get("loaders") or [])
    loaders = [f"a DataLoader made at {site}" for site in sites]
    passes = found.get("num_backwards")
    words = [*loaders, _amount(passes, "backward passes") if passes else "", *_counted(found.get("optimizers") or [])]
    return "; ".join(filter(None, [*words, "no optimizer step"]))


def _counted(names: list[Any]) -> list[str]:
    """Returns names with their counts: ["Adam", "Adam"] becomes ["2 x Adam"]."""
    return [f"{num} x {name}" if num > 1 else name for name, num in Counter(map(str, names)).items()]


def near(site: str) -> str:
    """Returns "train.py:7" for a file in the working directory, or the last two parts of another path: "lib/loading.py:7"."""
    inside = site.removeprefix(f"{os.getcwd()}{os.sep}")
    return inside if inside != site or not os.path.isabs(site) else str(Path(*Path(site).parts[-2:]))
