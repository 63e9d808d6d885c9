"""Converts a study and its trials to MLflow tags, params, metrics and notes, as plain values. Does not import MLflow."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from autotune.explained import accuracy_text, finding_lines, why_lines
from autotune.knobs.base import value_text
from autotune.masking import without_credentials
from autotune.quantities import interval_text, rate_text, seconds_text
from autotune.records import COST, ENERGY, TIME, Kind, Knobs, Outcome, StudyRecord, Summary, TrialRecord, objective_names
from autotune.wording import (
    aims_text,
    break_even_text,
    changes_phrase,
    command_text,
    communication_text,
    counts_text,
    effect_text,
    machine_text,
    objective_text,
    parity_lines,
    search_cost_text,
    side_texts,
    verdict_text,
    warm_start_text,
)

# Limits of MLflow 3 (mlflow/utils/validation.py). Longer values are cut, since MLflow would reject the whole trial's batch.
MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 8000
MAX_KEY_CHARACTERS = 250

STATUSES = {outcome: "FINISHED" for outcome in Outcome if outcome.has_value} | {Outcome.interrupted: "KILLED"}
STUDY_STATUSES = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

# Objective -> name of its metric, with the unit. Throughput is not listed: its metric is always throughput_per_s.
METRICS = {TIME: "time_for_samples_s", ENERGY: "energy_per_sample_j", COST: "cost_per_epoch"}

STUDY_TAG, TRIAL_TAG, DIGEST_TAG = "autotune.study_id", "autotune.trial", "autotune.digest"
PARENT_TAG = "mlflow.parentRunId"


# The view that `autotune ui` opens. MLflow keeps a shared view as JSON in a tag of the experiment; the URL names its key.
VIEW = "autotune"
VIEW_COLUMNS = (
    "tags.`outcome`",
    "metrics.`throughput_per_s`",
    "metrics.`peak_memory_bytes`",
    "params.`loader.batch_size`",
    "params.`loader.num_workers`",
    "params.`precision.amp`",
    "params.`layout.channels_last`",
    "params.`compile.mode`",
)


def experiment_tags() -> dict[str, str]:
    """Returns the tags of the experiment: its description, and the shared view with the columns that distinguish trials."""
    view = {
        "orderByKey": "metrics.`throughput_per_s`",
        "orderByAsc": False,
        "selectedColumns": list(VIEW_COLUMNS),
        "searchFilter": "tags.kind != 'study'",
    }
    return {
        "mlflow.note.content": "One parent run per study, one child run per trial. Params are knobs. Trials are compared by "
        "throughput_per_s, unless the study has another objective.",
        "mlflow.experimentKind": "custom_model_development",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }


def study_id(study: StudyRecord) -> str:
    """Returns the study's id: its name and start, to the millisecond, so that two studies of the same name differ."""
    return f"{study.name}@{study.started_at:.3f}"


def trial_status(trial: TrialRecord) -> str:
    """Returns a trial's MLflow run status: FINISHED if it has a value, KILLED if it was interrupted, FAILED otherwise."""
    return STATUSES.get(trial.outcome, "FAILED")


def digest(document: Any) -> str:
    """Returns a short hash of a JSON document. An unchanged digest means that there is nothing to write."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def trial_name(trial: TrialRecord) -> str:
    """Returns a trial's run name: "0007 bf16 batch 64", "0000 baseline", "0031 final 2 of 0007", "0040 attribution 1: ..."."""
    if trial.kind is Kind.baseline:
        return f"{trial.number:04d} baseline"
    if trial.kind is Kind.final:
        again = "" if trial.repeats is None else f" of {trial.repeats:04d}"
        turn = "" if trial.round is None else f" {trial.round}"
        return f"{trial.number:04d} final{turn}{again}"
    if trial.kind is Kind.attribution:
        turn = "" if trial.round is None else f" {trial.round}"
        return f"{trial.number:04d} attribution{turn}: {trial.why}"[:MAX_KEY_CHARACTERS]
    if trial.kind is Kind.parity:
        return _run_name(trial, f"losses of {changes_phrase(trial.changed, none='the baseline')}")
    if trial.kind in (Kind.explain, Kind.check):
        return _run_name(trial, f"{trial.kind}: {trial.why}")
    return _run_name(trial, changes_phrase(trial.changed))


def _run_name(trial: TrialRecord, words: str) -> str:
    return f"{trial.number:04d} {words}".replace(" · ", " ")[:MAX_KEY_CHARACTERS]


