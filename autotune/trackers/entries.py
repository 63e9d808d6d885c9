"""Converts a study and its trials to MLflow tags, params and notes, as plain values. Does not import MLflow."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable

from autotune.explained import accuracy_text, finding_lines, why_lines
from autotune.knobs.base import earlier_text, value_text
from autotune.masking import without_credentials
from autotune.plain_text import shell_word, storable
from autotune.quantities import rate_with_interval_text, seconds_text
from autotune.records import Kind, Knobs, Outcome, StudyRecord, Summary, TrialRecord, objective_names
from autotune.trackers import views
from autotune.trackers.metrics import MAX_KEY_CHARACTERS, OBJECTIVES, mlflow_name
from autotune.wording import (
    aims_text,
    break_even_text,
    changes_phrase,
    communication_text,
    counts_text,
    effect_text,
    headline,
    machine_text,
    node_of,
    objective_text,
    parity_lines,
    search_cost_text,
    side_texts,
    warm_start_text,
)

# Limits of MLflow 3 (mlflow/utils/validation.py). Longer values are cut, since MLflow would reject the whole trial's batch.
MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 8000

# Outcome -> run status; FAILED if not listed. MLflow shows a tick for FINISHED (here: the trial may win), else a cross.
STATUSES = {Outcome.ok: "FINISHED", Outcome.raced: "KILLED", Outcome.interrupted: "KILLED"}
# Outcome -> the run's color in charts; FAILED_COLOR if not listed.
COLORS = {Outcome.ok: "#077A9D", Outcome.raced: "#A8B4BF", Outcome.unsteady: "#E0A030", Outcome.infeasible: "#8E5BBF"}
BASELINE_COLOR, BEST_COLOR, FAILED_COLOR = "#3F4A54", "#3C9B5F", "#C82D4C"
STUDY_COLOR = "#1F6FB2"  # otherwise MLflow chooses any, such as the red of a failure
STUDY_STATUSES = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

STUDY_TAG, TRIAL_TAG, DIGEST_TAG, LAYOUT_TAG = "autotune.study_id", "autotune.trial", "autotune.digest", "autotune.layout"
# Version of tags, params and metrics. A run of another version is replaced by a new run, because MLflow cannot remove a metric.
LAYOUT = "3"
SEVERAL_PROCESSES = ("parallel.", "nccl.")  # beginnings of the keys of knobs that do nothing in a single process
PARENT_TAG = "mlflow.parentRunId"
NO_VALUE = "-"  # what MLflow shows for a missing tag; written over an earlier value, because tags are never removed
FINDING = "finding."  # beginning of the tags of findings, which are numbered
MAY_GO = ("reason", "verdict", "explanations", "warm_start")  # tags that may become empty, for example if a study is resumed


def study_id(study: StudyRecord) -> str:
    """Returns the study's id: its name and start, to the millisecond, so that two studies of the same name differ.

    A folder that was renamed may have quotes in its name. Double quotes become single quotes, because `search` needs a kind of
    quote that is not in the id.
    """
    name = storable(study.name).replace('"', "'")
    return f"{name}@{study.started_at:.3f}"


def search(study: StudyRecord) -> str:
    """Returns the MLflow query for a study's runs. Queries have no escapes, so an id with single quotes gets double quotes."""
    quote = '"' if "'" in study_id(study) else "'"
    return f"tags.`{STUDY_TAG}` = {quote}{study_id(study)}{quote}"


def trial_status(trial: TrialRecord) -> str:
    """Returns a trial's MLflow run status: FINISHED if it is ok, KILLED if it was stopped, FAILED otherwise."""
    return STATUSES.get(trial.outcome, "FAILED")


def trial_name(trial: TrialRecord) -> str:
    """Returns a trial's run name: "0007 bf16 batch 64", "0000 baseline", "0031 final 2 of 0007", "0040 attribution 1: ..."."""
    if trial.kind is Kind.baseline:
        return f"{trial.number:04d} baseline"
    turn = "" if trial.round is None else f" {trial.round}"
    if trial.kind is Kind.final:
        return f"{trial.number:04d} final{turn}{'' if trial.repeats is None else f' of {trial.repeats:04d}'}"
    if trial.kind is Kind.attribution:
        return f"{trial.number:04d} attribution{turn}: {trial.why}"[:MAX_KEY_CHARACTERS]
    if trial.kind is Kind.parity:
        return _run_name(trial, f"losses of {changes_phrase(trial.changed, none='the baseline')}")
    if trial.kind in (Kind.explain, Kind.check):
        return _run_name(trial, f"{trial.kind}: {trial.why}")
    return _run_name(trial, changes_phrase(trial.changed))


