"""What every export format says: the knobs, and where the claim comes from."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from autotune.errors import BadInput
from autotune.masking import is_masked
from autotune.records import THROUGHPUT, Knobs, Summary, Tier
from autotune.wording import BETTER, gain_words, number_text, objective_of, one_line, score_of, side_texts

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
    headline = _headline(summary, entry, speedup, is_best=is_best)
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
    """Returns the speedup of a configuration that was not the finals' choice: measured again, else from the search."""
    if measured := entry.get("speedup"):
        return dict(measured)
    trials = {trial["number"]: trial for trial in summary["trials"]}
    value, baseline = (score_of(summary, trials.get(number) or {}) for number in (entry["trial"], summary["baseline"]["trial"]))
    ratio = value / baseline if value and baseline else None
    verdict = "same" if not entry["overrides"] else "ambiguous"
    return {
        "ratio": ratio,
        "ci": None,
        "verdict": verdict,
        "reason": "from the search: one measurement, picked as the best, which overstates",
    }


def _headline(summary: Summary, entry: dict[str, Any], speedup: dict[str, Any] | None, *, is_best: bool) -> list[str]:
    lines = [f"autotune: the best configuration found for {summary['title']}"]
    if not entry["overrides"]:
        lines.append("Nothing measured was better than the program as it was run: there is nothing to change.")
    if speedup and speedup.get("ratio"):
        lines.append(_gain_line(summary, speedup))
    lines.append(" -> ".join(_measured(summary, side) for side in (summary["baseline"], entry)))
    if entry["trial"] == (summary["best"] or {}).get("trial"):
        lines += _worth_lines(summary)
    compared = (summary.get("parity") or {}) if is_best else entry.get("parity")
    if text := compared.get("text") if isinstance(compared, dict) else compared:
        lines.append(f"Loss parity: {text}")
    lines.append(f"Measured on {describe_machine(summary['machine'])}, {_day(summary['started_at'])}.")
    return [one_line(line, MAX_LINE) for line in lines]  # they become comments, which a line's end would end


def _worth_lines(summary: Summary) -> list[str]:
    """Returns what each change is worth, and which bought nothing."""
    lines = []
    for change in summary.get("attribution") or []:
        interval = f", {change['ci'][0]:.3f} to {change['ci'][1]:.3f}" if change.get("ci") else ""
        number = f"{change['ratio']:.3f} x{interval}" if change.get("ratio") else change.get("reason") or "unknown"
        lines.append(f"{change['knob']}: {change.get('verdict') or 'worth'}, {number}")
    dropped = (summary.get("minimality") or {}).get("dropped") or []
    if dropped:
        lines.append(f"Bought nothing, so left as they were: {', '.join(change['knob'] for change in dropped)}.")
    return lines


def _gain_line(summary: Summary, speedup: dict[str, Any]) -> str:
    """Returns ratio, interval and verdict in the objective's words: "1.310 x less energy per sample, 95 % interval ..."."""
    interval = f", 95 % interval {speedup['ci'][0]:.3f} to {speedup['ci'][1]:.3f}" if speedup.get("ci") else ", no interval"
    reason = f" ({speedup['reason']})" if speedup.get("reason") else ""
    words = BETTER[objective_of(summary)] if speedup["verdict"] == "faster" else speedup["verdict"]
    of = gain_words(summary, "") or "the baseline"
    return f"{speedup['ratio']:.3f} x {of}{interval}: {words}{reason}"


def _measured(summary: Summary, side: dict[str, Any]) -> str:
    if objective_of(summary) != THROUGHPUT:
        return side_texts(summary, side)[0]
    return f"{number_text(side['value'], digits=4)} {summary['unit']}/s" if side.get("value") else "unknown"


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
        "terms": summary.get("terms") or {},
        "unit": summary["unit"],
        "tier": str(tier or "training"),
        "trial": entry["trial"],
        "baseline": _rounded({"value": summary["baseline"]["value"], "ci": summary["baseline"]["ci"]}),
        "best": _rounded({"value": entry["value"], "ci": entry["ci"]}),
        "speedup": _rounded(speedup),
        **_worth(summary, entry),
        "versions": summary["versions"],
        **_again(summary),
    }


def _worth(summary: Summary, entry: dict[str, Any]) -> dict[str, Any]:
    if entry["trial"] != (summary["best"] or {}).get("trial"):
        return {}
    kept = {change["knob"]: _factor(change) for change in summary.get("attribution") or []}
    dropped = {change["knob"]: _factor(change) for change in (summary.get("minimality") or {}).get("dropped") or []}
    return {name: found for name, found in (("attribution", kept), ("bought_nothing", dropped)) if found}


def _factor(change: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = _rounded({"ratio": change.get("ratio"), "ci": change.get("ci"), "verdict": change.get("verdict")})
    return made


def _again(summary: Summary) -> dict[str, Any]:
    """Returns what it takes to measure the claim again: `autotune verify` reads it."""
    identity = summary.get("identity") or {}
    found: dict[str, Any] = {
        "identity": {name: value for name, value in identity.items() if name.startswith("machine.") or name in PROGRAM},
        "settings": summary.get("settings") or {},
        "pinned": sorted(summary.get("pinned") or {}),  # hold in the baseline too
    }
    if summary.get("target"):
        found["target"] = summary["target"]  # which loader the knobs belong to: `autotune apply` turns them there
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
