"""Describes the document summary.json, which `autotune show --json` prints, and checks one that was read from disk.

The values in "trials" are described in TrialRecord; terms, identity, pinned, settings, placeholders, detected, target,
warm_start and slots are described in StudyRecord. The other entries:

- status is "complete", "running", "interrupted" or "failed".
- why_no_ci says why the ci next to it is null. measured_in "search" means a single measurement. It is too high on average if
  the trial was picked as the best of many. num_unpaired is present only if the finals ended before their first pair. The value
  is then the mean of this many measurements, from search and finals.
- baseline: is_barred is true if the baseline violates a constraint, and reason names the constraint; otherwise it is absent.
- speedup: a ratio of scores, null if nothing was compared. The word "faster" means better whatever the objective is.
- failed_finalists: configurations that looked faster in the search and then failed; empty if the best is not the baseline.
- attribution: one entry for each change of the best, largest effect first; the verdict is "faster", "same", "slower",
  "ambiguous", "needed" or "not measured".
- minimality: dropped lists the changes that had no effect and were reverted. effects_need is the budget with which the missing
  effects can be measured. effects_together is the joint effect of the changes whose single effects are missing. front is the
  Pareto front of several objectives.
- parity: the verdict is "passed", "not checked" or "not needed"; failed lists the sets of changes that were ruled out.
- noise: how much measurements of one configuration vary from process to process, estimated from this study's rounds.
- disturbed_by: a disturbance that the study accepted, from trial since_trial on. own_share, drift, not_finite and page_cache
  are sentences on other things that affect the rates. cycles is a sentence like "Steps come in cycles of 40 steps in 2.5 s".
- Other modules describe break_even and search_cost (compare/break_even.py), verification (compare/verify.py), recording
  (study/recording.py) and explanation (explain/explanation.py).
"""

from __future__ import annotations

from typing import Any

from autotune.records import OBJECTIVES, THROUGHPUT, Kind, Outcome, Summary, Tier, check_schema
from autotune.shapes import (
    ANY,
    check,
    flag,
    interval,
    knob_value,
    moment,
    number,
    open_interval,
    ratio,
    text,
    whole_number,
)


def outcome(value: Any) -> bool:
    """Whether it is an outcome of a trial."""
    return value in list(Outcome)


def kind(value: Any) -> bool:
    """Whether it is a kind of trial."""
    return value in list(Kind)


def tier(value: Any) -> bool:
    """Whether it is a tier."""
    return value in list(Tier)


def objective(value: Any) -> bool:
    """Whether it is an objective, or a list of them."""
    return value in OBJECTIVES or (isinstance(value, list) and bool(value) and all(each in OBJECTIVES for each in value))


