"""Simulated steps with a known true rate, and simulated studies of configurations with known rates."""

import math
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np

from autotune.clock import VirtualClock
from autotune.compare.decision import Decision
from autotune.compare.finals import Finals
from autotune.harness.meter import DONE, Meter
from autotune.harness.protocol import MeasureRules, RankResult
from autotune.records import Kind, TrialRecord
from autotune.stats import Noise
from autotune.trials.budget import Budget
from autotune.trials.events import Listener
from autotune.trials.session import Session
from autotune.trials.trial_metrics import interval, why_no_interval
from tests.support.records import a_trial


def lognormal(state: np.ndarray, spread: float) -> np.ndarray:
    """Turns standard normal values into factors with mean 1 and relative standard deviation `spread`."""
    sigma = math.sqrt(math.log(1 + spread**2))
    return np.exp(sigma * state - sigma**2 / 2)


def autocorrelated(rng: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """Returns a stationary AR(1) series with standard normal values."""
    from scipy.signal import lfilter  # not at the top: every worker of pytest would import it

    shocks = rng.normal(size=count) * math.sqrt(1 - rho**2)
    shocks[0] = rng.normal()
    return lfilter([1.0], [1.0, -rho], shocks)


def in_bursts(rng: np.random.Generator, count: int, *, workers: int, step_s: float, spread: float) -> np.ndarray:
    """Returns step times in bursts: after one long wait, all `workers` batches are ready at once."""
    waits = workers * step_s * 0.8 * lognormal(rng.normal(size=-(-count // workers)), spread)
    steps = np.full((len(waits), workers), 0.2 * step_s)
    steps[:, 0] += waits
    return steps.ravel()[rng.integers(workers) :][:count]  # the window may open in the middle of a burst


def behind_workers(rng: np.random.Generator, count: int, *, workers: int, step_s: float, spread: float) -> np.ndarray:
    """Returns the times of steps that wait for `workers`. The workers take turns, prefetch two batches and vary in speed."""
    makes = workers * step_s * lognormal(rng.normal(size=count + 100), spread)
    ready, done = np.zeros(count + 100).tolist(), np.zeros(count + 100).tolist()
    for i, make_s in enumerate(makes.tolist()):
        free_at = max(ready[i - workers] if i >= workers else 0.0, done[i - 2 * workers] if i >= 2 * workers else 0.0)
        ready[i] = free_at + make_s
        done[i] = max(done[i - 1] if i else 0.0, ready[i]) + 0.1 * step_s
    return np.diff(done)[99:]


def with_pauses(rng: np.random.Generator, count: int, *, step_s: float, chance: float, factor: float) -> np.ndarray:
    """Returns step times. A random fraction `chance` of the steps takes `factor` times as long."""
    return step_s * lognormal(rng.normal(size=count), 0.05) * np.where(rng.random(count) < chance, factor, 1.0)


def measured(steps_s: Iterable[float], *, width: int = 1, rules: MeasureRules | None = None) -> RankResult:
    """Measures steps as the harness does, with warm-up and window, until the meter is done; returns the result."""
    meter = Meter(rules or MeasureRules(), width)
    for step_s in steps_s:
        if meter.feed(step_s, 1.0) == DONE:
            break
    else:
        raise AssertionError(f"not enough steps: {meter.phase}")
    window = meter.window()
    assert window is not None
    return RankResult(
        trial=0, nonce="", rank=0, world_size=1, pid=1, status="measured", window=window, throughput_per_s=window.rate_per_s
    )


class Coverage:
    """How many trials gave an interval, how many of these intervals contain the true rate, and the mean window length."""

    def __init__(self, trials: Iterable[RankResult], *, true_per_s: float) -> None:
        claimed, seconds, refusals = [], [], []
        for trial in trials:
            found = interval([trial])
            seconds.append(trial.window.seconds if trial.window else 0.0)
            if found is not None:
                claimed.append(found[0] <= true_per_s <= found[1])
            refusals.append(why_no_interval([trial]))
        self.given_frac = len(claimed) / len(seconds)
        self.frac = sum(claimed) / len(claimed) if claimed else math.nan
        self.window_s = float(np.mean(seconds))
        self.refusals = {reason for reason in refusals if reason}

    def __repr__(self) -> str:
        return f"{self.frac:.3f} of {self.given_frac:.0%}, {self.window_s:.2f} s"


class Machine:
    """A machine's noise between processes.

    Args:
        rng: random generator.
        noise_frac: relative standard deviation of a measurement.
        drift_frac: fraction by which each measurement is slower than the one before.
        rho: correlation of consecutive measurements' noise.
        tails: degrees of freedom if the noise follows Student's t distribution; None for a normal distribution.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        noise_frac: float,
        *,
        drift_frac: float = 0.0,
        rho: float = 0.0,
        tails: float | None = None,
    ) -> None:
        self._rng, self._noise_frac, self._drift_frac, self._rho, self._tails = rng, noise_frac, drift_frac, rho, tails
        self._state, self._count = float(rng.normal()), 0

    def factor(self) -> float:
        """Returns the ratio of the next measurement to the true rate. Without drift, its median is 1."""
        shock = self._rng.normal() if self._tails is None else self._rng.standard_t(self._tails) / math.sqrt(2)
        self._state = self._rho * self._state + math.sqrt(1 - self._rho**2) * float(shock)
        self._count += 1
        return math.exp(self._noise_frac * self._state - self._drift_frac * self._count)


class Study:
    """A simulated study after its search, ready for the finals.

    Args:
        true_per_s: true rate of each configuration, the baseline's first.
        machine: the noise of measurements.
        seconds: budget that is left for the finals; None for no limit.
        trial_s: seconds of each trial in the finals.
        earlier: the noise that earlier studies have measured.
    """

    def __init__(
        self,
        true_per_s: list[float],
        machine: Machine,
        *,
        seconds: float | None = None,
        trial_s: float = 10.0,
        earlier: Noise | None = None,
    ) -> None:
        self.earlier_noise = earlier
        self.true_per_s, self.machine, self.trial_s = true_per_s, machine, trial_s
        self.clock = VirtualClock()
        self.budget = Budget(clock=self.clock, total_s=seconds)
        config = SimpleNamespace(
            study=SimpleNamespace(seed=0),
            train=SimpleNamespace(global_batch=None),
            measure=SimpleNamespace(finals=MeasureRules()),
            parity=SimpleNamespace(steps=0),
        )
        self.inputs, self.listener = SimpleNamespace(config=config), Listener()
        self.costs = SimpleNamespace(again_s=lambda knobs, changed: trial_s)
        self.records = [self._record(number, Kind.search if number else Kind.baseline) for number in range(len(true_per_s))]

    @property
    def baseline(self) -> TrialRecord:
        return self.records[0]

    finals_rules = Session.finals_rules

    @property
    def searched(self) -> list[TrialRecord]:
        return [record for record in self.records if record.kind is not Kind.final]

    def measure_again(self, first: TrialRecord, *, round_number: int, rules: MeasureRules, why: str) -> TrialRecord:
        self.clock.sleep(self.trial_s)
        record = self._record(len(self.records), Kind.final, first.number)
        record.changed, record.round, record.why, record.repeats = first.changed, round_number, why, first.number
        self.records.append(record)
        return record

    def finals(self) -> Decision:
        """Runs the real finals on the simulated study."""
        return Finals(self).run()

    def _record(self, number: int, kind: Kind, of: int | None = None) -> TrialRecord:
        value = self.true_per_s[number if of is None else of] * self.machine.factor()
        changed = {"env.A": str(number)} if number else {}
        return a_trial(number, kind=kind, changed=changed, value=value, seconds=self.trial_s)