def trial_tags(trial: TrialRecord, study: StudyRecord, mark: str) -> dict[str, str]:
    """Returns a trial's tags, without the parent's run id; `mark` distinguishes its run from an earlier attempt's."""
    tags = {
        STUDY_TAG: study_id(study),
        TRIAL_TAG: mark,
        "study": study.name,
        "trial": str(trial.number),
        "kind": trial.kind.value,
        "outcome": trial.outcome.value,
        "reason": trial.reason,
        "tier": trial.tier.value,
        "start": trial.start,
        "why": trial.why,
        "changed": changes_phrase(trial.changed),
        "violations": "; ".join(f"{key} by {beyond:.1%}" for key, beyond in trial.violations.items()),
        "fingerprint": study.fingerprint,
        "repeats": "" if trial.repeats is None else str(trial.repeats),
        "mlflow.note.content": trial_note(trial),
        **_source(study),
    }
    return {key: without_credentials(value)[:MAX_TAG_CHARACTERS] for key, value in tags.items() if value}


def study_tags(study: StudyRecord, summary: Summary) -> dict[str, str]:
    """Returns the parent run's tags."""
    speedup = summary.get("speedup") or {}
    tags = {
        STUDY_TAG: study_id(study),
        "study": study.name,
        "kind": "study",
        "outcome": str(summary.get("status", "running")),
        "reason": str(summary.get("reason") or ""),
        "verdict": str((summary.get("verification") or speedup).get("verdict") or ""),
        "objective": aims_text(study.objective, study.terms),
        "warm_start": warm_start_text(study.warm_start),
        **{f"finding.{number}": line for number, line in enumerate(finding_lines(summary), 1)},
        "explanations": accuracy_text(summary.get("explanation") or {}),
        "fingerprint": study.fingerprint,
        "mlflow.note.content": study_note(study, summary),
        **_source(study),
    }
    return {key: without_credentials(value)[:MAX_TAG_CHARACTERS] for key, value in tags.items() if value}


def params(knobs: Knobs) -> dict[str, str]:
    """Returns a full configuration as MLflow params, with values as in YAML."""
    return {_name(key): value_text(value)[:MAX_PARAM_CHARACTERS] for key, value in sorted(knobs.items())}


def trial_metrics(trial: TrialRecord) -> dict[str, float]:
    """Returns a trial's metrics, with units in the names; unknown and non-finite values are left out."""
    low, high = trial.ci or (None, None)
    numbers: dict[str, Any] = {
        "throughput_per_s": trial.value,  # first, because MLflow's compare page draws the first metric
        "ci_low_per_s": low,
        "ci_high_per_s": high,
        "device_rate_per_s": trial.device_rate,
        "loader_rate_per_s": trial.loader_rate,
        "data_wait_frac": trial.data_wait_frac,
        "peak_memory_bytes": trial.peak_memory_bytes,
        "seconds": trial.seconds,
        "start_s": sum(trial.phases_s.get(phase, 0.0) for phase in ("spawn", "import", "init", "first_batch")),
        "compile_s": trial.phases_s.get("compile"),
        "warmup_s": trial.phases_s.get("warmup"),
        "steady_s": trial.phases_s.get("steady"),
    }
    numbers |= {METRICS[name]: value for name, value in trial.objectives.items() if name in METRICS}
    return _finite(numbers) | _finite({name: value for name, value in trial.metrics.items() if name not in numbers})


def study_metrics(summary: Summary) -> dict[str, float]:
    """Returns the parent run's metrics: baseline, best, speed-up with interval, counts, and seconds by activity."""
    baseline, best, speedup = (summary.get(key) or {} for key in ("baseline", "best", "speedup"))
    low, high = speedup.get("ci") or (None, None)
    numbers: dict[str, Any] = {
        "baseline_per_s": baseline.get("value"),
        "best_per_s": best.get("value"),
        "throughput_per_s": best.get("value"),
        "speedup": speedup.get("ratio"),
        "speedup_claimed": ((summary.get("verification") or {}).get("claimed") or {}).get("ratio"),
        "speedup_ci_low": low,
        "speedup_ci_high": high,
        "trials": len(summary.get("trials") or []),
    }
    for side, found in (("baseline", baseline), ("best", best)):
        values = found.get("objectives") or {}
        numbers |= {f"{side}_{METRICS[name]}": value for name, value in values.items() if name in METRICS}
    paying = summary.get("break_even") or {}
    numbers |= {f"break_even_{name}": paying.get(name) for name in ("samples", "steps", "seconds")}
    cost = summary.get("search_cost") or {}
    low_s, high_s = cost.get("ci") or (None, None)
    numbers |= {"repaid_after_s": cost.get("repaid_after_s"), "repaid_after_ci_low_s": low_s, "repaid_after_ci_high_s": high_s}
    numbers |= {f"seconds_{name}": value for name, value in (summary.get("seconds") or {}).items()}
    return _finite(numbers)


def best_so_far(trials: list[TrialRecord]) -> list[tuple[int, float]]:
    """Returns (trial number, best score so far) for the trials that may win: the curve of the study's progress."""
    curve, best = [], -math.inf
    for trial in trials:
        if trial.outcome.may_win and trial.score is not None and trial.kind in (Kind.baseline, Kind.search):
            best = max(best, trial.score)
            curve.append((trial.number, best))
    return curve


