"""Builds the summary, the document of `autotune show --json`, from the trial records."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autotune import stats
from autotune.compare import noise, parity
from autotune.compare.attribution import Attribution
from autotune.compare.break_even import break_even, search_cost
from autotune.compare.decision import ONE_ROUND_FRAC, Decision, failed_finalists
from autotune.compare.pareto import front, measured_again
from autotune.compare.tiers import failed_again, is_barred, leader, or_baseline
from autotune.compare.trend import trend
from autotune.compare.verify import verification
from autotune.config.overrides import GLOBAL_BATCH
from autotune.explain.explanation import with_best
from autotune.harness.protocol import APPLIED
from autotune.knobs.loader import MULTIPROCESSING_CONTEXT
from autotune.records import SCHEMA, START_PHASES, Kind, StudyRecord, Summary, Tier, TrialRecord, objective_names
from autotune.study.diagnosis import diagnose
from autotune.study.effects import needed, together, with_estimates
from autotune.study.recording import recorded
from autotune.trials import not_finite
from autotune.trials.configurations import configuration_key
from autotune.trials.health import PAGE_CACHE, caveat, drift, shared
from autotune.trials.objective import means
from autotune.wording import cycles_text

OVERSTATED = "the ratio is from the search, which overstates it"
UNPAIRED = "the ratio is from measurements that were not made in pairs"
CONTRADICTORY = "repeated measurements of one configuration contradict each other, and none of them has an interval"
_TRIAL_FIELDS = (
    "number", "kind", "outcome", "reason", "why", "knobs", "changed", "tier", "value", "ci", "why_no_ci", "seconds", "phases_s",
    "start", "spared_s",
    "peak_memory_bytes", "device_rate", "loader_rate", "data_wait_frac", "regime", "round", "repeats",
    "score", "objectives", "violations", "ranks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The state of a study.

    Attributes:
        status: "running", "complete", "interrupted" or "failed".
        reason: why the study ended; "" while it runs.
        seconds: wall time so far.
        decision: result of the finals; None before they run.
        attribution: the effects of the chosen configuration's changes; None before the ablation.
        tiers: {trial number of the best configuration of a lower tier: decision from measuring it again}.
        explanation: the document of explain/explanation.py; None before any pass has run.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    decision: Decision | None = None
    attribution: Attribution | None = None
    tiers: dict[int, Decision] = field(default_factory=dict)
    explanation: dict[str, Any] | None = None


def summarise(about: StudyRecord, records: list[TrialRecord], standing: Standing) -> Summary:
    """Returns the summary of a study."""
    return _Study(about, records, standing).summary()


class _Study:
    """The trials and the state of a study, from which its summary is made.

    Attributes:
        everything: all trials.
        records: all trials except the passes and checks of `autotune explain`.
        first: trial 0; None before it was measured.
        baseline: trial 0 if it has a rate.
        best: trial of the best configuration; None without a baseline.
    """

    def __init__(self, about: StudyRecord, records: list[TrialRecord], standing: Standing) -> None:
        self.about, self.everything, self.standing, self.decision = about, records, standing, standing.decision
        self.records = [one for one in records if one.kind not in (Kind.explain, Kind.check)]
        # If a resumed study has to measure the baseline again, its first record is that of another trial until then.
        self.first = self.records[0] if self.records and self.records[0].kind is Kind.baseline else None
        self.baseline = self.first if self.first and self.first.outcome.has_value else None
        self.best = self._best(self.baseline) if self.baseline else None
        self.is_held = GLOBAL_BATCH in about.settings

    def summary(self) -> Summary:
        """Returns the summary."""
        about, standing, records, baseline, best = self.about, self.standing, self.records, self.baseline, self.best
        speedup, attribution = self._speedup(), self._attribution()
        return {
            "schema": SCHEMA,
            "study": about.name,
            "title": about.title,
            "status": standing.status,
            "reason": standing.reason,
            "objective": about.objective,
            "terms": about.terms,
            "unit": baseline.unit if baseline else "samples",
            "machine": about.machine,
            "baseline": self._baseline_entry(),
            "best": self._entry(best, knobs=True, overrides=True) if best else None,
            "best_by_tier": self._by_tier(),
            "speedup": speedup,
            "failed_finalists": [] if about.verifies else self._failed_finalists(),
            "break_even": self._break_even(),
            "search_cost": self._search_cost(speedup),
            "front": self._front(),
            "attribution": attribution,
            "effects_need": needed(attribution, about, records),
            "effects_together": together(attribution, best, about, records) if best else None,
            "minimality": self._minimality(),
            "parity": parity.report(best, records, is_held=self.is_held),
            "diagnosis": diagnose(best, device=about.machine.get("device")) if best else [],
            "counts": dict(Counter(str(record.outcome) for record in records)),
            "seconds": _seconds(records, standing.seconds),
            "fingerprint": about.fingerprint,
            "identity": about.identity,
            "versions": about.versions,
            "started_at": about.started_at,
            "budget_s": about.budget_s,
            "budget_trials": about.budget_trials,
            "pinned": about.pinned,
            "settings": about.settings,
            "command": about.command,
            "placeholders": about.placeholders,
            "detected": about.detected,
            "disturbed_by": caveat(records),
            "own_share": shared(records) or None,
            "drift": drift(records) or trend(records) or None if baseline and not about.recording else None,
            "not_finite": not_finite.caveat(records) or None,
            "page_cache": best.evidence.get(PAGE_CACHE) if best else None,
            "cwd": about.cwd,
            "is_recipe": about.is_recipe,
            "target": about.target,
            "verification": verification(about, records, standing.decision) if about.verifies else None,
            "warm_start": about.warm_start,
            "noise": noise.as_json(noise.noise_of(noise.rounds_of(records))),
            "recording": recorded(about, records) if about.recording else None,
            "files": files_of(self.everything),
            "explanation": with_best(standing.explanation, best.number if best else 0),
            "cycles": cycles_text(self.first.metrics) or None if self.first else None,
            "num_trials": len(self.everything),
            "trials": [trial_entry(record) for record in self.everything],
            **({"slots": about.slots} if about.slots else {}),
        }

    def _best(self, baseline: TrialRecord) -> TrialRecord:
        """Returns the best configuration: the finals' choice, or the search's leader if the finals have none."""
        decision = self.decision
        finalist = decision.finalist if decision else None
        if decision is None or (decision.ratio is None and finalist):
            if finalist is None or configuration_key(finalist.changed) in failed_again(self.records):
                return self._kept(leader(self.records, baseline, Tier.training))
            return self._kept(or_baseline(finalist, baseline))
        return finalist if finalist and (decision.is_better or is_barred(baseline)) else baseline

    def _kept(self, top: TrialRecord) -> TrialRecord:
        """Returns `top`, or the baseline if unpaired measurements do not confirm that `top` is better."""
        baseline = self.records[0]
        if is_barred(baseline) or not self._unpaired(baseline):
            return top
        ratio = self._unpaired_ratio(top)
        return top if ratio is not None and ratio > 1 + ONE_ROUND_FRAC else baseline

    def _by_tier(self) -> dict[str, Any]:
        """Returns {tier: entry of the best configuration of this or a lower tier}."""
        baseline, best = self.baseline, self.best
        if baseline is None or best is None:
            return {}
        found = {}
        for tier in Tier:
            is_decided = best.changed and best.tier.rank <= tier.rank
            is_nothing_better = self.decision is not None and not best.changed and tier is Tier.training
            top = best if is_decided or is_nothing_better else self._kept(leader(self.records, baseline, tier))
            claim = self.standing.tiers.get(top.number) or self._finals_of(top)
            if claim and not claim.is_better and not is_barred(baseline):
                top, claim = baseline, None
            entry = self._entry(top, overrides=True)
            if claim and claim.ratio:
                ratio, known = claim.ratio, ("ratio", "ci", "num_rounds", "freedom", "error")
                said = {**{name: getattr(ratio, name) for name in known}, "verdict": claim.verdict, "reason": claim.reason}
                entry |= {"measured_in": "finals", "speedup": said}
                entry.pop("num_unpaired", None)
                if top.score == top.value:
                    entry["value"], entry["ci"] = claim.rate(top.number)
            compared = parity.report(top, self.records, is_held=self.is_held) or {}
            found[str(tier)] = {**entry, "parity": compared.get("text", "")}
        return found

    def _finals_of(self, record: TrialRecord) -> Decision | None:
        """Returns the finals' decision if they measured this configuration but kept the baseline."""
        decision = self.decision
        if decision is None or decision.ratio is None or decision.finalist is None or decision.is_better:
            return None
        return decision if decision.finalist.number == record.number else None

    def _entry(self, record: TrialRecord, *, knobs: bool = False, overrides: bool = False) -> dict[str, Any]:
        """Returns trial number, value and interval: from the measurements in `_reported`, or else from the search."""
        rates, counted = self._scores(record), self._reported(record) or [record]
        entry: dict[str, Any] = {
            "trial": record.number,
            **means(counted),
            "measured_in": "finals" if rates or any(one is not record for one in counted) else "search",
        }
        if len(counted) > 1 and any(one is record for one in counted):
            entry["num_unpaired"] = len(counted)
        if self.decision and rates and record.score == record.value:
            entry["value"], entry["ci"] = self.decision.rate(record.number)
        if entry["ci"] is None:
            entry["why_no_ci"] = "one round only" if rates else record.why_no_ci
        if overrides:
            entry["overrides"] = record.changed
            entry |= _forced(record)
        if knobs:
            entry["knobs"] = record.knobs
        return entry

    def _reported(self, record: TrialRecord) -> list[TrialRecord]:
        """Returns the trials that measured a configuration again, to report the result.

        These are its reporting rounds (the rounds of the finals after those that choose the finalist) or, on a Pareto front,
        its repeats. If it has neither, because the finals ended before the first pair, returns its other measurements.
        """
        scores = self._scores(record)
        found = [final for final in self.records if final.repeats == record.number and final.score in scores]
        return found or measured_again(record, self.records) or self._unpaired(record)

    def _unpaired(self, record: TrialRecord) -> list[TrialRecord]:
        """Returns a configuration's measurements for a comparison without pairs.

        Returns [] if the finals have a pair, or if they did not measure the configuration again.

        In a measurement without an interval, one slow step may dominate. So measurements with an interval are preferred.
        """
        if self.decision is not None and self.decision.ratio is not None:
            return []
        finals = [one for one in self.records if one.kind is Kind.final]
        again = [final for final in finals if final.repeats == record.number and final.score]
        measured = [record, *again]
        return [one for one in measured if one.score and one.ci] or measured if again else []

    def _unpaired_ratio(self, top: TrialRecord) -> float | None:
        """Returns the rate of `top` over the baseline's, from unpaired measurements.

        None if the measurements of one of the two configurations contradict each other.
        """
        means_of = []
        for record in (top, self.records[0]):
            counted = self._unpaired(record) or [record]
            scores = [one.score for one in counted if one.score]
            is_vague = not any(one.ci for one in counted)
            if not scores or (is_vague and max(scores) > (1 + ONE_ROUND_FRAC) * min(scores)):
                return None
            means_of.append(scores[0] if len(scores) == 1 else stats.log_mean_interval(scores)[0])
        return means_of[0] / means_of[1]

    def _scores(self, record: TrialRecord) -> list[float]:
        return self.decision.values.get(record.number, []) if self.decision else []

    def _break_even(self) -> dict[str, Any] | None:
        if self.baseline is None or self.best is None or not self.best.changed:
            return None
        own, other = (self._reported(record) or [record] for record in (self.best, self.baseline))
        return break_even(self.records, own, other, batches_per_step=self.about.detected.get("batches_per_step"))

    def _search_cost(self, speedup: Summary | None) -> dict[str, Any] | None:
        """Returns the cost of the search and when it pays off; None if there was no search or the study is not complete."""
        about, best = self.about, self.best
        if about.verifies or about.recording or best is None or self.standing.status != "complete":
            return None
        return search_cost(
            self.records,
            seconds=self.standing.seconds,
            speedup=speedup,
            is_kept=not best.changed,
            dearer_s=float((self._break_even() or {}).get("dearer_s") or 0.0),
            objective=about.objective,
        )

    def _front(self) -> list[dict[str, Any]]:
        names = objective_names(self.about.objective)
        return [self._entry(record, overrides=True) for record in front(self.records, names)] if len(names) > 1 else []

    def _baseline_entry(self) -> dict[str, Any]:
        """Returns the baseline's entry, marked `is_barred` if the baseline violates a constraint and so cannot win."""
        if self.baseline:
            barred = {"is_barred": True, "reason": self.baseline.reason} if is_barred(self.baseline) else {}
            return {**self._entry(self.baseline, knobs=True), **barred}
        first = self.first
        reason = f"{first.outcome}: {first.reason}" if first else "not measured yet"
        return {"trial": 0, "value": None, "ci": None, "knobs": first.knobs if first else {}, "reason": reason}

    def _speedup(self) -> dict[str, Any] | None:
        decision, best = self.decision, self.best
        if best is None:
            return None
        if decision is None or decision.ratio is None:
            return self._unproven(best)
        if decision.is_slower and not best.changed:  # the baseline is kept; its ratio to itself is 1
            rounds = decision.ratio.num_rounds
            return {"ratio": 1.0, "ci": None, "verdict": decision.verdict, "reason": decision.reason, "num_rounds": rounds}
        return {
            "ratio": decision.ratio.ratio,
            "ci": decision.ratio.ci,
            "verdict": decision.verdict,
            "reason": decision.reason,
            "num_rounds": decision.ratio.num_rounds,
            "freedom": decision.ratio.freedom,
            "error": decision.ratio.error,
            "margin": decision.margin,
            "trial": decision.finalist.number if decision.finalist else None,
            "overrides": decision.finalist.changed if decision.finalist else {},
        }

    def _unproven(self, best: TrialRecord) -> dict[str, Any] | None:
        """Returns the speed-up if the finals have no complete pair, usually from one measurement per side.

        Returns None if the finals have not run and the baseline is the best.
        """
        decision, baseline = self.decision, self.records[0]
        if decision is None and not best.changed:
            return None  # a comparison of the baseline with itself gives no verdict
        if decision is not None and decision.finalist is None:  # only the baseline was worth measuring again
            reason = decision.reason
            if is_barred(baseline):
                today = f"the unchanged program ({baseline.reason})"
                reason = f"no configuration that was tried satisfies the constraints, and neither does {today}"
            return {"ratio": None, "ci": None, "verdict": decision.verdict, "reason": reason}
        top = decision.finalist if decision and decision.finalist and not best.changed else best
        has_finals = any(self._unpaired(record) for record in (top, baseline))
        reason = decision.reason if decision else "the finals are not complete" if has_finals else "the finals have not run"
        ratio, how = self._unpaired_ratio(top), UNPAIRED if has_finals else OVERSTATED
        return {
            "ratio": ratio,
            "ci": None,
            "verdict": "ambiguous",
            "reason": f"{reason}: {how if ratio is not None else CONTRADICTORY}",
            "trial": top.number,
            "overrides": top.changed,
        }

    def _failed_finalists(self) -> list[dict[str, Any]]:
        """Returns the configurations that looked faster and then failed; [] if a faster configuration was found."""
        if self.best is None or self.best.changed or self.decision is None:
            return []
        return [
            {
                "trial": first.number,
                "overrides": first.changed,
                "ratio": (first.score or 0.0) / (self.records[0].score or math.inf),
                "outcome": failed.outcome,
                "reason": failed.reason,
            }
            for first, failed in failed_finalists(self.records, self.decision)
        ]

    def _attribution(self) -> list[dict[str, Any]]:
        """Returns the effect of each change of the best, largest first: ratios 1.2 and 1.1 have "cumulative" 1.2 and 1.32."""
        found, best, decision = self._found(), self.best, self.decision
        if best is None or not best.changed or found is None:
            return []
        entries = [change.as_json() for change in found.changes if change.knob in best.changed]
        if len(entries) == 1 and decision and decision.ratio:  # the effect of a single change is the whole speed-up
            whole = decision.ratio
            alone = {"ratio": whole.ratio, "ci": whole.ci, "num_rounds": whole.num_rounds, "basis": "measured"}
            entries[0] |= {**alone, "verdict": decision.verdict, "reason": decision.reason}
        entries = with_estimates(entries, found.winner, self.about, self.records)
        entries = sorted(entries, key=lambda entry: -(entry["ratio"] or 0.0))
        products = itertools.accumulate((entry["ratio"] or 1.0 for entry in entries), lambda one, other: one * other)
        return [{**entry, "cumulative": product} for entry, product in zip(entries, products, strict=True)]

    def _minimality(self) -> dict[str, Any] | None:
        """Returns the changes that were reverted because they had no effect; None if there are none."""
        found = self._found()
        return found.minimality() if found and self.best and self.best.number == found.best.number else None

    def _found(self) -> Attribution | None:
        """Returns the attribution; None if there is none, or if it is of a configuration that the finals did not choose."""
        found, best = self.standing.attribution, self.best
        return found if found and best and best.number in (found.best.number, found.winner.number) else None


