"""Holds the state of a running study (its trials, search space and budget), and runs one more trial of any kind."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.harness.protocol import MeasureRules, RankResult
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import knob
from autotune.records import Kind, Knobs, StudyRecord, Tier, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.space import ResolvedSpace
from autotune.stats import Noise
from autotune.trials.budget import Budget, Costs, finals_rules, outlook, without_window_s
from autotune.trials.configurations import SEARCHED, attribution_of, first_of
from autotune.trials.events import Listener, Outlook
from autotune.trials.identity import SCRIPT, script
from autotune.trials.inputs import StudyInputs
from autotune.trials.interrupts import Interrupts
from autotune.trials.not_finite import NOT_FINITE, caveat, excused
from autotune.trials.objective import ColdCompiles
from autotune.trials.places import Place, slot_number
from autotune.trials.quarantine import Quarantine
from autotune.trials.runner import Finished, Request, TrialRunner
from autotune.trials.schedule import Ending, Schedule
from autotune.trials.tally import Tally

MIN_BASELINE_S = 60.0  # minimum time for the baseline, however small the budget, because a study needs a baseline
# Steps may come in cycles (harness/cycles.py). A window that opens within a cycle must be this many cycles long to hold a whole
# cycle.
LEAST_CYCLES = 2
MIN_TRIAL_S = 30.0  # minimum time limit of a trial, even if it is expected to be shorter
RACED_FRAC = 0.8  # a trial that is certainly below this share of the best rate so far is stopped early
# Minimum window of the baseline, as a multiple of the minimum window of other trials. Only the baseline looks for cycles.
BASELINE_WINDOW_TIMES = 3.0
NEIGHBOURS = "neighbours"  # `origin` of the trials that measure whether parallel trials disturb each other
OVERRUN_FACTOR = 4.0  # a trial may take this many times its expected duration


class OutOfTime(Exception):
    """A trial was not started, because even the shortest useful trial would not have ended within the budget."""


@dataclass(kw_only=True)
class Session:
    """A running study.

    Attributes:
        inputs: the study's inputs.
        folder: where everything is written.
        listener: receives the events.
        interrupts: whether the user asked to stop.
        runner: runs trials.
        quarantine: whether the device may still be used.
        budget: the time left.
        about: the content of study.json.
        after_trial: called when a trial's record is on disk; rewrites the summary.
        while_waiting: called repeatedly while trials run.
        schedule: runs trials, alone or in parallel.
        records: finished trials, by number.
        tally: statistics of all search trials.
        space: the resolved search space; None until the baseline has run.
        host_context: machine and program; None until the baseline has run.
        target: the loaders that the loader.* knobs change, as the baseline found them.
        costs: predicts how long trials take.
        memory_capacity_bytes: memory that each process of a trial may fill, as the baseline saw it; None when unknown.
        earlier_noise: spread between processes on this machine, from earlier studies; None if unknown.
    """

    inputs: StudyInputs
    folder: StudyFolder
    listener: Listener
    interrupts: Interrupts
    runner: TrialRunner
    quarantine: Quarantine
    budget: Budget
    about: StudyRecord
    after_trial: Callable[[], None] = lambda: None
    while_waiting: Callable[[], None] = lambda: None
    records: list[TrialRecord] = field(default_factory=list)
    space: ResolvedSpace | None = None
    host_context: HostContext | None = None
    target: list[dict[str, Any]] | None = None
    costs: Costs = field(default_factory=lambda: Costs({}))
    memory_capacity_bytes: int | None = None
    earlier_noise: Noise | None = None
    schedule: Schedule = field(init=False)
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self._searched = [record for record in self.records if record.kind in SEARCHED]
        self.recount()
        clock, poll_s = self.inputs.clock, self.inputs.poll_s
        self.schedule = Schedule(self.runner, self._add, lambda: self.while_waiting(), clock=clock, poll_s=poll_s)

    @property
    def resolved(self) -> ResolvedSpace:
        """The search space; valid only after the baseline."""
        assert self.space is not None
        return self.space

    @property
    def baseline(self) -> TrialRecord:
        """Trial 0."""
        return self.records[0]

    def finals_rules(self, seconds_each: float) -> MeasureRules:
        """Returns the rules for trials of the finals that may take `seconds_each`; see `budget.finals_rules`."""
        return finals_rules(self.inputs.config.measure.finals, seconds_each=seconds_each, baseline=self.baseline)

    @property
    def searched(self) -> list[TrialRecord]:
        """The search trials and the baseline."""
        return list(self._searched)

    @property
    def num_searched(self) -> int:
        """Number of search trials so far, without the baseline."""
        return len(self._searched) - 1

    def recount(self) -> None:
        """Recomputes tally and compile times. Call this after changing the record of a search trial."""
        self.tally, self._cold_compiles = Tally(self._searched), ColdCompiles(self.records)

    def outlook(self, *, is_searching: bool = True) -> Outlook:
        """Returns what is left of the study; valid only after the baseline."""
        is_warm = not self.runner.warm.why_never
        spared_s = self.baseline.phases_s.get("import", 0.0) if is_warm else 0.0
        num, again = self.schedule.num_slots, (self.baseline.knobs, self.baseline.changed)
        return outlook(
            self.budget,
            self.baseline,
            self.tally.seconds,
            warm_spares_s=spared_s,
            is_searching=is_searching,
            is_room=self.budget.fits(self.costs.expected_s(*again), again_s=self.costs.again_s(*again), has_finalist=False),
            num_slots=num,
        )

    def measure_baseline(self) -> list[RankResult]:
        """Runs trial 0 and returns its ranks' results."""
        inputs = self.inputs
        knobs: Knobs = {**inputs.command.placeholders, **inputs.space.pinned}
        rules = self.budget.screening_rules(inputs.config.measure.screening)
        rules = replace(rules, min_s=max(rules.min_s, min(BASELINE_WINDOW_TIMES * rules.min_s, rules.max_s)))
        total_s = self.budget.total_s
        request = Request(
            number=0,
            kind=Kind.baseline,
            knobs=knobs,
            changed={},
            rules=rules,
            why="the program as you run it today",
            max_s=None if total_s is None else max(MIN_BASELINE_S, self.budget.left_s),
            retry_max_s=None if total_s is None else max(MIN_TRIAL_S, total_s / 4),
        )
        return self._run(request).results

    def measure(
        self, knobs: Knobs, why: str, *, origin: str, repeats: int | None = None, round_number: int | None = None
    ) -> TrialRecord:
        """Runs a search trial and returns its record.

        Args:
            knobs: the configuration.
            why: one line on why it is tried.
            origin: what proposed it.
            repeats: in a recording, number of the trial that measured the configuration before.
            round_number: round of the recording.
        """
        record = self._run(self._searching(knobs, why, origin, repeats=repeats, round=round_number)).record
        self.costs.learn(record)
        return record

    def begin(self, knobs: Knobs, why: str, *, origin: str, take: Callable[[TrialRecord], None]) -> None:
        """Starts a search trial as soon as a slot is free.

        Args:
            knobs: the configuration.
            why: one line on why it is tried.
            origin: what proposed it.
            take: called with the finished trial, once the schedule has waited for it.
        """

        def taken(finished: Finished) -> None:
            self.costs.learn(finished.record)
            take(finished.record)

        self.schedule.make_room()
        self._prepare(request := self._searching(knobs, why, origin))
        self.schedule.begin(request, self._with_follow_up(taken))

    def _searching(self, knobs: Knobs, why: str, origin: str, **more: Any) -> Request:
        """Returns the request of a search trial."""
        changed = self.resolved.changed(knobs)
        expected_s = self.costs.expected_s(knobs, changed)
        return self._request(
            Kind.search,
            knobs,
            changed,
            why=why,
            origin=origin,
            rules=self.budget.screening_rules(self.inputs.config.measure.screening),
            race_below_per_s=self._race_below_per_s(self.resolved.tier(changed)),
            promote_above_per_s=self._promote_above_per_s(),
            max_s=self._most_s(expected_s),
            ends_s=self.budget.search_ends_s(expected_s),
            retry_max_s=self.budget.search_left_s / 4,
            **more,
        )

    def _request(self, kind: Kind, knobs: Knobs, changed: Knobs, **more: Any) -> Request:
        """Returns a request for the next trial, with the fields that all trials except the baseline share."""
        number, tier = self.folder.next_number(), self.resolved.tier(changed)
        return Request(number=number, kind=kind, knobs=knobs, changed=changed, tier=tier, target=self.target, **more)

    def _most_s(self, expected_s: float) -> float | None:
        """Returns the time limit of a trial expected to take `expected_s`; a trial that takes longer is stuck."""
        return None if self.budget.total_s is None else max(MIN_TRIAL_S, OVERRUN_FACTOR * expected_s)

    def _check_time(self, least_s: float, ends_s: float | None) -> None:
        """Raises OutOfTime if a trial that takes `least_s`, its shortest useful duration, would not end in time."""
        if ends_s is not None and self.inputs.clock.monotonic() + least_s > ends_s:
            raise OutOfTime

    def _least_again_s(self, first: TrialRecord) -> float:
        """Returns the minimum time of a finals trial: its expected start plus the longer of `race_min_s` and two cycles."""
        cycles_s = LEAST_CYCLES * (self.runner.cycle or {}).get("seconds", 0.0)
        return self.again_start_s(first) + max(self.inputs.config.measure.finals.race_min_s, cycles_s)

    def again_start_s(self, first: TrialRecord) -> float:
        """Returns the seconds outside its window that a fresh trial with the configuration of `first` is expected to take.

        The fresh trial finds what the earlier trial compiled in the compile cache.
        """
        finals = [record for record in self.records if record.kind is Kind.final and record.outcome.has_value]
        again = [record for record in finals if record.repeats == first.number]
        if again:
            return without_window_s(again[-1])
        return min(without_window_s(first) + first.spared_s, self.costs.again_s(first.knobs, first.changed))

    def _race_below_per_s(self, tier: Tier) -> float | None:
        """Returns the rate below which a search trial is stopped early; None to never stop it.

        A trial is compared only with proven rates of its own tier and of lower tiers: the best configuration of a lower tier is
        useful even if a higher tier is faster. If not only throughput decides, a low rate does not rule out a trial.
        """
        proven_per_s = self._proven_per_s(tier)
        is_fit = self.inputs.config.measure.racing and self.runner.goal.follows_rate
        return RACED_FRAC * proven_per_s if is_fit and proven_per_s is not None else None

    def _promote_above_per_s(self) -> float | None:
        """Returns the rate above which a trial is measured to a narrower interval: the highest lower bound of a rate so far."""
        return self._proven_per_s(Tier.training) if self.runner.goal.follows_rate else None

    def _proven_per_s(self, tier: Tier) -> float | None:
        """Returns the highest lower bound of a rate so far, among trials that ran like the next one: alone, or in parallel."""
        return self.tally.proven_per_s(tier, has_neighbours=self.schedule.num_slots > 1)

    def measure_again(self, first: TrialRecord, *, round_number: int, rules: MeasureRules, why: str) -> TrialRecord:
        """Runs a trial of the finals: measures the configuration of an earlier trial again in a fresh process.

        Raises:
            OutOfTime: the trial would not end in time.
        """
        least_s, ends_s = self._least_again_s(first), self.budget.ends_s()
        self._check_time(least_s, ends_s)
        request = self._request(
            Kind.final,
            first.knobs,
            first.changed,
            repeats=first.number,
            round=round_number,
            why=why,
            rules=rules,
            max_s=self._most_s(max(least_s, first.fresh_s)),
            ends_s=ends_s,
            retry_max_s=0.0,  # not repeated if it fails: its round is left out
        )
        return self._run(request).record

    def measure_part(
        self, knobs: Knobs, *, winner: TrialRecord, round_number: int, rules: MeasureRules, why: str, kept_s: float
    ) -> TrialRecord:
        """Runs an ablation trial: some or all of a winner's changes, in a fresh process.

        `kept_s` seconds of the budget are left for the trials that follow.
        """
        changed = self.resolved.changed(knobs)
        first = first_of(self.records, changed)
        expected_s = self.costs.expected_s(knobs, changed) + self.costs.spared_s
        request = self._request(
            Kind.attribution,
            knobs,
            changed,
            repeats=None if first is None else first.number,
            round=round_number,
            why=why,
            origin=attribution_of(winner),
            rules=rules,
            max_s=self._most_s(expected_s),
            ends_s=self.budget.ends_s(kept_s=kept_s),
            retry_max_s=0.0,  # a failed trial is not repeated, as in the finals
        )
        return self._run(request).record

    def first_steps(
        self, changed: Knobs, candidate: TrialRecord, *, why: str, seed: int, kept_s: float = 0.0, **limits: float
    ) -> TrialRecord:
        """Runs the seeded first steps of the baseline with some changes; returns a record with losses but no measurement.

        Args:
            changed: changes to the baseline.
            candidate: the trial whose losses are in question.
            why: one line on why it is run.
            seed: seed of random, numpy and torch.
            kept_s: seconds of the budget to leave for the trials that follow.
            limits: `max_steps` and `max_s` of the spec.

        Raises:
            OutOfTime: the trial would not end in time.
        """
        most_s, ends_s = self._most_s(max(candidate.seconds, self.baseline.seconds)), self.budget.ends_s(kept_s=kept_s)
        self._check_time(without_window_s(self.baseline), ends_s)
        max_s = None if most_s is None else most_s + limits["max_s"]
        request = self._request(
            Kind.parity,
            self.resolved.active({**self.resolved.reference, **changed}),
            changed,
            repeats=candidate.number if changed else 0,
            why=why,
            rules=self.inputs.config.measure.screening,
            max_s=max_s,
            retry_max_s=max_s,
            ends_s=ends_s,
            first_steps={"mode": "parity", "seed": seed, **limits},
        )
        return self._run(request).record

    def explain(self, record: TrialRecord, which: str, *, ends_s: float | None) -> TrialRecord:
        """Runs a pass that explains the configuration of a trial; its record has no value.

        Args:
            record: the trial.
            which: the pass, one of `documents.PASSES`.
            ends_s: moment on the clock by which the pass must be over; None for no limit.
        """
        request = self._request(
            Kind.explain,
            record.knobs,
            record.changed,
            repeats=record.number,
            why=f"{which} of trial {record.number}",
            origin=which,
            rules=self.inputs.config.measure.screening,
            max_s=max(MIN_TRIAL_S, OVERRUN_FACTOR * record.fresh_s),
            retry_max_s=0.0,
            ends_s=ends_s,
            first_steps={"mode": "explain", "explain": which},
        )
        return self._run(request).record

    def measure_check(
        self,
        first: TrialRecord,
        knobs: Knobs,
        *,
        cause: str,
        round_number: int,
        why: str,
        ends_s: float | None,
        skipped: tuple[str, ...] = (),
        is_fixed: bool = False,
    ) -> TrialRecord:
        """Measures one side of a pair in a fresh process: a configuration with or without the remedy that a finding proposes.

        Args:
            first: the trial that was explained.
            knobs: that trial's configuration, without or with the remedy.
            cause: cause of the finding.
            round_number: round of the pair.
            why: one line that names the side.
            ends_s: as in `explain`.
            skipped: stages of the loader to skip.
            is_fixed: whether this session runs a corrected version of the study's program (`explain --fixed`).
        """
        more = {"round": round_number, "why": why, "ends_s": ends_s, "skipped": skipped, "is_fixed": is_fixed}
        return self._run(self._checking(first, knobs, cause, **more)).record

    def calibrate(self, first: TrialRecord, places: Sequence[Place], *, round_number: int) -> list[TrialRecord]:
        """Measures the configuration of a trial alone, or on several slots in parallel; returns a record for each slot.

        Args:
            first: the trial.
            places: the slots; [] to measure it alone.
            round_number: round of the calibration.
        """
        finished: list[Finished] = []
        num = len(places)
        why = f"in parallel with {num - 1} other{'s' if num > 2 else ''}" if places else "alone"
        ends_s = self.budget.search_ends_s(first.fresh_s)

        def request() -> Request:
            wanted = self._checking(first, first.knobs, NEIGHBOURS, round=round_number, why=why, ends_s=ends_s)
            self._prepare(wanted)
            return wanted

        self.schedule.drain()
        if places:
            self.schedule.run_beside(request, places, self._with_follow_up(finished.append))
        else:
            self.schedule.run(request(), self._with_follow_up(finished.append))
        return [one.record for one in finished]

    def _checking(self, first: TrialRecord, knobs: Knobs, origin: str, **more: Any) -> Request:
        """Returns the request of a trial of kind `check`, which measures without being a candidate."""
        return self._request(
            Kind.check,
            knobs,
            self.resolved.changed(knobs),
            repeats=first.number,
            origin=origin,
            rules=self.inputs.config.measure.screening,
            max_s=max(MIN_TRIAL_S, OVERRUN_FACTOR * (first.fresh_s + self.compile_s(first, knobs))),
            retry_max_s=0.0,
            **more,
        )

    def compile_s(self, first: TrialRecord, knobs: Knobs) -> float:
        """Returns the expected seconds of compiling for values in `knobs` that need it and that trial `first` did not have."""
        changed = self.resolved.changed(knobs)
        new = [key for key in changed if knob(key).is_costly and changed[key] != first.knobs.get(key)]
        return math.fsum(self.costs.compile_s(key, changed[key]) for key in new)

    def _run(self, request: Request) -> Finished:
        """Runs a trial alone, and returns it."""
        finished: list[Finished] = []
        self.schedule.drain()
        self._prepare(request)
        self.schedule.run(request, self._with_follow_up(finished.append))
        return finished[0]

    def _prepare(self, request: Request) -> None:
        """Checks that a trial may begin, and completes its request."""
        if self.interrupts.is_requested:
            raise Ending
        was = self.about.identity.get(SCRIPT)
        if was and was != script(self.inputs.command):
            name = was.partition(" (")[0]
            raise Ending(f"{name} was edited or removed while the study ran; restore it before you continue")
        request.cold_compile_s = self._cold_compiles.seconds(request.knobs)
        if self.records:
            is_searching = request.kind is Kind.search and not self.inputs.is_recording
            self.listener.time_left(self.outlook(is_searching=is_searching))

    def _with_follow_up(self, take: Callable[[Finished], None]) -> Callable[[Finished], None]:
        """Returns a callback for a finished trial: it does what is due after every trial, then calls `take`."""

        def taken(finished: Finished) -> None:
            self.after_trial()
            # A pass that fails says nothing about the device: the same configuration trained before.
            is_pass = finished.record.kind is Kind.explain
            fault = "" if is_pass else self.quarantine.note(finished.record)
            if fault and not self._goes_on_without(finished.record.slot, fault):
                raise Ending(fault)
            take(finished)

        return taken

    def _goes_on_without(self, slot: str, fault: str) -> bool:
        """Leaves out a slot with a faulty device; returns False for the first slot, which the study cannot do without."""
        if not self.runner.can_do_without(slot_number(slot)):
            return False
        self.schedule.leave_out([slot_number(slot)])
        self.listener.notice(f"The study goes on without slot {slot}: {fault.removesuffix(f' {self.quarantine.advice}')}")
        return True

    def _add(self, finished: Finished) -> None:
        record = finished.record
        for records in (self.records, *([self._searched] if record.kind in SEARCHED else [])):
            bisect.insort(records, record, key=lambda one: one.number)  # a baseline that is measured late still comes first
        self._cold_compiles.add(record)
        if record.kind in SEARCHED:
            self.tally.add(record)
        if not record.changed and NOT_FINITE in record.evidence and record.is_of_program:
            self.learn_excuses()

    def learn_excuses(self) -> None:
        """Excuses values that are not finite even in the unchanged program; notifies the user of new excuses."""
        known, self.runner.excused = self.runner.excused, excused(self.records)
        if self.runner.excused - known:
            text = caveat(self.records)
            self.listener.notice(f"{text[:1].upper()}{text[1:]}.")
