"""Makes the folder of a finished study by hand, to test `show`, trackers and reports without training anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from autotune.documents import write_json
from autotune.records import Kind, Knobs, Outcome, StudyRecord, Summary, Tier, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.studies import create

STARTED_AT = 1_780_000_000.0
BASELINE: Knobs = {
    "loader.batch_size": 32,
    "loader.num_workers": 0,
    "precision.amp": "off",
    "layout.channels_last": False,
    "compile.mode": "off",
    "threads.intra": 2,
}
MACHINE: dict[str, Any] = {
    "hostname": "bench",
    "cpu_model": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
    "num_cores": 2,
    "memory_bytes": 24 * 2**30,
    "isa": ["avx2", "avx512f", "amx_bf16"],
    "gpus": [],
}

_Row = tuple[Kind, Knobs, Outcome, float | None, str]
_ROWS: list[_Row] = [
    (Kind.baseline, {}, Outcome.ok, 16.8, "the program as it is"),
    (Kind.search, {"precision.amp": "bf16", "layout.channels_last": True}, Outcome.ok, 38.4, "what an expert would start with"),
    (Kind.search, {"loader.num_workers": 2, "loader.batch_size": 128}, Outcome.raced, 15.9, "sampler"),
    (Kind.search, {"loader.batch_size": 4096}, Outcome.host_oom, None, "sampler"),
    (Kind.search, {"precision.amp": "bf16", "compile.mode": "default"}, Outcome.timeout, None, "costly: compile"),
    (
        Kind.search,
        {"precision.amp": "bf16", "layout.channels_last": True, "loader.batch_size": 64, "loader.num_workers": 2},
        Outcome.ok,
        40.7,
        "sampler",
    ),
    (Kind.final, {}, Outcome.ok, 16.9, "finals, round 1"),
    (
        Kind.final,
        {"precision.amp": "bf16", "layout.channels_last": True, "loader.batch_size": 64, "loader.num_workers": 2},
        Outcome.ok,
        40.6,
        "finals, round 1",
    ),
]
_REASONS = {
    Outcome.raced: "stopped after 3.2 s: 12 % slower than the best, with certainty",
    Outcome.host_oom: "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9663676416 bytes",
    Outcome.timeout: "compile took longer than 120 s",
}


def make_study(runs: Path, name: str = "resnet18", *, status: str = "complete", num_trials: int | None = None) -> StudyFolder:
    """Makes a study's folder as a run would leave it, and returns it.

    Args:
        runs: the runs folder.
        name: the study's name.
        status: of the summary; only "complete" has a verdict.
        num_trials: how many trials there are so far; None for all of them.
    """
    folder = create(runs, name)
    folder.write_study(dataclasses.replace(_study(folder.name), base=folder.base, sequence=folder.sequence))
    folder.config_file.write_text("model:\n  name: resnet18\ntracker:\n  uri: null\n", encoding="utf-8")
    num = len(_ROWS) if num_trials is None else num_trials
    trials = [add_trial(folder, number) for number in range(num)]
    folder.write_summary(summary_of(folder.name, trials, status=status))
    if status == "complete":
        folder.best_file.write_text("# @package _global_\nprecision:\n  amp: bf16\n", encoding="utf-8")
    return folder


def add_trial(folder: StudyFolder, number: int) -> TrialRecord:
    """Writes one of the study's trials, its files included, and returns its record."""
    trial = _trial(number)
    path = folder.trial_path(number)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "spec.json", {"schema": 1, "trial": number, "nonce": f"nonce{number}", "knobs": trial.changed})
    if trial.outcome.has_value:
        write_json(path / "result.rank0.json", {"schema": 1, "trial": number, "throughput_per_s": trial.value})
    (path / "stdout.log").write_text(f"training, trial {number}\n", encoding="utf-8")
    (path / "stderr.log").write_text("" if trial.outcome.has_value else trial.reason, encoding="utf-8")
    folder.write_trial(trial)
    return trial


def _study(name: str) -> StudyRecord:
    return StudyRecord(
        name=name,
        title="resnet18 on photos",
        command=["python", "vision.py", "--model", "resnet18", "--batch-size", "32"],
        cwd="/home/me",
        fingerprint="4f1d0c",
        space={"loader.batch_size": {"choice": [16, 32, 64]}, "precision.amp": {"choice": ["off", "bf16"]}},
        machine=MACHINE,
        versions={"autotune": "0.1.0", "torch": "2.14.1"},
        started_at=STARTED_AT,
        budget_s=480.0,
    )


