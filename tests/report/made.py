"""Makes study folders for tests of reports: the studies run on the fake launcher, with hand-written results of passes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from autotune.explain.tables import explained, write_tables
from autotune.records import Kind, Outcome, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.study.summary import trial_entry
from tests.explain import made as documents
from tests.explain.passes import lines, memory, step_of_the_cpu, traced, write
from tests.study.conftest import Bench
from tests.support.fake_launcher import Surface
from tests.support.studies import make_study

SPACE = "loader.batch_size: [16, 32, 64, 128]\nloader.num_workers: [0, 2]\nprecision.amp: ['off', 'bf16']\n"
WASTE = documents.line("total += sum(i * i for i in range(20000))", 0.02, function="train", line=12)
MINUTES = 20
HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(2)>'`{{7*7}}{% raw %}&lt;&#x202e;</style></svg>"""
HOSTILE += "\u202e\x1b[31m\x9b2J"  # characters that reverse a text, colour a terminal or clear it


def surface(**changes: Any) -> Surface:
    """Returns a program that bf16 makes 1.8 times as fast, and that runs out of memory if the batch size exceeds 64."""
    return Surface(**{"gains": {("precision.amp", "bf16"): 1.8}, "max_batch": 64, "documents": _documents, **changes})


def _documents(which: str, _: Any) -> list[Any]:
    if which == "lines":
        return [documents.lines(WASTE, stages=(documents.stage("decode", 0.004), documents.stage("collate", 0.001)))]
    return [documents.memory()] if which == "memory" else []


def bench(folder: Path, *overrides: str, of: Surface | None = None, **given: Any) -> Bench:
    """Returns a study that is ready to run."""
    space = folder / "space.yaml"
    space.write_text(SPACE)
    return Bench(folder / "runs", of or surface(), f"search_space={space}", *overrides, **{"minutes": MINUTES, **given})


def complete(folder: Path) -> StudyFolder:
    """Returns the folder of a study with a faster configuration; it has the tables of all passes for baseline and best."""
    made = bench(folder, "explain.auto=true")
    made.run()
    for trial in made.trials:
        if trial.kind is Kind.explain and trial.origin == "trace":
            with_tables(made.folder.trial_path(trial.number))
    return made.folder


def with_tables(path: Path) -> None:
    """Writes the documents of all passes and the tables made from them to a trial's folder."""
    write(path, lines(), traced(), memory(timeline=[[0.0, 10, 20], [0.05, 900, 1000], [0.1, 30, 1000]]))
    step_of_the_cpu(path)
    write_tables(explained([path]).tables, path)


def large(runs: Path, num_trials: int) -> StudyFolder:
    """Returns the folder of a study with many trials. Each has a long reason and an interval."""
    folder = make_study(runs, "large")
    first, pattern = folder.read_trials()[0], folder.read_trials()[5]
    records = [first, *(_like(pattern, number) for number in range(1, num_trials))]
    for record in records:
        folder.trial_path(record.number).mkdir(parents=True, exist_ok=True)
        (folder.trial_path(record.number) / "trial.json").write_text(_json(record))
    folder.write_summary({**folder.read_summary(), "trials": [trial_entry(record) for record in records]})
    return folder


def _like(pattern: TrialRecord, number: int) -> TrialRecord:
    is_out = number % 10 == 0
    batch = 16 * 2 ** (number % 8)
    return dataclasses.replace(
        pattern,
        number=number,
        kind=Kind.search,
        repeats=None,
        round=None,
        knobs={**pattern.knobs, "loader.batch_size": batch},
        changed={**pattern.changed, "loader.batch_size": batch},
        outcome=Outcome.device_oom if is_out else Outcome.ok,
        value=None if is_out else 20.0 + number % 23,
        ci=None if is_out else (19.0 + number % 23, 21.0 + number % 23),
        reason="CUDA out of memory: tried to allocate 2.00 GiB on device 0, of which 1.2 GiB are free" if is_out else "",
        peak_memory_bytes=None if is_out else 10**9 + number * 10**6,
        started_at=pattern.started_at + 20 * number,
    )


def _json(record: TrialRecord) -> str:
    from autotune.documents import as_json

    return as_json(record.as_json())


def hostile(folder: Path, of: StudyFolder) -> StudyFolder:
    """Returns a copy of a study's folder, made in `folder`, in which all texts of the program and the user attack the page."""
    made = StudyFolder(shutil.copytree(of.path, folder / of.name))
    summary = _poisoned(made.read_summary())
    for trial in made.read_trials():
        made.write_trial(dataclasses.replace(trial, reason=HOSTILE, why=HOSTILE, evidence={"log_tail": HOSTILE}))
        for table in made.trial_path(trial.number).glob("explain/*.json"):
            table.write_text(table.read_text().replace("aten::mm", "<b onclick=1>mm"))
    made.write_summary(summary)
    return made


def _poisoned(summary: dict[str, Any]) -> dict[str, Any]:
    trials = [{**trial, "reason": HOSTILE, "why": HOSTILE} for trial in summary["trials"]]
    entries = [
        {**one, "notes": [HOSTILE], "findings": [{**each, "where": HOSTILE, "evidence": HOSTILE} for each in one["findings"]]}
        for one in summary["explanation"]["explained"]
    ]
    machine = {**summary["machine"], "cpu_model": HOSTILE, "hostname": HOSTILE, "environment": {HOSTILE: HOSTILE}}
    return {
        **summary, "title": HOSTILE, "command": [HOSTILE], "cwd": HOSTILE, "trials": trials, "machine": machine,
        "explanation": {**summary["explanation"], "explained": entries}, "disturbed_by": {"words": HOSTILE, "since_trial": 1},
        "unit": HOSTILE,
    }  # fmt: skip
