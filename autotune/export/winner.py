"""What every export format says: the knobs, and where the claim comes from."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from autotune.errors import BadInput
from autotune.masking import is_masked
from autotune.records import Knobs, Summary, Tier
from autotune.wording import number_text, one_line

DIGITS = 5  # of a measured value; its interval is seldom narrower than the third
MAX_LINE = 160
PROGRAM = ("program.torch", "program.device_name", "program.executable")  # of a study's identity, beside the machine's


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A configuration ready to be written down.

    Attributes:
        knobs: what to set: the winner's changes and the user's pins.
        headline: comment lines: what this is, how much faster, where and when it was measured.
        provenance: the same as plain values.
    """

    knobs: Knobs
    headline: list[str]
    provenance: dict[str, Any]


def winner(summary: Summary, tier: Tier | None) -> Winner:
    """Returns the best configuration of a study, at a tier when one is given.

    Raises:
        BadInput: the study has no winner.
    """
    entry = summary["best"] if tier is None else summary["best_by_tier"].get(str(tier))
    if not entry:
        raise BadInput(
            f"STUDY: has no winner to export, got {summary['study']!r} ({summary['status']}). "
            "`autotune show` tells what became of its trials."
        )
    is_best = entry["trial"] == (summary["best"] or {}).get("trial")
    speedup = summary["speedup"] if is_best else _search_ratio(summary, entry)
    knobs = {**(summary.get("pinned") or {}), **entry["overrides"]}
    hidden = {key: knobs.pop(key) for key in list(knobs) if is_masked(knobs[key])}
    headline = _headline(summary, entry, speedup)
    headline += [f"{key}={value}: a secret, which is not written down: set it yourself." for key, value in hidden.items()]
    provenance = _provenance(summary, entry, speedup, tier)
    if hidden:
        provenance["secret"] = list(hidden)
    return Winner(knobs=knobs, headline=headline, provenance=provenance)


def describe_machine(machine: dict[str, Any]) -> str:
    """Returns the machine in a few words."""
    gpus = [str(gpu.get("name")) for gpu in machine.get("gpus") or []]
    parts = [*gpus, str(machine.get("cpu_model") or "unknown CPU"), f"{machine.get('num_cores', '?')} cores"]
    return ", ".join(parts)


def _search_ratio(summary: Summary, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the speedup of a configuration that was not the finals' choice: search value over search value."""
    trials = {trial["number"]: trial for trial in summary["trials"]}
    value, baseline = ((trials.get(number) or {}).get("value") for number in (entry["trial"], summary["baseline"]["trial"]))
    ratio = value / baseline if value and baseline else None
    verdict = "same" if not entry["overrides"] else "ambiguous"
    return {"ratio": ratio, "ci": None, "verdict": verdict, "reason": "from the search, not measured again in the finals"}


def _headline(summary: Summary, entry: dict[str, Any], speedup: dict[str, Any] | None) -> list[str]:
    lines = [f"autotune: the best configuration found for {summary['title']}"]
    if not entry["overrides"]:
        lines.append("Nothing measured was better than the program as it was run: there is nothing to change.")
    if speedup and speedup.get("ratio"):
        lines.append(_speed_line(speedup))
    lines.append(f"{_rate(summary['baseline'], summary['unit'])} -> {_rate(entry, summary['unit'])}")
    lines.append(f"Measured on {describe_machine(summary['machine'])}, {_day(summary['started_at'])}.")
    return [one_line(line, MAX_LINE) for line in lines]  # they become comments, which a line's end would end


def _speed_line(speedup: dict[str, Any]) -> str:
    interval = f", 95 % interval {speedup['ci'][0]:.3f} to {speedup['ci'][1]:.3f}" if speedup.get("ci") else ", no interval"
    reason = f" ({speedup['reason']})" if speedup.get("reason") else ""
    return f"{speedup['ratio']:.3f} x the baseline{interval}: {speedup['verdict']}{reason}"


def _rate(entry: dict[str, Any], unit: str) -> str:
    return f"{number_text(entry['value'], digits=4)} {unit}/s" if entry.get("value") else "unknown"


def _day(started_at: float) -> str:
    return datetime.datetime.fromtimestamp(started_at, tz=datetime.UTC).date().isoformat()


def _provenance(summary: Summary, entry: dict[str, Any], speedup: dict[str, Any] | None, tier: Tier | None) -> dict[str, Any]:
    return {
        "study": summary["study"],
        "title": summary["title"],
        "status": summary["status"],
        "date": _day(summary["started_at"]),
        "machine": describe_machine(summary["machine"]),
        "fingerprint": summary["fingerprint"],
        "objective": summary["objective"],
        "unit": summary["unit"],
        "tier": str(tier or "training"),
        "trial": entry["trial"],
        "baseline": _rounded({"value": summary["baseline"]["value"], "ci": summary["baseline"]["ci"]}),
        "best": _rounded({"value": entry["value"], "ci": entry["ci"]}),
        "speedup": _rounded(speedup),
        "versions": summary["versions"],
        **_again(summary),
    }


def _again(summary: Summary) -> dict[str, Any]:
    """Returns what it takes to measure the claim again: `autotune verify` reads it."""
    identity = summary.get("identity") or {}
    found: dict[str, Any] = {
        "identity": {name: value for name, value in identity.items() if name.startswith("machine.") or name in PROGRAM},
        "settings": summary.get("settings") or {},
        "pinned": sorted(summary.get("pinned") or {}),  # hold in the baseline too
    }
    if not summary.get("is_recipe"):
        found["program"] = {"command": summary.get("command") or [], "cwd": summary.get("cwd") or ""}
    return found


def _rounded(measured: Any) -> Any:
    """Returns measured values with as many digits as they are worth."""
    if isinstance(measured, dict):
        return {key: _rounded(value) for key, value in measured.items()}
    if isinstance(measured, list | tuple):
        return [_rounded(value) for value in measured]
    return float(f"{measured:.{DIGITS}g}") if isinstance(measured, float) else measured
