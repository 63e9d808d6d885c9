"""Describes a verification, with its claimed and measured values, as lines and rows without layout."""

from __future__ import annotations

from typing import Any

from autotune.quantities import (
    DASH,
    interval_text,
    number_text,
    ratio_interval_text,
    ratio_with_interval_text,
    seconds_text,
)
from autotune.records import Summary
from autotune.wording import changes_phrase

SIDES = ("baseline", "best")

Row = tuple[str, str, str, str]


def explanation(found: dict[str, Any]) -> str:
    """Returns the reason for the verdict and what to do about it; "" if the claim holds."""
    reason, verdict = str(found.get("reason") or ""), found.get("verdict")
    if verdict == "ambiguous" and found.get("now"):
        rounds = 2 * int(found["now"]["num_rounds"])
        return f"{reason}. Measure more rounds: --rounds {rounds} --minutes 15."
    if verdict == "no longer holds":
        return f"{reason}. `autotune run` finds what is fastest here and now."
    return reason


def broken(found: dict[str, Any]) -> str:
    """Returns the error message for a claim that does not hold."""
    return f"{found['file']}: the claim does not hold: {explanation(found)}"


def lines(summary: Summary) -> list[str]:
    """Returns claimed and measured values, long runs and differences from the conditions of the claim, as plain lines."""
    found, unit = summary["verification"], str(summary.get("unit") or "samples")
    said = [f"file  {found['file']}: {changes_phrase(found['changed'])}"]
    for name, claimed, now, left in compared_rows(found):
        rate = "" if name == "speed-up" else f" {unit}/s"
        said.append(f"{name}  claimed {claimed}{rate}, now {now}{rate}{f', now / claimed {left}' if left else ''}")
    for name, claimed, achieved, ratio in long_rows(found):
        said.append(f"long run  {name}: claimed {claimed}, achieved {achieved} {unit}/s, claimed / achieved {ratio or DASH}")
    return said + [f"differs  {phrase}" for phrase in found.get("differences") or []]


def compared_rows(found: dict[str, Any]) -> list[Row]:
    """Returns (name, claimed, now, now / claimed) for baseline, best and speed-up."""
    claimed, now, left = found["claimed"], found.get("now") or {}, found.get("left")
    rows = [_row(name, claimed[name], now.get(name) or {}) for name in SIDES]
    interval = f"{left['ratio']:.2f} {ratio_interval_text(left['ci'])}".strip() if left and left["ratio"] else ""
    return [*rows, ("speed-up", _speedup(claimed), _speedup(now), interval)]


def _row(name: str, then: dict[str, Any], here: dict[str, Any]) -> Row:
    left = here["value"] / then["value"] if here.get("value") and then.get("value") else None
    return (name, _rate(then), _rate(here), "" if left is None else f"{left:.2f}")


def long_title(found: dict[str, Any]) -> str:
    """Returns the title of the long runs."""
    return f"long runs of {seconds_text(found['long']['seconds'])}"


def long_rows(found: dict[str, Any]) -> list[Row]:
    """Returns (configuration, claimed rate, achieved rate, claimed / achieved) for the long runs; [] without any."""
    rows = []
    for name in SIDES if found.get("long") else ():
        side = found["long"][name]
        claimed, achieved = side["claimed"], side["achieved"]
        ratio = f"{claimed / achieved:.3f}" if claimed and achieved else ""
        rows.append((name, number_text(claimed), number_text(achieved), ratio))
    return rows


def _rate(side: dict[str, Any]) -> str:
    return f"{number_text(side.get('value'))} {interval_text(side.get('ci'))}".strip()


def _speedup(side: dict[str, Any]) -> str:
    return ratio_with_interval_text(side.get("ratio"), side.get("ci"))
