"""Prints the processor time and the function calls of a proposal of the default sampler, by the number of trials.

    python -m tests.benchmarks.proposals --trials 500,4000,10000

The trials are made up, and the study's own rules are left out. `python -m tests.benchmarks.scale` measures whole studies.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution

from autotune.search import begin_study, make_sampler
from autotune.search.rates import MEASURED

NUM_TIMED = 16  # proposals, of which the median counts
SPACE = {
    "loader.batch_size": CategoricalDistribution([8, 16, 32, 64, 128, 256]),
    "loader.num_workers": CategoricalDistribution([0, 1, 2, 4, 8, 16]),
    "loader.pin_memory": CategoricalDistribution([False, True]),
    "loader.prefetch_factor": CategoricalDistribution([2, 4, 8]),
    "precision.amp": CategoricalDistribution(["off", "bf16"]),
    "layout.channels_last": CategoricalDistribution([False, True]),
    "threads.intra": CategoricalDistribution([1, 2, 4, 8]),
    "optimizer.implementation": CategoricalDistribution(["default", "foreach", "fused"]),
    **{f"env.X{number}": CategoricalDistribution([0, 1, 2]) for number in range(6)},
}


def ask(study: optuna.Study) -> optuna.trial.Trial:
    """Returns a new trial with all its knobs."""
    trial = study.ask()
    for key, distribution in SPACE.items():
        trial.suggest_categorical(key, distribution.choices)
    return trial


def add(study: optuna.Study, rng: random.Random) -> None:
    """Adds a made-up trial."""
    rate = 100 * rng.lognormvariate(0.0, 0.2)
    measured = {"rate": rate, "score": rate, "device_rate": 1.1 * rate, "loader_rate": 1e3, "outcome": "ok"}
    params = {key: rng.choice(distribution.choices) for key, distribution in SPACE.items()}
    study.add_trial(
        optuna.trial.create_trial(
            value=rate, params=params, distributions=SPACE, user_attrs={MEASURED: {**measured, "peak_memory_bytes": 1e9}}
        )
    )


def timed(study: optuna.Study, num_running: int) -> str:
    """Returns the median processor time of a proposal, and its function calls, while other trials run."""
    sampler, study.sampler = study.sampler, optuna.samplers.RandomSampler(seed=0)
    running = [ask(study) for _ in range(num_running)]
    study.sampler = sampler
    running.append(ask(study))  # reads the new trials
    times_s = []
    for _ in range(NUM_TIMED):
        began_s = time.process_time()
        running.append(ask(study))
        times_s.append(time.process_time() - began_s)
    profile = cProfile.Profile()
    running.append(profile.runcall(ask, study))
    for trial in running:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    calls = sum(row[1] for row in pstats.Stats(profile).stats.values())
    return f"{1e3 * statistics.median(times_s):7.1f} {calls:9,}"


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default="500,4000,10000", help="numbers of trials, ascending")
    parser.add_argument("--running", type=int, default=64, help="number of running trials")
    options = parser.parse_args(words)
    rng, num = random.Random(0), 0
    print(f"{'trials':>7} {'ms':>7} {'calls':>9}")
    with tempfile.TemporaryDirectory() as folder:
        study = begin_study(Path(folder) / "optuna.journal", "s", make_sampler("rates", seed=0, distributions=SPACE))
        for num_trials in map(int, options.trials.split(",")):
            for _ in range(num_trials - num):
                add(study, rng)
            num = num_trials
            print(f"{num:7,} {timed(study, options.running)}", flush=True)


if __name__ == "__main__":
    main()
