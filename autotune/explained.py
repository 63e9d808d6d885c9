"""Formats an explanation as text for the terminal, files and the tracker, from the document in a study's summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.harness.explain.documents import PASSES
from autotune.knobs.base import value_text
from autotune.plain_text import shell_word

LARGE_FRAC = 0.1  # if each finding's predicted gain is below this, `limit_lines` begins with "nothing in particular"
LEAST_SHARE = 5.0  # percent of a step; phases with a smaller share are not named
MAX_SAID = 3  # maximum number of findings that a verdict names
# Values of `Check.how` (see `explain/checks.py`) for checks that try no setting: they skip the cause (WITHOUT), or run a
# program that the user has corrected (FIXED). Summaries contain these values, so they must not change.
WITHOUT, FIXED = "pairs without it", "fixed program"
ROLES = {"best": "the best", "baseline": "the baseline"}


def signed(gain: float) -> str:
    """Returns a gain: "+38 %"."""
    return f"{100 * gain:+.0f} %"


def gain_text(gain: Mapping[str, Any]) -> str:
    """Returns a gain with its kind and bounds: "predicted +38 % [30, 47]", "at least +22 %, about +25 %"."""
    kind = str(gain["kind"])
    if kind == "floor":
        return f"at least {signed(gain['low'])}, about {signed(gain['mid'])}"
    if kind == "bound":
        return f"at most {signed(gain['high'])}, about {signed(gain['mid'])}"
    return f"{kind} {signed(gain['mid'])} [{100 * gain['low']:.0f}, {100 * gain['high']:.0f}]"


def check_text(check: Mapping[str, Any]) -> str:
    """Returns a gain as it was predicted and as it was measured: "predicted +38 % [30, 47], measured +41 % [36, 46]"."""
    return f"{gain_text({**check['predicted'], 'kind': 'predicted'})}, {gain_text(check['measured'])}"


def check_name(check: Mapping[str, Any]) -> str:
    """Returns what a check tried instead of the finding's remedy: "without it" (the cause) or "with the corrected program".

    Returns "" if the check tried the remedy.
    """
    return {WITHOUT: "without it", FIXED: "with the corrected program"}.get(str(check.get("how")), "")


def size_text(finding: Mapping[str, Any]) -> str:
    """Returns the gain from removing a finding's cause: the predicted gain and, if removing it was tried, the measured gain.

    "predicted +38 % [30, 47], measured +41 % [36, 46]", "predicted +34 % [16, 46]; without it, measured +41 % [36, 46]",
    "at least +17 %, about +24 %; with the corrected program, measured +12 % [8, 16]".
    """
    check = finding.get("check")
    if check and (what := check_name(check)):
        return f"{gain_text(finding['gain'])}; {what}, {gain_text(check['measured'])}"
    return check_text(check) if check else gain_text(finding["gain"])


def remedy_text(finding: Mapping[str, Any]) -> str:
    """Returns what to do about a finding: "loader.num_workers=2", or what to change in the program."""
    remedy = finding["remedy"]
    return f"{remedy['knob']}={value_text(remedy['value'])}" if remedy.get("knob") else str(remedy.get("code") or "")


def advice_text(finding: Mapping[str, Any], unit: str) -> str:
    """Returns a finding as a sentence: its cause and place, what to do, and what that gains.

    "too few workers (DataLoader, num_workers=0): set loader.num_workers=2 (predicted +6 % [0, 14] samples/s)".
    """
    do = f"set {remedy_text(finding)}" if finding["remedy"].get("knob") else remedy_text(finding)
    return f"{finding['cause']} ({finding['where']}): {do} ({size_text(finding)} {unit}/s)"


def accuracy_text(document: Mapping[str, Any]) -> str:
    """Returns how many predicted gains were confirmed so far: "3 of 4 predicted gains held"; "" if no remedy was tried."""
    accuracy = document.get("accuracy") or {}
    if not accuracy.get("checked"):
        return ""
    return f"{accuracy['held']} of {accuracy['checked']} predicted gain{'s' * (accuracy['checked'] != 1)} held"


def entry_of(document: Mapping[str, Any] | None, trial: int | None) -> dict[str, Any] | None:
    """Returns the entry of a trial in a study's explanation; None if the trial was not explained."""
    return next((entry for entry in (document or {}).get("explained") or [] if entry["trial"] == trial), None)


