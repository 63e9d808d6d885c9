"""Reads what earlier runs of a study left in its folder, so that a resumed study can continue from there."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import BadInput
from autotune.harness import protocol
from autotune.harness.protocol import RankResult
from autotune.launchers.progress_file import ProgressFile
from autotune.launchers.rank_results import RankResults
from autotune.records import Kind, Outcome, StudyRecord, TrialRecord, TrialRequest
from autotune.run_dir import StudyFolder
from autotune.trials.running import NODE_LOST

CUT_OFF_CAUSE = "cut off"  # cause in a record's evidence: autotune was killed while the trial ran


@dataclass(kw_only=True)
class Earlier:
    """The results of earlier runs.

    Attributes:
        about: study.json.
        records: ended trials, by number, including cut-off ones; without the baseline if it must be measured again.
        cut_off: the cut-off trials among `records`; their record files are not written yet.
        spent_s: wall time used.
        first: rank 0's result of the baseline; None if the baseline must be measured.
        why_no_baseline: why a measured baseline cannot be used; "" if it can be used, or if none was measured.
        failed_baseline: the baseline's record if it has no measurement; None otherwise.
    """

    about: StudyRecord
    records: list[TrialRecord] = field(default_factory=list)
    cut_off: list[TrialRecord] = field(default_factory=list)
    spent_s: float = 0.0
    first: RankResult | None = None
    why_no_baseline: str = ""
    failed_baseline: TrialRecord | None = None


def read_earlier(folder: StudyFolder) -> Earlier:
    """Returns the earlier results in a study's folder.

    Raises:
        BadInput: a file cannot be read; the error names the file.
    """
    try:
        about, records = folder.read_study(), folder.read_trials()
    except (OSError, ValueError) as error:
        advice = "Move that trial's folder away to continue without the trial, or start a new study with `autotune run`."
        raise BadInput(f"{folder.path}: cannot be continued, got {error}. {advice}") from error
    ended = [_cut_off(request, folder.trial_path(request.number)) for request in folder.read_cut_off()]
    cut_off = [record for record in ended if record.number]  # trial 0 is measured again as trial 0; its time counts
    counted = [record for record in records if record.kind not in (Kind.explain, Kind.check)]
    measured_s = sum(record.seconds / (1 + record.neighbours) for record in counted)
    earlier = Earlier(about=about, records=sorted([*records, *cut_off], key=lambda record: record.number), cut_off=cut_off)
    earlier.spent_s = max(_noted_s(folder), about.spent_s, measured_s) + max((record.seconds for record in ended), default=0.0)
    _take_baseline(earlier, folder)
    return earlier


def _take_baseline(earlier: Earlier, folder: StudyFolder) -> None:
    baseline = earlier.records[0] if earlier.records and earlier.records[0].kind is Kind.baseline else None
    if baseline is None:
        earlier.why_no_baseline = "the baseline's record is missing" if earlier.records else ""
        return
    if not baseline.outcome.has_value:
        earlier.failed_baseline = earlier.records.pop(0)
        return
    try:
        earlier.first = _first_result(folder.trial_path(0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        earlier.why_no_baseline = f"the baseline's results cannot be read ({error})"
        earlier.records.pop(0)


def _first_result(path: Path) -> RankResult:
    """Returns the result that rank 0 of a trial wrote.

    Raises:
        OSError, ValueError, KeyError, TypeError: the result cannot be read, or belongs to another attempt.
    """
    results = RankResults(path, protocol.read_spec(str(path / protocol.SPEC_FILE)))
    results.collect()
    if 0 not in results.by_rank:
        raise ValueError("; ".join(results.problems) or f"{protocol.result_file(0)} is missing")
    return results.by_rank[0]


def _noted_s(folder: StudyFolder) -> float:
    """Returns the wall time that the study's summary states; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        total_s = folder.read_summary()["seconds"].get("total")
        return float(total_s) if isinstance(total_s, int | float) else 0.0
    return 0.0


def _cut_off(request: TrialRequest, path: Path) -> TrialRecord:
    """Returns a record for a trial without one: autotune was killed while the trial ran."""
    # After a reboot or on another machine, the clock by which these times were written is not comparable with the present one.
    progress = ProgressFile(path / protocol.PROGRESS_FILE, now_s=lambda: math.inf)
    progress.read()
    seconds = progress.changed_s - min(progress.entered_s.values(), default=progress.changed_s)
    passed_s = time.time() - request.started_at  # limits `seconds`, because the program may write anything into this file
    return TrialRecord(
        **request.shared(),
        outcome=Outcome.interrupted,
        reason=f"cut off in phase {progress.phase}: autotune was ended, or the machine went down",
        evidence={"cause": CUT_OFF_CAUSE, "phase": progress.phase},
        started_at=request.started_at,
        seconds=max(0.0, min(seconds, passed_s)),
    )


def was_stopped(record: TrialRecord) -> bool:
    """Whether the user or the budget ended a trial early, so that the trial says nothing about its configuration.

    False if autotune was killed or the node was lost. The configuration may be the cause: it may use up the machine's memory.
    """
    is_cut_off = record.evidence.get("cause") == CUT_OFF_CAUSE or NODE_LOST in record.evidence
    return record.outcome is Outcome.interrupted and not is_cut_off
