"""Replays one study on a table, with the real loop from the baseline to the verdict, and judges the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from autotune import stats
from autotune.clock import VirtualClock
from autotune.compare.verify import compare
from autotune.config.command import CommandTemplate
from autotune.config.compose import typed
from autotune.config.schema import Budget, StudyConfig
from autotune.errors import NothingWorked
from autotune.masking import Secrets
from autotune.records import CHOOSING, REPORTED, THROUGHPUT, Kind, Knobs, Outcome, Summary, TrialRecord
from autotune.replay.folder import NoFolder
from autotune.replay.launcher import ReplayLauncher
from autotune.replay.space import Grid
from autotune.replay.strategies import Strategy
from autotune.replay.table import Key, Table, key_of
from autotune.replay.world import Use, World
from autotune.study import Listener, StudyInputs, run_study
from autotune.study.interference import Uncalibrated
from autotune.study.proposals import Search
from autotune.trials.session import Session

POLL_S = 1.0  # seconds of the replay's virtual clock between two checks of trials that run in parallel

VERIFY_ROUNDS = 4  # number of rounds that `autotune verify` measures
FRESH = "off"
# Settings of the recording that a replay ignores. Racing, for example, was off in the recording, and is on in a replay.
NOT_REPLAYED = ("measure.racing", "launch.", "train.")


@dataclass(kw_only=True)
class Limits:
    """When a replayed study ends, as in study.budget: number of search trials, minutes of recorded time; None for no limit."""

    trials: int | None = 40
    minutes: float | None = None


@dataclass(kw_only=True)
class Step:
    """State of a study after a search trial, after the finals' choosing rounds, or after the attribution.

    The choosing rounds are the first rounds of the finals and choose the winner. The attribution then measures what each of the
    winner's changes contributes, and drops changes without an effect.

    Attributes:
        trials: number of trials so far, including those of choosing rounds and attribution, but not the baseline.
        seconds: recorded seconds so far, including the baseline.
        fraction: true rate of the best configuration so far, divided by the true rate of the optimum.
        outcome: how the trial ended.
    """

    trials: int
    seconds: float
    fraction: float
    outcome: Outcome = Outcome.ok


@dataclass(kw_only=True)
class Claim:
    """What the verdict claims about its winner, compared with the truth.

    Attributes:
        ratio, ci: the reported speed-up over the baseline.
        overstated_frac: by how much the winner's reported rate exceeds its true rate, as a fraction of the true rate.
        is_truth_inside: whether the reported interval of the winner's rate contains the true rate (itself an estimate).
        is_verified: whether a simulated later `verify` agrees with the claim. It agrees if the interval of (measured speed-up /
            claimed speed-up) contains 1. None if there is no interval.
        verdict: the verdict of `verify`: "holds", "no longer holds" or "ambiguous".
    """

    ratio: float
    ci: tuple[float, float] | None
    overstated_frac: float
    is_truth_inside: bool | None
    is_verified: bool | None
    verdict: str


@dataclass(kw_only=True)
class Replayed:
    """A replayed study.

    Attributes:
        steps: state after each trial of the search; the first is the baseline.
        choice: state after the finals' choosing rounds; None without such rounds, or if nothing was chosen.
        reason: why the search ended.
        apart: state after the attribution; None if there was no attribution.
        final_fraction: true rate of the exported configuration, divided by the true rate of the optimum. Without a winner, the
            baseline counts as exported.
        needless: knobs whose change is exported although it has no effect in the table, see `World.needless`.
        total_s: recorded seconds of everything, including finals and attribution.
        claim: what the verdict claims about the winner; None if it does not claim that the winner is faster than the baseline.
        own_s: CPU time that the replay took, mostly in the sampler.
    """

    steps: list[Step] = field(default_factory=list)
    choice: Step | None = None
    reason: str = ""
    apart: Step | None = None
    final_fraction: float = 0.0
    needless: list[str] = field(default_factory=list)
    total_s: float = 0.0
    claim: Claim | None = None
    own_s: float = 0.0

    @property
    def path(self) -> list[Step]:
        """The steps of the search, then those of the choosing rounds and the attribution."""
        return [*self.steps, *(step for step in (self.choice, self.apart) if step)]


def _search_on_all_slots(session: Session) -> Search:
    """Returns a search that uses all slots from the first trial on. It does not measure whether parallel trials interfere."""
    session.schedule.num_slots = len(session.runner.beside)
    return Search(session, Uncalibrated(session))


class _Watcher(Listener):
    """Records the trials of search, choosing rounds and attribution, with their end times, and what was chosen."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        self.searched: list[tuple[TrialRecord, float]] = []
        self.choosing: list[tuple[TrialRecord, float]] = []
        self.parts: list[tuple[TrialRecord, float]] = []  # attribution trials of the latest choice
        self.num_parts_before = 0  # number of attribution trials of earlier choices, which were discarded
        self.chosen: Key | None = None
        self.reported: Key | None = None
        self._world, self._clock = world, clock

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        is_search = kind in (Kind.baseline, Kind.search)
        of_finals = Use.parts if kind is Kind.attribution else Use.choice if why == CHOOSING else Use.report
        self._world.serves = Use.search if is_search else of_finals

    def trial_ended(self, trial: TrialRecord) -> None:
        if trial.kind in (Kind.baseline, Kind.search):
            self.searched.append((trial, self._clock.now_s))
        elif trial.why == CHOOSING:
            self._begin_anew()
            self.choosing.append((trial, self._clock.now_s))
        elif trial.kind is Kind.attribution:
            self.parts.append((trial, self._clock.now_s))
        elif trial.why == REPORTED and trial.repeats:
            self._choose(trial.repeats)
            self.reported = self.reported or key_of(trial.changed)

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        self._choose(trial)

    def _begin_anew(self) -> None:
        """Discards the choice and its attribution when the finals choose again."""
        self.num_parts_before += len(self.parts)
        self.parts, self.chosen, self.reported = [], None, None

    def _choose(self, number: int) -> None:
        """Records the first choice, before the attribution drops some of its changes."""
        if self.chosen is None:
            self.chosen = next((key_of(record.changed) for record, _ in self.searched if record.number == number), None)


