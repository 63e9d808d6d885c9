"""Accumulates and scales gradients between `backward()` and the optimizer's step, without changes to the program.

Accumulation: of every k calls of `step()` only the last one steps, `zero_grad()` clears only before the first, and each
backward pass contributes 1/k of its gradients. Under DistributedDataParallel, ranks average the sum only in the k-th pass, and
the other passes run in `no_sync`. In the first cycles of k calls, `no_sync` is not used yet: these cycles show whether the
program leaves its gradients alone.

Loss scaling for float16: a backward pass starts with the scale, not 1, as the loss's gradient, and the step goes through
a GradScaler. Gradients are clipped once in k calls, before the call of `step()` that steps. They are unscaled before clipping.

Both need a program that handles its gradients as usual. Some programs clear or clip gradients by hand, discard them, or have
several optimizers. The harness detects such a program, mostly in the first steps by inspecting the gradients, and then leaves
its gradients unchanged.

Nothing here is installed unless a knob needs it.
"""

from __future__ import annotations

import statistics
import weakref
from typing import Any, Callable, List, Optional, Tuple

import torch

from . import gradient_entry as entry
from . import gradient_state as state
from . import members, process
from .captures import is_capturing
from .context import TrialContext
from .knobs import module as module_knobs
from .knobs import step as step_knobs
from .writes import trained_by

# A cycle is the k calls of `step()` that make one real step.
CHECKED_CYCLES = 2  # the values of gradients are inspected only in the first cycles, because reading them waits for the device
MAX_DISCARDED = 4  # after this many consecutive discarded cycles, the program is assumed to discard gradients at each step
MAX_ZEROED = 64  # number of first zero_grad() calls that may be inspected