def _run_name(trial: TrialRecord, words: str) -> str:
    return f"{trial.number:04d} {words}".replace(" · ", " ")[:MAX_KEY_CHARACTERS]


def trial_tags(
    trial: TrialRecord, study: StudyRecord, mark: str, *, ratio: float | None = None, is_best: bool = False
) -> dict[str, str]:
    """Returns a trial's tags, without the parent's run id.

    The tags make MLflow's table list the best trial first. The best is listed even if it is an ablation trial, because no other
    trial in the table has its settings.

    Args:
        trial: the trial.
        study: its study.
        mark: distinguishes the trial's run from the run of an earlier attempt.
        ratio: the trial's ratio to the baseline; None if it has none.
        is_best: whether the study has ended with this trial as its best.
    """
    tags = {
        STUDY_TAG: study_id(study),
        TRIAL_TAG: mark,
        "mlflow.runColor": _color(trial, is_best=is_best),
        views.ORDER: _order(_place(trial.outcome), math.inf if is_best else ratio),
        views.BEST: "yes" if is_best else NO_VALUE,
        "study": study.name,
        "trial": str(trial.number),
        "kind": trial.kind.value,
        "outcome": trial.outcome.value,
        "reason": trial.reason,
        "tier": trial.tier.value,
        "start": trial.start,
        "why": trial.why,
        "slot": trial.slot,
        "host": trial.host or str(node_of(trial).get("host") or ""),
        "neighbours": str(trial.neighbours or ""),
        "changed": changes_phrase(trial.changed),
        "violations": "; ".join(f"{key} by {beyond:.1%}" for key, beyond in trial.violations.items()),
        "repeats": "" if trial.repeats is None else str(trial.repeats),
        "repeat": "no" if is_best or trial.kind in (Kind.baseline, Kind.search) else "yes",
        "mlflow.note.content": trial_note(trial),
        **_of_study(study),
    }
    return _stored(tags)


def best_number(summary: Summary) -> int | None:
    """Returns the number of the best trial; None if there is none, or while the study runs and the best may still change."""
    is_over = summary.get("status", "running") != "running"
    return (summary.get("best") or {}).get("trial") if is_over else None


def study_tags(study: StudyRecord, summary: Summary, present: Iterable[str] = ()) -> dict[str, str]:
    """Returns the tags of the study's own run. A tag in `present` that the study no longer has is set to NO_VALUE."""
    speedup, best = summary.get("speedup") or {}, best_number(summary)
    tags = {
        STUDY_TAG: study_id(study),
        "study": study.name,
        "kind": "study",
        "mlflow.runColor": STUDY_COLOR,
        views.ORDER: _order(0, speedup.get("ratio")),
        "repeat": "no",
        "status": str(summary.get("status", "running")),
        "outcome": headline(summary),
        "reason": "; ".join(filter(None, [summary.get("reason"), counts_text(summary.get("counts") or {})])),
        views.BEST: NO_VALUE if best is None else f"trial {best}" if best else "the baseline",
        "verdict": str((summary.get("verification") or speedup).get("verdict") or ""),
        "objective": aims_text(study.objective, study.terms),
        "warm_start": warm_start_text(study.warm_start),
        **{f"{FINDING}{number}": line for number, line in enumerate(finding_lines(summary), 1)},
        "explanations": accuracy_text(summary.get("explanation") or {}),
        "mlflow.note.content": study_note(study, summary),
        **_of_study(study),
    }
    return {key: NO_VALUE for key in present if key in MAY_GO or key.startswith(FINDING)} | _stored(tags)


def _stored(tags: dict[str, str]) -> dict[str, str]:
    return {key: storable(without_credentials(value))[:MAX_TAG_CHARACTERS] for key, value in tags.items() if value}


def params(knobs: Knobs, *, is_distributed: bool = True) -> dict[str, str]:
    """Returns a full configuration as MLflow params, values as in YAML; SEVERAL_PROCESSES only if `is_distributed`."""
    left_out = () if is_distributed else SEVERAL_PROCESSES
    wanted = {key: value for key, value in sorted(knobs.items()) if not key.startswith(left_out)}
    return {mlflow_name(key): storable(value_text(value))[:MAX_PARAM_CHARACTERS] for key, value in wanted.items()}


