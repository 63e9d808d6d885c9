"""Feeds the steps of a trial to the meter, and opens and closes the measured window."""

from __future__ import annotations

import math
import time
from typing import Any, Dict, List, Optional, Sequence

from .clock import Finished
from .context import TrialContext
from .last_step import num_ahead
from .meter import DONE, STEADY, WARMUP, Meter

PARITY_STEPS = 8  # minimum number of steps of a parity run, however slow they are


class Window:
    """Feeds finished steps to the meter, and notifies the objects that must know when the window opens.

    Attributes:
        meter: the meter; None before the first step.
        steps: "end_s", "samples", "wait_s" of every step of the process.
        plain_s: in mode "explain", seconds of each quiet step (see `clock.Finished`) without an evaluation.
        wait_s, busy_s, step_s: sums of these fields of `clock.Finished` over the window's steps.
        is_full: whether the measurement is complete, so that the program may end.
        is_cut_off: whether the window was ended for lack of time.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.meter: Optional[Meter] = None
        self.steps: Dict[str, List[float]] = {"end_s": [], "samples": [], "wait_s": []}
        self.plain_s: List[float] = []
        self.wait_s = self.busy_s = self.step_s = 0.0
        self.is_full = self.is_cut_off = False
        self._last_seen: Any = None
        self._held: List[Finished] = []  # the last steps, held back because they took no batch

    @property
    def rate_per_s(self) -> Optional[float]:
        """The rate of the last closed block; None before the first block is closed."""
        return self.meter.rate_per_s if self.meter else None

    def first_step(self) -> None:
        """Makes the meter; called at the first step, and again when the number of processes that train changes."""
        self.is_full = False
        context, spec = self._context, self._context.spec
        # The limits are rates of all ranks together, but this meter counts only this rank's batch, on which `num_together`
        # ranks train. Ranks step together, so each batch gets the same share of the limits. Processes at their own pace have no
        # limits, because their shares of the rate are unknown.
        num_together, is_joint = context.sharing.ranks_per_batch(), context.peers.is_joint
        is_led = context.world_size > 1 and context.rank > 0 and not is_joint  # rank 0 decides for all ranks
        race, promote = (
            None if limit is None or is_led or is_joint else limit * num_together / context.world_size
            for limit in (spec.race_below_per_s, spec.promote_above_per_s)
        )
        width = max(1, context.loaders.num_workers())
        limits: Dict[str, Any] = {"race_below_per_s": race, "promote_above_per_s": promote}
        self.meter = Meter(spec.rules, width, cycle=spec.cycle, is_led=is_led, **limits)
        self._enter_warmup()

    def _enter_warmup(self) -> None:
        self._context.phases.enter("compile" if self._context.modules.is_compiled() else "warmup")

    def is_quiet(self) -> bool:
        """Returns whether, since the last call, nothing was compiled and, before the window, no memory was allocated."""
        context = self._context
        is_steady = context.phases.now == "steady"
        segments, retries = context.memory.movement()
        if is_steady:
            segments = 0  # one more segment does not disturb the window
            retries = 0  # their number is in the result, so many retries need not restart the window
        seen = (context.modules.num_graphs(), segments, retries, is_steady)
        last, self._last_seen = self._last_seen, seen
        if last is not None and last[3] != seen[3]:
            return bool(last[0] == seen[0])
        return last is None or bool(last == seen)

    def feed(self, steps: List[Finished]) -> None:
        """Processes finished steps, in order."""
        context, meter = self._context, self.meter
        if meter is None or not steps:
            return
        columns = _columns(steps)
        for name, values in self.steps.items():
            values += columns[name]
        if context.last_step.is_announced:
            return  # the window is over
        if context.spec.mode == "parity":
            self.is_full = self._is_parity_over()
            return
        new, steps = steps, self._without_last_held(steps)
        if context.explained is not None:
            steps = [step for step in steps if not step.is_foreign]
            self.plain_s += [step.step_s for step in steps if step.is_quiet]
            self._warm_up(meter, steps)
            return
        # Foreign steps (`Finished.is_foreign`) are not training time. But if no loader feeds the steps, what looks like an
        # evaluation may be a rollout, which is part of the training.
        may_feed = context.loaders.unit_source != "loader"
        while may_feed and (number := _next_evaluated(steps)) is not None:
            self._feed(meter, [step for step in steps[:number] if not step.is_foreign])
            was = meter.phase
            if meter.feed_evaluation(steps[number].step_s, steps[number].samples) == STEADY != was:
                self._open()
            steps = steps[number + 1 :]
        if steps is new and meter.phase == STEADY and True not in columns["is_foreign"]:
            self._measure(meter, columns)  # the common case; filtering these steps would take as long as measuring them
        else:
            self._feed(meter, [step for step in steps if not step.is_foreign])
        self.is_full = meter.phase == DONE

    def _without_last_held(self, steps: List[Finished]) -> List[Finished]:
        """Returns the steps to process now: those held back earlier, and the new ones up to the last that took a batch.

        A program that fetches one batch ahead takes no batch in the last step of an epoch, and two in the first step of the
        next epoch. If no epoch follows, the last step must not be measured, because its batch was counted before. If an epoch
        follows, the samples of its first step are spread evenly over both steps.
        """
        if not self._held and (steps[-1].samples or self._context.loaders.unit_source != "loader"):
            return steps
        steps, end = [*self._held, *steps], 0
        for number, step in enumerate(steps, 1):
            end = number if step.samples else end
        self._held = steps[end:]
        return _spread(steps[:end])

    def _feed(self, meter: Meter, steps: List[Finished]) -> None:
        self._warm_up(meter, steps)
        if meter.phase == STEADY and steps:
            self._measure(meter, _columns(steps))

    def _warm_up(self, meter: Meter, steps: List[Finished]) -> None:
        """Feeds the meter until the window opens, and removes the fed steps from the list."""
        context = self._context
        if meter.phase == WARMUP:
            meter.is_draining = context.supply.drains_within(context.spec.rules.drain_max_s)
        while meter.phase == WARMUP and steps:
            step = steps.pop(0)
            if meter.feed(step.step_s, step.samples, is_quiet=step.is_quiet) == STEADY:
                self._open()
            elif step.is_quiet:
                context.phases.enter("warmup")

    def _ahead_s(self, step_s: float) -> float:
        # The window's end is noticed one step later. With several ranks, the last step is also announced some steps ahead.
        context = self._context
        return step_s * (1 if context.world_size == 1 else 1 + num_ahead(context))

    def _is_parity_over(self) -> bool:
        # Nothing is measured: a parity run is over after enough steps, or enough time since the first.
        context, ends_s = self._context, self.steps["end_s"]
        is_late = ends_s[-1] - ends_s[0] >= (context.spec.max_s or math.inf) and context.num_steps >= PARITY_STEPS
        return bool(is_late or context.num_steps >= (context.spec.max_steps or 0))

    def _open(self) -> None:
        context = self._context
        self.wait_s = self.busy_s = self.step_s = 0.0
        context.clock.open_window()
        context.supply.open_window()
        context.optimizers.open_window()
        context.memory.open_window()
        context.phases.enter("steady")

    def _measure(self, meter: Meter, columns: Dict[str, Sequence[Any]]) -> None:
        self.wait_s += sum(columns["wait_s"])
        self.busy_s += sum(columns["busy_s"])
        self.step_s += sum(columns["step_s"])
        meter.is_draining = self._context.supply.is_falling
        meter.feed_window(columns["step_s"], columns["samples"], is_quiet=all(columns["is_quiet"]))
        end_s = self._context.spec.end_s
        now_s = time.monotonic() + self._context.clock_offset_s
        if end_s is not None and now_s + self._ahead_s(columns["step_s"][-1]) >= end_s:
            self.is_cut_off = meter.cut_off()
        if meter.phase == DONE:
            self._context.supply.close_window()
        elif meter.phase == WARMUP:  # something was compiled, or the step time still changes: start again
            self._enter_warmup()


def _columns(steps: List[Finished]) -> Dict[str, Sequence[Any]]:
    """Returns the values of all steps for each field of `Finished`; faster than reading fields step by step."""
    return dict(zip(Finished._fields, zip(*steps)))  # noqa: B905 (Python 3.9)


def _spread(steps: List[Finished]) -> List[Finished]:
    """Divides the samples of each step equally among this step and the steps without samples right before it."""
    found: List[Finished] = []
    begin = 0
    for end, step in enumerate(steps, 1):
        if step.samples:
            each = step.samples / (end - begin)
            found += [one._replace(samples=each) for one in steps[begin:end]]
            begin = end
    return found


def _next_evaluated(steps: List[Finished]) -> Optional[int]:
    return next((number for number, step in enumerate(steps) if step.is_foreign and step.is_quiet), None)
