"""Counts the steps of a trial: those of the first optimizer that steps, here called the counted optimizer.

Steps are seen by hooks on each optimizer and by a patch of `GradScaler.step`. A scaler that finds an inf does not call the
optimizer's step, but the iteration has used its samples and must count (measured: the optimizer's own hook saw 3 of 5
iterations). With a fused optimizer, the scaler calls the step even if it finds an inf; then the kernel changes nothing.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import weakref
from functools import partial
from typing import Any, Dict, Iterable, List, Optional, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import members
from .captures import CapturedSteps, is_capturing
from .context import TrialContext
from .gradient_state import parameters_of
from .knobs.step import calls_closure_once, with_closure
from .members import nothing
from .patches import patches

# If another optimizer makes this many steps while the counted one makes none, the program has switched to the other optimizer.
# Steps of different optimizers are not added up: a program may have an optimizer for each parameter, and all of these step in
# each iteration.
SILENT_STEPS = 64
# Once a step has evaluated its closure this often, each further evaluation counts as a step: the whole training may be a
# single step of LBFGS (max_iter=50000). With its default options, a step of LBFGS makes at most 25 evaluations.
MANY_EVALUATIONS = 32
EVALUATIONS = "evaluations of the optimizer's closure, because a single step has many"
ADDED_TOGETHER = 32  # number of `found_inf` tensors that are kept before they are added up on the device


class Overflows:
    """Counts the steps that fused optimizers skip. Counting happens on the device, without waiting for it.

    A GradScaler does not read whether the gradients of a fused optimizer overflowed. It passes a tensor, `optimizer.found_inf`,
    and the kernel that updates the weights does nothing if this is not 0.
    """

    def __init__(self) -> None:
        self._new: List[Any] = []
        self._sum: Any = None  # number of skipped steps, from the tensors that are no longer in `_new`

    def note(self, optimizer: Any) -> None:
        """Notes whether a step overflowed; called while the scaler runs the optimizer's step."""
        found = members.held(optimizer).get("found_inf")
        if isinstance(found, Tensor) and not is_capturing():  # a captured tensor has another value at each replay
            self._new.append(found)
            if len(self._new) >= ADDED_TOGETHER:
                self._add_up()

    def _add_up(self) -> None:
        new, self._new = self._new, []
        device = new[0].device
        number = torch.stack([found.to(device) for found in new]).ne(0).sum()
        self._sum = number if self._sum is None else self._sum.to(device) + number

    def number(self) -> int:
        """Returns the number of skipped steps so far. Waits for the device."""
        if self._new:
            self._add_up()
        return 0 if self._sum is None else int(self._sum)