def _trial(number: int) -> TrialRecord:
    kind, changed, outcome, value, why = _ROWS[number]
    knobs = BASELINE | changed
    return TrialRecord(
        number=number,
        kind=kind,
        knobs=knobs,
        changed=changed,
        outcome=outcome,
        tier=_tier(changed),
        repeats=None if kind is not Kind.final else (0 if not changed else 5),
        round=1 if kind is Kind.final else None,
        why=why,
        reason=_REASONS.get(outcome, ""),
        evidence={} if outcome.has_value else {"log_tail": _REASONS.get(outcome, "")},
        value=value,
        ci=None if value is None else (value * 0.985, value * 1.015),
        started_at=STARTED_AT + 30 * number,
        seconds=21.5,
        phases_s={"spawn": 0.1, "import": 3.0, "init": 0.6, "first_batch": 1.1, "warmup": 5.0, "steady": 11.2},
        peak_memory_bytes=None if value is None else int(1.4e9 + 2e7 * int(knobs["loader.batch_size"])),
        device_rate=None if value is None else value * 1.04,
        loader_rate=None if value is None else 118.0,
        data_wait_frac=None if value is None else 0.03,
        metrics={} if value is None else {"step_p50_s": 1.9, "step_p90_s": 2.1, "power_w": float("nan")},
    )


def _tier(changed: Knobs) -> Tier:
    if "loader.batch_size" in changed:
        return Tier.training
    return Tier.numerics if "precision.amp" in changed else Tier.exact


def _change(knob: str, before: Any, after: Any, **found: Any) -> dict[str, Any]:
    """Returns one entry of the attribution."""
    return {"knob": knob, "from": before, "to": after, "with": [], "reason": "", "num_rounds": 4, **found}


def summary_of(name: str, trials: list[TrialRecord], *, status: str) -> Summary:
    """Returns the summary that a study with these trials would write."""
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.outcome] = counts.get(trial.outcome, 0) + 1
    study, is_over = _study(name), status == "complete"
    best_changes = _ROWS[5][1]
    best = {
        "trial": 5,
        "measured_in": "finals",
        "value": 40.6,
        "ci": [40.1, 41.1],
        "overrides": best_changes,
        "knobs": BASELINE | best_changes,
    }
    numerics = {"trial": 1, "value": 38.4, "ci": [37.8, 39.0], "overrides": _ROWS[1][1]}
    fields = ("number", "reason", "why", "knobs", "changed", "value", "ci", "seconds", "phases_s", "peak_memory_bytes")
    more = ("device_rate", "loader_rate", "data_wait_frac", "regime", "round", "repeats")
    return {
        "schema": 1,
        "study": name,
        "title": study.title,
        "status": status,
        "reason": "budget used" if is_over else "",
        "objective": "throughput",
        "unit": "samples",
        "machine": study.machine,
        "baseline": {"trial": 0, "measured_in": "finals", "value": 16.8, "ci": [16.6, 17.0], "knobs": BASELINE},
        "best": best if is_over else None,
        "best_by_tier": {"numerics": numerics, "training": best} if is_over else {},
        "speedup": {"ratio": 2.41, "ci": [2.36, 2.46], "verdict": "faster", "reason": ""} if is_over else None,
        "attribution": [
            _change("precision.amp", "off", "bf16", ratio=1.62, ci=[1.58, 1.66], verdict="faster", cumulative=1.62),
            _change("layout.channels_last", False, True, ratio=1.38, ci=[1.33, 1.43], verdict="faster", cumulative=2.24),
            _change(
                "loader.num_workers", 0, 2, ratio=1.03, ci=[0.99, 1.07], verdict="ambiguous", cumulative=2.30, basis="estimated"
            ),
            _change(
                "loader.batch_size", 32, 64, ratio=None, ci=None, verdict="not measured", reason="no time", cumulative=2.30
            ),
        ]
        if is_over
        else [],
        "minimality": {
            "winner": 5,
            "dropped": [_change("loader.pin_memory", False, True, ratio=1.0, ci=[0.98, 1.02], verdict="ambiguous")],
            "ratio": 1.0,
            "ci": [0.99, 1.01],
            "num_rounds": 4,
            "margin": 0.01,
        }
        if is_over
        else None,
        "diagnosis": [],
        "counts": counts,
        "seconds": {"total": 471.0, "measuring": 90.0, "starting": 39.0, "compiling": 120.0, "lost": 22.0},
        "fingerprint": study.fingerprint,
        "versions": study.versions,
        "started_at": study.started_at,
        "budget_s": study.budget_s,
        "num_trials": len(trials),
        "trials": [
            {name: getattr(t, name) for name in fields + more} | {"kind": t.kind, "outcome": t.outcome, "tier": t.tier}
            for t in trials
        ],
    }