def trial_note(trial: TrialRecord) -> str:
    """Returns a trial's description in Markdown."""
    lines = [f"**{trial.outcome.value}** {trial.reason}".strip(), ""]
    if trial.value is not None:
        lines += [rate_with_interval_text(trial.value, trial.ci, trial.unit), ""]
    others = {name: value for name, value in trial.objectives.items() if name in OBJECTIVES}
    lines += [f"- {name}: {objective_text(name, value, trial.unit)}" for name, value in others.items()]
    if trial.ranks:
        lines += [f"{trial.ranks['world_size']} ranks; {communication_text(trial.ranks)}", ""]
    if trial.why:
        lines += [f"Why tried: {trial.why}", ""]
    lines += [f"- `{key}` = `{value_text(value)}`" for key, value in sorted(trial.changed.items())]
    return "\n".join(lines).strip()


def study_note(study: StudyRecord, summary: Summary) -> str:
    """Returns the study's description in Markdown: verdict, numbers, changes and the next commands."""
    lines = [f"### {headline(summary)}", "", "| | trial | measured | 95 % interval |", "|---|---|---|---|"]
    for name in ("baseline", "best"):
        side = summary.get(name) or {}
        if name == "best" and side.get("trial") == 0:
            lines.append("| best | 0 | the baseline | |")
        elif side:
            cells = (name, side.get("trial"), *side_texts(summary, side))
            lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    overrides = (summary.get("best") or {}).get("overrides") or {}
    before = (summary.get("baseline") or {}).get("knobs") or {}
    effects = {entry["knob"]: entry for entry in summary.get("attribution") or []}
    lines.append("")
    for key in [*effects, *sorted(set(overrides) - set(effects))]:
        effect = effect_text(effects.get(key) or {})
        change = f"`{key}`: {earlier_text(before.get(key))} → **{value_text(overrides.get(key))}**"
        lines.append(f"- {change}{f', {effect}' if effect else ''}")
    if dropped := (summary.get("minimality") or {}).get("dropped"):
        named = (f"`{e['knob']}` = {value_text(e['to'])}, {effect_text(e)}".rstrip(", ") for e in dropped)
        lines += ["", f"No clear effect, so left as it was: {'; '.join(named)}."]
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
    lines += [f"Program: `{shlex.join(study.command)}`", "", f"Machine: {machine_text(study.machine)}", ""]
    commands = [f"`autotune show {shell_word(study.name)}`"]
    if overrides and not (summary.get("verification") or summary.get("recording")):
        commands.append(f"`autotune export {shell_word(study.name)} -o best.yaml`")
    lines.append(" · ".join(commands))
    return "\n".join(lines)


def _front_lines(summary: Summary) -> list[str]:
    """Returns the Pareto front as a Markdown table; [] with a single objective."""
    if not (points := summary.get("front")):
        return []
    names, unit = objective_names(summary["objective"]), str(summary.get("unit") or "samples")
    lines = ["", "Pareto front", "", f"| trial | {' | '.join(names)} | changed |", f"|---|{'---|' * len(names)}---|"]
    for point in points:
        values = [objective_text(name, point["objectives"].get(name), unit) for name in names]
        lines.append(f"| {' | '.join([str(point['trial']), *values, changes_phrase(point.get('overrides') or {})])} |")
    return lines


def _place(outcome: Outcome) -> int:
    """Returns a trial's place in tables: 1 if it may win, 2 if its rate does not count, 3 if it failed, 4 if raced."""
    if outcome is Outcome.raced:
        return 4
    return 1 if outcome.may_win else 2 if outcome.has_value else 3


def _order(place: int, ratio: float | None) -> str:
    """Returns a text that sorts runs by `_place`, and runs with the same place by ratio, the largest first."""
    return f"{place} {1 / ratio:010.5f}" if ratio else f"{place} 9999"


def _color(trial: TrialRecord, *, is_best: bool) -> str:
    if trial.kind is Kind.baseline and trial.outcome.has_value:
        return BASELINE_COLOR
    return BEST_COLOR if is_best else COLORS.get(trial.outcome, FAILED_COLOR)


def _of_study(study: StudyRecord) -> dict[str, str]:
    return {
        LAYOUT_TAG: LAYOUT,
        "program": views.program(study),
        "machine": machine_text(study.machine),
        "fingerprint": study.fingerprint,
        "mlflow.source.name": shlex.join(study.command),
        "mlflow.source.type": "LOCAL",
    }
