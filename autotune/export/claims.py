"""Collects what a study knows about the exported configuration: its speedup, the evidence, and each change's effect."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from autotune.knobs.base import value_text
from autotune.plain_text import one_line
from autotune.records import Kind, Summary, Tier
from autotune.wording import changes_phrase, score_of

MAX_REMARK = 120
SPACE = "space."  # prefix of the searched knobs in a study's identity


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A configuration to export: an entry of a study's summary, with what the summary says about it."""

    summary: Summary
    entry: dict[str, Any]  # the study's best entry, or the best of a tier
    tier: Tier | None  # the requested tier; None for the study's best

    @property
    def speedup(self) -> dict[str, Any] | None:
        """Comparison with the baseline (ratio, interval, verdict, reason); None if unknown."""
        return speedup_of(self.summary, self.entry, self.tier)

    @property
    def is_best(self) -> bool:
        """Whether the entry is the study's best: the results of finals and attribution are about that entry only."""
        return _is_best(self.summary, self.entry)

    @property
    def nothing(self) -> str:
        """Why the entry changes nothing; "" if it changes something."""
        if self.entry["overrides"]:
            return ""
        if not is_compared(self.summary, self.tier):
            only = f"Up to tier {self.tier}, only" if self.tier else "Only"
            return f"{only} the baseline was measured, which is the program as it was run: there is nothing to change."
        measured = f"Nothing measured up to tier {self.tier}" if self.tier else "Nothing measured"
        return f"{measured} was better than the program as it was run: there is nothing to change."

    @property
    def tier_of_changes(self) -> str:
        """Tier of what the entry changes; "" if it changes nothing, or if an older summary lacks the tier."""
        trial: dict[str, Any] = next(
            (one for one in self.summary.get("trials") or [] if one["number"] == self.entry["trial"]), {}
        )
        return str(trial.get("tier") or "") if self.entry["overrides"] else ""

    @property
    def beyond(self) -> str:
        """Gain and changes of the study's best if this entry changes nothing: "2.092 x the baseline, with bf16"; else ""."""
        best, ratio = self.summary["best"] or {}, (self.summary["speedup"] or {}).get("ratio")
        is_excluded = best.get("overrides") and not self.entry["overrides"] and ratio
        return f"{ratio:.3f} x the baseline, with {changes_phrase(best['overrides'])}" if is_excluded else ""

    @property
    def worth(self) -> dict[str, dict[str, Any]]:
        """Knob key -> effect of the change, from the summary's attribution."""
        return {change["knob"]: change for change in self.summary.get("attribution") or []} if self.is_best else {}

    @property
    def dropped(self) -> dict[str, dict[str, Any]]:
        """Knob key -> change that had no effect and was reverted."""
        found = (self.summary.get("minimality") or {}).get("dropped") or []
        return {change["knob"]: change for change in found} if self.is_best else {}

    @property
    def left_alone(self) -> list[str]:
        """Searched knobs that the entry does not change and that are not in `dropped`."""
        names = [name.removeprefix(SPACE) for name in self.summary.get("identity") or {} if name.startswith(SPACE)]
        return [name for name in names if name not in self.entry["overrides"] and name not in self.dropped]

    @property
    def parity(self) -> str:
        """Result of the loss comparison; "" if there is none."""
        compared = (self.summary.get("parity") or {}) if self.is_best else self.entry.get("parity")
        return str((compared.get("text") if isinstance(compared, dict) else compared) or "")

    @property
    def caveats(self) -> list[str]:
        """Problems during the measurements."""
        words = (self.summary.get("disturbed_by") or {}).get("words")
        noise = f"disturbed while it was measured: {words}" if words else ""
        found = [noise, *map(self.summary.get, ("own_share", "drift", "not_finite", "page_cache"))]
        return [str(line) for line in found if line]

    def remark(self, key: str, *, is_pinned: bool) -> str:
        """Returns the remark on a knob: "was 0; 1.401 x [1.350, 1.452]"."""
        if is_pinned and key not in self.entry["overrides"]:
            return "pinned by you, in the baseline too"
        before = (self.summary["baseline"].get("knobs") or {}).get(key)
        was = f"was {value_text(before)}" if before not in (None, "") else ""
        return one_line("; ".join(filter(None, [was, worth_text(self.worth.get(key))])), MAX_REMARK)


