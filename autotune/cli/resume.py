"""Implements `autotune resume`: resumes a study that was interrupted or whose budget is used up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli import verdict
from autotune.cli.run import carry_out, inputs_of, judge
from autotune.cli.show import check_cwd, chosen, read_study, read_summary
from autotune.cli.terminal import print_json
from autotune.errors import BadInput
from autotune.plain_text import plain
from autotune.records import Kind, Outcome, StudyRecord, Summary
from autotune.report.verdict import more_time
from autotune.run_dir import StudyFolder
from autotune.studies import call

if TYPE_CHECKING:
    from autotune.config.schema import Budget


def resume(runs: Path, name: str, overrides: Sequence[str], *, as_json: bool, is_quiet: bool = False) -> int:
    """Resumes a study and prints the verdict. If the study is complete and no new budget is given, only prints the verdict.

    Raises:
        BadInput: the study does not exist, another tuner is working on it, it cannot be read, machine or program have
            changed, or the new budget is no larger than what the study has used.
        NothingWorked, Interrupted, FolderLost: as for `run`.
    """
    folder = chosen(runs, name)
    study = _study(folder)
    if study.verifies and overrides:
        key = overrides[0].lstrip("+").partition("=")[0]
        instead = "Leave it out, or verify the file again with --rounds N or --minutes M."
        raise BadInput(f"{key}: has no effect on a verification, got {overrides[0]!r}. {instead}")
    if (summary := _summary(folder)) and summary["status"] == "complete" and not overrides:
        return _print_complete(folder, summary, as_json=as_json)

    folder.check_free()
    from autotune.cli.verify import inputs_to_resume
    from autotune.config.recorded import recorded
    from autotune.machine import host_facts
    from autotune.study import resume_study

    # Only searches run trials in parallel, and a new budget may continue a search. Verifications and recordings do not.
    is_alone = bool((study.search_ended and not overrides) or study.verifies or study.recording)
    composed = recorded(study, folder.config_file, overrides, is_alone=is_alone)
    check_cwd(study)
    if summary and overrides and not study.recording:
        has_trials = any(word.lstrip("+").startswith("study.budget.trials=") for word in overrides)
        _check_budget(composed.config.study.budget, summary, has_trials=has_trials)
    if study.recording:
        from autotune.cli import record

        return record.run_recording(composed, host_facts(), folder, output=None, as_json=as_json, is_quiet=is_quiet)
    make_plan = inputs_to_resume(study) if study.verifies else functools.partial(inputs_of, is_alone=is_alone)
    return carry_out(resume_study, make_plan(composed, host_facts()), folder, as_json=as_json, is_quiet=is_quiet)


def _study(folder: StudyFolder) -> StudyRecord:
    study = read_study(folder)
    if not study.identity:
        raise BadInput(f"STUDY: made by a version of autotune that had no `resume`, got {folder.name!r}. Start a new study.")
    return study


def _summary(folder: StudyFolder) -> Summary | None:
    """Returns the summary, or None if it is missing or unreadable; a study can be resumed without it."""
    try:
        return read_summary(folder)
    except BadInput:
        return None


def _print_complete(folder: StudyFolder, summary: Summary, *, as_json: bool) -> int:
    if as_json:
        print_json(summary)
    else:
        for line in verdict.lines(summary, folder.path):
            print(plain(line))
    if verification := summary.get("verification"):
        judge(verification)
    elif not (as_json or summary.get("recording")):
        print(plain(_how_to_continue(folder, summary)))
    return 0


def _how_to_continue(folder: StudyFolder, summary: Summary) -> str:
    why = f"  {summary['reason']}" if summary["reason"] else ""
    larger = more_time(summary)
    more = f" To continue, give it a larger budget: autotune resume {call(folder)}{larger}" if larger else ""
    return f"complete{why}.{more}"


def _check_budget(budget: Budget, summary: Summary, *, has_trials: bool) -> None:
    """Checks that a budget is not used up yet.

    A used-up number of trials is an error only if the user has just given this number (`has_trials`). Otherwise, the search is
    over, but the finals may still continue.

    Raises:
        BadInput: it is used up.
    """
    spent_min = float(summary["seconds"].get("total") or 0.0) / 60
    tried = [t for t in summary["trials"] if t.get("kind") == Kind.search and t["outcome"] != Outcome.interrupted]
    problems = []
    if budget.minutes is not None and budget.minutes <= spent_min:
        problems.append(f"study.budget.minutes: {spent_min:.1f} minutes are already used, got {budget.minutes:g}. Give more.")
    if has_trials and budget.trials is not None and budget.trials <= len(tried):
        problems.append(f"study.budget.trials: {len(tried)} trials are already used, got {budget.trials}. Give more.")
    if problems:
        raise BadInput(problems)
