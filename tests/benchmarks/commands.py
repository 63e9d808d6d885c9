"""Runs studies for the benchmarks by the commands that a user types, in their own processes, and resumes interrupted ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.records import Summary, TrialRecord
from autotune.run_dir import StudyFolder

ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 120.0  # a command is killed this long after its budget; the baseline alone may take longer than the budget
TAIL_CHARS = 600


def run_command(*arguments: str, timeout_s: float = 600.0, may_fail: bool = False) -> str:
    """Returns what a Python command wrote to standard output.

    Raises:
        AssertionError: the command failed; the message has the end of its output.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert may_fail or done.returncode == 0, (
        f"`{' '.join(arguments[:4])} ...` ended with exit status {done.returncode}: {(done.stdout + done.stderr)[-TAIL_CHARS:]}"
    )
    return done.stdout


def run_study(runs: Path, name: str, overrides: Sequence[str] = (), *, minutes: float, command: Sequence[str] = ()) -> Summary:
    """Returns the summary of a study. Starts the study, or resumes it if it was interrupted; a complete study is not run again.

    Args:
        runs: folder of the studies.
        name: the study's name.
        overrides: KEY=VALUE overrides of the configuration.
        minutes: the study's budget.
        command: the user's own program; () for a recipe.
    """
    folder = StudyFolder(runs / name)
    if folder.study_file.exists():
        if folder.summary_file.exists() and folder.read_summary()["status"] == "complete":
            return folder.read_summary()
        arguments = ["resume", name, "--runs-dir", str(runs)]
    else:
        arguments = ["run", *overrides, f"study.name={name}", f"runs_dir={runs}", f"study.budget.minutes={minutes:g}"]
        arguments += ["--", *command] if command else []
    run_command("-m", "autotune", *arguments, timeout_s=minutes * 60 + SLACK_S)
    summary = folder.read_summary()
    assert summary["status"] == "complete", summary["reason"]
    return summary


def trials_of(runs: Path, name: str) -> list[TrialRecord]:
    """Returns the trials of a study."""
    return StudyFolder(runs / name).read_trials()


def essence(summary: Summary) -> dict[str, Any]:
    """Returns the parts of a summary that the results keep: the verdict, and the settings and outcome of every trial."""
    trial_keys = ("number", "kind", "outcome", "reason", "changed", "value", "ci", "seconds", "start", "peak_memory_bytes")
    kept = ("unit", "baseline", "best", "speedup", "attribution", "minimality", "parity", "counts", "seconds", "diagnosis")
    trials = [{key: trial.get(key) for key in trial_keys} for trial in summary["trials"]]
    return {**{key: summary.get(key) for key in kept}, "trials": trials}


def verdict_words(found: dict[str, Any]) -> str:
    """Returns the verdict of a study in one line."""
    best, speedup = found["best"], found["speedup"]
    changes = " ".join(f"{key}={json.dumps(value)}" for key, value in (best or {}).get("overrides", {}).items()) or "no change"
    ratio = f"{speedup['ratio']:.2f}x, " if speedup and speedup["ratio"] else ""
    rate = f"{found['baseline']['value']:.0f} -> {best['value']:.0f} {found['unit']}/s" if best else "no winner"
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found["counts"].items())
    verdict = speedup["verdict"] if speedup else "no verdict"
    return f"{rate}, {ratio}{verdict}: {changes} ({counts}, {found['seconds']['total']:.0f} s)"
