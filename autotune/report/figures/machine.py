"""Figures on where and how a study was measured: its ranks, the machine, and what disturbed it."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from autotune.knobs.base import value_text
from autotune.monitors.disturbances import STEAL_CORES, foreign_limit
from autotune.quantities import bytes_text, number_text, percent_text, share_text, step_time_text
from autotune.records import Kind, Knobs, TrialRecord, objective_names
from autotune.report.changes import entries_of
from autotune.report.drawing import Bars, Row, Scale, bar
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ms_text, sentence
from autotune.report.study import Study
from autotune.report.verdict import file_lines, noise_lines
from autotune.trials.losses import Verdict
from autotune.wording import (
    aims_text,
    budget_text,
    changes_phrase,
    communication_text,
    cycles_text,
    machine_text,
    rank_names,
    warm_start_text,
)

# Basis of an effect -> how it was determined.
BASES = {
    "measured": "measured by trials with and without the change, side by side",
    "estimated": "estimated from all trials of the study",
}


def ranks(study: Study) -> Figure:
    """Returns how each rank of the best trial spends a step: on its own work, and waiting for the others."""
    title = "Do the ranks keep up with each other?"
    found: dict[str, Any] = study.trial(study.best).get("ranks") or {}
    by_rank = found.get("by_rank") or []
    if not by_rank:
        return Figure(key="ranks", title=title, absent="One process trains, so there are no ranks to compare.")
    known = [entry for entry in by_rank if entry.get("own_s") is not None]
    names = dict(zip((entry["rank"] for entry in by_rank), rank_names(by_rank), strict=True))
    scale = Scale(0.0, 1.02 * max([float(entry["step_s"] or 0.0) for entry in by_rank] or [1.0]) or 1.0)
    rows = [
        Row(
            label=f"rank {names[entry['rank']]}",
            value=f"{step_time_text(entry['own_s'])} + {step_time_text(entry['exposed_s'])}",
            note="the other ranks wait for it" if entry["rank"] in found["stragglers"] else "",
            marks=[bar(0, scale(entry["own_s"]), "best"), bar(scale(entry["own_s"]), scale(entry["step_s"]), "predicted")],
        )
        for entry in known
    ]  # fmt: skip
    chart = Bars(rows=rows, key=[("best", "own work"), ("predicted", "waiting for other ranks")])
    grid = Grid(columns=["rank ", f"{study.unit}/s ", "a step ", "waiting for input ", "memory "], rows=[
        [names[entry["rank"]], number_text(entry["rate_per_s"]), ms_text(entry["step_s"]),
         percent_text(entry["data_wait_frac"]), bytes_text(entry["peak_memory_bytes"])]
        for entry in by_rank
    ])  # fmt: skip
    says = f"{sentence(communication_text(found))}."
    return Figure(key="ranks", title=title, says=says, drawing=chart.html() if rows else Markup(""), grid=grid)


def quiet(study: Study) -> Figure:
    """Returns whether the machine was quiet: the cores that other programs used while trials were measured."""
    title = "Was the machine quiet?"
    lines = [f"{name}: {text}." for name, text in noise_lines(study.summary)]
    measured = [record for record in study.records.values() if record.outcome.has_value and record.kind is not Kind.explain]
    disturbed = [record for record in study.records.values() if record.outcome == "disturbed"]
    said = _foreign(measured, study)
    if disturbed:
        num = len(disturbed)
        said.append(f"{num} trial{'s were' if num > 1 else ' was'} disturbed, and not used.")
    if noise := study.summary.get("noise"):
        said.append(f"From process to process, the rate of one configuration varies by {share_text(noise['spread'])}.")
    if not said and not lines:
        return Figure(key="quiet", title=title, absent="What else ran on the machine was not recorded.")
    return Figure(key="quiet", title=title, says=" ".join(said), notes=lines)


def _foreign(records: Sequence[TrialRecord], study: Study) -> list[str]:
    cores = (study.summary.get("machine") or {}).get("num_cores") or "?"
    used = [value for record in records if (value := record.metrics.get("host.foreign_cores")) is not None]
    stolen = [value for record in records if (value := record.metrics.get("host.steal_cores")) is not None]
    if not used:
        return []
    limit = foreign_limit(cores if isinstance(cores, int | float) else 0)
    is_quiet = max(used) <= limit and max(stolen or [0.0]) <= STEAL_CORES
    said = "Yes: while" if is_quiet else "Not always: while"
    said += f" trials were measured, other programs used at most {max(used):.2f} of {cores} cores"
    said += f" ({statistics.median(used):.2f} in the median)"
    return [said + (f", and a hypervisor took at most {max(stolen):.2f} of them." if stolen else ".")]


def environment(study: Study) -> Figure:
    """Returns the program, the machine and the versions that the numbers hold for."""
    summary = study.summary
    machine, versions = summary.get("machine") or {}, summary.get("versions") or {}
    facts = {
        "study": f"{summary['study']}, {summary.get('status')}, in {study.folder.path}",
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(summary["started_at"] or 0.0))),
        "budget": budget_text(summary.get("budget_s"), summary.get("budget_trials")),
        "goal": aims_text(summary.get("objective") or "throughput", summary.get("terms") or {}),
        "program": shlex.join(map(str, summary.get("command") or [])),
        "folder": str(summary.get("cwd") or ""),
        "machine": f"{machine.get('hostname') or ''}: {machine_text(machine)}",
        "kernel": str(machine.get("kernel") or ""),
        "device": " ".join(str(machine[key]) for key in ("device", "device_name") if machine.get(key)),
        "CUDA": str(machine.get("cuda") or "") if machine.get("device") == "cuda" else "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "pinned": ", ".join(f"{key}={value_text(value)}" for key, value in (summary.get("pinned") or {}).items()),
        "variables": ", ".join(f"{name}={value}" for name, value in (machine.get("environment") or {}).items()),
        "reused": warm_start_text(summary.get("warm_start") or {}),
        "fingerprint": str(summary.get("fingerprint") or ""),
    }
    files = [f"{name}: {said}" for name, said in file_lines(summary)]
    grid = Grid(columns=["what", "value"], rows=[[name, value] for name, value in facts.items() if value.strip(": ")])
    return Figure(key="environment", title="Under which conditions do the numbers hold?", grid=grid, is_open=True, notes=files)


def _effects(study: Study) -> list[str]:
    """Returns a sentence for each way in which effects were determined, with the changes concerned."""
    dropped = (study.summary.get("minimality") or {}).get("dropped") or []
    found: dict[str, Knobs] = {}
    for entry in [*entries_of(study.summary), *dropped]:
        if entry.get("ratio"):
            found.setdefault(str(entry.get("basis") or "measured"), {})[entry["knob"]] = entry["to"]
    return [f"Effects {how}: {changes_phrase(found[basis])}." for basis, how in BASES.items() if basis in found]


def method(study: Study) -> Figure:
    """Returns sentences on how the numbers were measured."""
    summary = study.summary
    rounds = (summary.get("speedup") or {}).get("num_rounds") or 0
    said = [
        "Every trial is a process of the unchanged program. Its rate is samples over wall time once start-up, compilation and "
        "warm-up are over.",
        f"Baseline and best were measured again in {rounds} pairs of fresh processes that took turns. The ratio and its "
        "interval come from these pairs alone, not from the search that picked the best." if rounds else
        "Baseline and best were not measured in pairs, so only the search's numbers are available.",
        *_effects(study),
    ]  # fmt: skip
    if (summary.get("parity") or {}).get("verdict") == Verdict.passed:
        said.append("The losses of the first steps of the best were compared with the baseline's, on the same batches.")
    warm = sum(trial.get("start") == "warm" for trial in study.trials)
    if warm:
        trials = f"{warm} trial{'s' * (warm > 1)} of the search"
        said.append(f"{trials} started as forks of a process that had imported torch; all others were fresh.")
    if cycles := cycles_text(study.records[0].metrics) if 0 in study.records else "":
        said.append(f"{cycles}.")
    goal = objective_names(summary.get("objective") or "throughput")[0]
    if goal != "throughput":
        said.append(f"A ratio above 1 means a better {goal}.")
    return Figure(key="method", title="How were the numbers measured?", says=" ".join(said))