def config_of(table: Table, strategy: Strategy) -> StudyConfig:
    """Returns the configuration of a replayed study: the recorded settings, overridden by the strategy's settings."""
    raw = OmegaConf.structured(StudyConfig)
    settings = {key: value for key, value in table.settings.items() if not key.startswith(NOT_REPLAYED)}
    for key, value in {**settings, **strategy.keys}.items():
        OmegaConf.update(raw, key, value, merge=True)
    config = typed(raw)
    config.objective = THROUGHPUT
    config.launch.warm, config.explain.auto = FRESH, False  # as in the recording, where trials start fresh
    config.train.global_batch = table.settings.get("train.global_batch")
    return config


def replay(
    table: Table,
    grid: Grid,
    strategy: Strategy,
    *,
    seed: int,
    limits: Limits,
    world: World | None = None,
) -> Replayed:
    """Runs the real study loop on a recorded table of measurements instead of a machine.

    Args:
        table: the recording.
        grid: the part of the table that can be searched.
        strategy: how to search.
        seed: seed of everything random: held-out repeats, the order of repeats, the sampler.
        limits: when the study ends.
        world: serves the measurements, for example of a simulated machine; None to serve the measurements of the table.
    """
    begun_s = time.process_time()
    world, clock = world or World(table, grid.keys, seed=seed), VirtualClock(start_s=0.0)
    watcher = _Watcher(world, clock)
    config = config_of(table, strategy)
    config.study.seed, config.study.budget = seed, Budget(minutes=limits.minutes, trials=limits.trials)
    inputs = StudyInputs(
        title=table.workload,
        config=config,
        yaml="",
        space=grid.space,
        command=CommandTemplate(parts=["replayed"], placeholders=table.placeholders, is_recipe=table.is_recipe, cwd="/"),
        launcher=ReplayLauncher(table, world, clock, num_slots=strategy.num_slots),
        machine=table.machine,
        secrets=Secrets(),
        clock=clock,
        search=strategy.search or (_search_on_all_slots if strategy.num_slots > 1 else None),
        poll_s=POLL_S,
    )
    try:
        summary = run_study(inputs, NoFolder(), watcher)
    except NothingWorked as failure:
        summary = {"reason": str(failure).partition("\n")[0], "best": None, "speedup": None}
    made = _judged(watcher, summary, world)
    made.total_s, made.own_s = clock.now_s, time.process_time() - begun_s
    return made


