"""Prints the tuner's own time per trial, and how busy it keeps its slots, for many trials on a fake launcher in simulated time.

    python -m tests.benchmarks.scale                                          # 100 and 1,000 trials on 1 to 512 slots
    python -m tests.benchmarks.scale --trials 10000 --slots 512 --sampler random
    python -m tests.benchmarks.scale --trials 1000 --slots 16 --sampler rates --profile    # and where the time goes

A trial takes 60 simulated seconds. The clock also counts the tuner's own processor time, so a tuner that is too slow for its
slots leaves them idle. "busy" is the share of all slots that is busy. At the end, fewer trials are left than there are slots.
"used" leaves out the slots for which no trial is left. Both count from the end of the first calibration on. Own time includes
the calibration of the slots, all files, and the fake launcher itself. It does not include the baseline, the report (written at
the end) and MLflow (another process tracks). The processor times of report and MLflow are printed separately, in seconds. Each
machine has eight slots.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import math
import pstats
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import psutil

from autotune.clock import VirtualClock
from autotune.config.compose import compose
from autotune.launchers.base import Launch
from autotune.records import TrialRecord
from autotune.report.writing import write_report
from autotune.run_dir import StudyFolder
from autotune.studies import create
from autotune.study import run_study
from autotune.study.search_budget import NUM_ALONE
from autotune.trackers.store import embedded_uri
from autotune.trackers.sync import sync
from autotune.trials.events import Listener, Outlook
from autotune.trials.schedule import Ending
from tests.study.conftest import fake_inputs
from tests.support.fake_launcher import FakeLauncher, FakeRunning, Surface

START_S, WINDOW_S, POLL_S = 52.0, 8.0, 0.5
NUM_SHOWN = 60  # functions in a profile
SLOTS_PER_HOST = 8
TIMES = 10  # the tuner's time is compared between the first and the last 1/TIMES of the trials, to see whether it grows
MACHINE = {
    "hostname": "h", "cpu_model": "Fake CPU", "num_cores": 4096, "num_cpus": 4096, "memory_bytes": 2**40,
    "isa": ["avx2", "amx_bf16"], "kernel": "6", "python": "3.11", "has_compiler": True, "gpus": [],
}  # fmt: skip


# What the program reports about its device, by kind of machine. On a CPU, cores are shared, and three forecasts are averaged.
FACTS = {
    "gpu": {"device": "cuda", "device_name": "Fake GPU", "compute_capability": [9, 0]},
    "cpu": {"device": "cpu", "isa": MACHINE["isa"]},
}


class OwnTimeClock(VirtualClock):
    """A virtual clock that also advances by the processor time of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._begun_s = time.process_time()

    @property
    def own_s(self) -> float:
        """Processor time since the clock was made."""
        return time.process_time() - self._begun_s

    def monotonic(self) -> float:
        """Returns the simulated seconds plus the processor time."""
        return self.now_s + self.own_s


class ForgetfulLauncher(FakeLauncher):
    """A fake launcher that keeps no launches, so that the memory measured is the tuner's."""

    def begin(self, launch: Launch, slot: str = "") -> FakeRunning:
        """Starts a trial, and forgets its launch."""
        begun = super().begin(launch, slot)
        self.launches.clear()
        return begun


@dataclass
class SearchOnly(Listener):
    """Records the tuner's processor time after each trial, and ends the study when its finals would begin.

    Attributes:
        clock: the clock.
        num_trials: number of trials of the search.
        num_slots: number of slots.
        before_s: the tuner's processor time before the search.
        own_s: the tuner's processor time after each trial of the search.
        memory_mib: resident memory after each trial of the search.
        busy_s: seconds of all trials of the search.
        wanted_s: seconds of all slots for which there was a trial, one that ran or had yet to begin.
        begun_s, ended_s: start of the first search trial and end of the last one.
    """

    clock: OwnTimeClock
    num_trials: int
    num_slots: int
    before_s: float = 0.0
    own_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    wanted_s: float = 0.0
    begun_s: float = 0.0
    ended_s: float = 0.0

    def planned(self, outlook: Outlook) -> None:
        """Records when the search begins."""
        self.before_s = self.clock.own_s

    def trial_ended(self, trial: TrialRecord) -> None:
        """Records a trial of the search."""
        if trial.kind == "check" and len(self.own_s) <= NUM_ALONE:  # counts from the first calibration on
            self.busy_s = self.wanted_s = self.begun_s = self.ended_s = 0.0
        if trial.kind != "search":
            return
        now_s = self.clock.monotonic()
        self.begun_s = self.begun_s or now_s - trial.seconds
        self.wanted_s += min(self.num_slots, self.num_trials - len(self.own_s)) * (now_s - (self.ended_s or self.begun_s))
        self.ended_s = now_s
        self.busy_s += trial.seconds
        self.own_s.append(self.clock.own_s)
        self.memory_mib.append(psutil.Process().memory_info().rss / 2**20)

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """Ends the study."""
        raise Ending


