"""Implements a launcher that starts no processes, but answers with recorded measurements and advances a simulated clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from autotune import stats
from autotune.clock import VirtualClock
from autotune.harness.protocol import MeasureRules, Progress, RankResult, Spec, Window
from autotune.knobs.step import ACCUMULATION
from autotune.launchers.base import Cause, Ended, Launch, Launcher, Running, Slot
from autotune.monitors.nvml import NoDevice
from autotune.monitors.watch import MachineWatch
from autotune.records import START_PHASES, Outcome
from autotune.replay.results import ended_of
from autotune.replay.space import first_result
from autotune.replay.table import Key, Measurement, Table, key_of
from autotune.replay.world import World
from autotune.trials.objective import METRICS

BEFORE_STEPS = (*START_PHASES, "compile")
RACE_CONFIDENCE = 0.99  # as in the harness, which stops a trial if the upper end of its rate's 99 % interval is too low
OF_THE_PROGRAM = ("facts", "observed", "applicability")  # recorded only with the baseline, since they are equal in all trials


class RecordedDevice(NoDevice):
    """A device monitor that reports the recorded power and step time of the latest trial, which constraints may limit.

    The other numbers of a trial come from its ranks' results. These two are not in them.
    """

    def __init__(self) -> None:
        self.recorded: Mapping[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """See `DeviceMonitor.metrics`."""
        return {name: self.recorded[name] for name in METRICS.values() if name in self.recorded}


class ReplayLauncher(Launcher):
    """A launcher that answers trials with recorded measurements from `world`. Parallel trials do not affect each other."""

    def __init__(self, table: Table, world: World, clock: VirtualClock, *, num_slots: int = 1) -> None:
        self._table, self._world, self._clock = table, world, clock
        self._slots = [_ReplaySlot(self, str(index + 1)) for index in range(num_slots if num_slots > 1 else 0)]
        self._device = RecordedDevice()
        first = next(one for one in table.measurements if one.number == 0)
        self._program = [{name: result.get(name, {}) for name in OF_THE_PROGRAM} for result in first.results]
        self._program[0]["observed"] = first_result(table).observed
        self._losses = [result.get("loss") for result in first.results]

    def start(self, launch: Launch) -> Running:
        """Returns a trial that is already over."""
        ended = self.answer(launch, self._device)
        self._clock.sleep(ended.seconds)
        return _Over(ended)

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._slots)

    def watch(self) -> MachineWatch:
        """Returns a monitor that reports recorded metrics."""
        return self.watching(self._device)

    def watching(self, device: RecordedDevice) -> MachineWatch:
        """Returns a monitor of a device."""
        return MachineWatch(device, self._clock)

    def start_on_slot(self, launch: Launch, device: RecordedDevice) -> Running:
        """Returns a trial that is over once its recorded seconds have passed."""
        ended = self.answer(launch, device)
        return _Later(ended, self._clock, self._clock.monotonic() + ended.seconds)

    def answer(self, launch: Launch, device: RecordedDevice) -> Ended:
        """Returns how a trial ends; from then on, `device` reports the trial's metrics."""
        measurement = self._world.serve(self._key(launch.spec))
        if measurement is None:  # the table is incomplete and lacks this configuration
            measurement = Measurement(number=-1, round=0, changed={}, outcome=Outcome.error, seconds=0.0, reason="not recorded")
            measurement.ended = {"exit_code": 1, "cause": "exit", "evidence": {"is_harness_seen": True}}
        device.recorded = measurement.metrics
        return self._ended(measurement, launch)

    def _key(self, spec: Spec) -> Key:
        """Returns the key of the configuration that a spec asks for."""
        # If the global batch is fixed, accumulation follows from the batch size and is no part of the key.
        left_out = {*self._table.pinned, *([ACCUMULATION.key] if spec.global_batch else [])}
        wanted = {name: value for name, value in {**spec.passed, **spec.knobs}.items() if name not in left_out}
        return key_of(wanted) - key_of(self._table.reference)

    def _ended(self, measurement: Measurement, launch: Launch) -> Ended:
        spec = launch.spec
        ended = ended_of(measurement, trial=spec.trial, nonce=spec.nonce)
        for result, program in zip(ended.results, self._program, strict=False):
            for name, value in program.items():
                setattr(result, name, dict(value))
        if spec.mode != "measure":
            self._make_first_steps(ended, spec)
        elif spec.race_below_per_s is not None:
            limit_per_s = spec.race_below_per_s / max(1, len(ended.results))  # limit for one rank, as in the harness
            ended.seconds -= max((race(result, limit_per_s, spec.rules) for result in ended.results), default=0.0)
        left_s = math.inf if spec.end_s is None else spec.end_s - self._clock.monotonic()
        if spec.mode == "measure" and ended.seconds > left_s:
            ended.seconds -= max((cut(result, left_s) for result in ended.results), default=0.0)
        limit_s = launch.deadlines.total_s
        if ended.seconds > limit_s:
            evidence: dict[str, Any] = {"is_harness_seen": True, "deadline": f"no result within {limit_s:.0f} s"}
            cause: Cause = "stopped" if limit_s > left_s else "deadline"  # "stopped" if the study's deadline was earlier
            return dataclasses.replace(
                ended, exit_code=None, cause=cause, phase="steady", results=[], seconds=limit_s, evidence=evidence
            )
        return ended

    def _make_first_steps(self, ended: Ended, spec: Spec) -> None:
        """Changes a recorded trial into one that ended after its first steps, with the baseline's losses.

        A trial's own first losses were not recorded. With the baseline's losses in their place, a comparison of losses takes a
        realistic time but never rejects a trial. Recorded failures, for example for lack of memory, stay failures.
        """
        for result, loss in zip(ended.results, self._losses, strict=False):
            if result.status == "failed":
                return
            result.loss = dict(loss) if loss else None
        if not ended.results:
            return
        first = ended.results[0]
        steps_s = 0.0
        if first.window and first.window.steps:
            steps_s = (spec.max_steps or 0) * first.window.seconds / first.window.steps
        start_s = sum(first.phases_s.get(phase, 0.0) for phase in BEFORE_STEPS)
        ended.seconds = min(ended.seconds, start_s + min(steps_s, spec.max_s or steps_s))


