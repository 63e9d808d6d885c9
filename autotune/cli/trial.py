"""Implements `autotune show STUDY --trial N`: prints everything about one trial."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, outcome_style, print_json
from autotune.errors import BadInput
from autotune.harness.protocol import APPLIED
from autotune.knobs.base import earlier_text, value_text
from autotune.quantities import bytes_text, rate_text, rate_with_interval_text, seconds_text
from autotune.records import TrialRecord
from autotune.run_dir import StudyFolder
from autotune.studies import call
from autotune.wording import changes_phrase, log_lines, where_text


def print_trial(folder: StudyFolder, number: int, *, as_json: bool) -> int:
    """Prints one trial: its settings and why it was tried, outcome, phases, metrics, a report per knob, the end of its log.

    Raises:
        BadInput: the study has no such trial, or its record or the baseline's cannot be read.
    """
    there = [int(file.parent.name) for file in folder.trial_files("trial.json")]
    if number not in there:
        numbered = f"Its trials are numbered 0 to {max(there)}" if there else "It has none yet"
        raise BadInput(f"--trial: no such trial of {folder.name!r}, got {number}. {numbered}.")
    record = _read(folder, number)
    if as_json:
        print_json(record.as_json())
        return 0
    out = console()
    out.print(Group(*_blocks(record, _read(folder, 0), folder)))
    return 0


def _read(folder: StudyFolder, number: int) -> TrialRecord:
    try:
        return folder.read_trial(number)
    except (OSError, ValueError) as error:
        file = folder.trial_path(number) / "trial.json"
        raise BadInput(f"{file}: cannot be read, got: {error}. `autotune show {call(folder)}` shows all trials.") from error


def _blocks(record: TrialRecord, baseline: TrialRecord, folder: StudyFolder) -> list[RenderableType]:
    title = Text.assemble((f"trial {record.number:04d}", "name"), f"  {record.kind}  ")
    title.append(str(record.outcome), style=outcome_style(str(record.outcome)))
    parts: list[RenderableType] = [title, Text(changes_phrase(record.changed), overflow="fold"), Text()]
    parts += [_pairs(_facts(record)), Text(), Text("settings", style="name"), _settings(record, baseline)]
    if record.phases_s:
        phases = [(name, seconds_text(seconds)) for name, seconds in record.phases_s.items()]
        parts += [Text(), Text("phases", style="name"), _pairs(phases)]
    if record.metrics:
        numbers = [(name, f"{value:.6g}") for name, value in sorted(record.metrics.items())]
        parts += [Text(), Text("metrics", style="name"), _pairs(numbers)]
    if log := log_lines(record.evidence):
        parts += [Text(), Text("the end of its log", style="name"), Text("\n".join(log), overflow="fold")]
    return [*parts, Text(), Text(f"everything else is in {folder.trial_path(record.number)}", style="quiet", overflow="fold")]


def _facts(record: TrialRecord) -> list[tuple[str, str]]:
    rate = rate_with_interval_text(record.value, record.ci, record.unit)
    found = [
        ("why", record.why),
        ("proposed by", record.origin),
        ("reason", record.reason),
        ("repeats trial", "" if record.repeats is None else f"{record.repeats:04d}"),
        ("rate", rate if record.value is not None else ""),
        ("no interval", record.why_no_ci if record.value is not None and record.ci is None else ""),
        ("D", rate_text(record.device_rate, record.unit) if record.device_rate else ""),
        ("L", rate_text(record.loader_rate, record.unit) if record.loader_rate else ""),
        ("peak memory", bytes_text(record.peak_memory_bytes) if record.peak_memory_bytes else ""),
        ("took", f"{seconds_text(record.seconds)}, started {record.start}"),
        ("ran on", where_text(record)),
        ("tier", str(record.tier)),
    ]
    return [(name, text) for name, text in found if text]


def _settings(record: TrialRecord, baseline: TrialRecord) -> Table:
    """Returns the configuration, changed knobs first, with the report on whether each setting took effect."""
    made = Table.grid(padding=(0, 2, 0, 2))
    made.add_column(style="key", overflow="fold")
    made.add_column(overflow="fold")
    made.add_column(style="quiet", overflow="fold")
    for key in sorted(record.knobs, key=lambda key: (key not in record.changed, key)):
        report: dict[str, Any] = record.knob_reports.get(key) or {}
        value = value_text(record.knobs[key])
        if key in record.changed:
            value = f"{earlier_text(baseline.knobs.get(key))} -> {value}"
        elif report.get("status") == APPLIED and report.get("observed") is not None:
            value = value_text(report["observed"])  # differs if the harness had to fork workers that the trial added
        said = ": ".join(str(report[name]) for name in ("status", "reason") if report.get(name))
        made.add_row(Text(key), Text(value), Text(said))
    return made


def _pairs(pairs: list[tuple[str, str]]) -> Table:
    made = Table.grid(padding=(0, 2, 0, 2))
    made.add_column(style="quiet", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in pairs:
        made.add_row(Text(name), Text(text, overflow="fold"))  # a stranger's file may name a metric "[/x]", which is no markup
    return made
