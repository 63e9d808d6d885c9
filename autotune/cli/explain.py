"""Implements `autotune explain` and `autotune show --why`: where a program's time goes, and what a change would gain."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.padding import Padding
from rich.text import Text

from autotune.cli.plain import Quiet
from autotune.cli.show import check_cwd, chosen, read_study, read_summary
from autotune.cli.terminal import MAX_WIDTH, console, print_json, table_width
from autotune.errors import BadInput, Interrupted, one_of
from autotune.explained import ROLES, accuracy_text, nothing_text, other_checks, remedy_text, size_text
from autotune.harness.explain.documents import PASSES, trace_file
from autotune.quantities import flops_text, percent_text, share_text, step_time_text
from autotune.records import Kind, Knobs, Summary
from autotune.run_dir import StudyFolder
from autotune.studies import call

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.masking import Secrets
    from autotune.records import StudyRecord, TrialRecord
    from autotune.study import StudyInputs

NUM_PAIRS = 4  # default of --pairs; a pair is a run of the corrected program and a run of the study's program
MINUTES = 2.0  # default of --minutes
LEAST_PHASE = 0.005  # share of a step's time; phases with a smaller share are not listed


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: study, trial, passes, limits, and the command after `--`. None for an option that was not given."""

    study: str | None
    trial: int | None
    passes: str | None
    minutes: float | None
    is_fixed: bool
    finding: int | None
    pairs: int | None
    is_retrying: bool
    command: list[str] | None
    runs: Path


class Steps(Quiet):
    """Prints a line for each pass and check on standard error, and at the end the result on standard output.

    Args:
        show: prints the explanation of a study, given its summary.
    """

    def __init__(self, show: Callable[[Summary], object]) -> None:
        super().__init__()
        self._show = show

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """Prints what is run and why."""
        self.notice(f"{kind} {number:04d}: {why}")

    def finished(self, summary: Summary) -> None:
        """Prints the result."""
        self._show(summary)


def explain(asked: Asked, *, as_json: bool) -> int:
    """Explains a trial, or compares a fixed version of the program with the study's version; prints the result.

    Raises:
        BadInput: the study, the trial, a pass or the command cannot be used.
        Interrupted: by the user; the results so far are kept.
        FolderLost: the study's folder cannot be written any more.
    """
    passes = _passes(asked)
    folder = chosen(asked.runs, asked.study)
    summary = read_summary(folder)
    if folder.is_owned:
        raise BadInput(f"STUDY: still running, got {folder.name!r}. Wait until it ends.")
    from autotune.config.compose import compose
    from autotune.machine import host_facts
    from autotune.study import Wanted, explain_study
    from autotune.study.explaining import explainable, to_fix

    # Everything is checked before the wait for a node, which may be long.
    record, _ = explainable(asked.trial, _records(folder), summary, folder)
    study, facts, finding = _study(folder), host_facts(), asked.finding or 1
    fixed = compose([], command=asked.command, facts=facts) if asked.is_fixed else None
    if fixed:
        to_fix(folder.read_explanation(), record.number, finding, folder)
    inputs = _inputs(study, folder, facts, fixed.secrets if fixed else None)
    wanted = Wanted(
        trial=asked.trial, passes=passes, minutes=MINUTES if asked.minutes is None else asked.minutes,
        fixed=fixed.command if fixed else None, finding=finding, pairs=asked.pairs or NUM_PAIRS, is_retrying=asked.is_retrying,
    )  # fmt: skip
    steps = Steps(lambda explained: _print(explained, folder, asked.trial, as_json=as_json))
    try:
        explain_study(inputs, folder, steps, wanted)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: the results so far are kept. To continue: autotune explain {call(folder)}") from None
    return 0


def print_why(folder: StudyFolder, trial: int | None, *, as_json: bool) -> int:
    """Prints what is known about where a study's time goes.

    Raises:
        BadInput: no trial was explained yet, or `trial` was not explained.
    """
    summary = read_summary(folder)
    document = summary.get("explanation") or {}
    if not document.get("explained"):
        why = str(document.get("skipped") or "").partition(";")[0]  # the rest repeats the command given below
        skipped = f" ({why})" if why else ""
        raise BadInput(
            f"--why: this study was not explained yet, got {folder.name!r}{skipped}. Run `autotune explain {call(folder)}`."
        )
    return _print(summary, folder, trial, as_json=as_json, is_all=trial is None)


