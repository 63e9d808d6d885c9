"""Says why the baseline could not be measured, and what the user can do about it."""

from __future__ import annotations

import operator
import shutil

from autotune.detected import findings
from autotune.harness.protocol import RankResult
from autotune.records import Outcome, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.trials.inputs import StudyInputs
from autotune.wording import log_lines

# The time limits that the reason of a timeout may name -> their configuration keys.
LIMITS = {"total": "study.budget.minutes", **{name: f"measure.{name}_s" for name in ("start", "compile", "step")}}
NO_MODULE = "No module named"  # part of Python's own message


def why_nothing_worked(record: TrialRecord, folder: StudyFolder, results: list[RankResult], inputs: StudyInputs) -> str:
    """Returns the message of NothingWorked: why the baseline has no measurement, the end of its log, and what to do."""
    lines = [f"baseline: the unchanged program could not be measured, got {record.outcome}: {record.reason}."]
    lines += [f"  {label}: {text}" for label, text in (findings(results[0]) if results else [])]
    lines += log_lines(record.evidence)
    if NO_MODULE in record.reason:
        first = inputs.command.argv({})[0]
        words = "Activate the environment that it needs, or name its interpreter."
        lines.append(f"The program ran with {shutil.which(first) or first}. {words}")
    limit = record.reason.partition(":")[0]
    if record.outcome is Outcome.timeout and limit in LIMITS:
        key, value = LIMITS[limit], operator.attrgetter(LIMITS[limit])(inputs.config)
        lines.append(f"If it only needs more time than {key}={value:g} allows, raise this limit.")
    lines.append(f"Tuning needs this measurement. The program's output is in {folder.trial_path(0)}.")
    return "\n".join(lines)