NUMBERS, KNOBS = {ANY: (None, number)}, {ANY: knob_value}
SPEEDUP = {
    "ratio": (None, ratio), "ci?": interval, "verdict": text, "reason?": text, "num_rounds?": whole_number,
    "trial?": whole_number, "overrides?": KNOBS,
}  # fmt: skip
SIDE = {
    "trial": whole_number, "value": (None, number), "ci": (None, interval), "why_no_ci?": text, "objectives?": NUMBERS,
    "objectives_ci?": {ANY: (None, interval)}, "measured_in?": text, "num_unpaired?": whole_number,
    "reason?": text, "knobs?": KNOBS,
}  # fmt: skip
ENTRY = {**SIDE, "overrides": KNOBS, "speedup?": SPEEDUP, "parity?": text, "worker_start?": text}
CHANGE = {
    "knob": text, "from?": knob_value, "to": knob_value, "ratio?": ratio, "ci?": interval, "num_rounds?": whole_number,
    "cumulative?": number, "verdict?": text, "basis?": text, "reason?": text,
}  # fmt: skip
FILE = {"name": text, "bytes": number, "trial": whole_number}
FILES = {
    "left?": [FILE], "new?": [FILE], "kept?": [{"path": text, "trials": [whole_number]}],
    "continued?": [{"path": text, "trials": [whole_number]}],
    "aside?": [{"path": text, "copy": text, "trial": whole_number}], "unguarded?": [{"path": text, "why": text}],
}  # fmt: skip
CLAIM = {
    "ratio": ratio, "ci?": interval, "num_rounds?": whole_number,
    "baseline": {"value?": number, "ci?": interval}, "best": {"value?": number, "ci?": interval},
}  # fmt: skip
RUN = {"claimed": (None, number), "achieved": (None, number)}
VERIFICATION = {
    "file": text, "changed": KNOBS, "verdict?": text, "reason?": text, "claimed": CLAIM, "now?": CLAIM,
    "left?": {"ratio": (None, ratio), "ci": (None, interval)}, "differences?": [text],
    "long?": {"seconds": number, "baseline": RUN, "best": RUN},
}  # fmt: skip
WARM_START = {
    "sources": [{"study": text, "differs": [text]}], "seeds": [{}],
    "out_of_memory": [{"study": text, "knobs": KNOBS, "outcome": text}],
}  # fmt: skip
GAIN = {"kind": text, "low": number, "mid": number, "high": number}
CHECK = {"trial": whole_number, "cause": text, "where": text, "remedy": text, "predicted": GAIN, "measured": GAIN}
FINDING = {
    "cause": text, "where": text, "evidence": text, "basis": text, "gain": GAIN, "check?": CHECK,
    "remedy": {"knob?": text, "value?": knob_value, "code?": text},
    "without?": (None, {"stages": [text], "gain": GAIN, "remaining": [number]}),
}  # fmt: skip
EXPLANATION = {
    "explained": [{
        "trial": whole_number, "role": text, "passes": {ANY: {"trial": whole_number, "outcome": text, "reason?": text}},
        "phases_s": {ANY: number}, "findings": [FINDING], "notes": [text],
    }],
    "checks": [CHECK], "accuracy?": {"checked?": whole_number, "held?": whole_number}, "skipped?": text,
}  # fmt: skip
RANKS = {
    "by_rank": [{
        "rank": whole_number,
        **dict.fromkeys(("rate_per_s", "step_s", "own_s", "exposed_s", "data_wait_frac", "peak_memory_bytes"), (None, number)),
    }],
    "stragglers": [whole_number],
    "communication": (None, {
        "exposed_s": number, "exposed_frac": (None, number),
        **dict.fromkeys(("bound_s", "gradient_bytes", "bandwidth_bytes_per_s"), (None, number)),
    }),
}  # fmt: skip
TRIAL = {
    "number": whole_number, "kind?": kind, "outcome": outcome, "tier?": tier, "knobs?": KNOBS, "changed?": KNOBS,
    **dict.fromkeys(("reason?", "why?", "why_no_ci?", "regime?", "start?", "slot?"), text),
    **dict.fromkeys(("repeats?", "round?"), whole_number),
    **dict.fromkeys(
        ("value?", "score?", "seconds?", "spared_s?", "peak_memory_bytes?", "device_rate?", "loader_rate?", "data_wait_frac?"),
        number,
    ),
    "ci?": interval, "phases_s?": {ANY: number}, "objectives?": NUMBERS, "ranks?": RANKS,
}  # fmt: skip
SUMMARY = {
    "study": text, "status": text, "machine": {"gpus?": [{}], "memory_bytes?": number, "device_memory_bytes?": number,
                                               "environment?": {}, "num_nodes?": whole_number},
    "baseline": SIDE, "best": (None, ENTRY), "speedup": (None, SPEEDUP),
    "best_by_tier": dict.fromkeys((f"{each}?" for each in Tier), ENTRY),
    "attribution": [CHANGE], "diagnosis": [{"finding": text, "advice": text, "evidence": text}], "counts": {ANY: whole_number},
    "seconds": NUMBERS, "versions": {ANY: text}, "started_at": moment, "trials": [TRIAL],
    "num_trials?": whole_number,  # length of "trials"; absent in summaries of earlier versions
    "objective?": objective, "terms?": {"samples?": number, "price_per_hour?": number, "constraints?": {ANY: number}},
    "break_even?": {"samples?": number, "steps?": number, "seconds?": number, "dearer_s": number, "compile_s?": number},
    "search_cost?": {
        "seconds": number, "trials": whole_number, "repaid_after_s": (None, number), "ci?": open_interval, "why_not": text,
    },
    "failed_finalists?": [{"trial": whole_number, "overrides": KNOBS, "ratio": ratio, "outcome": outcome, "reason?": text}],
    "front?": [{**ENTRY, "objectives": NUMBERS, "measured_in": text}],
    "effects_need?": {"minutes": number, "more_minutes": number},
    "effects_together?": {"knobs": [text], "ratio": ratio, "ci": interval},
    "minimality?": {"dropped?": [CHANGE], "ratio?": ratio, "ci?": interval},
    "parity?": {"verdict?": text, "text?": text, "training?": KNOBS, "failed?": [{"knobs": KNOBS, "reason": text}]},
    "disturbed_by?": {"words": text, "since_trial": whole_number},
    "noise?": {"spread": number}, "files?": FILES, "explanation?": EXPLANATION, "verification?": VERIFICATION,
    "recording?": {"configurations": whole_number, "trials": whole_number}, "warm_start?": WARM_START,
    "slots?": {"num?": whole_number},
    "detected?": {"optimizers?": [text], "world_size?": whole_number, "num_replicas?": whole_number},
    "budget_s?": number, "budget_trials?": whole_number, "command?": [text], "is_recipe?": flag, "target?": [{}],
    **dict.fromkeys(("pinned?", "placeholders?"), KNOBS), "identity?": {}, "settings?": {},
    **dict.fromkeys(
        ("title?", "reason?", "unit?", "fingerprint?", "cwd?", "own_share?", "drift?", "not_finite?", "page_cache?", "cycles?"),
        text,
    ),
}  # fmt: skip

# Entries that every summary has after reading, with their values for a summary that lacks them.
DEFAULTS = {"title": "", "reason": "", "objective": THROUGHPUT, "unit": "samples", "fingerprint": "", "placeholders": {}}


def checked_summary(raw: Any) -> Summary:
    """Returns the document of summary.json after checking it, with the values of DEFAULTS that it lacks.

    Raises:
        ValueError: another schema, or not a summary; the message names the first place that is wrong.
    """
    check_schema(raw, "summary")
    check(raw, SUMMARY)
    given = {name: value for name, value in raw.items() if value is not None or name not in DEFAULTS}
    by_tier = {tier: entry for tier, entry in raw["best_by_tier"].items() if entry is not None}
    return {**DEFAULTS, **given, "best_by_tier": by_tier}
