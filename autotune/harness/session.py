"""Holds the state of one trial in one process and follows its steps.

Every process of a trial that imports torch has a session. A session reports for the trial only from the first optimizer step
on (`activate`). Loader workers, launch agents and helpers make no steps and so never write a result.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from multiprocessing.process import BaseProcess
from typing import Any, Optional

from . import libraries, process, protocol, state
from .clock import make_clock
from .context import TrialContext
from .ending import Ending
from .explain import skipping
from .knobs.affinity import AffinityBinder
from .last_step import LastStep
from .patches import patches
from .peers import Peers
from .phases import Phases
from .window import Window

EAGER_STEPS = 8  # number of steps at the start that are processed one by one; with several ranks, all steps are
OTHER_DEVICE = "the program trains on a device of type {}: autotune can time steps only on CPUs and on CUDA devices"
LOOK_S = 0.2  # seconds between two calls of `_look` after the eager steps; `_look` is costly because its code is cold


class Session(TrialContext):
    """The harness in this process: creates the objects that watch the program and follows its steps."""

    __slots__ = ("_is_plain", "_next_look_s")  # every step reads them, and a slot is faster

    def __init__(self, spec_path: str) -> None:
        super().__init__(protocol.read_spec(spec_path))
        self.binder = AffinityBinder(self)  # must come before torch counts the cores
        self.window = Window(self)
        self.last_step = LastStep(self)
        self.ending = Ending(self)
        self.phases = Phases(self)
        self.peers = Peers(self)
        self._next_look_s = 0.0
        self._eager_steps = max(EAGER_STEPS, self.spec.max_steps or 0)
        self.explained = None
        self._is_stepped_by_hand = False  # whether the program calls `autotune.trial_step`
        self._stated_samples: Optional[float] = None
        self._is_plain = False  # whether steps may use `plain_step_hook`, because nothing is left to find out
        self.phases.enter("import")

    def torch_is_there(self) -> None:
        """Applies the knobs that must be set early and starts watching for training; called once torch is imported."""
        from . import (
            applied,
            gradients,
            loaders,
            losses,
            modules,
            optimizers,
            ranks,
            ranks_per_batch,
            stack_requests,
            supply,
            uneven_inputs,
            writes,
        )
        from .knobs import registry

        self.applied = applied.Applied(self, is_called=state.is_called) if self.is_applying else None
        process.limit_memory(self.spec)
        self.handlers = registry.make(self)
        for handler in self.handlers:
            handler.on_torch()
        stack_requests.answer_by_file(self.spec)
        if self.spec.seed is not None:
            losses.seed_everything(self.spec.seed)
        self.losses = None if self.is_applying else losses.LossWatch(self, self.spec.max_steps)
        self.memory = process.MemoryWatch()
        self.loaders = loaders.LoaderWatch(self)
        self.supply = supply.Supply(self.loaders, self.binder, functools.partial(process.num_local_ranks, self))
        self.sharing = ranks_per_batch.Sharing(self)
        self.modules = modules.ModuleWatch(self)
        self.communication = ranks.Communication(self.handlers.parallel)
        self.optimizers = optimizers.OptimizerWatch(self)
        self.gradients = gradients.Gradients(self)
        if self.spec.mode == "explain":
            from .explain.passes import Explained

            self.explained = Explained(self)
            self._eager_steps = sys.maxsize if self.explained.looks_at_every_step else self._eager_steps
        if self.spec.skipped:
            skipping.begin(tuple(self.spec.skipped), self.loaders.is_training_now)
        self.writes = writes.Writes(self)  # last, so its patch of `backward()` is on top and is removed first
        atexit.register(self.ending.at_exit)
        if not self.is_applying:
            uneven_inputs.watch(self)
            patches.install(BaseProcess, "_bootstrap", self.ending.around_process)
            patches.install(os, "_exit", self.ending.around_exit)
        os.register_at_fork(after_in_child=self._forked)
        self.phases.enter("init")

    def _forked(self) -> None:
        # A forked process may be a rank that trains. But if its parent was already training, the harness ignores the child.
        self.pid = os.getpid()
        self.is_child, self.phases.is_writing = True, False
        self.is_over = self.is_over or self.is_active
        self._is_plain = False
        self.modules.forked()

    def activate(self) -> None:
        """Makes this process write the result of its rank; called before the first optimizer step is counted."""
        self.is_active = True
        libraries.end()
        self.phases.start_writing()
        if (ranks := process.group()) is not None:
            self.rank, self.world_size = ranks.get_rank(), ranks.get_world_size()
        else:  # several processes without a process group do not train together
            self.rank, self.world_size = self.rank if "RANK" in os.environ else 0, 1
        kind, index = self.modules.device()
        self.device, self.device_index = ("cuda", index) if kind == "cuda" else ("cpu", None)
        if kind not in ("cpu", "cuda", "meta"):  # libraries that move weights around may keep them on "meta" between uses
            self.ending.give_up(OTHER_DEVICE.format(kind))
        if not self.is_applying:
            self.clock = make_clock(self.device, self.device_index)
            self.loaders.is_on_gpu = self.device == "cuda"
            self.memory.begin(self.device, self.device_index, limit_bytes=self.spec.memory_limit_bytes)
            if self.world_size == 1:
                self.peers.claim()
            elif self.rank == 0:
                self.peers.lead()
        self.modules.begin_training()
        for handler in self.handlers:
            handler.on_activate()
        if self.spec.skipped:
            skipping.skip_functions(self.spec.skipped, is_needed=self.rank == 0)

    def plain_step_hook(self, otherwise: Any) -> Any:
        """Returns a short hook for usual steps, i.e. steps without an evaluation that only the training loader feeds.

        After any other step, the hook calls `otherwise`. For a usual step, it does the same as `step_done`, but in one call
        instead of seventeen, because each call of cold code costs a microsecond (measured).
        """
        modules, touched, training = self.modules, self.loaders.touched, self.loaders.training
        waiting, monotonic = self.clock.waiting, time.monotonic  # a HostClock: on a GPU, `_look` asks for no short hook

        def after_plain_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if len(touched) != 1 or touched[0] is not training or modules.is_evaluated or not self._is_plain:
                otherwise(optimizer, args, kwargs)
                return
            touched.clear()
            self.num_steps = training.fed_step = self.num_steps + 1
            samples, wait_s = training.samples, training.wait_s
            training.total_samples += samples
            training.total_wait_s += wait_s
            training.total_batches += training.num_yields
            training.num_steps_fed += 1
            training.num_steps_running += 1
            training.samples = training.wait_s = training.num_yields = 0
            now_s = monotonic()
            waiting.append((now_s, samples, wait_s, False))
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S
                try:
                    self._look(now_s)
                except Exception:
                    self.broke("looking at the steps")

        after_plain_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return after_plain_step

    def step_done(self) -> None:
        """Processes a counted optimizer step; everything here is on the program's critical path."""
        if self.is_over or self._is_stepped_by_hand:
            return
        try:
            self._step_done()
        except Exception:
            self.broke("counting a step")

    def trial_step(self, samples: Optional[float]) -> None:
        """Counts a step that the program reports itself; from the first such step on, optimizer steps no longer count.

        Args:
            samples: samples of this step in this process; if None, they are counted as for an optimizer step.
        """
        if self.is_over:
            return
        if not self._is_stepped_by_hand:
            self.writes.stand_down()
        self._is_stepped_by_hand, self._is_plain, self._stated_samples = True, False, samples
        try:
            self._step_done()
        except Exception:
            self.broke("counting a step")

    def _step_done(self) -> None:
        if not self.is_active:
            self.activate()
        self.num_steps += 1
        if self.modules.is_looking:
            self.modules.step_done()
        if self.applied is not None:
            self.applied.step_done()
            return
        samples, wait_s, is_foreign = self.loaders.take_step(self.modules.take_samples(), self.modules.unit)
        if self._stated_samples is not None:
            samples = float(self._stated_samples)
            self.loaders.unit, self.loaders.unit_source = "samples", "autotune.trial_step"
        if self.modules.is_evaluated:
            is_foreign = self.modules.take_evaluated() or is_foreign
        if is_foreign and self.explained is not None:
            self.explained.leave_out(samples, wait_s)
        now_s = self.clock.mark(samples, wait_s, is_foreign)
        # One look processes several short steps, because running its cold code at every step would cost far more.
        if now_s >= self._next_look_s or self.num_steps <= self._eager_steps or self.world_size > 1:
            self._next_look_s = now_s + LOOK_S
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        self.peers.look(now_s)
        if not self.window.is_quiet():
            self.clock.noise()
        self.window.feed(list(self.clock.finished()))
        # Calls of the model are counted if the batches do not show the number of samples. On a GPU they are always counted,
        # because a step's first call tells the clock that the batch is there.
        is_fed = self.loaders.unit_source == "loader" and not self.loaders.is_idle
        self.modules.is_counting = self.device == "cuda" or not is_fed
        self.modules.settle()
        self.loaders.settle()
        if self.num_steps == 1:
            self.window.first_step()
        is_alone = self.world_size == 1 and not self._is_stepped_by_hand and self.loaders.unit_source == "loader"
        is_alone = is_alone and not self.loaders.is_read_elsewhere()
        optimizers = self.optimizers
        is_usual = optimizers.scaler is None and not optimizers.is_in_parts
        is_settled = not self.modules.is_looking and is_usual and self.num_steps > self._eager_steps
        self._is_plain = is_alone and is_settled
        optimizers.settle(is_short=self._is_plain and not self.modules.is_counting)
        if self.explained is not None:
            self.explained.look()
            self.window.is_full = self.explained.is_over
        if self.last_step.is_reached():
            if self.spec.skipped and self.rank == 0:  # the other ranks need not call the functions that are to be skipped
                skipping.check_skipped()
            self.ending.leave("measured")
        if now_s >= self.phases.next_beat_s:
            self.phases.beat(now_s)
            self.memory.look(now_s)
            if self.losses is not None:
                self.losses.look_again(now_s)
