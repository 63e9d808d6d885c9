"""Decides when warm-up ends and when measuring stops, and computes the window's rate. Uses neither torch nor a clock.

The meter is fed finished steps. A rate is samples divided by wall time, over a number of steps that is a multiple of the
loader's worker count. The median step is not used: loader-bound steps come in bursts of one step per worker, and their median
is wrong no matter how long the window is (measured: 11 ms instead of 25 ms). Steps are grouped into blocks (blocks.py). The
spread of the blocks' rates decides when a window ends. The interval that is reported afterwards accounts for correlated
blocks; if they are too correlated, it is None (interval.py).
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from .blocks import Blocks, agree, keeps_changing, trend
from .cycles import FREQUENT, Cycles, Gap, Whole, in_words, whole
from .interval import MIN_BLOCKS, mean_half_width_frac, spread_frac
from .protocol import MeasureRules, Window

MIN_STEPS = 3  # a window that is ended for lack of time needs at least this many steps
# Time spent compiling does not count against the warm-up's time limit, up to this many times the longest compilation.
LONG_COMPILATIONS = 3
WARMUP, STEADY, DONE = "warmup", "steady", "done"
# Slow trials are stopped by a 99 % interval. For five blocks, it is RACE_WIDTH times as wide as the 95 % interval (Student's t,
# 4.60 / 2.78); for more blocks, the ratio is smaller.
RACE_WIDTH = 1.66
CYCLES_RACE_WIDTH = {2: 5.0, 3: 2.31, 4: 1.84}  # cycles -> factor like RACE_WIDTH: 63.7 / 12.7, 9.92 / 4.30, 5.84 / 3.18
CYCLES = 3  # number of cycles that a window needs; two are enough if a third would not fit into `max_s`


class Meter:
    """Follows one trial from its first step to the end of its window.

    Args:
        rules: thresholds.
        width: max(1, loader workers); the number of steps in a block is a multiple of this.
        race_below_per_s: the window ends early once the rate is certainly below this; None for never.
        promote_above_per_s: if the rate may reach this, a narrower interval is wanted (`_wanted_frac`); None for never.
        cycle: `Spec.cycle`, see cycles.py.
        is_led: whether rank 0 ends the window of this rank. Such a window need not hold whole cycles: if rank 0 alone evaluates
            the model, the other ranks wait for it, and these waits only look like the gaps between cycles.
    """

    def __init__(
        self,
        rules: MeasureRules,
        width: int = 1,
        *,
        race_below_per_s: Optional[float] = None,
        promote_above_per_s: Optional[float] = None,
        cycle: Optional[Dict[str, float]] = None,
        is_led: bool = False,
    ) -> None:
        self.rules = rules
        self._promote_above_per_s = promote_above_per_s
        self._race_below_per_s = race_below_per_s
        self.is_raced = False
        self.width = max(1, width)
        self.phase = WARMUP
        self._warmup_steps = 0
        self.is_steady = True
        self.reason = ""
        self.is_draining = False  # steps take batches from a queue faster than it is filled; set by the caller
        self._held_s: Optional[float] = None  # seconds of warm-up since it could first have ended; None before
        self._left: Optional[Window] = None  # the previous window, if the window was restarted
        self._left_after_steps = 0  # warm-up steps before the previous window
        self._moving: List[float] = []  # block rates of the previous window, if the step time seemed to change in it
        self._warm = Blocks(self.width, rules.block_min_s)
        self._warm_s = 0.0
        self._compiling_s = self._longest_compiling_s = 0.0  # seconds of all steps that were not quiet, and of the longest one
        self._has_closed = False
        self._quiet_s = 0.0
        self._quiet_steps = 0
        self._window = Blocks(self.width, rules.block_min_s)
        self._window_s = self._window_samples = 0.0
        self._window_steps = 0
        self._checked_at, self._checked_width = 0, math.inf
        # Number, seconds and samples of steps with long evaluations. Such steps count only as parts of whole cycles.
        self._other_steps, self._other_s, self._other_samples = 0, 0.0, 0.0
        self._opened_s = 0.0  # seconds of `_position` at which the window opened
        self._evaluated_at_s = -math.inf
        self._cycles = Cycles(self.width, rules.min_s / FREQUENT, baseline=cycle)
        self._is_led = is_led

    def feed(self, step_s: float, samples: float, *, is_quiet: bool = True) -> str:
        """Processes a finished step and returns the phase that the trial is now in.

        Args:
            step_s: seconds from the end of the previous step to the end of this step.
            samples: work units of the step.
            is_quiet: whether nothing was compiled and no memory segment was allocated during the step.
        """
        if self.phase == WARMUP:
            self._feed_warmup(step_s, samples, is_quiet)
        elif self.phase == STEADY:
            self.feed_window([step_s], [samples], is_quiet=is_quiet)
        return self.phase

    def feed_evaluation(self, step_s: float, samples: float) -> str:
        """Processes a step that contained an evaluation of the model (perhaps a rollout), and returns the phase.

        If evaluations are frequent, or the step is not a gap, i.e. not much longer than the others (cycles.py), it counts like
        any other step. Otherwise it counts only as part of a cycle.
        """
        ended_s = self._position[1] + step_s
        is_often = ended_s - self._evaluated_at_s <= self.rules.min_s / FREQUENT
        self._evaluated_at_s = ended_s
        if is_often or step_s < self.rules.block_min_s or not self._is_gap(step_s, samples):
            return self.feed(step_s, samples)
        self._other_steps += 1
        self._other_s += step_s
        self._other_samples += samples
        if self.phase == STEADY:
            self._is_decided_by_cycles()
        return self.phase

    def _is_gap(self, step_s: float, samples: float) -> bool:
        steps, end_s = self._position
        samples += self._window_samples + self._other_samples
        return self._cycles.note(step_s, steps=steps + 1, end_s=end_s + step_s, samples=samples, is_evaluation=True)

    # --- warm-up ---

    def _feed_warmup(self, step_s: float, samples: float, is_quiet: bool) -> None:
        self._warmup_steps += 1
        self._warm_s += step_s
        if self._held_s is not None:
            self._held_s += step_s
        if not is_quiet:
            self._cycles.begin_after(*self._position)
            self._compiling_s += step_s
            self._longest_compiling_s = max(self._longest_compiling_s, step_s)
            self._quiet_steps, self._quiet_s = 0, 0.0
            self._warm = Blocks(self.width, self.rules.block_min_s)
        else:
            self._quiet_steps += 1
            self._quiet_s += step_s
            self._has_closed = self._warm.add(step_s, samples)
            if step_s >= self.rules.block_min_s:
                self._note_long(step_s)
        self._opened_s = self._position[1]
        if self._is_warm():
            self._held_s = self._held_s or 0.0
            if not self.is_draining or self._held_s >= self.rules.drain_max_s:
                self.phase = STEADY
        elif self._waited_s >= self.rules.warmup_max_s * (1 if self._quiet_steps else 2):  # 2 if the last step was not quiet
            self.phase, self.is_steady = STEADY, False
            self.reason = f"no steady state within {self.rules.warmup_max_s:g} s"

    @property
    def _waited_s(self) -> float:
        """Seconds so far that count against the warm-up's time limit, i.e. without compilations; see LONG_COMPILATIONS."""
        return self._warm_s - min(self._compiling_s, LONG_COMPILATIONS * self._longest_compiling_s)

    def _is_warm(self) -> bool:
        rules = self.rules
        if self._is_slow():
            return self._quiet_steps >= rules.slow_warmup_steps
        if self._quiet_steps < rules.warmup_quiet_steps or self._quiet_s < rules.warmup_min_device_s:
            return False
        return self._has_closed and len(self._warm) >= 2 and agree(self._warm, rules)

    def _is_slow(self) -> bool:
        steps, seconds = self._quiet_steps + self._window_steps, self._quiet_s + self._window_s
        return steps > 0 and seconds / steps > self.rules.slow_step_s

    # --- window ---

    def feed_window(self, steps_s: Sequence[float], samples: Sequence[float], *, is_quiet: bool = True) -> None:
        """Processes several finished steps of the window at once, which costs far less than feeding them one by one.

        Args:
            steps_s: seconds of each step.
            samples: work units of each step.
            is_quiet: whether nothing was compiled in any of these steps. Otherwise the window restarts, unless the warm-up's
                time limit has passed.
        """
        if not is_quiet:
            self._begin_anew(sum(steps_s), len(steps_s), "graphs are still being compiled")
            if self.phase == WARMUP:
                if self._left is not None:
                    self._left.is_steady, self._left.reason = False, "a graph was compiled inside the window"
                return
        min_s, num_fed = self.rules.block_min_s, 0
        while num_fed < len(steps_s):
            num_before, begin = len(self._window), num_fed
            num_fed += self._window.add_until_closed(steps_s[begin:], samples[begin:])
            self._window_s += sum(steps_s[begin:num_fed])
            self._window_samples += sum(samples[begin:num_fed])
            self._window_steps += num_fed - begin
            last_s, is_closed = steps_s[num_fed - 1], len(self._window) > num_before
            if is_closed or last_s >= min_s:  # the window can end only after a block or a long step
                if last_s >= min_s:
                    self._note_long(last_s)
                self._decide(is_closed=is_closed)
                if self.phase == WARMUP:
                    self._warmup_steps += len(steps_s) - num_fed  # the remaining steps only add to this number
                if self.phase != STEADY:
                    return

    def cut_off(self) -> bool:
        """Ends the window for lack of time if it holds enough steps; returns whether the window was ended."""
        is_enough = self._window_steps >= MIN_STEPS and self._window_s >= self.rules.race_min_s and len(self._window) > 0
        if self.phase != STEADY or not is_enough:
            return False
        if self.is_draining and self.is_steady:  # part of the samples were prepared before the window
            self.is_steady, self.reason = False, "the trial's time was up while the loader's queue was running empty"
        self.phase, self.reason = DONE, self.reason or "the trial's time was up"
        return True

    def _begin_anew(self, more_s: float, more_steps: int, otherwise: str) -> None:
        # The steps measured so far do not show how the program runs now. So return to warm-up, unless too much time has passed.
        if self._waited_s + self._window_s + more_s >= self.rules.warmup_max_s:
            self.is_steady, self.reason = False, f"{otherwise} after {self._warm_s + self._window_s + more_s:.0f} s"
            return
        self._left, self._left_after_steps = self.window() or self._left, self.warmup_steps
        self.phase = WARMUP
        self._warm_s += self._window_s + more_s
        self._warmup_steps += self._window_steps + more_steps
        self._quiet_steps, self._quiet_s, self._has_closed, self._held_s = 0, 0.0, False, None
        self._warm, self._window = (Blocks(self.width, self.rules.block_min_s) for _ in range(2))
        self._window_s = self._window_samples = 0.0
        self._window_steps = 0
        self._checked_at, self._checked_width = 0, math.inf

    def _decide(self, *, is_closed: bool) -> None:
        if not self._cycles.is_idle and self._is_decided_by_cycles():
            return
        if self._is_slow():
            self._stop_slow()
        elif is_closed:
            self._stop_by_interval()
        if self.phase == STEADY and is_closed and self._window_s >= self.rules.race_min_s:
            self._race(self._window.samples / self._window.seconds, lambda: self._spread_frac, RACE_WIDTH)
        if self.phase == STEADY and self._window_s >= self.rules.max_s and self._window_steps >= self.rules.slow_min_steps:
            self._end(f"time cap of {self.rules.max_s:g} s")

    def _stop_slow(self) -> None:
        rules = self.rules
        full = self._window_steps % self.width == 0
        if self._window_steps >= rules.slow_min_steps and full and self._is_narrow():
            self._end("interval narrow enough")
        elif self._window_s >= rules.slow_max_s and self._window_steps >= min(rules.slow_min_steps, MIN_STEPS):
            self._end(f"time cap for slow steps of {rules.slow_max_s:g} s")

    def _stop_by_interval(self) -> None:
        rules = self.rules
        if len(self._window) < rules.min_blocks or self._window_steps < rules.min_steps or self._window_s < rules.min_s:
            return
        width = self._spread_frac
        if width is None:
            return
        if self._is_narrow() and not self._is_too_correlated():
            self._end("interval narrow enough")
        elif len(self._window) >= 2 * max(self._checked_at, rules.min_blocks):
            if width > 0.9 * self._checked_width:
                self._end("a longer window no longer narrows the interval")
            self._checked_at, self._checked_width = len(self._window), width

    def _is_narrow(self) -> bool:
        blocks, width = self._window, self._spread_frac
        return width is not None and width <= self._wanted_frac(blocks.samples / blocks.seconds, width)

    def _wanted_frac(self, rate_per_s: float, width: float) -> float:
        """Returns the half-width at which to stop.

        It is smaller for a rate that may be the best so far, until the window has lasted `promoted_max_s` seconds.
        """
        rules, above_per_s = self.rules, self._promote_above_per_s
        if above_per_s is None or self._window_s >= rules.promoted_max_s:
            return rules.half_width_frac
        is_contender = rate_per_s * (1 + width) >= above_per_s
        return min(rules.half_width_frac, rules.promoted_half_width_frac) if is_contender else rules.half_width_frac

    def _race(self, rate_per_s: float, spread: Callable[[], Optional[float]], width: float) -> None:
        """Ends the window if the upper end of the rate's 99 % interval is too low to be of interest.

        Warm-up is over, and a queue that was filled before the window can only make the beginning of the window too fast. So a
        rate that is too low now will stay low. The bound is checked at every block, so its confidence is less than 99 %. To
        compensate, the race limit is 20 % below the best rate.

        A window that was restarted because the step time changed is never ended here: the previous window was not too slow, and
        another program may have slowed down the trial since then.
        """
        limit_per_s = self._race_below_per_s
        if limit_per_s is None or not self.is_steady or self._moving or rate_per_s >= limit_per_s:
            return
        half = spread()
        if half is None or rate_per_s * (1 + half * width) >= limit_per_s:
            return
        self.is_raced = True
        self._end(f"stopped after {self._window_s:.1f} s: certainly slower than 0.8 times the best rate so far")

    # --- cycles ---

    @property
    def _position(self) -> Tuple[int, float]:
        """Number of steps fed so far and their seconds."""
        steps = self._warmup_steps + self._window_steps + self._other_steps
        return steps, self._warm_s + self._window_s + self._other_s

    def _note_long(self, step_s: float) -> None:
        steps, end_s = self._position
        self._cycles.note(step_s, steps=steps, end_s=end_s, samples=self._window_samples + self._other_samples)

    def _gaps(self) -> List[Gap]:
        return self._cycles.gaps(self._position[1])

    @property
    def _open_s(self) -> float:
        """Seconds since the window opened, including the steps that count only as parts of cycles."""
        return self._position[1] - self._opened_s

    @property
    def _cycles_max_s(self) -> float:
        return max(self.rules.cycles_max_s, 1.5 * self.rules.max_s)

    def _is_awaited(self) -> bool:
        is_bounded = self._open_s < self._cycles_max_s
        return is_bounded and self._cycles.is_awaited(self._window_steps, self._open_s)

    def _whole(self) -> Optional[Whole]:
        """Returns the whole cycles of the window; None if there are none."""
        return whole([gap for gap in self._gaps() if gap.end_s >= self._opened_s])

    def _is_decided_by_cycles(self) -> bool:
        """Ends the window after enough whole cycles; returns True if the other rules must not end it."""
        gaps = self._gaps()
        if not gaps:
            return self._is_awaited()
        found = self._whole()
        if found and gaps[-1].steps == self._position[0]:
            self._stop_by_cycles(found)
        if self.phase == STEADY and self._open_s >= self._cycles_max_s:
            self.reason = self.reason or ("" if found else self._why_not_whole())
            self._end("time cap for cycles")
        return True

    def _stop_by_cycles(self, found: Whole) -> None:
        rules, num, rate_per_s = self.rules, len(found.block_s), found.samples / found.seconds
        half = spread_frac(found.rates_per_s, min_blocks=2)
        if half is None or found.seconds < rules.min_s:
            return
        is_narrow = num >= CYCLES and half <= self._wanted_frac(rate_per_s, half)
        if is_narrow or found.seconds * (1 + 1 / num) > rules.max_s:
            self._end(str(found))
        else:
            self._race(rate_per_s, lambda: half, CYCLES_RACE_WIDTH.get(num, RACE_WIDTH))

    def _why_not_whole(self) -> str:
        """Returns why the window holds no whole cycle although it should; "" if it holds one, need not, or has no cycles."""
        gaps = self._gaps()
        if self._is_led or self._whole() or not (len(gaps) > 1 or self._is_awaited()):
            return ""
        if len(gaps) < 2:
            return "ended before a whole cycle of the baseline's length"
        before, last = gaps[-2:]
        found, most = in_words(last.steps - before.steps, last.end_s - before.end_s), self._cycles_max_s
        more = "allow more time (study.budget.minutes, measure.*.cycles_max_s)"
        return f"{found}, and the window of at most {most:g} s holds no whole cycle: {more}"

    def _end(self, reason: str) -> None:
        if not self.is_draining and self._restarts_for_trend():  # a draining queue also changes the step time
            return
        self.phase = DONE
        self.reason = self.reason or reason

    def _restarts_for_trend(self) -> bool:
        """Returns whether another window was started because the step time changed during this one."""
        found = self._whole()
        rates, between = (found.rates_per_s, []) if found else (self._window.rates_per_s, self._warm.rates_per_s)
        last = trend(rates)
        if not self._moving:
            if last.is_suspect:
                self._moving = rates
                self._begin_anew(0.0, 0, "the step time still changes")
            return self.phase == WARMUP
        whole = trend([*self._moving, *between, *rates])
        if keeps_changing(whole, last, self.rules.trend_frac):
            self.is_steady = False
            self.reason = f"the step time keeps {'growing' if last.moved_frac > 0 else 'falling'}: {whole.moved_frac:+.0%}"
            self.reason += " from one window to the end of the next"
        return False

    @property
    def _spread_frac(self) -> Optional[float]:
        return spread_frac(self._window.rates_per_s, min_blocks=self.rules.min_blocks)

    def _is_too_correlated(self) -> bool:
        # A longer window helps if the blocks are too correlated for an interval. With few blocks their correlation is unknown,
        # and with slow steps it would cost too much to find out.
        blocks = self._window
        return len(blocks) >= MIN_BLOCKS and mean_half_width_frac(blocks.rates_per_s, blocks.block_s)[0] is None

    @property
    def rate_per_s(self) -> Optional[float]:
        """Samples per second of the last closed block; None before the first is closed."""
        rates = self._window.rates_per_s or self._warm.rates_per_s
        return rates[-1] if rates else None

    @property
    def warmup_steps(self) -> int:
        """Steps before the window that `window` returns; all steps so far if it returns None."""
        found = self._whole() if self._window_steps else None
        if found:
            return found.begin.steps
        return self._left_after_steps if self._left is not None and not self._window_steps else self._warmup_steps

    def window(self) -> Optional[Window]:
        """Returns the window measured so far, cut to whole cycles or blocks if it holds any; None if no window was reached.

        If the window was restarted and has no steps yet, returns the previous window: the program may end at that moment.
        """
        if not self._window_steps:
            return self._left
        steps, seconds, samples = self._window_steps, self._window_s, self._window_samples
        found, blocks = self._whole(), self._window
        if found or len(blocks):
            steps, seconds, samples = found[1:4] if found else (blocks.num_steps, blocks.seconds, blocks.samples)
        rates, block_s = (found or blocks).rates_per_s, (found or blocks).block_s
        why_not = self._why_not_whole()
        return Window(
            steps=steps,
            seconds=seconds,
            samples=samples,
            rate_per_s=samples / seconds,
            block_rates_per_s=rates,
            half_width_frac=mean_half_width_frac(rates, block_s)[0],
            is_steady=self.is_steady and not why_not,
            reason=self.reason if not self.is_steady else why_not or self.reason,
            block_s=block_s,
            is_raced=self.is_raced,
            cycles=len(found.block_s) if found else 0,
        )
