"""Prints how close searches come to the optimum of simulated machines with thousands of configurations, and how soon.

    python -m tests.benchmarks.search                                    # machines for developing the search
    python -m tests.benchmarks.search --held-out --seeds 20              # machines for judging the search
    python -m tests.benchmarks.search --calibration                      # also compares forecasts with the truth
    python -m tests.benchmarks.search --own-time                         # CPU seconds of one proposal after 100 to 3,000 trials
    python -m tests.benchmarks.search --strategies default --pending 1,4,16   # with 1, 4 and 16 trials in parallel
    python -m tests.benchmarks.search --held-out --seeds 20 --file FILE  # after an interruption, the same command continues

The machines are in `tests/search/machines.py`. The fraction of the optimum's true rate is given after a number of trials, and
after the seconds that this number of average trials takes. Machines on which the unchanged program does not fit are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.plain_json import from_json
from autotune.quantities import seconds_text
from autotune.replay.figures import at_seconds, at_trials
from autotune.replay.strategies import SLOTS, strategy
from autotune.replay.study import Limits, Replayed, replay
from autotune.search.rates.history import Known
from autotune.search.rates.sampler import RatesSampler
from autotune.search.rates.step import Proposed, Step, calibration
from tests.search.machines import DEVELOPMENT, HELD_OUT, SimulatedWorld, machine, ranked

STRATEGIES = "default,expert,tpe,tpe+seeds,random"
AT = (10, 20, 40)
MEAN_TRIAL_S = 30.0  # length of an average trial, for the comparison by seconds
NEAR = 0.99  # a study counts as near the optimum if it ends with at least this fraction
INTERVAL_Z = 1.6449  # half-width of a 90 % interval, in standard deviations
NUM_ASKED = 300  # configurations whose forecasts are compared with the truth, at each of ASKED_AT trials
ASKED_AT = (6, 12, 24)
NUM_DRAWS = 1000  # posterior samples that decide how likely an open configuration is faster than all that were tried
UNSURE = 0.02, 0.98  # forecasts of memory are compared with the truth where the chance to fit is within this range


@dataclass(kw_only=True)
class Forecasts:
    """Forecasts compared with the truth.

    Attributes:
        chances: (forecast chance to fit, whether it fits) for configurations that were not tried.
        proposed: error of the forecast rate of each proposal, in standard deviations of the forecast.
        rates: the same for configurations that were not tried.
        peaks: the same for the memory of untried configurations whose chance to fit is uncertain (within UNSURE).
        regret: true regret of a search that ended because no improvement was expected; None if it ended otherwise.
        tried_regret: the regret if the search had chosen the truly best configuration it tried; the rest is due to noise.
        chosen_regret: the regret after the finals' choosing rounds, which prefer the fewest changes among about equal ones.
        chance_of_right: the sampler's last forecast of the chance that `tried_regret` is at most 1 %.
    """

    chances: list[tuple[float, bool]] = field(default_factory=list)
    proposed: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    regret: float | None = None
    tried_regret: float | None = None
    chosen_regret: float | None = None
    chance_of_right: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One study to simulate."""

    machine: int
    strategy: str
    seed: int
    trials: int | None
    minutes: float | None
    is_asked: bool = False
    pending: int = 1

    @property
    def name(self) -> str:
        """Name of the strategy, with the number of trials that run in parallel."""
        return self.strategy if self.pending == 1 else f"{self.strategy}, {self.pending} pending"


def study_of(job: Job) -> tuple[Replayed, Forecasts]:
    """Returns a simulated study, and its sampler's forecasts if the job asks for them."""
    one = machine(job.machine)
    world = SimulatedWorld(one, seed=job.seed)
    limits, found = Limits(trials=job.trials, minutes=job.minutes), Forecasts()
    how = strategy(job.strategy if job.pending == 1 else f"{job.strategy}:{SLOTS}={job.pending}")
    run = functools.partial(replay, one.table(), one.grid(), how, seed=job.seed, limits=limits, world=world)
    made = _asking(run, world, found, job.seed) if job.is_asked else run()
    if "no improvement is expected" in made.reason:
        found.regret, found.tried_regret = 1 - made.steps[-1].fraction, 1 - world.best_tried
        found.chosen_regret = 1 - (made.choice or made.steps[-1]).fraction
    return made, found