def _passes(asked: Asked) -> tuple[str, ...]:
    given = PASSES if asked.passes is None else asked.passes.split(",")
    names = tuple(dict.fromkeys(name.strip() for name in given if name.strip()))
    problems = [f"--passes: no such pass, got {name!r}. {one_of(name, PASSES)}" for name in names if name not in PASSES]
    if not names:
        problems.append(f"--passes: no pass, got {asked.passes!r}. Allowed: {', '.join(PASSES)}.")
    if asked.minutes is not None and not math.isfinite(asked.minutes):
        problems.append(f"--minutes: not a length of time, got {asked.minutes}. Give minutes: --minutes 2.")
    problems += [
        f"{option}: has an effect only together with --fixed, got {value}. Give both, or neither."
        for option, value in (("--finding", asked.finding), ("--pairs", asked.pairs))
        if value is not None and not asked.is_fixed
    ]
    problems += [
        f"{option}: has no effect together with --fixed, which only measures pairs, got {value}. Leave one of the two out."
        for option, value in (("--passes", asked.passes), ("--minutes", asked.minutes), ("--retry", asked.is_retrying or None))
        if value is not None and asked.is_fixed
    ]
    if asked.is_fixed and asked.command is None:
        problems.append(
            "--fixed: needs a command after '--', got none. Give the corrected program: --fixed -- python train_fixed.py."
        )
    if asked.command is not None and not asked.is_fixed:
        problems.append(
            "COMMAND: explain runs the study's own program, got a command. To compare the two programs, add --fixed."
        )
    if problems:
        raise BadInput(problems)
    return names


def _study(folder: StudyFolder) -> StudyRecord:
    study = read_study(folder)
    check_cwd(study)
    return study


def _records(folder: StudyFolder) -> list[TrialRecord]:
    try:
        return folder.read_trials()
    except (OSError, ValueError) as error:
        raise BadInput(f"{error}. Every trial's record is needed: restore this one, or move its folder away.") from error


def _inputs(study: StudyRecord, folder: StudyFolder, facts: dict[str, Any], secrets: Secrets | None) -> StudyInputs:
    """Returns the study's inputs, without a budget: explaining ends by itself. `secrets`: those of a corrected program."""
    from autotune.cli.run import inputs_of
    from autotune.config.recorded import recorded
    from autotune.config.schema import Budget

    composed = recorded(study, folder.config_file, is_alone=True)
    composed.config.study.budget = Budget(minutes=None, trials=None)
    composed.secrets = secrets or composed.secrets
    return inputs_of(composed, facts, is_alone=True)


def _print(summary: Summary, folder: StudyFolder, trial: int | None, *, as_json: bool, is_all: bool = False) -> int:
    """Prints the explanation of one trial (the best trial if `trial` is None), or of all trials if `is_all`."""
    document = summary.get("explanation") or {}
    entries = list(document.get("explained") or [])
    if not is_all:
        number = (summary.get("best") or {}).get("trial") or 0 if trial is None else trial
        entries = [entry for entry in entries if entry["trial"] == number]
    if trial is not None and not entries:
        raise BadInput(f"--trial: not explained yet, got {trial}. Run `autotune explain {call(folder)} --trial {trial}`.")
    if as_json:
        print_json({**document, "explained": entries})
        return 0
    out = console()
    width = min(out.width, MAX_WIDTH) if table_width(out) else None
    entries.sort(key=lambda one: one["role"] == "baseline")
    for entry in entries:
        _say(out, [*_lines(entry, folder), Row("")], width)
    _say(out, [*_last(document), *_next(entries, folder)], width)
    return 0


class Row(NamedTuple):
    """A line of the screen: its text, its style, and how far it is indented."""

    text: str
    style: str = ""
    indent: int = 0


def _say(out: Console, rows: Sequence[Row], width: int | None) -> None:
    """Prints rows: wrapped under their indentation on a terminal, one line each in a pipe."""
    for row in rows:
        if width:
            out.print(Padding(Text(row.text, style=row.style, overflow="fold"), (0, 0, 0, row.indent)), width=width)
        else:
            out.print(Text(" " * row.indent + row.text, style=row.style))


