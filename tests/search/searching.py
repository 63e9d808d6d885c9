"""Runs only the search of a study, with the real study loop, on a made-up landscape."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autotune.clock import VirtualClock
from autotune.config.compose import compose
from autotune.records import Kind, Knobs, TrialRecord
from autotune.space import ResolvedSpace
from autotune.studies import create
from autotune.study import run_study
from autotune.trials.schedule import Ending
from tests.search.landscapes import Landscape
from tests.study.conftest import fake_inputs
from tests.support.fake_launcher import FakeLauncher
from tests.support.listener import RecordingListener

GPU = {"name": "Fake GPU", "uuid": "GPU-1", "memory_bytes": 80 * 2**30}


class SearchOnly(RecordingListener):
    """Ends the study before its finals."""

    def finals_started(self, trials, reserved_s):
        """Ends the study."""
        super().finals_started(trials, reserved_s)
        raise Ending


@dataclass
class Searched:
    """The trials of a finished search.

    Attributes:
        trials: the baseline and the search's trials.
        landscape: the made-up program.
    """

    trials: list[TrialRecord]
    landscape: Landscape

    def best_rates(self) -> list[float]:
        """Returns, after each trial, the true rate of the configuration with the best measurement so far."""
        best, found = None, []
        for trial in self.trials:
            if trial.outcome.may_win and trial.value and (best is None or trial.value > best.value):
                best = trial
            found.append(0.0 if best is None else self.landscape.rate_per_s(best.knobs))
        return found

    def seconds(self) -> list[float]:
        """Returns the total seconds of trials after each trial."""
        return list(itertools.accumulate(trial.seconds for trial in self.trials))

    @property
    def num_out_of_memory(self) -> int:
        """Number of trials that ran out of memory."""
        return sum(trial.outcome.is_memory for trial in self.trials)


def search(landscape: Landscape, *overrides: str, seed: int = 0, listener: RecordingListener | None = None) -> Searched:
    """Runs a study's search on a landscape; returns its trials."""
    machine = {
        "hostname": "h", "cpu_model": "Fake CPU", "num_cores": landscape.num_cores, "num_cpus": landscape.num_cores,
        "memory_bytes": 64 * 2**30, "isa": ["avx2", "amx_bf16"], "kernel": "6", "python": "3.11", "has_compiler": True,
        "gpus": [GPU] if landscape.is_gpu else [],
    }  # fmt: skip
    given = [f"study.seed={seed}", "study.budget.minutes=null", "explain.auto=false", *overrides]
    composed = compose(given, command=["python", "-c", "pass"], facts=machine)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="autotune-test-") as runs:
        folder = create(Path(runs), "s")
        folder.is_kept = False  # no summary after every trial
        inputs = fake_inputs(composed, FakeLauncher(landscape, VirtualClock(), seed=seed), machine, poll_s=1.0)
        run_study(inputs, folder, listener or SearchOnly())
        trials = [trial for trial in folder.read_trials() if trial.kind in (Kind.baseline, Kind.search)]
    return Searched(trials, landscape)


def optimum(landscape: Landscape, space: ResolvedSpace, starts: int = 30) -> float:
    """Returns the rate of the fastest configuration that fits, found by hill climbing from many random starts."""
    import random

    rng, best = random.Random(0), 0.0
    domains = {key: list(domain.values) for key, domain in space.domains.items()}

    def rate(knobs: Knobs) -> float:
        active = space.active(knobs)
        return 0.0 if landscape.is_out_of_memory(active) else landscape.rate_per_s(active)

    for _ in range(starts):
        knobs = {**space.reference, **{key: rng.choice(values) for key, values in domains.items()}}
        value, is_rising = rate(knobs), True
        while is_rising:
            changed = max(({**knobs, key: other} for key, values in domains.items() for other in values), key=rate)
            is_rising = rate(changed) > value * (1 + 1e-9)
            if is_rising:
                knobs, value = changed, rate(changed)
        best = max(best, value)
    return best