def _asking(run: Callable[[], Replayed], world: SimulatedWorld, found: Forecasts, seed: int) -> Replayed:
    """Runs a study and records its sampler's forecasts."""
    propose, rng, one = RatesSampler._propose, np.random.default_rng(seed), world.machine
    improvement, draw, num = Step._improvement, np.random.default_rng([seed, 1]), 0

    def asked(self: RatesSampler, study: Any, trial: Any, distributions: Any) -> Proposed:
        nonlocal num
        found.chance_of_right = 1.0  # unless `improved` finds open configurations
        made = propose(self, study, trial, distributions)
        if made.is_fallback:
            return made
        num += 1
        drawn = [{key: values[int(rng.integers(len(values)))] for key, values in one.domains.items()} for _ in range(NUM_ASKED)]
        asked_of = [dict(made.params), *(drawn if num in ASKED_AT else [])]
        asked_of = [dict(self.rules.active(params)) for params in asked_of]
        for place, (params, forecast) in enumerate(zip(asked_of, _forecasts(self, study, asked_of), strict=True)):
            truth, (log_rate, spread, chance_to_fit, (peak, peak_spread)) = one.truth({**one.reference, **params}), forecast
            if place:
                found.chances.append((chance_to_fit, bool(truth.peak_frac <= 0.985)))
            if place and math.isfinite(peak):
                found.peaks.append((truth.peak_frac - peak) / peak_spread)
            if truth.rate:
                z = (math.log(truth.rate) - log_rate) / spread
                (found.rates if place else found.proposed).append(z)
        return made

    def improved(self: Step, reference: Any, codes: Any, works: Any) -> float:
        draws = self._forecast.draws(np.vstack([self._winners, codes]), num=NUM_DRAWS, rng=draw)
        does_work = draw.random((len(codes), NUM_DRAWS)) < works[:, None]
        tried, others = np.split(draws, [len(self._winners)])
        fastest = np.where(does_work, others, -math.inf).max(axis=0)
        chance = float((tried.max(axis=0) >= fastest + math.log(NEAR)).mean())
        found.chance_of_right = min(chance, found.chance_of_right or 0.0)
        return improvement(self, reference, codes, works)

    RatesSampler._propose, Step._improvement = asked, improved  # type: ignore[method-assign]
    try:
        return run()
    finally:
        RatesSampler._propose, Step._improvement = propose, improvement  # type: ignore[method-assign]