def race(result: RankResult, below_per_s: float, rules: MeasureRules) -> float:
    """Cuts off the rest of a window in which the trial is certainly too slow, and returns the seconds saved.

    In a search, the harness ends such a window early, which is called racing. A recording measures whole windows. So this
    function finds the block after which racing would have ended the window.

    Args:
        result: as recorded, with its whole window; changed in place.
        below_per_s: the window ends once the rate is certainly below this.
        rules: give the minimum number of blocks and of seconds before the rate is checked.
    """
    window = result.window
    if window is None or not window.is_steady or not window.block_s:
        return 0.0
    seconds = samples = 0.0
    for number, (rate, length) in enumerate(zip(window.block_rates_per_s, window.block_s, strict=False), 1):
        seconds, samples = seconds + length, samples + rate * length
        if number < rules.min_blocks or seconds < rules.race_min_s or seconds >= window.seconds:
            continue
        rates = window.block_rates_per_s[:number]
        if samples / seconds + (stats.half_width(rates, RACE_CONFIDENCE) or 0.0) < below_per_s:
            why = "stopped early: certainly slower than 0.8 times the best rate so far"
            return _shorten(result, number, why=why, is_raced=True)
    return 0.0


def cut(result: RankResult, left_s: float) -> float:
    """Cuts off the blocks of a window that end after the trial's time is up, and returns the seconds saved.

    Args:
        result: as recorded, with its whole window; changed in place.
        left_s: seconds from the trial's launch until its window must be over.
    """
    room_s = left_s - sum(result.phases_s.get(phase, 0.0) for phase in (*BEFORE_STEPS, "warmup"))
    if result.window is None or not result.window.block_s or room_s >= result.window.seconds:
        return 0.0
    ends_s = list(itertools.accumulate(result.window.block_s))
    fitting = sum(end_s <= room_s for end_s in ends_s)
    if not fitting or ends_s[fitting - 1] < MeasureRules.race_min_s:
        return 0.0  # the cut window would be too short, so the trial continues until it is stopped
    return _shorten(result, fitting, why="the trial's time was up", is_raced=False)


def _shorten(result: RankResult, num_blocks: int, *, why: str, is_raced: bool) -> float:
    """Keeps only the first blocks of a result's window, and returns the seconds saved."""
    window = result.window
    assert window is not None
    rates, lengths = window.block_rates_per_s[:num_blocks], window.block_s[:num_blocks]
    seconds, samples = sum(lengths), sum(rate * length for rate, length in zip(rates, lengths, strict=True))
    saved_s = window.seconds - seconds
    result.throughput_per_s = (result.throughput_per_s or 0.0) * samples / seconds / window.rate_per_s
    result.phases_s = {**result.phases_s, "steady": max(0.0, result.phases_s.get("steady", 0.0) - saved_s)}
    result.window = Window(
        steps=round(window.steps * seconds / window.seconds),
        seconds=seconds,
        samples=samples,
        rate_per_s=samples / seconds,
        block_rates_per_s=rates,
        half_width_frac=None,
        is_steady=True if is_raced else window.is_steady,
        reason=why,
        is_raced=is_raced,
        block_s=lengths,
    )
    return saved_s


class _Over(Running):
    """A trial that has already ended."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def poll(self) -> Ended | None:
        return self._ended

    def progress(self) -> Progress | None:
        return None

    def stop(self, reason: str) -> None:
        return None


class _Later(_Over):
    """A trial that ends when the simulated clock reaches `due_s`."""

    def __init__(self, ended: Ended, clock: VirtualClock, due_s: float) -> None:
        super().__init__(ended)
        self._clock, self._due_s = clock, due_s

    def poll(self) -> Ended | None:
        return self._ended if self._clock.monotonic() >= self._due_s else None


class _ReplaySlot(Launcher):
    def __init__(self, whole: ReplayLauncher, name: str) -> None:
        self._whole, self._device = whole, RecordedDevice()
        self.slot = Slot(name=name, host="replay", gpus=(), cores=(), facts={})

    def start(self, launch: Launch) -> Running:
        return self._whole.start_on_slot(launch, self._device)

    def watch(self) -> MachineWatch:
        return self._whole.watching(self._device)
