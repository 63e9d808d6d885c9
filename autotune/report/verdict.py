"""Writes a study's verdict as lines without layout: gain, cost, next commands, and what may have affected the numbers."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

from autotune.export.claims import SPACE, is_compared, speedup_of
from autotune.knobs.catalogue import CATALOGUE
from autotune.masking import is_masked
from autotune.plain_text import one_line, shell_word
from autotune.quantities import bytes_text, number_text, ratio_interval_text, ratio_text
from autotune.records import THROUGHPUT, Summary, Tier, objective_names
from autotune.report import verification_rows
from autotune.run_dir import StudyFolder, where
from autotune.studies import call
from autotune.trackers.store import NONE, study_uri
from autotune.wording import break_even_text, changes_phrase, listed, objective_text

MAX_FAILED, MAX_REASON = 3, 120  # maximum number of failed configurations in a line, and of characters of each reason
MAX_FILES = 5  # maximum number of file names in a line
MAX_COMMAND = 200  # characters; a longer command is replaced by COMMAND in the lines to copy
WHEN = {"baseline": "before the search", "search": "in the search", "attribution": "in the attribution"}
ASKED = re.compile(r"give study\.budget\.minutes=(\d+) at least")  # from the reason if no trial fitted into the budget
SETTLED = "The program already runs about as well as it can with these knobs."
NO_CHOICE = (
    "There was nothing to compare: nothing in the search space can be changed here (`autotune inspect` says why). Start a new "
    "study with other values, KEY=choice(A,B), another search_space or more tiers"
)


def has_winner(summary: Summary) -> bool:
    """Whether there is a configuration to export: a best trial that changes at least one knob."""
    return bool((summary.get("best") or {}).get("overrides"))


def is_undecided(summary: Summary) -> bool:
    """Whether the baseline was kept because the measurements of a complete study could not tell it from the best."""
    return summary.get("status") == "complete" and verdict_of(summary) == "ambiguous" and not has_winner(summary)


def has_no_choice(summary: Summary) -> bool:
    """Whether a complete study had nothing to search: no knob of its search space could be changed."""
    identity = summary.get("identity")  # names the searched knobs as soon as the baseline is measured
    is_search = summary.get("status") == "complete" and not (summary.get("verification") or summary.get("recording"))
    is_empty = isinstance(identity, dict) and bool(identity) and not any(name.startswith(SPACE) for name in identity)
    return is_search and is_empty and not is_compared(summary)


def next_commands(summary: Summary, path: Path) -> list[str]:
    """Returns the commands to type next, ready to copy."""
    study = call(StudyFolder(path))
    commands = [f"autotune resume {study}"] if summary.get("status") == "interrupted" else []
    is_search = not (summary.get("verification") or summary.get("recording"))
    if is_search and is_undecided(summary) and (more := more_time(summary)):
        commands.append(f"autotune resume {study}{more}")
    if has_winner(summary) and is_search:
        commands.append(f"autotune export {study} -o best.yaml")
        if program := summary.get("command") if not summary.get("is_recipe") else None:
            typed = shlex.join(program)
            commands.append(f"autotune apply {study} -- {typed if len(typed) <= MAX_COMMAND else 'COMMAND'}")
        elif summary.get("is_recipe"):
            commands.append(f"autotune apply {study}")
    return [*commands, f"autotune report {study} --open", f"autotune show {study}", *_ui_command(path)]


def _ui_command(path: Path) -> list[str]:
    """Returns the command that shows a study in MLflow; [] if it is not tracked, or if its address is not known."""
    uri = study_uri(StudyFolder(path))
    if uri and (uri == NONE or is_masked(uri) or "${" in uri):  # credentials and variables are not stored with a study
        return []
    return [f"autotune ui{where(path.parent)}{f' --uri {shell_word(uri)}' if uri else ''}"]


def more_time(summary: Summary) -> str:
    """Returns the overrides that double a study's budget, or give more minutes if the search asked for more.

    For example " study.budget.minutes=16", " study.budget.trials=20"; "" if the study has no budget or nothing to search.
    """
    if has_no_choice(summary):
        return ""
    asked = ASKED.search(str(summary.get("reason") or ""))
    least = int(asked[1]) if asked else 0
    words = f" study.budget.minutes={max(least, math.ceil(summary['budget_s'] / 30))}" if summary.get("budget_s") else ""
    return words + (f" study.budget.trials={2 * summary['budget_trials']}" if summary.get("budget_trials") else "")


def objective_lines(summary: Summary) -> list[str]:
    """Returns notes on the ratio.

    They name a search space without a choice, a baseline that violates a constraint, what looked faster and failed, the ratio
    without training changes, and after how much training a slower start pays off.
    """
    baseline, empty = summary.get("baseline") or {}, NO_CHOICE if has_no_choice(summary) else ""
    barred = f"The unchanged program cannot be chosen: {baseline.get('reason')}" if baseline.get("is_barred") else ""
    said = (empty, barred, failed_text(summary), same_training_text(summary), break_even_text(summary))
    return [line for line in said if line]


def failed_text(summary: Summary) -> str:
    """Returns which configurations looked faster than the baseline and then failed, and how.

    Returns "" if there are none, or if the best is faster than the baseline.
    """
    failed = summary.get("failed_finalists") or []
    named = [
        f"trial {entry['trial']}, {ratio_text(entry['ratio'])} ({changes_phrase(entry['overrides'])}): {entry['outcome']}"
        + (f", {one_line(entry['reason'], MAX_REASON)}" if entry.get("reason") else "")
        for entry in failed[:MAX_FAILED]
    ]
    more = [f"{len(failed) - MAX_FAILED} more"] if len(failed) > MAX_FAILED else []
    return f"Faster in the search, but failed when checked again: {'; '.join([*named, *more])}" if named else ""


def same_training_text(summary: Summary) -> str:
    """Returns the speed-up without changes of the training tier, as text; "" if the best configuration has no such changes."""
    best, tiers = summary.get("best") or {}, summary.get("best_by_tier") or {}
    lower = tiers.get(Tier.numerics.value) or {}
    if (
        not lower.get("overrides")
        or lower.get("trial") == best.get("trial")
        or (summary.get("speedup") or {}).get("ratio") is None
    ):
        return ""
    ratio, interval = tier_ratio(summary, lower)
    overrides = best.get("overrides") or {}
    changed = {key: overrides[key] for key in overrides if key in CATALOGUE and CATALOGUE[key].tier is Tier.training}
    if not changed or ratio is None:
        return ""
    once = "" if interval else " (measured once)"
    return f"{f'{ratio_text(ratio)} {interval}'.strip()}{once} without changing the training: no {changes_phrase(changed)}"


def verdict_of(summary: Summary) -> str:
    """Returns the verdict as one word or phrase: "faster", "same", "ambiguous", "holds"; "" before there is one."""
    return str((summary.get("verification") or summary.get("speedup") or {}).get("verdict") or "")


def reason_of(summary: Summary) -> str:
    """Returns the reason for the verdict; "" if there is none, or if the headline contains it."""
    if verification := summary.get("verification"):
        return verification_rows.explanation(verification)
    speedup = summary.get("speedup") or {}
    # Without a ratio, the headline contains the reason.
    return "" if speedup.get("ratio") is None else str(speedup.get("reason") or "")


def advice_of(summary: Summary) -> str:
    """Returns the reason for the verdict. If there is none, returns SETTLED if nothing faster was found, else ""."""
    has_ratio = (summary.get("speedup") or {}).get("ratio") is not None
    is_settled = has_ratio and verdict_of(summary) == "same" and not failed_text(summary)  # what failed might be faster
    return reason_of(summary) or (SETTLED if is_settled else "")


def no_interval_text(side: dict[str, Any]) -> str:
    """Returns "no interval: REASON"; for a rate of the finals "no interval", since `origin_text` gives the reason there."""
    is_said = side.get("measured_in") == "finals" or not side.get("why_no_ci")
    return "no interval" if is_said else f"no interval: {side['why_no_ci']}"


def origin_text(summary: Summary, side: dict[str, Any]) -> str:
    """Returns what the rate of baseline or best is: "trial 1, mean of 3 rounds of the finals; 31.5 in the search"."""
    number = side.get("trial")
    if side.get("measured_in") != "finals":
        return f"trial {number}" + (", measured once" if side.get("measured_in") else "")
    trials: list[dict[str, Any]] = summary.get("trials") or []
    first: dict[str, Any] = next((trial for trial in trials if trial.get("number") == number), {})
    rate, when = number_text(first.get("value")), WHEN.get(str(first.get("kind")))
    rounds, num_unpaired = (summary.get("speedup") or {}).get("num_rounds"), side.get("num_unpaired")
    what = "one round" if rounds == 1 else f"mean of {rounds} rounds" if rounds else "mean"
    mean = f"trial {number}, {what} of the finals"
    if num_unpaired:
        mean = f"trial {number}, mean of {num_unpaired} measurements, {when or 'first'} and in the finals"
    return f"{mean}; {rate} {when}" if when and first.get("value") and rate != number_text(side.get("value")) else mean


def tier_ratio(summary: Summary, side: dict[str, Any], tier: Tier | None = None) -> tuple[float | None, str]:
    """Returns the ratio of a tier's best to the baseline, and the ratio's interval as text ("" if there is none)."""
    entry = speedup_of(summary, side, tier) or {}
    return entry.get("ratio"), ratio_interval_text(entry.get("ci"))


def front_lines(summary: Summary) -> list[str]:
    """Returns the Pareto front as plain lines; [] with a single objective."""
    names, unit = objective_names(summary.get("objective") or THROUGHPUT), str(summary.get("unit") or "samples")
    said = []
    for point in summary.get("front") or []:
        values = ", ".join(objective_text(name, point["objectives"].get(name), unit) for name in names)
        said.append(
            f"trial {point['trial']}: {values}  {changes_phrase(point.get('overrides') or {})} ({point['measured_in']})"
        )
    return said


def noise_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns what affects the numbers, as (label, text): non-finite loss, other load, limited cores, drift, page cache."""
    said = [("not finite", str(why))] if (why := summary.get("not_finite")) else []
    if accepted := summary.get("disturbed_by"):
        since = f" from trial {accepted['since_trial']} on" if accepted["since_trial"] else ""
        text = f"{accepted['words']}{since}: rates are lower than on a quiet machine"
        if (summary.get("speedup") or {}).get("ci"):
            text += "; the finals measured the configurations side by side, so the ratio is still valid"
        said.append(("disturbed", text))
    labels = {"own_share": "shared", "drift": "drift", "page_cache": "disk"}
    return said + [(label, str(summary[key])) for key, label in labels.items() if summary.get(key)]