def _forecasts(
    sampler: RatesSampler, study: Any, configurations: Sequence[Any]
) -> list[tuple[float, float, float, tuple[float, float]]]:
    """Returns forecasts: log of the rate and its standard deviation, chance to fit, (memory, its standard deviation).

    The memory is NaN unless the chance to fit is within UNSURE.
    """
    known = Known(one for one in sampler._history.seen(study) if not one.is_running)
    machine, coding = sampler._machine(study), sampler._coding(sampler._distributions or {}, known)
    codes = coding.encode(configurations)
    expected = sampler._fitting(coding, known, machine).expected(codes, codes[:1])
    spreads = expected.own_spread * calibration(codes, coding.encode([one.params for one in known.rated]))
    memory = sampler._memory(known, machine)
    chances = memory.chances(configurations).tolist()
    peaks = [
        memory.fraction(params) if UNSURE[0] < chance < UNSURE[1] else (math.nan, math.nan)
        for params, chance in zip(configurations, chances, strict=True)
    ]
    return list(zip(expected.mean.tolist(), spreads.tolist(), chances, peaks, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search", description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default=STRATEGIES, help="names as for `autotune replay --sampler`, our own first")
    parser.add_argument("--seeds", type=int, default=5, help="studies of each strategy on each machine")
    parser.add_argument("--trials", type=int, default=40, help="search trials of a study")
    parser.add_argument("--minutes", type=float, default=None, help="limit studies by simulated minutes instead of trials")
    parser.add_argument("--held-out", action="store_true", help="use the machines for judging, not those for development")
    parser.add_argument("--machines", default="", help="only these seeds, as in 3,7")
    parser.add_argument("--calibration", action="store_true", help="also compare forecasts with the truth; only for `default`")
    parser.add_argument("--own-time", action="store_true", help="times one proposal after many trials")
    parser.add_argument("--pending", default="1", help="numbers of trials in parallel, as in 1,4,16; not for rivals")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--file", type=Path, help="stores studies, which are not simulated again; a new file for each version")
    options = parser.parse_args(words)
    if options.own_time:
        return _print_own_time()
    asked = [int(word) for word in options.machines.split(",") if word] or list(HELD_OUT if options.held_out else DEVELOPMENT)
    seeds = _with_baseline(asked)
    names = ["default"] if options.calibration else options.strategies.split(",")
    limit = {"trials": None if options.minutes else options.trials, "minutes": options.minutes}
    jobs = [
        Job(machine=seed, strategy=name, seed=number, is_asked=options.calibration, pending=pending, **limit)
        for seed in seeds
        for name in names
        for pending in map(int, options.pending.split(","))
        for number in range(options.seeds)
    ]
    found = _studies(jobs, options.jobs, options.file)
    if options.calibration:
        grouped: dict[int, list[Forecasts]] = {}
        for job, (_, forecasts) in zip(jobs, found, strict=True):
            grouped.setdefault(job.machine, []).append(forecasts)
        _print_calibration(grouped)
        print()
    by: dict[tuple[int, str], list[Replayed]] = {}
    for job, (made, _) in zip(jobs, found, strict=True):
        by.setdefault((job.machine, job.name), []).append(made)
    _print_tables(by, seeds, list(dict.fromkeys(job.name for job in jobs)))
    return 0


def _with_baseline(seeds: Sequence[int]) -> list[int]:
    """Returns the machines that can run the unchanged program, and prints the others: a study on them ends at once."""
    found = []
    for seed in seeds:
        one = machine(seed)
        if one.truth(one.reference).rate:
            found.append(seed)
        else:
            print(f"{one.name} left out: the unchanged program needs more memory than it has")
    if not found:
        raise SystemExit("no machine is left")
    return found


def _studies(jobs: Sequence[Job], num_jobs: int, file: Path | None) -> list[tuple[Replayed, Forecasts]]:
    """Returns each job's study: from the file, or else simulated and added to the file."""
    found = {}
    for line in file.read_text().splitlines() if file and file.exists() else []:
        job, made, forecasts = json.loads(line)
        found[from_json(job, Job)] = from_json(made, Replayed), from_json(forecasts, Forecasts)
    new = [job for job in jobs if job not in found]
    for job, study in zip(new, _simulated(new, num_jobs), strict=True):
        found[job] = study
        if file:
            with file.open("a") as kept:
                kept.write(json.dumps([asdict(part) for part in (job, *study)]) + "\n")
    return [found[job] for job in jobs]


def _simulated(jobs: Sequence[Job], num_jobs: int) -> Iterator[tuple[Replayed, Forecasts]]:
    if num_jobs == 1:
        yield from map(study_of, jobs)
        return
    with ProcessPoolExecutor(max_workers=num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(study_of, jobs, chunksize=max(1, len(jobs) // (16 * num_jobs)))


HEAD = (
    f"{'':24} {'10':>6} {'20':>6} {'40':>6} {'p10@20':>6} | {'s10':>6} {'s20':>6} {'s40':>6} | {'final':>6} {'stop':>4} "
    f"{'oom%':>5} {'near%':>5} {'own s':>5} {'time':>10}"
)


def _print_tables(by: dict[tuple[int, str], list[Replayed]], seeds: Sequence[int], names: Sequence[str]) -> None:
    print(f"median fraction of the optimum after 10, 20, 40 trials, p10 after 20; after the seconds of as many trials of "
          f"{MEAN_TRIAL_S:.0f} s; handed over;\ntrials at the stop; share out of memory of the first 20; share of studies "
          f"that end at {NEAR} or more; own CPU seconds; seconds of trials\n")  # fmt: skip
    print(HEAD)
    for seed in seeds:
        one = machine(seed)
        over = ranked(seed)[0][0] / (one.truth(one.reference).rate or math.nan)
        print(f"{one.name}: {one.size:,} configurations, optimum {over:.2f}x the baseline")
        for name in names:
            print(_line(name, by[seed, name]))
    print("all together")
    for name in names:
        print(_line(name, [made for (_, strategy_name), group in by.items() if strategy_name == name for made in group]))


def _line(name: str, group: Sequence[Replayed]) -> str:
    trials = [_median(at_trials(made.path, num) for made in group) for num in AT]
    low = float(np.quantile([at_trials(made.path, 20) for made in group], 0.1))
    seconds = [_median(at_seconds(made.path, num * MEAN_TRIAL_S) for made in group) for num in AT]
    ended = [step.outcome.is_memory for made in group for step in made.steps[1:21]]
    near = statistics.mean(made.final_fraction >= NEAR for made in group)
    own, total = _median(made.own_s for made in group), seconds_text(_median(made.total_s for made in group))
    stop = _median(len(made.steps) - 1 for made in group)
    return (
        f"  {name:22} {trials[0]:6.3f} {trials[1]:6.3f} {trials[2]:6.3f} {low:6.3f} | {seconds[0]:6.3f} {seconds[1]:6.3f} "
        f"{seconds[2]:6.3f} | {_median(made.final_fraction for made in group):6.3f} {stop:4.0f} "
        f"{100 * statistics.mean(ended):5.1f} {100 * near:5.0f} {own:5.1f} {total:>10}"
    )


def _print_calibration(found: Mapping[int, Sequence[Forecasts]]) -> None:
    """Prints how often forecasts hold. Standard errors are over machines, as the errors on one machine have a common cause."""
    print("forecast chance to fit of untried configurations: share that fits, standard error over machines")
    for low, high in ((0.0, 0.05), (0.05, 0.25), (0.25, 0.75), (0.75, 0.85), (0.85, 0.95), (0.95, 1.01)):
        inside = [[fits for one in group for chance, fits in one.chances if low <= chance < high] for group in found.values()]
        print(f"  {low:4.2f} to {min(high, 1.0):4.2f}  {_share(inside)}")
    for what, name in (
        ("rate of proposals", "proposed"), ("rate of others", "rates"), ("memory of others that may or may not fit", "peaks"),
    ):  # fmt: skip
        errors = [[z for one in group for z in getattr(one, name)] for group in found.values()]
        share = _share([[abs(z) <= INTERVAL_Z for z in group] for group in errors])
        median = _median(z for group in errors for z in group) if any(errors) else math.nan
        print(f"90 % intervals, {what}: {share} hold the truth; median z {median:+.2f}")
    stopped = [[one for one in group if one.regret is not None] for group in found.values()]
    for what, name in (
        ("", "regret"), (" after the choosing rounds", "chosen_regret"),
        (" if the best of the tried were known", "tried_regret"),
    ):  # fmt: skip
        share = _share([[getattr(one, name) <= 1 - NEAR for one in group] for group in stopped])
        print(f"studies that stopped because no improvement was expected: regret at most 1 %{what}: {share}")
    print("forecast chance at the stop that no untried configuration is over 1 % faster than the best tried one: true share")
    for low, high in ((0.0, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 1.01)):
        inside = [
            [(one.tried_regret or 0.0) <= 1 - NEAR for one in group if low <= (one.chance_of_right or 0.0) < high]
            for group in stopped
        ]
        print(f"  {low:4.2f} to {min(high, 1.0):4.2f}  {_share(inside)}")


def _share(groups: Iterable[Sequence[bool]]) -> str:
    """Returns the share of true values over all groups, with a standard error that treats each group as one unit."""
    filled = [group for group in groups if group]
    num = sum(map(len, filled))
    if not num:
        return "    -  of 0"
    share = sum(map(sum, filled)) / num
    squares = sum((sum(group) - share * len(group)) ** 2 for group in filled)
    error = math.sqrt(squares * len(filled) / (len(filled) - 1)) / num if len(filled) > 1 else math.nan
    return f"{100 * share:5.1f} % +- {100 * error:.1f} of {num:,} on {len(filled)} machines"


def _print_own_time() -> int:
    """Prints the CPU seconds of one proposal in a large space."""
    import optuna
    from threadpoolctl import threadpool_limits

    from autotune.search import begin_study, make_sampler
    from autotune.search.rates import MEASURED, Machine

    one = machine(11)
    points = [knobs for _, knobs in ranked(11)]
    distributions = {key: optuna.distributions.CategoricalDistribution(values) for key, values in one.domains.items()}
    print(f"{one.name}: {one.size:,} configurations, {len(one.domains)} knobs; median of 5 proposals, on one core")
    threadpool_limits(1)
    for num in (100, 300, 1000, 3000):
        sampler = make_sampler("rates", seed=0, distributions=distributions)
        facts = Machine(num_cores=16, memory_bytes=one.device.memory_bytes)
        study = begin_study(None, "s", sampler, machine=facts)
        rng = np.random.default_rng(0)
        for place in rng.choice(len(points), size=num, replace=False):
            knobs, truth = points[place], one.truth(points[place])
            told = {
                "outcome": "ok", "rate": truth.rate, "device_rate": truth.device, "loader_rate": truth.loader,
                "regime": "separate", "peak_memory_bytes": truth.peak_frac * one.device.memory_bytes, "seconds": 30.0,
            }  # fmt: skip
            study.add_trial(
                optuna.trial.create_trial(
                    values=[truth.rate], params=knobs, distributions=distributions, user_attrs={MEASURED: told}
                )
            )
        taken = []
        for _ in range(6):
            begun = time.process_time()
            trial = study.ask()
            for key, values in one.domains.items():
                trial.suggest_categorical(key, values)
            taken.append(time.process_time() - begun)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        print(f"  {num:5,} trials  {1000 * statistics.median(taken[1:]):8.1f} ms  (first {1000 * taken[0]:.1f} ms)", flush=True)
    return 0


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


if __name__ == "__main__":
    raise SystemExit(main())