def best_entry(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the entry of a study's best trial; None if that trial was not explained."""
    return entry_of(summary.get("explanation"), (summary.get("best") or {}).get("trial"))


def other_checks(document: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each check of these trials that no finding contains.

    For example, if a setting gained nothing when a check tried it, no finding recommends the setting any longer.
    """
    trials = [entry["trial"] for entry in entries]
    shown = {check_key(one["check"]) for entry in document["explained"] for one in entry["findings"] if one.get("check")}
    others = [one for one in document.get("checks") or [] if one["trial"] in trials and check_key(one) not in shown]
    return [f"{one['cause']}, {one['remedy']}: {check_text(one)}" for one in others]


def check_key(check: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values that together identify a check within a study."""
    return check["trial"], check["cause"], check["where"], check["remedy"]


def finding_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the largest findings on the best trial, a line each; [] if that trial was not explained."""
    entry, unit = best_entry(summary) or {}, str(summary.get("unit") or "samples")
    return [advice_text(finding, unit) for finding in (entry.get("findings") or [])[:MAX_SAID]]


def nothing_text(entry: Mapping[str, Any], command: str) -> str:
    """Returns a line for an explained trial without findings: "no known cause costs 3 % or more".

    If passes are missing, the line names the command that runs them. Returns "" if the trial has findings, or if no pass timed
    its steps.
    """
    if entry["findings"] or not entry["phases_s"]:  # without the time of a step, there are never findings
        return ""
    text, missing = "no known cause costs 3 % or more", _missing_passes(entry)
    if not missing:
        return text
    return f"{text} in what was recorded so far; `{command}` records more: {' and '.join(missing)}"


def _missing_passes(entry: Mapping[str, Any]) -> list[str]:
    """Returns the passes that did not run, or failed, for an explained trial."""
    return [name for name in PASSES if (entry["passes"].get(name) or {}).get("outcome") != "ok"]


def why_lines(summary: Mapping[str, Any], study: str = "") -> list[str]:
    """Returns what still costs time in the best trial, in lines for a verdict; [] if nothing is known.

    Args:
        summary: the study's summary.
        study: the study as it is typed on a command line, from `studies.call`; if "", the summary's study name is used.
    """
    entry = best_entry(summary)
    command = f"autotune explain {study or shell_word(str(summary.get('study') or ''))}"
    nothing = nothing_text(entry, command) if entry is not None else ""
    return [nothing] if nothing else finding_lines(summary)


def limit_lines(summary: Mapping[str, Any], study: str = "") -> list[str]:
    """Returns what limits the best trial: its findings, preceded by where its time goes if no finding is large.

    If the trial was not explained, its own rates say what limits it. The arguments are those of `why_lines`.
    """
    entry = best_entry(summary) or {}
    lines = why_lines(summary, study) or diagnosis_lines(summary)
    is_small = all(finding["gain"]["mid"] < LARGE_FRAC for finding in entry.get("findings") or [])
    return [phases_text(entry), *lines] if is_small and entry.get("phases_s") else lines


def phases_text(entry: Mapping[str, Any]) -> str:
    """Returns the shares of a step's phases, largest first: "nothing in particular: a step is 63 % backward, 29 % forward".

    Read after "limited by". The text begins with "nothing in particular so far" if passes are missing, since these might show a
    large cause.
    """
    phases_s = entry["phases_s"]
    whole = sum(phases_s.values())
    parts = sorted(((100 * seconds / whole, name) for name, seconds in phases_s.items() if whole), reverse=True)
    shares = ", ".join(f"{share:.0f} % {name}" for share, name in parts if share >= LEAST_SHARE)
    return f"nothing in particular{' so far' if _missing_passes(entry) else ''}: a step is {shares}"


def diagnosis_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns what the best trial's rates say: "input-bound: Speed up the input pipeline: ... (trial 3: 16.8 samples/s)"."""
    found = summary.get("diagnosis") or []
    return [f"{one['finding']}: {str(one['advice']).rstrip('.')} ({one['evidence']})" for one in found]
