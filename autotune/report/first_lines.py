"""Writes the three lines that a report begins with: what was gained, what it costs, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.explained import why_lines
from autotune.export.claims import is_compared
from autotune.quantities import DASH, bytes_text
from autotune.report.study import Study
from autotune.report.verdict import (
    advice_of,
    has_no_choice,
    has_winner,
    is_undecided,
    more_time,
    next_commands,
    objective_lines,
    verdict_of,
)
from autotune.wording import changes_phrase, headline, parity_lines, search_cost_text, side_texts

OWN = ("autotune report", "autotune show", "autotune ui")  # commands that only show what the report already shows
# Verdict on a verified file -> what to do next.
VERIFIED = {
    "holds": "keep using the file",
    "no longer holds": "search again: autotune run finds what is fastest here and now",
    "ambiguous": "verify the file again with more rounds: the measurements did not decide",
}


@dataclass(frozen=True, kw_only=True)
class FirstLine:
    """One of the three lines.

    Attributes:
        label: "Gained", "Cost" or "Next".
        lead: the line itself.
        more: sentences below it.
        commands: commands to copy.
    """

    label: str
    lead: str
    more: Sequence[str] = ()
    commands: Sequence[str] = ()


def first_lines(study: Study) -> list[FirstLine]:
    """Returns the three lines of a study."""
    return [_gained(study), _cost(study), _next(study)]


def _gained(study: Study) -> FirstLine:
    summary = study.summary
    speedup = summary.get("speedup") or {}
    more = [_rates(study)]
    if speedup.get("ci") and speedup.get("num_rounds"):
        more.append(f"The brackets are the 95 % interval, from {speedup['num_rounds']} pairs of fresh processes.")
    more.append(advice_of(summary))
    more += objective_lines(summary)
    return FirstLine(label="Gained", lead=headline(summary), more=_sentences(more))


def _rates(study: Study) -> str:
    """Returns both rates: "13.6 samples/s unchanged, 28.5 samples/s with the best"."""
    summary = study.summary
    baseline, best = summary.get("baseline") or {}, summary.get("best") or {}
    if baseline.get("value") is None:
        return ""
    today = f"{side_texts(summary, baseline)[0]} unchanged"
    return f"{today}, {side_texts(summary, best)[0]} with the best" if best.get("overrides") else today


def _cost(study: Study) -> FirstLine:
    summary = study.summary
    changed = (summary.get("best") or {}).get("overrides") or {}
    num = len(changed)
    lead = f"{num} setting{'' if num == 1 else 's'}: {changes_phrase(changed)}" if changed else "nothing changes"
    more = [f"{name}: {text}" for name, text in parity_lines(summary)] if changed else []
    peaks = [study.trial(number).get("peak_memory_bytes") for number in study.sides.values()]
    if changed and len(peaks) == 2 and any(peaks):
        texts = [bytes_text(peak) if peak else DASH for peak in peaks]
        more.append(f"Memory: {' → '.join(texts)} at the peak, from one process each")
    if cost := search_cost_text(summary):
        more.append(f"The search: {cost}")
    return FirstLine(label="Cost", lead=lead, more=_sentences(more))


def _next(study: Study) -> FirstLine:
    summary = study.summary
    commands = [each for each in next_commands(summary, study.folder.path) if not each.startswith(OWN)]
    told = why_lines(summary, study.name)
    if summary.get("status") == "interrupted":
        lead = "continue the study, which ended early"
    elif summary.get("status") == "running":
        lead, commands = "wait: the study is still running, so all of this may change", []
    elif summary.get("verification") and verdict_of(summary) in VERIFIED:
        lead = VERIFIED[verdict_of(summary)]
    elif summary.get("recording"):
        lead = "compare searches on the recorded table: autotune replay"
    elif has_winner(summary):
        lead = "use the best settings in the real run"
    elif summary.get("status") == "failed":
        lead = "make the program train, then start again"
    elif has_no_choice(summary):
        lead = "start a study with other values to try: there was nothing to compare"
    elif not is_compared(summary) and more_time(summary):
        lead = "give the study more time: nothing was compared yet"
        commands = [f"autotune resume {study.name}{more_time(summary)}"]
    elif is_undecided(summary) and more_time(summary):
        lead = "give the study more time, or keep the program as it is: the measurements did not decide"
    else:
        lead = "keep the program as it is"
    if told and (summary.get("explanation") or {}).get("explained"):
        more = [f"Still costs time: {told[0]}"]
    else:
        can_explain = study.trial(0).get("value") and summary.get("status") != "running"
        more = [f"Where the rest of the time goes: `autotune explain {study.name}`"] if can_explain else []
    return FirstLine(label="Next", lead=lead, more=_sentences(more), commands=commands[:2])


def _sentences(lines: Sequence[str]) -> list[str]:
    return [f"{line[:1].upper()}{line[1:].rstrip('.')}." for line in lines if line]