def run(num_trials: int, num_slots: int, sampler: str, machine: str, *, is_profiled: bool, is_tracked: bool) -> str:
    """Runs a study; returns its row of the table. If `is_profiled`, lists below it the functions that took the most time."""
    profile = cProfile.Profile()
    given = [
        f"search.sampler={sampler}", "search.warm_start=off", "search.stop=false", "explain.auto=false",
        "study.budget.minutes=null", f"study.budget.trials={num_trials}", "measure.racing=false",
        "parity.steps=0", "compile.mode=off",
    ]  # fmt: skip
    composed = compose(given, command=["python", "-c", "pass"], facts=MACHINE)
    clock = OwnTimeClock()
    gains = {("precision.amp", "bf16"): 1.2}  # too small to cause another calibration of the slots
    surface = Surface(
        start_s=START_S, window_s=WINDOW_S, noise_frac=0.003, gains=gains, half_batch=0.01, loader_per_s=1e5, stop_s=0.0,
        facts={"torch": "2.14.1", "has_compiler": True, **FACTS[machine]},
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="autotune-scale-") as runs:
        folder, listener = create(Path(runs), "s"), SearchOnly(clock, num_trials, num_slots)
        launcher = ForgetfulLauncher(surface, clock, num_slots=num_slots, slots_per_host=SLOTS_PER_HOST)
        inputs = fake_inputs(composed, launcher, MACHINE, poll_s=POLL_S)
        run_study(inputs, folder, listener) if not is_profiled else profile.runcall(run_study, inputs, folder, listener)
        summary_mib = folder.summary_file.stat().st_size / 2**20
        report_s, report_mib = _report(folder)
        sync_s = _sync_s(folder) if is_tracked else math.nan
    own, num = listener.own_s, len(listener.own_s)
    tenth = max(1, num // TIMES)
    first, last = (own[tenth] - own[0]) / tenth, (own[-1] - own[-1 - tenth]) / tenth
    busy = listener.busy_s / min(num_slots, num) / max(listener.ended_s - listener.begun_s, 1e-9)
    used = listener.busy_s / max(listener.wanted_s, 1e-9)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    each_s, before_s = (own[-1] - listener.before_s) / num, own[0] - listener.before_s
    row = (
        f"{machine:7} {sampler:8} {num:7,} {num_slots:6} {1e3 * each_s:9.1f} {before_s:7.1f} {1e3 * first:8.1f} "
        f"{1e3 * last:8.1f} {busy:7.1%} {used:7.1%} {listener.memory_mib[0]:6.0f} {listener.memory_mib[-1]:6.0f} "
        f"{peak_mib:6.0f} {summary_mib:9.1f} {report_s:8.1f} {report_mib:6.1f} {sync_s:8.1f}"
    )
    return f"{row}\n{_profiled(profile)}" if is_profiled else row


def _report(folder: StudyFolder) -> tuple[float, float]:
    """Returns the processor time of writing the report again, and its size in MiB."""
    began_s = time.process_time()
    file = write_report(folder, folder.read_summary())
    return time.process_time() - began_s, file.stat().st_size / 2**20


def _sync_s(folder: StudyFolder) -> float:
    """Returns the processor time of a copy of the study into a new MLflow store."""
    began_s = time.process_time()
    state = sync(folder, embedded_uri(folder.path.parent))
    assert state.is_complete, state.problem
    return time.process_time() - began_s


def _profiled(profile: cProfile.Profile) -> str:
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out).strip_dirs()
    stats.sort_stats("cumulative").print_stats(NUM_SHOWN)
    stats.sort_stats("tottime").print_stats(NUM_SHOWN)
    return out.getvalue()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default="100,1000", help="numbers of trials")
    parser.add_argument("--slots", default="1,16,128,512", help="numbers of slots")
    parser.add_argument("--sampler", default="random,rates", help="samplers")
    parser.add_argument("--machine", default="gpu", choices=FACTS, help="what the fake program trains on")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time; slows the study")
    parser.add_argument("--mlflow", action="store_true", help="also copy each study into a new MLflow store")
    asked = parser.parse_args()
    heads = f"{'machine':7} {'sampler':8} {'trials':>7} {'slots':>6} {'ms/trial':>9} {'start s':>7} {'first':>8} {'last':>8}"
    heads += f" {'busy':>7} {'used':>7} {'MiB':>6} {'last':>6}"
    print(f"{heads} {'peak':>6} {'summary':>9} {'report':>8} {'MiB':>6} {'MLflow':>8}")
    for sampler in asked.sampler.split(","):
        for num_trials in map(int, asked.trials.split(",")):
            for num_slots in map(int, asked.slots.split(",")):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # for the peak memory of this study alone
                    options = {"is_profiled": asked.profile, "is_tracked": asked.mlflow}
                    print(pool.submit(run, num_trials, num_slots, sampler, asked.machine, **options).result(), flush=True)


if __name__ == "__main__":
    main()
