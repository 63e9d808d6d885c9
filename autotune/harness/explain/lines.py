"""The pass "lines": where the host's time goes, by phase, line and loader stage, without a profiler."""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

import torch

from ..context import TrialContext
from . import workers
from .base import Pass, mean_step_s
from .compiling import Compilations
from .documents import INPUT, LINES, MAIN, OTHER, Line, Lines, Stage
from .phase_marks import DevicePhases, Marks
from .restarts import RestartTimer
from .sampler import LineSampler, most_of_each
from .sources import Sources
from .stages import Stages, stages_of
from .syncs import SyncSites

# The pass lasts LENGTH_S (or the trial's `max_s`). If it has seen fewer than MIN_STEPS steps by then, it continues until it
# has seen that many or until it has lasted MOST times that length.
LENGTH_S, MIN_STEPS, MOST = 5.0, 20, 3.0
INTERVAL_S = 0.002  # mean seconds between two samples of the training thread
# A sample takes a larger share of a short step. So if steps are shorter than SHORT_S, samples are SHORT_INTERVAL_S apart on
# average. In LENGTH_S, this still gives a thousand samples.
SHORT_S, SHORT_INTERVAL_S = 0.005, 0.005
NO_DELAYS = "how long loader stages wait for storage is not known: the operating system does not record how long threads wait"
NO_LOADER = "no DataLoader feeds the steps, so loader stages and waiting for input are not known"
TRACED = "a debugger, coverage or cProfile is active: Python calls it at each line or call, which slows Python code down"
PROFILED = "the program's own profiler is active: it records each operator, which slows the steps down"
EVALUATED = "{:.0f} % of the observed time are steps in which the program evaluates its model, which do not count"
LEAST_EVALUATED_FRAC = 0.1  # if evaluations take a smaller share of the observed time, there is no note on them


def pages_touched() -> int:
    """Returns the number of this process's page faults so far, minus the faults by which it reached its peak memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt - used.ru_maxrss * 1024 // resource.getpagesize()


class Collections:
    """Times garbage collections in the training process. Those in the sampler's thread are also added to its `collected_s`."""

    def __init__(self, sampler: LineSampler) -> None:
        self.seconds, self.count, self._began_s = 0.0, 0, 0.0
        self._step_began = (0.0, 0)  # `seconds` and `count` when the current step began
        self._sampler = sampler

    def note(self, moment: str, info: Any) -> None:
        """Called by the collector before and after each run."""
        if moment == "start":
            self._began_s = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._began_s
            self.seconds += seconds
            self.count += 1
            if threading.get_ident() == self._sampler.ident:
                self._sampler.collected_s += seconds

    def step_begins(self) -> None:
        """Records that later collections belong to the next step."""
        self._step_began = (self.seconds, self.count)

    def leave_out_step(self) -> None:
        """Forgets the collections since the current step began."""
        self.seconds, self.count = self._step_began


def samples_of(seen: List[float], num_steps: int) -> float:
    """Returns the samples of a pass with `num_steps` steps, from the samples of its first steps: 96.0 for [32.0, 32.0] and 3.

    At the end of a pass, a GPU may still be computing the last steps. The samples of these steps are not in `seen`.
    """
    return sum(seen) * (num_steps / len(seen)) if seen else 0.0


def of_debugging() -> List[str]:
    """Returns notes on debuggers and profilers that are active in this thread."""
    is_traced = sys.gettrace() is not None or sys.getprofile() is not None
    is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return [TRACED] * is_traced + [PROFILED] * is_profiled


def of_evaluations(observed_s: float, counted_s: float) -> List[str]:
    """Returns a note if evaluations, which are left out of `counted_s`, take a large part of the observed time."""
    share = 1 - counted_s / observed_s if observed_s > 0 else 0.0
    return [EVALUATED.format(100 * share)] if share >= LEAST_EVALUATED_FRAC else []


