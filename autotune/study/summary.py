"""The summary: the document of `autotune show --json`, made from the records alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from autotune import stats
from autotune.records import SCHEMA, StudyRecord, Summary, Tier, TrialRecord
from autotune.study.budget import START_PHASES
from autotune.study.diagnosis import diagnose
from autotune.study.finals import Decision
from autotune.study.verify import verification

_TRIAL_FIELDS = (
    "number", "kind", "outcome", "reason", "why", "knobs", "changed", "tier", "value", "ci", "seconds", "phases_s",
    "peak_memory_bytes", "device_rate", "loader_rate", "data_wait_frac", "round", "repeats",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far the study has come.

    Attributes:
        status: "running", "complete", "interrupted" or "failed".
        reason: why it ended; "" while it runs.
        seconds: wall time so far.
        decision: what the finals found; None before they have run.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    decision: Decision | None = None


def summarise(about: StudyRecord, records: list[TrialRecord], standing: Standing) -> Summary:
    """Returns the summary of a study.

    Args:
        about: study.json.
        records: finished trials, by number.
        standing: how far it has come.
    """
    baseline = records[0] if records and records[0].outcome.has_value else None
    best = _best(records, baseline, standing)
    return {
        "schema": SCHEMA,
        "study": about.name,
        "title": about.title,
        "status": standing.status,
        "reason": standing.reason,
        "objective": about.objective,
        "unit": baseline.unit if baseline else "samples",
        "machine": about.machine,
        "baseline": _entry(baseline, standing, knobs=True) if baseline else _no_baseline(records),
        "best": _entry(best, standing, knobs=True, overrides=True) if best else None,
        "best_by_tier": _by_tier(records, baseline, best, standing),
        "speedup": _speedup(baseline, best, standing),
        "attribution": [],
        "diagnosis": diagnose(best, device=about.machine.get("device")) if best else [],
        "counts": dict(Counter(str(record.outcome) for record in records)),
        "seconds": _seconds(records, standing.seconds),
        "fingerprint": about.fingerprint,
        "identity": about.identity,
        "versions": about.versions,
        "started_at": about.started_at,
        "budget_s": about.budget_s,
        "budget_trials": about.budget_trials,
        "pinned": about.pinned,
        "settings": about.settings,
        "command": about.command,
        "cwd": about.cwd,
        "is_recipe": about.is_recipe,
        "verification": verification(about, records, standing.decision) if about.verifies else None,
        "files": _files(records),
        "trials": [_trial(record) for record in records],
    }


def _best(records: list[TrialRecord], baseline: TrialRecord | None, standing: Standing) -> TrialRecord | None:
    """Returns what is handed over: the finals' choice; before them the search's leader, which has yet to prove itself."""
    if baseline is None:
        return None
    decision = standing.decision
    if decision is not None and (decision.ratio is not None or decision.finalist is None):
        return decision.finalist if decision.is_better else baseline
    return _leader(records, baseline, Tier.training)


def _leader(records: list[TrialRecord], baseline: TrialRecord, tier: Tier) -> TrialRecord:
    """Returns the best search trial up to a tier, or the baseline where none beat it by more than the margin."""
    able = [
        r for r in records if r.repeats is None and r.outcome.may_win and r.score and r.tier.rank <= tier.rank and r.changed
    ]
    top = max(able, key=lambda record: record.score or 0.0, default=baseline)
    return top if (top.score or 0.0) > (baseline.score or 0.0) * (1 + stats.MARGIN_FRAC) else baseline


def _by_tier(
    records: list[TrialRecord], baseline: TrialRecord | None, best: TrialRecord | None, standing: Standing
) -> dict[str, Any]:
    if baseline is None or best is None:
        return {}
    found = {}
    for tier in Tier:
        is_decided = best.changed and best.tier.rank <= tier.rank
        is_nothing_better = standing.decision is not None and not best.changed and tier is Tier.training
        leader = best if is_decided or is_nothing_better else _leader(records, baseline, tier)
        found[str(tier)] = _entry(leader, standing, overrides=True)
    return found


def _entry(record: TrialRecord, standing: Standing, *, knobs: bool = False, overrides: bool = False) -> dict[str, Any]:
    """Returns trial, value and interval: from the finals' reporting rounds where there are any, else from the search."""
    rates = standing.decision.values.get(record.number) if standing.decision else None
    value, ci = stats.log_mean_interval(rates) if rates else (record.value, record.ci)
    entry: dict[str, Any] = {"trial": record.number, "value": value, "ci": ci, "measured_in": "finals" if rates else "search"}
    if overrides:
        entry["overrides"] = record.changed
    if knobs:
        entry["knobs"] = record.knobs
    return entry


def _no_baseline(records: list[TrialRecord]) -> dict[str, Any]:
    reason = f"{records[0].outcome}: {records[0].reason}" if records else "not measured yet"
    return {"trial": 0, "value": None, "ci": None, "knobs": records[0].knobs if records else {}, "reason": reason}


def _speedup(baseline: TrialRecord | None, best: TrialRecord | None, standing: Standing) -> dict[str, Any] | None:
    if baseline is None or best is None:
        return None
    decision = standing.decision
    if decision is None or decision.ratio is None:
        return _unproven(baseline, best, decision)
    if decision.is_slower:  # the baseline is handed over, and it is as fast as itself
        return {"ratio": 1.0, "ci": None, "verdict": decision.verdict, "reason": decision.reason}
    return {
        "ratio": decision.ratio.ratio,
        "ci": decision.ratio.ci,
        "verdict": decision.verdict,
        "reason": decision.reason,
        "num_rounds": decision.ratio.num_rounds,
        "margin": decision.margin,
    }


def _unproven(baseline: TrialRecord, best: TrialRecord, decision: Decision | None) -> dict[str, Any] | None:
    """Returns the speedup as the search saw it: one measurement each, picked as the best, so it overstates; None for none."""
    if decision is None and not best.changed:
        return None  # the baseline is as fast as itself: that is no verdict
    if decision is not None and decision.finalist is None:  # nothing was worth measuring beside the baseline
        return {"ratio": None, "ci": None, "verdict": decision.verdict, "reason": decision.reason}
    leader = decision.finalist if decision and decision.finalist else best
    reason = decision.reason if decision else "the finals have not run"
    ratio = (leader.value or 0.0) / baseline.value if baseline.value else None
    return {
        "ratio": ratio,
        "ci": None,
        "verdict": "ambiguous",
        "reason": f"{reason}: the search's own numbers, which overstate",
    }


def _seconds(records: list[TrialRecord], total_s: float) -> dict[str, float]:
    def phase_s(*names: str) -> float:
        return sum(record.phases_s.get(name, 0.0) for record in records if record.outcome.has_value for name in names)

    return {
        "total": total_s,
        "measuring": phase_s("steady"),
        "starting": phase_s(*START_PHASES),
        "compiling": phase_s("compile"),
        "lost": sum(record.seconds for record in records if not record.outcome.has_value),
    }


def _files(records: list[TrialRecord]) -> dict[str, Any]:
    """Returns what trials left in the working directory, and which of the user's checkpoints were written over and put back."""
    left = [
        {"name": name, "bytes": size, "trial": record.number}
        for record in records
        for name, size in record.evidence.get("files_left", {}).items()
    ]
    restored: dict[str, list[int]] = {}
    for record in records:
        for path in record.evidence.get("files_restored", []):
            restored.setdefault(path, []).append(record.number)
    return {"left": left, "restored": [{"path": path, "trials": numbers} for path, numbers in restored.items()]}


def _trial(record: TrialRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _TRIAL_FIELDS}