def curve_name(trials: list[TrialRecord]) -> str:
    """Returns the metric name of the curve of `best_so_far`; scores per joule or per unit of currency are not rates."""
    names = next((list(trial.scores) for trial in trials if trial.scores), [])
    return "best_so_far" if names and names[0] in (ENERGY, COST) else "best_so_far_per_s"


def trial_note(trial: TrialRecord) -> str:
    """Returns a trial's description in Markdown."""
    lines = [f"**{trial.outcome.value}** {trial.reason}".strip(), ""]
    if trial.value is not None:
        lines += [f"{rate_text(trial.value, trial.unit)} {interval_text(trial.ci)}".strip(), ""]
    lines += [f"- {name}: {objective_text(name, value)}" for name, value in trial.objectives.items() if name in METRICS]
    if trial.ranks:
        lines += [f"{trial.ranks['world_size']} ranks; {communication_text(trial.ranks)}", ""]
    if trial.why:
        lines += [f"Why tried: {trial.why}", ""]
    lines += [f"- `{key}` = `{value_text(value)}`" for key, value in sorted(trial.changed.items())]
    return "\n".join(lines).strip()


def study_note(study: StudyRecord, summary: Summary) -> str:
    """Returns the study's description in Markdown: verdict, numbers, changes and the next commands."""
    lines = [f"### {verdict_line(summary)}", "", "| | trial | measured | 95 % interval |", "|---|---|---|---|"]
    for name in ("baseline", "best"):
        side = summary.get(name) or {}
        if side:
            cells = (name, side.get("trial"), *side_texts(summary, side))
            lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    overrides = (summary.get("best") or {}).get("overrides") or {}
    before = (summary.get("baseline") or {}).get("knobs") or {}
    effects = {entry["knob"]: entry for entry in summary.get("attribution") or []}
    lines.append("")
    for key in [*effects, *sorted(set(overrides) - set(effects))]:
        effect = effect_text(effects.get(key) or {})
        change = f"`{key}`: {value_text(before.get(key))} → **{value_text(overrides.get(key))}**"
        lines.append(f"- {change}{f', {effect}' if effect else ''}")
    if dropped := (summary.get("minimality") or {}).get("dropped"):
        named = (f"`{e['knob']}` = {value_text(e['to'])}" for e in dropped)
        lines += ["", f"No effect, so left as it was: {', '.join(named)}."]
    lines += [*_front_lines(summary), *([f"\n{paying}"] if (paying := break_even_text(summary)) else [])]
    lines += ["", *(f"{name}: {text}  " for name, text in parity_lines(summary))]
    if why := why_lines(summary):
        lines += ["", "What still costs time:", "", *(f"- {line}" for line in why)]
    seconds = (summary.get("seconds") or {}).get("total")
    lines += ["", f"Outcomes: {counts_text(summary.get('counts') or {})}. Took {seconds_text(seconds)}.", ""]
    if taken_over := warm_start_text(study.warm_start):
        lines += [f"Warm start: {taken_over}.", ""]
    if cost := search_cost_text(summary):
        lines += [f"Cost: {cost}.", ""]
    lines += [f"Program: `{command_text(study.command)}`", "", f"Machine: {machine_text(study.machine)}", ""]
    lines += [f"`autotune show {study.name}` · `autotune export {study.name} -o best.yaml`"]
    return "\n".join(lines)


def verdict_line(summary: Summary) -> str:
    """Returns the verdict in one line, "faster: 2.41x [2.36, 2.46]", or the study's status if there is none."""
    speedup = summary.get("speedup") or {}
    if not speedup.get("ratio"):
        status = str(summary.get("status") or "running")
        return f"{status}: {summary['reason']}" if summary.get("reason") else status
    return verdict_text(summary)


def _front_lines(summary: Summary) -> list[str]:
    """Returns the Pareto front as a Markdown table; [] with a single objective."""
    if not (points := summary.get("front")):
        return []
    names = objective_names(summary["objective"])
    lines = ["", "Pareto front", "", f"| trial | {' | '.join(names)} | changed |", f"|---|{'---|' * len(names)}---|"]
    for point in points:
        values = [objective_text(name, point["objectives"].get(name)) for name in names]
        lines.append(f"| {' | '.join([str(point['trial']), *values, changes_phrase(point.get('overrides') or {})])} |")
    return lines


def _source(study: StudyRecord) -> dict[str, str]:
    return {"mlflow.source.name": command_text(study.command), "mlflow.source.type": "LOCAL"}


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key)[:MAX_KEY_CHARACTERS]


def _finite(numbers: dict[str, Any]) -> dict[str, float]:
    return {_name(k): float(v) for k, v in numbers.items() if isinstance(v, int | float) and math.isfinite(v)}