class LinesPass(Pass):
    """Observes the host for some seconds."""

    which = LINES

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._sources = Sources()
        self._began_s = 0.0
        self._before, self._pages = (0, 0, 0.0, 0.0), 0
        self._left_out = (0.0, 0.0)  # samples of steps with an evaluation, and seconds that these steps waited for the loader
        self._is_anomaly_mode, self._is_detecting = False, torch.is_anomaly_enabled

    def begin(self) -> None:
        """See the base class."""
        context = self.context
        self._marks = marks = Marks(context)
        self._device: Optional[DevicePhases] = DevicePhases(context.device_index) if context.device == "cuda" else None
        if self._device is not None:
            context.clock.open_window()  # waits for the device
            marks.on_change = self._device.note
        self._restarts = RestartTimer(context)
        marks.on_step = self._step_begins
        self._sampler = LineSampler(self._sources, self._interval_s(), self._phase, MAIN)
        self._syncs = SyncSites(context, marks, self._sources)
        self._collections = Collections(self._sampler)
        gc.callbacks.append(self._collections.note)
        self._stages = Stages()
        if context.loaders.num_workers():
            self._stages.install_hand_over()
        else:
            self._stages.is_observed = context.loaders.is_training_now
            self._stages.install()
        self._training = context.loaders.training
        self._workers = self._read_workers()
        self._compilations = Compilations()
        if context.world_size > 1:
            context.communication.begin(is_compiled=context.modules.num_graphs() > 0)
        self.notes += of_debugging()
        self._before, self._pages = self._now(), pages_touched()
        self._syncs.install()
        marks.install()
        self._restarts.install()
        if self._device is not None:
            self._device.note(marks.now)
        self._began_s = time.perf_counter()
        self._sampler.start()

    def _step_begins(self) -> None:
        self._restarts.step_begins()
        self._collections.step_begins()
        self._compilations.step_begins()
        if self._device is not None:
            self._device.step_begins()

    def _phase(self) -> str:
        self._is_anomaly_mode = self._is_anomaly_mode or self._is_detecting()
        return "" if self.context.modules.is_in_evaluation else self._marks.now

    def _interval_s(self) -> float:
        step_s = mean_step_s(self.context.window.plain_s)
        return SHORT_INTERVAL_S if step_s is not None and step_s < SHORT_S else INTERVAL_S

    def _now(self) -> Tuple[int, int, float, float]:
        """Returns the optimizer steps, steps with known samples, seconds waited for the loader, and its batches, all so far."""
        training = self.context.loaders.training
        waited = (training.total_wait_s, training.total_batches) if training is not None else (0.0, 0.0)
        return (self.context.num_steps, len(self.context.window.steps["samples"]), *waited)

    def _read_workers(self) -> workers.Reading:
        training = self.context.loaders.training
        if training is None or not training.num_workers:
            return {}
        return workers.read(workers.prefix(self.context.spec.folder, training.number))

    def step_done(self) -> None:
        """See the base class."""
        context = self.context
        if context.communication.is_looking and not context.last_step.is_announced:
            context.communication.step_done()
        elapsed_s = time.perf_counter() - self._began_s
        length_s = context.spec.max_s or LENGTH_S
        is_long = elapsed_s >= length_s and context.num_steps - self._before[0] >= MIN_STEPS
        self.is_over = is_long or elapsed_s >= MOST * length_s

    def leave_out(self, samples: float, wait_s: float) -> None:
        """See the base class."""
        self._left_out = (self._left_out[0] + samples, self._left_out[1] + wait_s)
        if self._device is not None:
            self._device.leave_out_step()
        self._restarts.leave_out_step()
        self._collections.leave_out_step()
        self._compilations.leave_out_step()
        self._marks.leave_out_step()
        if self._device is not None:
            self._device.note(self._marks.now)  # from now on, the current phase counts

    def finish(self) -> Optional[Lines]:
        """See the base class."""
        self._sampler.stop()
        observed_s = time.perf_counter() - self._began_s
        self._restarts.uninstall()
        self._marks.uninstall()
        self._syncs.uninstall()
        self._stages.uninstall()
        if self._device is not None:
            self._device.note(OTHER)  # ends the last phase
        gc.callbacks.remove(self._collections.note)
        after = self._now()
        num_steps = after[0] - self._before[0] - self._marks.num_left_out
        if self._marks.num_left_out:
            self.notes += of_evaluations(observed_s, sum(self._marks.seconds.values()))
        return self._document(num_steps, after) if num_steps > 0 else None

    def _document(self, num_steps: int, after: Tuple[int, int, float, float]) -> Lines:
        context, training = self.context, self.context.loaders.training
        seconds = sum(self._marks.seconds.values())
        samples = context.window.steps["samples"][self._before[1] : after[1]]
        stages, worker_lines = self._input(num_steps)
        if training is None:
            self.notes.append(NO_LOADER)
        sampler, device = self._sampler, self._device
        pages = None if self._marks.num_left_out else max(0, pages_touched() - self._pages) / num_steps
        return Lines(
            rank=context.rank,
            world_size=context.world_size,
            device=context.device,
            steps=num_steps,
            seconds=seconds,
            samples=samples_of(samples, after[0] - self._before[0]) - self._left_out[0],
            unit=context.loaders.unit,
            phases_s={phase: each / num_steps for phase, each in self._marks.seconds.items()},
            device_phases_s=None if device is None else {phase: each / num_steps for phase, each in device.seconds().items()},
            wait_s=None if training is None else self._wait_s(after[2]) / num_steps,
            num_workers=None if training is None else training.num_workers,
            batch_size=None if training is None else training.rows or training.batch_size,
            num_samples=sampler.num_samples,
            lines=most_of_each([*sampler.lines(num_steps, self._scale()), *worker_lines]),
            stages=stages,
            syncs=self._syncs.sites(num_steps),
            gc_s=self._collections.seconds / num_steps,
            gc_count=self._collections.count / num_steps,
            compiled=self._compilations.result(self._sources),
            communication=context.communication.summary(),
            busy_cpu_s=self._marks.busy_cpu_s / num_steps,
            is_stream=training is not None and training.is_stream,
            page_faults=pages,
            is_anomaly_mode=self._is_anomaly_mode,
            restarts=self._restarts.result(),
            ranks_per_batch=context.sharing.ranks_per_batch(),
            unit_source=context.loaders.unit_source,
        )

    def _wait_s(self, total_s: float) -> float:
        """Returns for how many seconds the training thread waited for the training loader, whose waits so far are `total_s`.

        The result is at most the seconds in phase "input": if another thread fetches the batches, the loader's count contains
        the waits of that thread. If another loader became the training loader during the pass, the result is the seconds in
        phase "input", which contain the waits for all loaders.
        """
        input_s = self._marks.seconds[INPUT]
        if self.context.loaders.training is not self._training:
            return input_s
        return max(0.0, min(total_s - self._before[2] - self._left_out[1], input_s))

    def _scale(self) -> Dict[str, float]:
        """Returns phase -> its measured seconds divided by its sampled seconds."""
        return {phase: self._marks.seconds[phase] / each for phase, each in self._sampler.phases_s.items() if each > 0}

    def _input(self, num_steps: int) -> Tuple[List[Stage], List[Line]]:
        """Returns the stages of the training loader and the lines of its workers."""
        own, reading = self._stages.counts(), self._read_workers()
        workers.remove(self.context.spec.folder)
        if not self.context.loaders.num_workers():
            if own["timed"] and not self._stages.knows_delays:
                self.notes.append(NO_DELAYS)
            stages = stages_of(own, self._stages.places, MAIN, knows_delays=self._stages.knows_delays)
            return self._per_sample(stages, own), []
        stages, lines, counts = workers.between(self._workers, reading, num_steps)
        if not self._stages.knows_delays:
            self.notes.append(NO_DELAYS)
        training = self.context.loaders.training
        if training is None or training is not self._training:  # its number of batches in these steps is not known
            return self._per_sample(stages, counts), lines
        per_batch = (
            counts["samples"] / counts["fetches"] if counts["fetches"] else float(training.rows or training.batch_size or 1)
        )
        own["samples"] = own["timed"] = max(1.0, self._now()[3] - self._before[3]) * per_batch
        return self._per_sample([*stages, *stages_of(own, {}, MAIN, knows_delays=False)], counts), lines

    def _per_sample(self, stages: List[Stage], counts: Dict[str, Any]) -> List[Stage]:
        """Converts the seconds of stages from seconds per item of the data set to seconds per sample.

        The two differ if an item is a whole batch.

        Args:
            stages: the stages.
            counts: the loader's fetches, and the items in them, as in `Stages.counts`.
        """
        training = self.context.loaders.training
        is_batch = counts["samples"] == counts["fetches"] > 0  # a fetch gets one item; with a batch sampler, it gets several
        if training is None or not is_batch or not (training.rows or training.batch_size is None):
            return stages
        by = training.rows or training.total_samples / max(1.0, training.total_batches) or 1.0  # samples of an item

        def divided(stage: Stage) -> Stage:
            cpu_s, blocked_s = (each if each is None else each / by for each in (stage.cpu_s, stage.blocked_s))
            return dataclasses.replace(stage, seconds=stage.seconds / by, cpu_s=cpu_s, blocked_s=blocked_s)

        return list(map(divided, stages))