def worth_text(change: dict[str, Any] | None) -> str:
    """Returns the effect of one change in a few words: "1.401 x [1.350, 1.452]", then the verdict unless it is "faster"."""
    if not change:
        return ""
    if not change.get("ratio"):
        return " ".join(filter(None, [change.get("verdict"), f"({change['reason']})" if change.get("reason") else ""]))
    interval = f" [{change['ci'][0]:.3f}, {change['ci'][1]:.3f}]" if change.get("ci") else ""
    verdict = "" if change.get("verdict") in (None, "faster") else f", {change['verdict']}"
    estimated = ", estimated" if change.get("basis") == "estimated" else ""
    return f"{change['ratio']:.3f} x{interval}{verdict}{estimated}"


def speedup_of(summary: Summary, entry: dict[str, Any], tier: Tier | None = None) -> dict[str, Any] | None:
    """Returns an entry's speedup over the baseline. The entry is the study's best or, with `tier`, the best up to this tier.

    If the baseline was kept, the entry's speedup is 1. `summary["speedup"]` then belongs to the configuration that lost.
    """
    compared: dict[str, Any] | None = summary["speedup"]
    if not entry.get("overrides"):
        said = (compared or {}) if _is_best(summary, entry) else {}
        if not is_compared(summary, tier):
            return {"ratio": None, "ci": None, "verdict": "none", "reason": said.get("reason") or ""}
        return {"ratio": 1.0, "ci": None, "verdict": "same", "reason": said.get("reason") or "", "kept": _kept_over(said)}
    return compared if _is_best(summary, entry) else _measured(summary, entry)


def is_compared(summary: Summary, tier: Tier | None = None) -> bool:
    """Returns whether a study measured anything besides its baseline. If a tier is given, higher tiers do not count.

    Checks of `autotune explain` do not count: they are not candidates for the best.
    """
    counted = {one.value for one in Tier if tier is None or one.rank <= tier.rank}
    candidates = (trial for trial in summary["trials"] if trial["number"] and trial.get("kind") != Kind.check)
    trials = (trial for trial in candidates if trial.get("tier", Tier.exact) in counted)
    return any(trial.get("value") and trial.get("changed", True) for trial in trials)


def _kept_over(said: dict[str, Any]) -> str:
    """Returns the comparison after which the baseline was kept: "0.82 x [0.70, 0.95] with channels_last: ambiguous"."""
    if not said.get("ratio") or not said.get("overrides"):
        return ""
    interval = f" [{said['ci'][0]:.3f}, {said['ci'][1]:.3f}]" if said.get("ci") else ", no interval"
    return f"{said['ratio']:.3f} x{interval} with {changes_phrase(said['overrides'])}: {said['verdict']}"


def _measured(summary: Summary, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the speedup of a configuration that the finals did not choose, from a later measurement or the search."""
    if again := entry.get("speedup"):
        return dict(again)
    sides = [entry, summary["baseline"]]
    paired = summary["speedup"] or {}
    if paired.get("num_rounds") or paired.get("ci"):  # the baseline's value is from the finals: compare the search's values
        trials = {trial["number"]: trial for trial in summary["trials"]}
        sides = [trials.get(side["trial"]) or {} for side in sides]
    value, baseline = (score_of(summary, side) for side in sides)
    return {
        "ratio": value / baseline if value and baseline else None,
        "ci": None,
        "verdict": "same" if not entry["overrides"] else "ambiguous",
        "reason": "from the search: a single measurement, likely overstated because it was picked as the best",
    }


def day(summary: Summary) -> str:
    """Returns the UTC date on which a study began."""
    return datetime.datetime.fromtimestamp(summary["started_at"], tz=datetime.UTC).date().isoformat()


def describe_machine(machine: dict[str, Any]) -> str:
    """Returns a short description of the machine."""
    gpus = [str(gpu.get("name")) for gpu in machine.get("gpus") or []]
    return ", ".join([*gpus, str(machine.get("cpu_model") or "unknown CPU"), f"{machine.get('num_cores', '?')} cores"])


def _is_best(summary: Summary, entry: dict[str, Any]) -> bool:
    return bool(entry["trial"] == (summary["best"] or {}).get("trial"))
