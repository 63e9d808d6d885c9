"""Simulates a loader's workers and the training steps on shared cores: what a trial would see, and the true long-run rate.

All runnable threads get an equal share of the cores. Of W workers, worker w makes batches w, w + W, w + 2 W, ... The steps take
the batches in order. As in torch, a worker may begin a new batch when a step has taken one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.harness.supply import Reading
from autotune.harness.worker import Counters


@dataclass(frozen=True, kw_only=True)
class Program:
    """One simulated program.

    Attributes:
        workers, prefetch: the loader's settings.
        batch_sleep_s, batch_cpu_s: waiting time and processor time of a batch, on one core.
        cv: coefficient of variation of a batch's times, which follow a gamma distribution.
        step_sleep_s: device time of a step.
        step_cpu_s: processor time of a step, split evenly among its threads.
        threads: number of threads of a step.
        cores: number of cores of the machine.
        stall_s: extra time of the first step, as if a compiler worked.
    """

    workers: int
    prefetch: int = 2
    batch_sleep_s: float = 0.0
    batch_cpu_s: float = 0.0
    cv: float = 0.0
    step_sleep_s: float = 0.0
    step_cpu_s: float = 0.0
    threads: int = 1
    cores: int = 2
    stall_s: float = 2.0


@dataclass
class Worker:
    """A loader worker: the batch that it is making, and its counters."""

    batch: int
    sleep_s: float = 0.0
    cpu_s: float = 0.0
    began_s: float = 0.0
    is_busy: bool = False
    made: float = 0.0
    busy_s: float = 0.0
    used_s: float = 0.0
    delay_s: float = 0.0


@dataclass
class Simulation:
    """A run of the program in simulated time."""

    program: Program
    seed: int = 0
    now_s: float = 0.0
    taken: int = 0
    step_used_s: float = 0.0
    ready: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.workers = [Worker(batch=number) for number in range(self.program.workers)]
        self._chance = random.Random(self.seed)

    def steps(self) -> Iterator[float]:
        """Yields the time at which each step ends."""
        program = self.program
        while True:
            while self.taken not in self.ready:
                self._advance(math.inf, 0)
            self.ready.remove(self.taken)
            self.taken += 1
            stall_s = program.stall_s if self.taken == 1 else 0.0
            self._run(program.step_sleep_s + stall_s, 0)
            self._run(program.step_cpu_s / program.threads, program.threads)
            yield self.now_s

    def _run(self, work_s: float, threads: int) -> None:
        while work_s > 1e-12:
            work_s -= self._advance(work_s, threads)

    def _advance(self, work_s: float, threads: int) -> float:
        """Advances to the next event; returns how much of `work_s` each thread did. With 0 threads, the step sleeps."""
        outstanding = self.taken + self.program.workers * self.program.prefetch
        for worker in self.workers:
            if not worker.is_busy and worker.batch < outstanding:
                self._begin(worker)
        busy = [worker for worker in self.workers if worker.is_busy]
        running = sum(worker.sleep_s <= 0 for worker in busy) + threads
        share = min(1.0, self.program.cores / running) if running else 1.0
        own = share if threads else 1.0
        ends = [worker.sleep_s if worker.sleep_s > 0 else worker.cpu_s / share for worker in busy] + [work_s / own]
        passed_s = min(ends)
        assert passed_s < math.inf, "neither the steps nor a worker can continue"
        self.now_s += passed_s
        self.step_used_s += threads * share * passed_s
        for worker in busy:
            self._work(worker, passed_s, share)
        return passed_s * own

    def _begin(self, worker: Worker) -> None:
        program = self.program
        scale = self._chance.gammavariate(1 / program.cv**2, program.cv**2) if program.cv else 1.0
        worker.is_busy, worker.began_s = True, self.now_s
        worker.sleep_s, worker.cpu_s = program.batch_sleep_s * scale, program.batch_cpu_s * scale

    def _work(self, worker: Worker, passed_s: float, share: float) -> None:
        worker.busy_s += passed_s
        if worker.sleep_s > 0:
            worker.sleep_s -= passed_s
        else:
            worker.cpu_s -= passed_s * share
            worker.used_s += passed_s * share
            worker.delay_s += passed_s * (1 - share)
        if worker.sleep_s <= 1e-12 and worker.cpu_s <= 1e-12:
            self.ready.add(worker.batch)
            worker.made += 1
            worker.batch += self.program.workers
            worker.is_busy = False
        elif worker.sleep_s <= 1e-12:
            worker.sleep_s = 0.0

    def reading(self) -> Reading:
        """Returns what the harness would read now."""
        counters = [
            Counters(
                w.made,
                w.busy_s - (self.now_s - w.began_s if w.is_busy else 0.0),  # counts only finished batches
                w.used_s,
                w.delay_s,
                w.began_s if w.is_busy else 0.0,
            )
            for w in self.workers
        ]
        return Reading(self.now_s, float(self.taken), self.step_used_s, counters)
