"""Describes the trials of a study: what each measured, and which was the best so far."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from autotune.quantities import DASH, bytes_text
from autotune.records import Kind, Outcome, Summary
from autotune.wording import against_phrase, changes_phrase, counts_text, score_of

UNCOUNTED = {Kind.explain: ("pass", "passes"), Kind.check: ("check", "checks")}  # kind -> words for one and for several


def outcomes_text(summary: Summary) -> str:
    """Returns the outcomes of a study's trials. Trials that only test or explain something are counted separately.

    "5 ok, 1 timeout; not among these, 6 passes and 4 checks: 10 ok (trials 0006 to 0015)".
    """
    counted = counts_text(summary.get("counts") or {})
    others = [trial for trial in summary.get("trials") or [] if trial.get("kind") in UNCOUNTED]
    if not others:
        return counted
    kinds = Counter(Kind(trial["kind"]) for trial in others)
    words = " and ".join(f"{kinds[kind]} {names[kinds[kind] > 1]}" for kind, names in UNCOUNTED.items() if kinds[kind])
    outcomes = counts_text(Counter(str(trial["outcome"]) for trial in others))
    numbers = _spans([int(trial["number"]) for trial in others])
    return f"{counted}; not among these, {words}: {outcomes} (trial{'s' * (len(others) > 1)} {numbers})"


def _spans(numbers: Sequence[int]) -> str:
    """Returns trial numbers in ascending order, with consecutive ones as a span: "0006 to 0015, 0020"."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ", ".join(f"{first:04d}" if first == last else f"{first:04d} to {last:04d}" for first, last in ends)


def is_better(about: Summary, trial: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Whether a trial is a baseline or search trial that can win, and scores higher than `before`, the best so far."""
    is_able = Outcome(str(trial["outcome"])).may_win and str(trial.get("kind")) in (Kind.baseline, Kind.search)
    return is_able and (score_of(about, trial) or 0.0) > (score_of(about, before) or 0.0 if before else 0.0)


def memory_text(trial: dict[str, Any]) -> str:
    """Returns a trial's peak memory; a dash for a pass of explain, which also allocates memory for its own measurements."""
    return DASH if trial.get("kind") == Kind.explain else bytes_text(trial.get("peak_memory_bytes"))


def trial_phrase(trial: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Returns what a trial measured: "baseline", "as 0003 with batch 64", "finals: 0007 again", "losses of bf16".

    Args:
        trial: one of `Summary["trials"]`.
        before: the best of the earlier trials; the changes are described relative to it.
    """
    kind, again = str(trial.get("kind")), trial.get("repeats")
    changed = trial.get("changed") or {}
    if kind == Kind.baseline:
        return "baseline"
    if kind == Kind.final:
        return "finals" if again is None else f"finals: {again:04d} again" if again else "finals: baseline again"
    if kind == Kind.parity:
        return f"losses of {changes_phrase(changed)}" if changed else "losses of the baseline"
    words = against_phrase(changed, before.get("changed") or {}, before["number"]) if before else changes_phrase(changed)
    if kind in (Kind.attribution, Kind.explain, Kind.check):
        return f"{kind}: {trial.get('why') or words}"
    return words


def phrases(summary: Summary) -> list[str]:
    """Returns what each trial of a study measured, in the order of `Summary["trials"]`."""
    trials: Sequence[dict[str, Any]] = summary.get("trials") or []
    said, before = [], None
    for trial in trials:
        said.append(trial_phrase(trial, before))
        before = trial if is_better(summary, trial, before) else before
    return said
