"""Marks the phases of a step in the training thread: waiting for input, copying, forward, backward, optimizer, other."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..context import TrialContext
from ..knobs.step import with_closure
from ..patches import Patch, patches
from .documents import BACKWARD, FORWARD, INPUT, OPTIMIZER, OTHER, STEP_PHASES

LEFT_OUT = "left out"  # replaces the phase of events in a step that does not count
MAX_EVENTS = 4_000  # at this number of CUDA events, the older half is read: the device has passed these events long ago
# Losses are mostly computed outside the module that trains. Calls of these functions also count as forward if the program calls
# them as attributes of `nn.functional` (`F.mse_loss(...)`), but not if it has imported `mse_loss` itself.
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class Marks:
    """The phase that the training thread is in, and the seconds spent in each. Created in the training thread.

    Attributes:
        now: the current phase.
        seconds: phase -> host seconds since the marks were installed.
        busy_cpu_s: CPU seconds that the training thread has used in all phases but INPUT since the marks were installed.
        thread: identifier of the training thread.
        on_change: if not None, called with each new phase.
        on_step: if not None, called in each step when the phase first changes.
        on_result: if not None, called with (phase, result) whenever a call wrapped by `around` returns.
        between_steps: if not None, called once, at the next change from OTHER to another phase.
        num_left_out: steps whose seconds do not count.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.now = OTHER
        self.seconds = dict.fromkeys(STEP_PHASES, 0.0)
        self.busy_cpu_s = 0.0
        self.thread = threading.get_ident()
        self.on_change: Optional[Callable[[str], None]] = None
        self.on_step: Optional[Callable[[], None]] = None
        self.on_result: Optional[Callable[[str, Any], None]] = None
        self.between_steps: Optional[Callable[[], None]] = None
        self._since_s = self._since_cpu_s = 0.0
        self._is_on = False
        self._patches: List[Patch] = []
        self._hooks: List[Any] = []
        self._before_step: List[str] = []  # phases that optimizers' steps interrupted
        self.num_left_out = 0
        # `seconds` and `busy_cpu_s` at the first change of phase after the last step, and the number of steps until then
        self._step_began: Tuple[Dict[str, float], float, int] = ({}, 0.0, -1)

    def enter(self, phase: str) -> str:
        """Begins a phase and returns the one that it interrupts, for `leave`."""
        before = self.now
        if before == OTHER and self.between_steps is not None:
            act, self.between_steps = self.between_steps, None
            act()
        self.leave(phase)
        return before

    def leave(self, phase: str) -> None:
        """Ends the current phase and continues `phase`, which `enter` has returned."""
        if phase == self.now:
            return
        now_s = time.perf_counter()
        self.seconds[self.now] += now_s - self._since_s
        if INPUT in (phase, self.now):
            self._count_cpu()
        self.now, self._since_s = phase, now_s
        if self._context.num_steps != self._step_began[2]:
            self._note_step()
        if self.on_change is not None:
            self.on_change(phase)

    def _count_cpu(self) -> None:
        cpu_s = time.thread_time()
        if self.now != INPUT:
            self.busy_cpu_s += cpu_s - self._since_cpu_s
        self._since_cpu_s = cpu_s

    def leave_out_step(self) -> None:
        """Subtracts from `seconds` and `busy_cpu_s` what was added since the previous step ended."""
        self.seconds, self.busy_cpu_s, num_steps = self._step_began
        self.num_left_out += self._context.num_steps - num_steps
        self._since_s, self._since_cpu_s = time.perf_counter(), time.thread_time()
        self._note_step()

    def _note_step(self) -> None:
        unread_s = time.thread_time() - self._since_cpu_s if self.now != INPUT else 0.0
        self._step_began = (dict(self.seconds), self.busy_cpu_s + unread_s, self._context.num_steps)
        if self.on_step is not None:
            self.on_step()

    def totals(self) -> Dict[str, float]:
        """Returns phase -> host seconds so far, including the current phase."""
        return {**self.seconds, self.now: self.seconds[self.now] + time.perf_counter() - self._since_s}

    def around(self, phase: str, function: Any) -> Any:
        """Returns `function`, wrapped so that each of its calls counts as `phase`."""
        is_compiling = torch.compiler.is_compiling  # while it returns true, our patches only call the original

        def marked(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_on or threading.get_ident() != self.thread:
                return function(*args, **kwargs)
            before = self.enter(phase)
            try:
                result = function(*args, **kwargs)
            finally:
                self.leave(before)
            if self.on_result is not None:
                self.on_result(phase, result)
            return result

        return marked

    def install(self) -> None:
        """Starts to mark phases."""
        self._is_on, self._since_s, self._since_cpu_s = True, time.perf_counter(), time.thread_time()
        self._note_step()
        for owner, name, phase in self._places():
            self._patches.append(patches.install(owner, name, functools.partial(self.around, phase)))
        self._hooks.append(register_optimizer_step_pre_hook(self._step_begins))
        self._hooks.append(register_optimizer_step_post_hook(self._step_ends))

    def uninstall(self) -> None:
        """Removes the marks."""
        self.seconds, self._is_on = self.totals(), False
        self._count_cpu()
        while self._patches:
            self._patches.pop().uninstall()
        while self._hooks:
            self._hooks.pop().remove()

    def _places(self) -> List[Tuple[Any, str, str]]:
        from ..modules import ModuleWatch

        places: List[Tuple[Any, str, str]] = [
            (_BaseDataLoaderIter, "__next__", INPUT),
            (DataLoader, "__iter__", INPUT),  # starts the workers
            (ModuleWatch, "run", FORWARD),
            (torch.autograd, "backward", BACKWARD),
            (torch.autograd, "grad", BACKWARD),
            (torch.amp.GradScaler, "unscale_", OPTIMIZER),
            (torch.amp.GradScaler, "step", OPTIMIZER),
            (torch.amp.GradScaler, "update", OPTIMIZER),
        ]
        if not self._context.modules.num_graphs():  # the compiler must see losses without our patch
            places.append((torch.nn.modules.loss._Loss, "__call__", FORWARD))
            places += [(torch.nn.functional, name, FORWARD) for name in LOSSES]
        return places

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return None
        self._before_step.append(self.enter(OPTIMIZER))
        return with_closure(args, kwargs, self._outside)

    def _outside(self, closure: Any) -> Any:
        """Returns a closure, wrapped to count as OTHER and not as OPTIMIZER: some libraries compute a whole step in it."""

        def called() -> Any:
            before = self.enter(OTHER)
            try:
                return closure()
            finally:
                self.leave(before)

        return called

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self.thread:
            self.leave(self._before_step.pop() if self._before_step else OTHER)

    # The compiler must not trace our hooks when a program compiles its optimizer's step.
    _step_begins._torchdynamo_disable = True  # type: ignore[attr-defined]
    _step_ends._torchdynamo_disable = True  # type: ignore[attr-defined]


class DevicePhases:
    """Times phases on a GPU: records an event at each change of phase, and reads it later. Not measured on a GPU yet.

    All events are recorded on the same stream: the one that is current at the first event. If a program later
    switches to another stream to copy batches, events there would complete before the work on the stream that trains.
    """

    def __init__(self, index: Optional[int] = None) -> None:
        self._index = index
        self._stream: Any = None
        self._events: List[Tuple[str, Any]] = []
        self._step_from = 0  # index of the first event since the current step began
        self._seconds = dict.fromkeys((*STEP_PHASES, LEFT_OUT), 0.0)
        self._of_step = dict(self._seconds)  # the part of `_seconds` since the current step began

    def note(self, phase: str) -> None:
        """Records an event when the host begins to queue work of a phase, unless the work is captured for a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if self._stream is None:
            self._stream = torch.cuda.current_stream(self._index)
        event.record(self._stream)
        self._events.append((phase, event))
        if len(self._events) >= MAX_EVENTS:
            self._read(MAX_EVENTS // 2)

    def _read(self, number: int) -> None:
        """Adds up the time until event `number`, and drops the events before it."""
        self._events[number][1].synchronize()
        pairs = zip(self._events[:number], self._events[1:])  # noqa: B905 (Python 3.9)
        for place, ((phase, begin), (_, end)) in enumerate(pairs):
            seconds = begin.elapsed_time(end) / 1e3
            self._seconds[phase] += seconds
            if place >= self._step_from:
                self._of_step[phase] += seconds
        del self._events[:number]
        self._step_from = max(0, self._step_from - number)

    def step_begins(self) -> None:
        """Records that later events belong to the next step."""
        self._step_from, self._of_step = len(self._events), dict.fromkeys(self._of_step, 0.0)

    def leave_out_step(self) -> None:
        """Subtracts the seconds since the current step began."""
        self._events[self._step_from :] = [(LEFT_OUT, event) for _, event in self._events[self._step_from :]]
        for phase, seconds in self._of_step.items():
            self._seconds[phase] -= seconds

    def seconds(self) -> Dict[str, float]:
        """Returns phase -> device seconds between the first event and the last; waits for the device."""
        if self._events:
            self._read(len(self._events) - 1)
        return {phase: self._seconds[phase] for phase in STEP_PHASES}