def _judged(watched: _Watcher, summary: Summary, world: World) -> Replayed:
    made = Replayed(reason=str(summary.get("reason") or ""))
    best: tuple[float, Key] = (0.0, key_of({}))
    for number, (record, seconds) in enumerate(watched.searched):
        if record.outcome.may_win and (record.score or 0.0) > best[0]:
            best = (record.score or 0.0, key_of(record.changed))
        step = Step(trials=number, seconds=seconds, fraction=world.fraction(best[1], Use.search), outcome=record.outcome)
        made.steps.append(step)
    num = len(made.steps) - 1 + len(watched.choosing) + watched.num_parts_before
    if watched.choosing and watched.chosen is not None:
        fraction = world.fraction(watched.chosen, Use.search, Use.choice)
        made.choice = Step(trials=num, seconds=watched.choosing[-1][1], fraction=fraction)
    handed: dict[str, Any] = summary.get("best") or {"overrides": {}}
    made.final_fraction = world.final_fraction(key_of(handed["overrides"]))
    made.needless = world.needless(handed["overrides"])
    if watched.parts:
        left = watched.reported or key_of(handed["overrides"])
        is_whole = left == watched.chosen  # no change was dropped, so the fraction is known
        fraction = made.path[-1].fraction if is_whole else world.fraction(left, Use.search, Use.choice, Use.parts)
        made.apart = Step(trials=num + len(watched.parts), seconds=watched.parts[-1][1], fraction=fraction)
    made.claim = _claim(summary, world)
    return made


def _claim(summary: Summary, world: World) -> Claim | None:
    """Returns the study's claim compared with the truth; None if nothing is claimed to be faster."""
    best, speedup = summary.get("best"), summary.get("speedup")
    if not best or not best["overrides"] or best.get("measured_in") != "finals" or not speedup:
        return None
    if speedup.get("verdict") != "faster":
        return None
    changed: Knobs = best["overrides"]
    key, truth = key_of(changed), world.held_out(key_of(changed))
    claimed = stats.Ratio(
        ratio=speedup["ratio"],
        ci=tuple(speedup["ci"]) if speedup.get("ci") else None,
        num_rounds=int(speedup.get("num_rounds") or 1),
        freedom=speedup.get("freedom"),
        error=speedup.get("error"),
    )
    pairs = [(world.another(key).value, world.another(key_of({})).value) for _ in range(VERIFY_ROUNDS)]
    complete = [(own, other) for own, other in pairs if own and other]
    is_verified, verdict = None, "ambiguous"
    if complete:
        now = stats.paired_ratio([own for own, _ in complete], [other for _, other in complete])
        compared = compare(claimed, now, float(speedup.get("margin") or stats.MARGIN_FRAC))
        verdict = compared.verdict
        is_verified = None if compared.left.ci is None else compared.left.ci[0] <= 1 <= compared.left.ci[1]
    ci = best.get("ci")
    return Claim(
        ratio=claimed.ratio,
        ci=claimed.ci,
        overstated_frac=best["value"] / truth - 1 if truth else 0.0,
        is_truth_inside=ci[0] <= truth <= ci[1] if ci else None,
        is_verified=is_verified,
        verdict=verdict,
    )