class OptimizerWatch:
    """Watches every optimizer of this process.

    Attributes:
        source: how steps are recognised, in words; "" if they are calls of `step()`.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._known: List[Any] = []  # weak references, in construction order
        self._held: Set[int] = set()
        self._held_groups = -1
        self._written: Set[int] = set()  # ids of parameters that the program writes itself
        self._counted: Optional[Any] = None
        self._counted_steps = 0
        self._steps_of_others: Dict[int, int] = {}  # id of another optimizer -> its steps since the counted one stepped
        # For `_is_first_part`. Weak references to the first parameter in the counted optimizer's groups:
        self._part: Any = nothing  # in the steps that count
        self._last_part: Any = nothing  # in the last step
        self.is_in_parts = False  # whether each step of the counted optimizer updates only some of its parameters
        # The short hook is a faster replacement of `_before` and `_after` (see `settle`). This is the one that the counted
        # optimizer has; None if the optimizer has `_before` and `_after`, the full hooks.
        self._short: Any = None
        self._is_scaling = self._stepped_inside = False  # whether a scaler's step runs; whether it has stepped the optimizer
        self.is_stepping = False
        self.is_uninstalled = False  # whether `uninstall` was called
        self._num_left_out = 0  # number of steps that a scaler skipped without calling the optimizer
        self._overflows = Overflows()  # counts the steps that fused optimizers skip
        self._num_skipped_before = 0  # skipped steps when the window opened
        self.scaler: Optional[Any] = None
        self._prepared: Set[int] = set()
        self.num_stepped = 0  # number of optimizers that have stepped
        self.source = ""
        self._num_evaluations = 0  # evaluations of the closure in the current step
        self._evaluators: Set[int] = set()  # ids of optimizers whose evaluations of the closure count as steps
        self._captured = CapturedSteps(context)
        self._patch()

    def _patch(self) -> None:
        def around(make: Any) -> Any:
            def enlisting(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                make(optimizer, *args, **kwargs)
                self._enlist(optimizer)

            return enlisting

        patches.install(Optimizer, "__init__", around)
        patches.install(Optimizer, "__setstate__", around)  # for copied and unpickled optimizers, and for `load_state_dict`
        patches.install(torch.amp.GradScaler, "step", self._around_scaled_step)

    def _enlist(self, optimizer: Any) -> None:
        self._prepared.discard(id(optimizer))  # a loaded state brings its own flags; an id may also be reused
        if any(hook in (self._after, self._short) for hook in optimizer._optimizer_step_post_hooks.values()):
            return
        self._known = [ref for ref in self._known if ref() is not None and ref() is not optimizer]
        self._known.append(weakref.ref(optimizer))
        self._held_groups = -1
        after = optimizer._optimizer_step_post_hooks
        for number in [number for number, hook in after.items() if hook is _left_alone]:
            del after[number]
        Optimizer.register_step_pre_hook(optimizer, self._before)
        Optimizer.register_step_post_hook(optimizer, self._after)
        self._context.modules.look_again()
        self._context.gradients.enlist(optimizer)

    def _around_scaled_step(self, step: Any) -> Any:
        is_enabled = torch.amp.GradScaler.is_enabled

        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
            if not is_enabled(scaler) or (self.is_uninstalled and _left_alone in hooks.values()):
                return step(scaler, optimizer, *args, **kwargs)
            self.settle(is_short=False)
            # The scaler passes its scale only to a fused optimizer. The knob for the implementation may make the optimizer
            # non-fused, and a non-fused optimizer that has been passed a scale fails in its step. So the knob is set before the
            # scaler's step, not in the hook `_before`, which runs after the scale has been passed.
            if self._before in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
                self._prepare_once(optimizer)
            self.scaler, self._is_scaling, self._stepped_inside = scaler, True, False
            try:
                returned = step(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaling = False
            self._num_left_out += not self._stepped_inside
            self._count(optimizer)
            return returned

        return scaled_step

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self.is_stepping, self._num_evaluations = id(optimizer) not in self._evaluators, 0
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        self._prepare_once(optimizer)
        return None if calls_closure_once(optimizer) else with_closure(args, kwargs, partial(self._counting, optimizer))

    def _counting(self, optimizer: Any, closure: Any) -> Any:
        """Returns a closure that counts its evaluations."""

        def counted(*arguments: Any, **named: Any) -> Any:
            loss = closure(*arguments, **named)
            self._evaluated(optimizer)
            return loss

        return counted

    def _evaluated(self, optimizer: Any) -> None:
        self._num_evaluations += 1
        has_steps = self._context.num_steps > 0 and self.counted() is optimizer
        if self._num_evaluations == MANY_EVALUATIONS and not has_steps:
            self._evaluators.add(id(optimizer))
            self.source, self.is_stepping = EVALUATIONS, False
        elif id(optimizer) in self._evaluators:
            self._count(optimizer)

    def _prepare_once(self, optimizer: Any) -> None:
        if id(optimizer) not in self._prepared:
            self._prepared.add(id(optimizer))
            try:
                self._context.writes.optimizer_steps()
                self.num_stepped += 1
                self._context.handlers.optimizer.on_optimizer(optimizer)
            except Exception:
                self._context.broke("preparing an optimizer")

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _has_inner_steps(optimizer) and _is_inner(optimizer):
            return
        self.is_stepping = False
        if self._is_scaling:
            self._stepped_inside = True  # counted when the scaler's step returns
            self._overflows.note(optimizer)
            return
        if id(optimizer) not in self._evaluators:
            self._count(optimizer)

    def settle(self, *, is_short: bool) -> None:
        """Gives the counted optimizer the short hook if `is_short`, else its full hooks (`_before` and `_after`).

        The short hook is `Session.plain_step_hook`. It runs after a step and counts the step in fewer calls than `_after`,
        which it replaces. `_before` is removed: it is needed only to prepare an optimizer once, and to recognise a closure's
        forward calls while forward calls are counted.
        """
        optimizer = self.counted()
        if is_short == (self._short is not None):
            return
        if optimizer is None:
            self._short = None
            return
        if is_short and _has_inner_steps(optimizer):
            return  # the short hook would count the inner steps
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if is_short:
            old, new = self._after, self._context.plain_step_hook(self._after)
            for number in [number for number, hook in before.items() if hook == self._before]:
                del before[number]
        else:
            old, new = self._short, self._after
            Optimizer.register_step_pre_hook(optimizer, self._before)
        for number, hook in after.items():
            if hook == old:
                after[number] = new
        self._short = new if is_short else None

    # The compiler must not trace our hooks when a program compiles its optimizer's step.
    _before._torchdynamo_disable = True  # type: ignore[attr-defined]
    _after._torchdynamo_disable = True  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Removes the hooks from optimizers whose knobs are set (mode "apply"); optimizers made later get hooks again."""
        self.is_uninstalled, self._counted = True, None
        for optimizer in self.optimizers():
            if id(optimizer) not in self._prepared:
                continue  # has not stepped yet and still needs its knobs
            before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            for number in [number for number, hook in before.items() if hook == self._before]:
                del before[number]
            for number, hook in after.items():  # a hook may be running now, so the dict must keep its size
                if hook == self._after:
                    after[number] = _left_alone

    def _count(self, optimizer: Any) -> None:
        if self._counted is None:  # the scaler skipped the very first step
            self._counted = weakref.ref(optimizer)
        if self._captured.is_captured():
            return
        counted = self._counted()
        # The second condition: `optimizer` is a wrapper around the counted one.
        if counted is optimizer or (counted is not None and counted is members.attribute(optimizer, "optimizer")):
            if self._is_first_part(counted):
                self._context.step_done()
            return
        self._context.modules.other_steps()
        if self._counted_steps != self._context.num_steps:
            self._counted_steps, self._steps_of_others = self._context.num_steps, {}
        num = self._steps_of_others[id(optimizer)] = self._steps_of_others.get(id(optimizer), 0) + 1
        if num >= SILENT_STEPS or counted is None:
            self.settle(is_short=False)
            self._counted = weakref.ref(optimizer)  # the program has built a new optimizer, and may still hold the old one
            self._steps_of_others, self._part = {}, nothing

    def _is_first_part(self, optimizer: Any) -> bool:
        """Whether a step of the counted optimizer is on the first part of the parameters.

        Libraries that shard an optimizer's state give the optimizer one part of the parameters after another, with a step for
        each part. Only the steps on the first part count.
        """
        groups = members.attribute(optimizer, "param_groups", ())
        first = next((each for group in groups for each in group["params"][:1]), None)
        if first is None or members.is_swapped(first):
            # Torch changes such a parameter by swapping its contents, and refuses that if a weak reference to it exists.
            return True
        part, last, self._last_part = self._part(), self._last_part(), weakref.ref(first)
        if part is None or first is last:  # the program may have replaced its parameters
            part, self._part = first, self._last_part
        self.is_in_parts = self.is_in_parts or (first is part and last is not None and last is not first)
        return first is part

    def open_window(self) -> None:
        """Records the steps skipped before the window opens: a scaler skips some steps until it has found its scale."""
        self._num_skipped_before = self._num_skipped()

    @property
    def has_any(self) -> bool:
        """Whether an optimizer was ever made."""
        return bool(self._known)

    def scaling(self) -> Optional[Dict[str, Any]]:
        """Returns {"scale", "skipped", "skipped_in_window"}; None without a GradScaler. Waits for the device."""
        if self.scaler is None:
            return None
        skipped = self._num_skipped()
        return {
            "scale": float(torch.amp.GradScaler.get_scale(self.scaler)),
            "skipped": skipped,
            "skipped_in_window": skipped - self._num_skipped_before,
        }

    def _num_skipped(self) -> int:
        return self._num_left_out + self._overflows.number()

    def counted(self) -> Any:
        """Returns the optimizer whose steps are counted; None if it no longer exists."""
        return self._counted() if self._counted is not None else None

    def optimizers(self) -> List[Any]:
        """Returns the optimizers that are still alive."""
        return [optimizer for ref in self._known if (optimizer := ref()) is not None]

    def held_parameters(self) -> Set[int]:
        """Returns the ids of all parameters that an optimizer holds or that the program writes itself."""
        groups = sum(len(members.attribute(o, "param_groups", ())) for o in self.optimizers())
        if groups != self._held_groups:
            self._held_groups = groups
            self._held = {id(p) for o in self.optimizers() for p in parameters_of(o)}
            self._held |= self._written
        return self._held

    def hold(self, parameters: Iterable[Any]) -> None:
        """Treats parameters that the program writes itself like those of an optimizer."""
        self._written.update(map(id, parameters))
        self._held_groups = -1
        self._context.modules.look_again()


def _left_alone(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Does nothing. In mode "apply", this replaces an optimizer's post-step hook once the optimizer's knobs are set."""


def _has_inner_steps(optimizer: Any) -> bool:
    """Whether a step may call another class's step (`super().step()`) for which torch calls the hooks as well."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    return len([step for step in steps if getattr(step, "hooked", False)]) > 1


def _is_inner(optimizer: Any) -> bool:
    """Whether the step that called our hook was itself called within a step of the same optimizer."""
    caller: Any = sys._getframe(2)  # torch's function around a step, which calls the hooks
    outer = itertools.islice(traceback.walk_stack(caller), 1, None)
    return any(frame.f_code is caller.f_code and frame.f_locals.get("self") is optimizer for frame, _ in outer)


_left_alone._torchdynamo_disable = True  # type: ignore[attr-defined]
