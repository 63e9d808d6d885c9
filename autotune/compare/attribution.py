"""Attribution: measures the effect of each change of the winner by ablation. Changes without an effect are reverted.

It runs between the two halves of the finals. The choosing rounds pick a winner. Attribution then reverts its changes one by
one, and the reporting rounds measure the remaining configuration against the baseline. So the reported configuration is the
exported one, and no round that helped to select it counts towards its reported speed-up.

A round runs the winner and its ablations once each, in random order. In two screening rounds, each change is reverted on its
own. If time is short, changes with a clear estimated effect are left out of these rounds. Next, all changes without a visible
effect are reverted together. If the result stays within the margin of the winner, these changes are dropped. If not, the
change with the largest effect among them is kept. Once the effect of a change is known well enough, the change is not reverted
in further rounds. Attribution ends when everything is decided or the time is used up.

If there is no time for two rounds, estimates decide (see `effects.estimated`). One more trial is run for each estimate that is
missing or vague. If there is no time for all of these trials, only the changes that probably matter most are reverted alone,
and all others together. Then the winner is measured once without the changes that seem ineffective. This configuration goes
into the reporting rounds.

The intervals hold simultaneously (see `stats.compare_rounds`), so they stay valid even though they decide which changes are
kept.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune import stats
from autotune.compare.ablation import MAX_FAILURES, SCREENING_ROUNDS, AblationResults, Change, Kept, part_of
from autotune.compare.effects import estimated, estimated_together, undoubted
from autotune.compare.noise import assumed_noise, known_noise
from autotune.compare.tiers import is_barred
from autotune.harness.protocol import MeasureRules
from autotune.knobs.catalogue import OUTSIDE_GRAPHS
from autotune.knobs.catalogue import knob as knob_of
from autotune.knobs.loader import BATCH_SIZE, NUM_WORKERS
from autotune.knobs.precision import AMP, MATMUL
from autotune.records import CHOOSING, Kind, Knobs, TrialRecord, last_round
from autotune.trials.configurations import SEARCHED, ConfigurationKey, attribution_of, configuration_key, first_of
from autotune.trials.session import Session

UNTIMED_ROUNDS = 8  # without a time budget, at most this many ablation rounds run: as many as the finals have pairs
# Without a time budget, the ablation takes at most this many times the seconds that the search took. In 200 replayed
# studies of each of two noisy programs, 2.0 instead of 1.0 brought the exported configuration from .981 to .986 of the
# optimum (mlp) and from .992 to 1.000 (transformer); studies took 20 % longer.
UNTIMED_FRAC = 2.0
VAGUE = 0.1  # an effect whose interval has a larger half-width (log scale) is vague, and gets another trial
MORE_TRIALS = 3  # after all rounds, at most this many trials per change of the winner make vague effects more precise
SETTLING_ROUNDS = 3  # if the winner seems as fast without a change, this many rounds measure it with and without the change
IDLE_LOADER_TIMES = 4.0  # if the loader is this many times as fast as the step, its settings do not matter
LITTLE_GAIN = 0.1  # a change probably matters little if its usual gain (log scale) is at most this
PLANNED_ROUNDS = 4  # measurements are so short that this many rounds fit, each with the winner and all its ablations


@dataclass(kw_only=True)
class Attribution:
    """The result of an attribution.

    Attributes:
        winner: the trial whose changes were reverted.
        best: the trial whose configuration is exported; the winner itself if nothing was dropped.
        changes: every change of the winner, largest effect first.
        together: ratio of the winner to `best`, from rounds that measured both; None if no round did.
        margin: maximum cost of dropping changes, as a fraction of the rate.
    """

    winner: TrialRecord
    best: TrialRecord
    changes: list[Change] = field(default_factory=list)
    together: stats.Ratio | None = None
    margin: float = stats.MARGIN_FRAC

    @property
    def dropped(self) -> list[Change]:
        """The changes that were reverted to the baseline's values."""
        return [change for change in self.changes if not change.is_kept]

    def minimality(self) -> dict[str, Any] | None:
        """Returns what was dropped and what that costs, as stored in the summary; None if nothing was dropped."""
        if not self.dropped:
            return None
        return {
            "winner": self.winner.number,
            "dropped": [change.as_json() for change in self.dropped],
            "ratio": self.together.ratio if self.together else None,
            "ci": self.together.ci if self.together else None,
            "num_rounds": self.together.num_rounds if self.together else 0,
            "margin": self.margin,
        }