def _forced(record: TrialRecord) -> dict[str, str]:
    """Returns {"worker_start": "fork"} if the harness had to choose how to start the workers that a trial added; else {}."""
    key = MULTIPROCESSING_CONTEXT.key
    report = record.knob_reports.get(key) or {}
    is_forced = report.get("status") == APPLIED and report.get("reason") and key not in record.changed
    return {"worker_start": str(report["observed"])} if is_forced else {}


def _seconds(records: list[TrialRecord], total_s: float) -> dict[str, float]:
    def phase_s(*names: str) -> float:
        return sum(record.phases_s.get(name, 0.0) for record in records if record.outcome.has_value for name in names)

    return {
        "total": total_s,
        "measuring": phase_s("steady"),
        "starting": phase_s(*START_PHASES),
        "compiling": phase_s("compile"),
        "lost": sum(record.seconds for record in records if not record.outcome.has_value),
    }


def files_of(records: list[TrialRecord]) -> dict[str, Any]:
    """Returns what the trials did to the user's files; see launchers/user_files.Report."""
    named = {"left": "files_left", "new": "files_new"}
    sizes = {
        what: [
            {"name": name, "bytes": size, "trial": record.number}
            for record in records
            for name, size in record.evidence.get(key, {}).items()
        ]
        for what, key in named.items()
    }
    kept, continued = _trials_of("files_kept", records), _trials_of("files_continued", records)
    aside = [
        {"path": path, "copy": copy, "trial": record.number}
        for record in records
        for path, copy in record.evidence.get("files_aside", {}).items()
    ]
    unguarded = {path: why for record in records for path, why in record.evidence.get("files_unguarded", {}).items()}
    return {
        **sizes,
        "kept": [{"path": path, "trials": numbers} for path, numbers in kept.items()],
        "continued": [{"path": path, "trials": numbers} for path, numbers in continued.items()],
        "aside": aside,
        "unguarded": [{"path": path, "why": why} for path, why in unguarded.items()],
    }


def _trials_of(key: str, records: list[TrialRecord]) -> dict[str, list[int]]:
    """Returns path -> numbers of the trials whose evidence lists it under `key`."""
    found: dict[str, list[int]] = {}
    for record in records:
        for path in record.evidence.get(key, []):
            found.setdefault(path, []).append(record.number)
    return found


def trial_entry(record: TrialRecord) -> dict[str, Any]:
    """Returns a trial's entry in a summary."""
    entry = {name: getattr(record, name) for name in _TRIAL_FIELDS}
    return {**entry, "slot": record.slot, "neighbours": record.neighbours} if record.slot else entry