class Gradients:
    """Accumulates and scales the gradients of one optimizer.

    Attributes:
        global_batch: number of samples that a step of all ranks together should hold; None if not given.
        every: calls of `step()` per real step; None until derived from `global_batch` and the size of a batch.
        scaler: the harness's own GradScaler; None where nothing is scaled.
        problem: why gradients are left unchanged; "" while they are handled.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context, knobs = context, context.spec.knobs
        self.global_batch: Optional[int] = context.spec.global_batch
        asked = knobs.get(step_knobs.ACCUMULATION)
        self._is_derived = asked is None and self.global_batch is not None
        self.every: Optional[int] = None if self._is_derived else int(asked or 1)
        self.set_to_none: Optional[bool] = knobs.get(step_knobs.SET_TO_NONE)
        self.scaler: Any = None
        self.problem = ""
        self.num_calls = self.num_done = self.num_cleared = 0  # step() calls of whole cycles, real steps, clearings inspected
        self._num_zeroed = 0  # zero_grad() calls while `set_to_none` is set
        self.is_left_empty: Optional[bool] = None  # whether gradients are None after zero_grad()
        self._optimizer: Any = None  # a weak reference
        self.gathered = self._num_discarded = 0  # step() calls held back in this cycle, cycles discarded since the last step
        # Whether a backward pass has run since the last call of `step()`; whether a backward pass runs now; whether a real step
        # runs now, in which all calls pass through; whether the gradients of this cycle were unscaled.
        self._is_dirty = self.is_inside = self.is_through = self._is_unscaled = False
        self._factor: Any = None  # the factor by which the gradients of the last backward pass are scaled
        self._inputs: List[Any] = []  # tensors without an optimizer that get gradients in the current backward pass
        self._of_inputs: List[Any] = []  # weak references to the gradients of `_inputs`, after the pass
        self._left_scale: Any = None  # the scale of a backward pass during which the harness has stopped scaling
        self._first_samples = 0.0  # samples of the forward calls before the first backward pass
        self._after_backward: Optional[List[Any]] = None  # `gradient_state.look` after the last backward pass
        self._when_held: Optional[List[Any]] = None  # `gradient_state.norms` when a step was held back
        self.is_in_place = False
        self._parallel = context.handlers.parallel
        if self.every != 1:
            self._parallel.is_due = self._is_due
        # Patch everything at once: a scheduler may wrap an optimizer's step before the harness knows whether losses are scaled.
        may_scale = knobs.get(module_knobs.AMP) == "fp16"
        if self._is_derived or self.every != 1 or self.set_to_none is not None or may_scale:
            self.is_in_place = True
            entry.put_in_place(self)

    def scale(self, module: Any, device: str) -> None:
        """Scales the losses of this process from now on; called when a module computes in float16."""
        if state.is_sharded(module):
            self._context.modules.leave_precision(step_knobs.SHARDED)
        elif self.problem:
            self._context.modules.leave_precision(self.problem)
        elif self.scaler is None:
            self.scaler = torch.amp.GradScaler(device)

    @property
    def is_active(self) -> bool:
        """Whether there is anything to do at a step."""
        return not self.problem and (self.every != 1 or self.scaler is not None)

    def enlist(self, optimizer: Any) -> None:
        """Wraps `step()` of an optimizer's class; called for each optimizer that is made."""
        if self.is_in_place:
            entry.before_steps(self, type(optimizer))

    def broke(self, doing: str) -> None:
        """Reports a failure of the harness's own code; called in an `except` block around it."""
        self._context.broke(doing)

    # --- backward ---

    def begin_backward(self, tensors: Any, grad_tensors: Any) -> Tuple[Any, Any]:
        """Returns the tensors to call backward on and the gradients to start from."""
        if is_capturing():
            self.captured()
        if self._when_held is not None:
            held, self._when_held = self._when_held, None
            if state.norms(self._parameters()) != held:
                self.stand_down(step_knobs.CLEARS)
        if self.every is None:  # the first backward pass: the batch shows how many calls of `step()` make the global batch
            samples, self._first_samples = self._batch()
            self._set_every(samples, 1)
        is_one = isinstance(tensors, torch.Tensor)
        outputs = (tensors,) if is_one else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors or [None] * len(outputs))
        if self.num_done < CHECKED_CYCLES:
            self._check_chain(outputs, given)
        if self.problem or (self.every == 1 and self.scaler is None) or len(given) != len(outputs):
            return tensors, grad_tensors
        starts = tuple(map(self._start_gradient, outputs, given))
        return (tensors, starts[0]) if is_one else (outputs, starts)

    def _check_chain(self, outputs: Any, given: Any) -> None:
        """Finds out whether the program computes gradients from those of the last pass, which are scaled already.

        Such a program passes those gradients to this pass, or keeps the gradients of tensors that it does not train.
        """
        kept = [gradient for ref in self._of_inputs if (gradient := ref()) is not None]
        if kept or (self._is_dirty and not all(map(state.is_constant, given))):
            # `data`, because the graph of this pass may hold these gradients, and autograd must not notice the division.
            state.divide([gradient.data for gradient in kept], self._factor)
            self.stand_down(step_knobs.CHAINED)
            return
        held, leaves = self._context.optimizers.held_parameters(), (leaf for each in outputs for leaf in trained_by(each))
        self._inputs = [leaf for leaf in leaves if id(leaf) not in held and not isinstance(leaf, torch.nn.Parameter)]

    def _start_gradient(self, output: Any, gradient: Any) -> Any:
        if gradient is None:
            if torch.Tensor.numel(output) != 1:
                return None  # torch raises its own error
            gradient = torch.ones_like(output, memory_format=torch.preserve_format)
        factor = torch.full((), 1 / (self.every or 1), dtype=output.dtype, device=output.device)
        self._factor = factor if self.scaler is None else self.scaler.scale(factor)
        return gradient * self._factor

    def backward_done(self) -> None:
        """Called after each backward pass."""
        self._is_dirty = True
        if self.num_done < CHECKED_CYCLES and not self.problem:
            self._after_backward = state.look(self._parameters())
            self._of_inputs = [weakref.ref(leaf.grad) for leaf in self._inputs if leaf.grad is not None]
        self._inputs = []

    # --- steps ---

    def is_in_charge(self, optimizer: Any) -> bool:
        """Whether the harness drives an optimizer's steps: true for the first optimizer that steps, until another one steps."""
        if self._left_scale is not None and self.is_inside:  # the backward pass that still runs began with the scale
            state.divide(_gradients(state.parameters_of(optimizer)), self._left_scale)
        if not self.is_active:
            return False
        own = self._optimizer() if self._optimizer is not None else None
        if own is None:
            if self._own() is not optimizer:
                self._after_backward = self._when_held = None  # these describe another optimizer's gradients
            self._optimizer = weakref.ref(optimizer)
        elif own is not optimizer:
            if self.scaler is not None and self._factor is not None:
                state.divide(_gradients(self._parameters_of_others(own)), self._scale())
                self._left_scale = self._scale() if self.is_inside else None
            self.stand_down(step_knobs.SEVERAL)
            return False
        return True

    def _parameters_of_others(self, own: Any) -> List[Any]:
        """Returns the parameters that only optimizers other than `own` hold, each once; their gradients are scaled, too."""
        optimizers = self._context.optimizers.optimizers()
        found = {id(parameter): parameter for each in optimizers for parameter in state.parameters_of(each)}
        for parameter in state.parameters_of(own):
            found.pop(id(parameter), None)
        return list(found.values())

    def _own(self) -> Any:
        """Returns the optimizer that steps; before the first step, the optimizer made last. None if it no longer exists."""
        if self._optimizer is not None:
            return self._optimizer()
        return next(reversed(self._context.optimizers.optimizers()), None)

    def is_last(self) -> bool:
        """Whether the next call of `step()` really steps, because no more gradients are to be accumulated."""
        return self.gathered + 1 >= (self.every or 1)

    def _is_due(self) -> bool:
        # In checked cycles every pass communicates, because a program that uses its gradients needs the averaged ones.
        return self.num_done < CHECKED_CYCLES or self.is_last()

    def step(self, step: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Steps, or skips the step if more gradients are to be accumulated; returns what the optimizer's step would return."""
        closure, returned = kwargs.get("closure", args[0] if args else None), None
        if closure is not None:
            if not step_knobs.calls_closure_once(optimizer):
                self.stand_down(step_knobs.CLOSURE)
                return step(optimizer, *args, **kwargs)
            with torch.enable_grad():
                returned = closure()
            args, kwargs = (), {name: value for name, value in kwargs.items() if name != "closure"}
        is_idle = (self.scaler is not None or not self._is_dirty) and not state.has_gradients(self._parameters())
        if not is_idle:
            self._program_steps()
        if self.problem or is_idle:  # idle: the program steps without gradients, because it skips a batch
            done = step(optimizer, *args, **kwargs)
            return done if closure is None else returned
        if not self.is_last():
            self._hold()
            return returned
        self.num_calls += self.gathered + 1  # counted first: the harness may write its result file during the step
        self.num_done += 1
        self.is_through = True
        try:
            done = self._scaled_step(optimizer) if self.scaler is not None else step(optimizer, *args, **kwargs)
        finally:
            self.is_through = self._is_dirty = self._is_unscaled = False
            self.gathered = self._num_discarded = 0
            self._after_backward = self._when_held = None
        return done if closure is None else returned

    def _program_steps(self) -> None:
        """Called at each step of the program; its first step shows how many backward passes it makes per step."""
        if self._factor is None:
            self.stand_down(step_knobs.NO_BACKWARD)
            return
        if self._is_derived and self.every and not self.num_done and not self.gathered:
            self._correct()
        if not self.is_last() or self.scaler is not None:
            self._check_untouched()

    def _hold(self) -> None:
        self.gathered += 1
        self._is_dirty = False
        if self.num_done < CHECKED_CYCLES:
            self._when_held = state.norms(self._parameters())

    def _scaled_step(self, optimizer: Any) -> Any:
        returned = self.scaler.step(optimizer)
        self.scaler.update()
        return returned

    def unscale(self) -> None:
        """Divides the gradients by the scale, once per cycle, before the program clips or reads them."""
        if self.scaler is None or self._is_unscaled or self._factor is None or not state.has_gradients(self._parameters()):
            return
        self._check_untouched()
        if not self.problem:
            self._is_unscaled = True
            self.scaler.unscale_(self._own())

    def keeps(self, owner: Any) -> bool:
        """Whether a call of `zero_grad()` of an optimizer or a module is skipped, because gradients are being accumulated."""
        if self._is_unscaled and not self.problem and self._is_concerned(owner):
            self._is_unscaled = False  # the program skips this step, for example because the clipped norm is not finite
            self.scaler.update()
        if not self.gathered or self.problem or not self._is_concerned(owner):
            return False
        if not self._is_dirty:
            return True
        self.gathered, self._is_dirty, self._when_held = 0, False, None  # the program discards all that was accumulated
        self._num_discarded += 1
        if self._num_discarded >= MAX_DISCARDED:
            self.stand_down(step_knobs.DISCARDS)
        return False

    def _is_concerned(self, owner: Any) -> bool:
        held = self._context.optimizers.held_parameters()
        if isinstance(owner, torch.nn.Module):
            return any(id(parameter) in held for parameter in members.parameters(owner))
        return owner is self._own()

    def to_inspect(self, owner: Any) -> List[Any]:
        """Returns the parameters whose gradients to inspect after a `zero_grad()` of this optimizer or module.

        Returns [] after the first cycles, because these show the knob's effect. Leaves out parameters without a gradient.
        """
        self._num_zeroed += 1
        if self.num_cleared >= 2 * CHECKED_CYCLES or self._num_zeroed > MAX_ZEROED:
            return []
        is_module = isinstance(owner, torch.nn.Module)
        found = members.parameters(owner) if is_module else state.parameters_of(owner)
        return [parameter for parameter in found if parameter.grad is not None]

    def cleared(self, parameters: List[Any]) -> None:
        """Called after a `zero_grad()` whose `set_to_none` came from the knob, with what `to_inspect` returned before it."""
        if parameters:
            self.num_cleared += 1
            self.is_left_empty = all(parameter.grad is None for parameter in parameters)

    # --- clipping ---

    def norm(self, name: str, parameters: Any, limit: Any = None, norm_type: float = 2.0, *_: Any, **more: Any) -> Any:
        """Returns what clipping would return, without clipping, because more gradients are to be accumulated."""
        if name != "clip_grad_norm_":
            return None
        norm = state.total_norm(parameters, float(norm_type))
        return norm if self.scaler is None or self._factor is None else norm / self._scale().to(norm.device)

    # --- how many calls per step ---

    def _correct(self) -> None:
        """Corrects `every` at the first step if the program accumulates by itself: with two backward passes, it is halved."""
        samples, called = self._batch()
        own = max(1, round(called / self._first_samples)) if self._first_samples else 1
        if own == 1:
            return
        before = self.every or 1
        self._set_every(samples, own)
        if self.every and not self.problem:
            with torch.no_grad():
                for parameter in self._parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(before / self.every)
            self._after_backward = None

    def _set_every(self, samples: Optional[float], own: int) -> None:
        ranks = process.group()
        each = (samples or 0.0) * own * (ranks.get_world_size() // self._context.sharing.ranks_per_batch() if ranks else 1)
        if not each:
            self.stand_down(step_knobs.UNCOUNTED)
        elif (self.global_batch or 0) % each:
            self.stand_down(step_knobs.UNEVEN.format(int(each), self.global_batch))
        else:
            self.every = int((self.global_batch or 0) // each)
            self._parallel.is_due = None if self.every == 1 else self._is_due

    def _batch(self) -> Tuple[Optional[float], float]:
        """Returns the samples of a batch (None if unknown) and the samples of all forward calls since the last step."""
        context = self._context
        called = max((root.calls.samples for root in context.modules.roots), default=0.0)
        size = context.loaders.touched[-1].batch_size if context.loaders.touched else None
        if size is not None:
            return float(size), called
        is_counted = context.modules.roots and context.modules.roots[0].sizes.unit == "samples"
        return (called if is_counted else None), called

    def samples_per_step(self) -> Optional[float]:
        """Returns all ranks' samples per step: this rank's median times the number of batches; None if unknown."""
        samples = self._context.window.steps["samples"]
        if not samples or self._context.loaders.unit != "samples":
            return None
        num_batches = self._context.world_size // self._context.sharing.ranks_per_batch()
        return float(statistics.median(samples) * num_batches)

    # --- what the program does ---

    def stand_down(self, why: str) -> None:
        """Stops changing the gradients."""
        if self.problem:
            return
        self.problem = why
        if self.scaler is not None:
            if self._is_dirty and not self._is_unscaled:
                state.divide(_gradients(self._parameters()), self._scale())
            self._context.modules.leave_precision(why)
        self.scaler, self.every, self.gathered, self._after_backward, self._when_held = None, 1, 0, None, None
        self._parallel.is_due = None
        self._parallel.catch_up()

    def captured(self) -> None:
        """Stops changing gradients if a step is captured: a CUDA graph cannot replay the harness's work between passes."""
        if self.is_active:
            self.stand_down(step_knobs.CAPTURED)

    def _scale(self) -> Any:
        """Returns the factor by which the gradients are too large until they are unscaled."""
        return self._factor * (self.every or 1)

    def _check_untouched(self) -> None:
        before, self._after_backward = self._after_backward, None
        if before is not None and state.look(self._parameters()) != before:
            self.stand_down(step_knobs.CHANGES)

    def _parameters(self) -> List[Any]:
        return state.parameters_of(self._own())


def _gradients(parameters: List[Any]) -> List[Any]:
    return [parameter.grad for parameter in parameters]