class Attributor:
    """The ablation of a study. Rounds of earlier runs of the study count if they had the same winner.

    Attributes:
        found: the latest result; None before the first.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._estimates: dict[tuple[int, int, int, int], tuple[dict[str, stats.Ratio], dict[frozenset[str], stats.Ratio]]] = {}
        self.found: Attribution | None = None

    def run(self, winner: TrialRecord, kept: Kept) -> TrialRecord:
        """Measures until everything is decided or the time is used up. Returns the trial with the configuration to report."""
        self.found = self._attribution(winner)
        if len(winner.changed) > 1 and self._is_promising(winner):
            self._measure(winner, kept)
        return self.found.best

    def known_part(self, winner: TrialRecord) -> TrialRecord:
        """Returns the trial whose configuration would be reported without any further measurement."""
        return self._attribution(winner).best

    def _measure(self, winner: TrialRecord, kept: Kept) -> None:
        session, evidence = self._session, self._evidence(winner)
        order = random.Random(session.inputs.config.study.seed + last_round(session.records, Kind.attribution))
        knobs = self._affordable(winner, evidence, kept.rounds_s)
        skipped = [knob for knob in winner.changed if knob not in knobs]
        unknown = [knob for knob in winner.changed if math.isinf(evidence.estimate(knob))]
        if skipped and unknown:  # one trial for each change of unknown effect says more than two trials for some of them
            evidence = self._revert_once(winner, unknown, kept.least_s)
            knobs = self._affordable(winner, evidence, kept.rounds_s)
            skipped = [knob for knob in winner.changed if knob not in knobs]
        if unknown := [knob for knob in skipped if math.isinf(evidence.estimate(knob))]:
            session.listener.notice(f"No time to measure the effects of {', '.join(unknown)} one by one.")
        if skipped:
            self._without_idle(winner, kept.least_s)
        rules, is_announced = self._rules(knobs, kept.rounds_s), False
        while wanted := evidence.wanted(knobs):
            num_more = max(1, SCREENING_ROUNDS - min(map(evidence.num_rounds_of, wanted)))  # a single round shows no spread
            configurations = self._first_that_fit([winner.knobs, *(part.knobs for part in wanted)], kept.rounds_s, num_more)
            is_enough = session.budget.total_s is None and evidence.num_rounds >= UNTIMED_ROUNDS
            if len(configurations) < 2 or is_enough or self._is_lost(winner):
                break
            if not is_announced:
                session.listener.attribution_started(winner.number, knobs, self._left_s(kept.rounds_s))
                is_announced = True
            order.shuffle(configurations)
            self._measure_round(winner, configurations, rules=rules, kept_s=kept.rounds_s)
            evidence = self._evidence(winner)
        self._without_idle(winner, kept.least_s)
        self._settle(winner, kept)
        for _ in range(MORE_TRIALS * len(winner.changed)):
            if not self._refine(winner, kept.enough_s):
                break
            self._without_idle(winner, kept.least_s)

    def _refine(self, winner: TrialRecord, kept_s: float) -> bool:
        """Runs one trial for the vaguest effect; returns False if no effect is vague or there is no time.

        An effect compares the winner with and without a change. The trial measures the one of these two configurations that was
        measured less often.
        """
        evidence = self._evidence(winner)
        vague = [knob for knob in winner.changed if evidence.vagueness(knob) > VAGUE and evidence.worth(knob) != "needed"]
        for knob in sorted(vague, key=lambda knob: (evidence.is_clear(knob), -evidence.vagueness(knob))):
            part = evidence.parts[knob]
            is_winners_turn = evidence.num_measured(configuration_key(winner.changed)) <= evidence.num_measured(part.key)
            knobs = winner.knobs if is_winners_turn else part.knobs
            if self._expected_s(knobs) <= self._left_s(kept_s) and not self._is_lost(winner):
                self._measure_round(winner, [knobs], rules=self._rules(vague, kept_s), kept_s=kept_s)
                return True
        return False

    def _settle(self, winner: TrialRecord, kept: Kept) -> None:
        """Measures the winner and the parts of it that seem as fast (`parts_as_fast`).

        One round is not enough to decide, and a change must not be exported if the winner is as fast without it.
        """
        kept_s = kept.rounds_s
        for _ in range(SETTLING_ROUNDS):
            evidence = self._evidence(winner)
            parts = evidence.parts_as_fast(num_rounds=SETTLING_ROUNDS)
            needed_s = sum(map(self._expected_s, [winner.knobs, *(part.knobs for part in parts)]))
            if not parts or needed_s > self._left_s(kept_s) or self._is_lost(winner):
                break
            rules = self._rules([key for part in parts for key in part.keys], kept_s)
            self._measure_round(winner, [winner.knobs, *(part.knobs for part in parts)], rules=rules, kept_s=kept_s)

    def _without_idle(self, winner: TrialRecord, kept_s: float) -> None:
        """Measures the winner once without its ineffective changes; if that is far slower, leaves out fewer of them.

        Does nothing if every change has an effect, or if there is no time. Also does nothing if the configuration that would be
        exported now has no more changes than the one to measure.
        """
        for _ in winner.changed:
            evidence = self._evidence(winner)
            idle, minimal = evidence.idle(), evidence.minimal()
            is_known = idle and minimal and len(minimal.key) <= len(idle.key)
            if not idle or is_known or self._expected_s(idle.knobs) > self._left_s(kept_s):
                return
            self._measure_round(winner, [idle.knobs], rules=self._rules(idle.keys, kept_s), kept_s=kept_s)

    def _revert_once(self, winner: TrialRecord, knobs: Sequence[str], kept_s: float) -> AblationResults:
        """Reverts changes of unknown effect, each once. One trial is enough, since other rounds show the spread.

        Changes that probably matter most come first, each alone. The last trial that fits reverts all remaining changes that
        probably matter little. If compiling again would take too long, only changes that need no compilation are reverted.
        """
        session, rules = self._session, self._rules(knobs, kept_s)
        left, is_announced = sorted(knobs, key=lambda knob: -self._likely_effect(winner, knob)), False
        while left:
            left_s, alone = self._left_s(kept_s), part_of(session.resolved, winner, left[:1])
            little = [knob for knob in left if self._matters_little(winner, knob)]
            groups = [part_of(session.resolved, winner, keys) for keys in (little, OUTSIDE_GRAPHS.intersection(little))]
            costs_s = [(group, self._expected_s(group.knobs)) for group in groups if group.keys and group.key]
            affordable = [(group, cost_s) for group, cost_s in costs_s if cost_s <= left_s]
            has_time = any(self._expected_s(alone.knobs) + cost_s <= left_s for _, cost_s in costs_s)
            part = alone if has_time or not affordable else affordable[0][0]
            left = [knob for knob in left if knob not in part.keys]
            if self._expected_s(part.knobs) > left_s:
                continue
            if not is_announced:
                session.listener.attribution_started(winner.number, knobs, left_s)
                is_announced = True
            self._measure_round(winner, [part.knobs], rules=rules, kept_s=kept_s)
        return self._evidence(winner)

    def _likely_effect(self, winner: TrialRecord, key: str) -> float:
        """Returns the absolute difference in the log rate that a change probably makes, before it is measured.

        Knobs of the loader, except the batch size, make none if the baseline's loader is IDLE_LOADER_TIMES times as fast as the
        winner's step.
        """
        supply, demand = self._session.baseline.loader_rate, winner.device_rate
        usual = abs(knob_of(key).usual_gain)
        if not key.startswith("loader.") or key == BATCH_SIZE.key or not supply or not demand:
            return usual
        if supply >= IDLE_LOADER_TIMES * demand:
            return 0.0
        return max(usual, math.log(demand / supply)) if key == NUM_WORKERS.key else usual

    def _matters_little(self, winner: TrialRecord, key: str) -> bool:
        """Whether a change probably has little effect.

        False for a batch size, for a compilation, and for TF32 in a winner that computes in float32.
        """
        is_in_float32 = winner.knobs.get(AMP.key, "off") == "off"
        if key == BATCH_SIZE.key or knob_of(key).is_costly or (key == MATMUL.key and is_in_float32):
            return False
        return self._likely_effect(winner, key) <= LITTLE_GAIN

    def _measure_round(
        self, winner: TrialRecord, configurations: Sequence[Knobs], *, rules: MeasureRules, kept_s: float
    ) -> None:
        """Measures configurations next to each other, once each, and updates `found`.

        Each has all or some of the winner's changes. The trials get a new round number, because trials with the same round
        number count as measured next to each other.
        """
        number = last_round(self._session.records, Kind.attribution) + 1
        for knobs in configurations:
            missing = set(winner.changed) - self._session.resolved.changed(knobs).keys()
            words = f"without {', '.join(sorted(missing))}" if missing else "against its ablations"
            why = f"trial {winner.number} {words}"
            self._session.measure_part(knobs, winner=winner, round_number=number, rules=rules, why=why, kept_s=kept_s)
            self.found = self._attribution(winner)

    def _first_that_fit(self, configurations: list[Knobs], kept_s: float, num_rounds: int) -> list[Knobs]:
        """Returns the first few configurations: as many as there is time to measure `num_rounds` times each."""
        spare_s = self._left_s(kept_s) / num_rounds
        sums_s = itertools.accumulate(map(self._expected_s, configurations))
        return [found for found, sum_s in zip(configurations, sums_s, strict=True) if sum_s <= spare_s]

    def _left_s(self, kept_s: float) -> float:
        """Returns the seconds left for ablation: without a budget, UNTIMED_FRAC times the search's, minus those it has used."""
        session = self._session
        if session.budget.total_s is not None:
            return session.budget.left_s - kept_s
        spent_s = sum(record.seconds for record in session.records if record.kind is Kind.attribution)
        return UNTIMED_FRAC * sum(record.seconds for record in session.searched) - spent_s

    def _attribution(self, winner: TrialRecord) -> Attribution:
        evidence = self._evidence(winner)
        minimal = evidence.minimal()
        first = None if minimal is None else first_of(self._session.records, dict(minimal.key))
        return Attribution(
            winner=winner,
            best=first or winner,
            changes=evidence.changes(),
            together=None if minimal is None else evidence.ratio(minimal),
            margin=evidence.loss_frac,
        )

    def _evidence(self, winner: TrialRecord) -> AblationResults:
        session, trials = self._session, self._trials(winner)
        # Reporting rounds are left out, so that a resumed study decides as it did before it measured them.
        others = [one for one in undoubted(session.records) if one.kind in SEARCHED or one.why == CHOOSING]
        noise = known_noise(others, session.earlier_noise)
        lost = {knob: part_of(session.resolved, winner, [knob]).also for knob in winner.changed}
        assumed = assumed_noise([session.baseline, winner])
        measured: dict[ConfigurationKey, list[float]] = {}
        for one in [*others, *trials]:
            if one.score and one.outcome.may_win:
                measured.setdefault(configuration_key(one.changed), []).append(one.score)
        # Loss parity may rule out a trial afterwards. This changes the last number of the key, but not the number of trials.
        key = (winner.number, len(session.records), len(trials), sum(one.outcome.has_value for one in [*others, *trials]))
        if key not in self._estimates:
            records, spread = [*others, *trials], noise or assumed
            found = estimated(winner.changed, lost, records, spread)
            unknown = set(winner.changed) - found.keys()
            parts = [unknown - dict(one).keys() for one in measured if set(one) <= set(configuration_key(winner.changed))]
            joint = {
                frozenset(missing): ratio
                for missing in parts
                if len(missing) > 1 and (ratio := estimated_together(sorted(missing), winner.changed, records, spread))
            }
            self._estimates[key] = found, joint
        found, joint = self._estimates[key]
        return AblationResults(session.resolved, winner, trials, found, noise, measured, joint, assumed)

    def _trials(self, winner: TrialRecord) -> list[TrialRecord]:
        """Returns the ablation trials of this winner."""
        origin = attribution_of(winner)
        return [record for record in self._session.records if record.kind is Kind.attribution and record.origin == origin]

    def _is_promising(self, winner: TrialRecord) -> bool:
        """Whether ablation is worthwhile: the winner seems faster than the baseline, or the baseline violates a constraint."""
        baseline = self._session.baseline
        return is_barred(baseline) or (winner.score or 0.0) > (baseline.score or 0.0) * (1 + stats.MARGIN_FRAC)

    def _is_lost(self, winner: TrialRecord) -> bool:
        key = configuration_key(winner.changed)
        own = [trial for trial in self._trials(winner) if configuration_key(trial.changed) == key]
        return sum(trial.score is None and not trial.outcome.is_no_answer for trial in own) >= MAX_FAILURES

    def _affordable(self, winner: TrialRecord, evidence: AblationResults, kept_s: float) -> list[str]:
        """Returns the knobs that there is time to revert one by one.

        Knobs whose estimated effect is clear come last, because they will be kept anyway.
        """
        left_s = self._left_s(kept_s)
        by_effect = sorted(winner.changed, key=lambda knob: -self._likely_effect(winner, knob))
        knobs = sorted(by_effect, key=lambda knob: (evidence.is_clear(knob), -evidence.estimate(knob)))
        costs_s = {knob: SCREENING_ROUNDS * self._expected_s(evidence.parts[knob].knobs) for knob in knobs}
        winner_s = SCREENING_ROUNDS * self._expected_s(winner.knobs)
        done = [knob for knob in knobs if evidence.worth(knob) != "not measured"]
        if winner_s + sum(costs_s[knob] for knob in knobs if knob not in done) <= left_s:
            return knobs
        spare_s = left_s - 2 * winner_s  # each round also runs the winner, and the winner without its ineffective changes
        for knob in knobs:
            if knob not in done and costs_s[knob] <= spare_s:
                done.append(knob)
                spare_s -= costs_s[knob]
            elif knob not in done and not evidence.is_clear(knob):
                break  # single trials of this doubtful change are more useful than rounds for the clear changes
        return done

    def _rules(self, knobs: Collection[str], kept_s: float) -> MeasureRules:
        """Returns the finals' rules, with windows short enough for PLANNED_ROUNDS rounds in the time left."""
        return self._session.finals_rules((self._session.budget.left_s - kept_s) / (PLANNED_ROUNDS * (len(knobs) + 1)))

    def _expected_s(self, knobs: Knobs) -> float:
        """Returns the expected seconds of a measurement, from earlier ablation rounds or else from similar trials."""
        session = self._session
        changed = session.resolved.changed(knobs)
        key = configuration_key(changed)
        own = [r.seconds for r in session.records if r.kind is Kind.attribution and configuration_key(r.changed) == key]
        if own:
            return max(own)
        is_known = first_of(session.records, changed) is not None
        return session.costs.again_s(knobs, changed) if is_known else session.costs.expected_s(knobs, changed)