def _lines(entry: Mapping[str, Any], folder: StudyFolder) -> list[Row]:
    role = f", {ROLES[entry['role']]}" if entry["role"] in ROLES else ""
    rows = [Row(f"trial {entry['trial']:04d}{role}", "name")]
    if steps := _step_text(entry["phases_s"]):
        rows.append(Row(steps, indent=2))
    ran = {name: folder.trial_path(one["trial"]) for name, one in entry["passes"].items() if one["outcome"] == "ok"}
    if "trace" in ran and (used := _gpu_text(ran["trace"])):
        rows.append(Row(used, indent=2))
    for number, finding in enumerate(entry["findings"], 1):
        rows += [Row(""), *_finding(number, finding)]
    if len(entry["findings"]) > 1:
        rows += [Row(""), Row("gains do not add up: each is the gain from removing that cost alone", "quiet", 2)]
    if nothing := nothing_text(entry, _command(entry, folder)):
        rows.append(Row(nothing, indent=2))
    rows += [Row(f"note: {note}", "quiet", 2) for note in entry["notes"]]
    trace = ran["trace"] / trace_file(0) if "trace" in ran else None
    if trace is not None and trace.is_file():
        rows.append(Row(f"trace: {trace}, opens in https://ui.perfetto.dev", "quiet", 2))
    return rows


def _step_text(phases_s: Mapping[str, float]) -> str:
    """Returns a step's time by phase: "a step takes 102 ms: forward 31 %, backward 40 %, ..."."""
    total_s = math.fsum(phases_s.values())
    if not total_s:
        return ""
    shares = {name: seconds / total_s for name, seconds in phases_s.items() if seconds >= LEAST_PHASE * total_s}
    listed = ", ".join(f"{name} {percent_text(share)}" for name, share in shares.items())
    return f"a step takes {step_time_text(total_s)}: {listed}"


def _gpu_text(folder: Path) -> str:
    """Returns how well a step uses the GPU, from the tables in a trial's folder; "" if they have no GPU numbers."""
    from autotune.explain.tables import read_tables

    row: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        row = next(iter(read_tables(folder).rows("roofline", 0)), {})
    if row.get("busy_frac") is None:
        return ""
    said = f"the GPU is busy for {share_text(row['busy_frac'])} of a step"
    if (on_tensor_cores := row.get("tensor_core_frac")) is not None:
        said += f", its kernels spend {share_text(on_tensor_cores)} of their time on Tensor Cores"
    if row.get("mfu_frac") and row.get("peak_flops_per_s"):
        said += f"; {flops_text(row['flops_per_s'])}, {share_text(row['mfu_frac'])} of its peak in {row['dtype']}"
        said += ", " + flops_text(row["peak_flops_per_s"])
    return said


def _finding(number: int, finding: Mapping[str, Any]) -> list[Row]:
    return [
        Row(f"{number}  {finding['cause']}: {size_text(finding)}", "name"),
        Row(str(finding["where"]), "key", 3),
        Row(str(finding["evidence"]), "", 3),
        Row(f"do: {remedy_text(finding)}", "command", 3),
        Row(f"sized by: {finding['basis']}", "quiet", 3),
    ]


def _last(document: Mapping[str, Any]) -> list[Row]:
    """Returns the rows at the end: checks that are not shown with a finding above, and how often predictions held."""
    rows = [Row(f"tried: {line}") for line in other_checks(document, document["explained"])]
    if words := accuracy_text(document):
        rows.append(Row(f"explanations: {words}"))
    return rows


def _next(entries: Sequence[Mapping[str, Any]], folder: StudyFolder) -> list[Row]:
    """Returns the command that checks a change of the code, for the first trial with a finding; [] without findings."""
    entry = next((entry for entry in entries if entry["findings"]), None)
    if entry is None:
        return []
    command = f"{_command(entry, folder)} --fixed -- python train_fixed.py"
    return [Row(f"to check a change of the code: {command}", "quiet")]


def _command(entry: Mapping[str, Any], folder: StudyFolder) -> str:
    """Returns the command that explains an entry's trial."""
    return f"autotune explain {call(folder)}" + ("" if entry["role"] == "best" else f" --trial {entry['trial']}")
