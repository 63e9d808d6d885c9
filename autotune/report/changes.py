"""Describes the changes of the best configuration and their effects, in lines of plain text."""

from __future__ import annotations

from typing import Any

from autotune.knobs.base import earlier_text, value_text
from autotune.quantities import ratio_text, ratio_with_interval_text
from autotune.records import Kind, KnobValue, Outcome, Summary
from autotune.wording import changes_phrase, effect_number, effect_text, knob_phrase, listed, score_of

MAX_TRIED = 4  # maximum number of values in a line


def entries_of(summary: Summary) -> list[dict[str, Any]]:
    """Returns the best configuration's changes, in the order of the summary's attribution.

    Changes that the attribution does not contain follow, without effects.
    """
    overrides = (summary.get("best") or {}).get("overrides") or {}
    before = (summary.get("baseline") or {}).get("knobs") or {}
    known = [entry for entry in summary.get("attribution") or [] if entry.get("knob") in overrides]
    rest = sorted(set(overrides) - {entry["knob"] for entry in known})
    return known + [{"knob": key, "from": before.get(key), "to": overrides[key]} for key in rest]


def basis_lines(summary: Summary) -> list[str]:
    """Returns notes on the numbers: which are estimates, and how to measure the missing ones."""
    entries = summary.get("attribution") or []
    lines = []
    if any(entry.get("basis") == "estimated" for entry in entries):
        lines.append("estimated: from all trials of the study, not measured side by side")
    return [*lines, *([missing] if (missing := missing_text(summary)) else [])]


def missing_text(summary: Summary) -> str:
    """Returns a line on changes whose effects are unknown, and the budget needed to measure them; "" if all are known."""
    entries = [entry for entry in summary.get("attribution") or [] if entry.get("verdict") == "not measured"]
    if not entries:
        return ""
    what, need = "its effect" if len(entries) == 1 else "their effects", summary.get("effects_need")
    more = f"{what} can be measured with more time or trials"
    if need:
        more = (
            f"{what} can be measured in about {need['more_minutes']:.0f} more minutes: "
            f"study.budget.minutes={need['minutes']:.0f}"
        )
    words = f"only tried together with other changes: {changes_phrase({e['knob']: e['to'] for e in entries})}"
    if joint := summary.get("effects_together"):
        words += f", together {ratio_with_interval_text(joint['ratio'], joint['ci'])} (estimated)"
    return f"{words}; {more}"


def dropped_lines(summary: Summary) -> list[str]:
    """Returns one or two lines on the winner's changes that had no effect and were reverted; [] if there are none."""
    found = summary.get("minimality") or {}
    dropped = found.get("dropped") or []
    if not dropped:
        return []
    words = ", ".join(
        f"{knob_phrase(e['knob'], e['to'])} {effect_number(e)}{' estimated' * (e.get('basis') == 'estimated')}".strip()
        for e in dropped
    )
    whole = ratio_with_interval_text(found.get("ratio"), found.get("ci"))
    lines = [f"no clear effect, so reverted: {words}"]
    return [*lines, f"all of them together: {whole}"] if len(dropped) > 1 and found.get("ratio") else lines


def tried_text(summary: Summary) -> str:
    """Returns a line on values that the search tried and the best does not have, the fastest first; "" if there are none.

    For example: "batch 64 0.98x (each the fastest trial with that value, relative to the best configuration's first)".
    """
    if not summary.get("speedup") or summary.get("verification") or summary.get("recording"):
        return ""
    ratios = _tried(summary)
    ranked = sorted(ratios.items(), key=lambda pair: -pair[1] if isinstance(pair[1], float) else 0.0)
    words = [f"{knob_phrase(*pair)} {found if isinstance(found, str) else ratio_text(found)}" for pair, found in ranked]
    whose = "best configuration" if (summary.get("best") or {}).get("overrides") else "baseline"
    how = f"each the fastest trial with that value, relative to the {whose}'s first"
    return f"{listed(words, MAX_TRIED)} ({how})" if words else ""


def _tried(summary: Summary) -> dict[tuple[str, KnobValue], float | str]:
    """Returns (knob, value) -> score of the fastest search trial with it, relative to the best configuration's first trial.

    If no trial with the value has a score, the outcome of the first such trial takes the place of the score: "timeout".
    """
    best, trials = summary.get("best") or {}, summary.get("trials") or []
    dropped = (summary.get("minimality") or {}).get("dropped") or []
    said = {*(best.get("overrides") or {}).items(), *((entry["knob"], entry["to"]) for entry in dropped)}
    speedup = summary.get("speedup") or {}
    if speedup.get("num_rounds") or speedup.get("ci"):  # the verdict already gives this ratio, measured in the finals
        said |= {*(speedup.get("overrides") or {}).items()}
    # Values are compared with the winner's trial of the search. If ineffective changes were reverted, `best` is a later trial.
    number = (summary.get("minimality") or {}).get("winner", best.get("trial"))
    first = next((trial for trial in trials if trial["number"] == number), best)
    whole, found = score_of(summary, first), dict[tuple[str, KnobValue], float | str]()
    for trial in trials:
        outcome, score = Outcome(str(trial["outcome"])), score_of(summary, trial)
        if str(trial.get("kind")) != Kind.search or outcome is Outcome.interrupted:
            continue
        is_comparable = outcome.has_value and outcome is not Outcome.infeasible
        now: float | str = score / whole if score and whole and is_comparable else str(outcome)
        for pair in (trial.get("changed") or {}).items():
            before = found.get(pair)
            if pair not in said and (before is None or (isinstance(now, float) and (isinstance(before, str) or now > before))):
                found[pair] = now
    return found


def change_lines(summary: Summary) -> list[str]:
    """Returns the changes as plain lines, one per change: "precision.amp: off -> bf16  1.62x [1.58, 1.66]"."""
    lines = []
    for entry in entries_of(summary):
        words = [f"{entry['knob']}: {earlier_text(entry.get('from'))} -> {value_text(entry.get('to'))}"]
        is_known = entry.get("ratio") or entry.get("verdict") not in (None, "not measured")
        lines.append("  ".join([*words, *([effect_text(entry)] if is_known else [])]))
    return lines
