"""Records the origin of a configuration as plain values, for people and for `autotune verify` and `autotune apply`."""

from __future__ import annotations

from typing import Any

from autotune.export.claims import Claimed, day, describe_machine, speedup_of
from autotune.plain_json import mapped
from autotune.records import Summary, Tier

DIGITS = 5  # significant digits of a measured value; intervals such as 1.35 to 1.42 leave even the third digit uncertain
PROGRAM = ("program.torch", "program.device_name", "program.executable")  # exported parts of the identity, besides machine.*


def provenance(claimed: Claimed) -> dict[str, Any]:
    """Returns study, machine, versions, measurements with intervals, and what `verify` and `apply` need."""
    summary, entry = claimed.summary, claimed.entry
    return {
        "study": summary["study"],
        "title": summary["title"],
        "status": summary["status"],
        "date": day(summary),
        **_machine(summary),
        "fingerprint": summary["fingerprint"],
        "objective": summary["objective"],
        "terms": summary.get("terms") or {},
        "unit": summary["unit"],
        "tier": str(claimed.tier or Tier.training),
        **({"tier_of_changes": claimed.tier_of_changes} if claimed.tier_of_changes else {}),
        "trial": entry["trial"],
        "baseline": _rounded({"value": summary["baseline"]["value"], "ci": summary["baseline"]["ci"]}),
        "best": _rounded({"value": entry["value"], "ci": entry["ci"]}),
        "speedup": _rounded(claimed.speedup),
        **_effects(claimed),
        **({"parity": claimed.parity} if claimed.parity else {}),
        **({"caveats": claimed.caveats} if claimed.caveats else {}),
        "tiers": _tiers(summary),
        "versions": summary["versions"],
        **_for_verify_and_apply(summary),
    }


def _machine(summary: Summary) -> dict[str, Any]:
    """Returns the machine, plus driver and CUDA version if there is a GPU."""
    machine = summary["machine"]
    drivers = {str(gpu["driver"]) for gpu in machine.get("gpus") or [] if gpu.get("driver")}
    found = {
        "machine": describe_machine(machine),
        "device": machine.get("device_name") or machine.get("device"),
        "driver": ", ".join(sorted(drivers)),
        "cuda": machine.get("cuda") if machine.get("device") == "cuda" else None,
    }
    return {name: value for name, value in found.items() if value}


def _effects(claimed: Claimed) -> dict[str, Any]:
    found = {
        "attribution": {key: _factor(change) for key, change in claimed.worth.items()},
        "without_effect": {key: _factor(change) for key, change in claimed.dropped.items()},
        "left_alone": claimed.left_alone,
    }
    return {name: value for name, value in found.items() if value}


def _factor(change: dict[str, Any]) -> dict[str, Any]:
    said = {name: change.get(name) for name in ("ratio", "ci", "verdict")}
    made: dict[str, Any] = _rounded(said | ({"basis": "estimated"} if change.get("basis") == "estimated" else {}))
    return made


def _tiers(summary: Summary) -> dict[str, Any]:
    """Returns the changes and the speedup of each tier's best entry."""
    found = {}
    for tier, entry in (summary.get("best_by_tier") or {}).items():
        speedup = speedup_of(summary, entry, Tier(tier)) or {}
        said = {name: speedup.get(name) for name in ("ratio", "ci", "verdict")}
        found[tier] = {"changes": list(entry["overrides"]), **_rounded(said)}
    return found


def _for_verify_and_apply(summary: Summary) -> dict[str, Any]:
    """Returns what is needed to verify the claim and to apply the configuration."""
    identity, detected = summary.get("identity") or {}, summary.get("detected") or {}
    program: dict[str, Any] = {}
    if not summary.get("is_recipe"):
        program |= {"command": summary.get("command") or [], "cwd": summary.get("cwd") or ""}
        if placeholders := summary.get("placeholders"):
            program["placeholders"] = placeholders  # placeholder of the command -> value in the baseline
    program |= {name: value for name, value in {"python": summary["machine"].get("python"), **detected}.items() if value}
    return {
        "identity": {name: value for name, value in identity.items() if name.startswith("machine.") or name in PROGRAM},
        "settings": summary.get("settings") or {},
        "pinned": sorted(summary.get("pinned") or {}),  # knobs that the user pinned; the baseline has them, too
        **({"target": summary["target"]} if summary.get("target") else {}),  # the training DataLoader, for `autotune apply`
        "program": program,
    }


def _rounded(value: Any) -> Any:
    """Returns measured values rounded to DIGITS significant digits."""
    return mapped(value, lambda number: float(f"{number:.{DIGITS}g}") if isinstance(number, float) else number)