def file_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns what happened to the user's files during the trials, as (label, text)."""
    files = summary.get("files") or {}
    said = []
    if left := listed([f"{_sized(entry)}, trial {entry['trial']})" for entry in files.get("left") or []], MAX_FILES):
        said.append(("left", f"{left}: written by trials, not removed"))
    known = {entry["name"] for entry in files.get("left") or []}
    others = {entry["name"]: entry for entry in files.get("new") or [] if entry["name"] not in known}
    if new := listed([f"{_sized(entry)})" for entry in others.values()], MAX_FILES):
        said.append(("new", f"{new}: written during the study, by a trial or by another program"))
    for entry in files.get("kept") or []:
        said.append(("kept", f"{entry['path']}: {_trials(entry)} would have changed it; it is unchanged"))
    for entry in files.get("continued") or []:
        why = "which an earlier trial had saved: their losses belong to a later part of the training. Let each run start anew"
        said.append(("continued", f"{entry['path']}: {_trials(entry)} continued from this checkpoint, {why}"))
    for entry in files.get("aside") or []:
        what = f"changed or removed during trial {entry['trial']}; its previous content is in {entry['copy']}"
        said.append(("overwritten", f"{entry['path']}: {what}"))
    if open_ := [f"{entry['path']} ({entry['why']})" for entry in files.get("unguarded") or []]:
        said.append(("not guarded", f"{listed(open_, MAX_FILES)}: a trial that saves there overwrites it"))
    return said


def _trials(entry: dict[str, Any]) -> str:
    numbers = entry["trials"]
    return f"trial{'s' if len(numbers) > 1 else ''} {listed(list(map(str, numbers)), MAX_FILES)}"


def _sized(entry: dict[str, Any]) -> str:
    return f"{entry['name']} ({bytes_text(entry['bytes'])}"
