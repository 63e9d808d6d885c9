"""Counts the steps of a trial: those of the first optimizer that steps, which is called the trial's clock.

Steps are seen by hooks on each optimizer instance and by a patch of `GradScaler.step`. The patch is needed because a scaler
that finds an inf skips the optimizer's step, although the program's iteration is over and its samples are used up (measured:
the optimizer's own hook saw 3 of 5 iterations).
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, Optional, Set

from torch.optim import Optimizer

from . import members
from .captures import CapturedSteps
from .context import TrialContext
from .gradient_state import parameters_of
from .patches import patches

SILENT_STEPS = 64  # if another optimizer makes this many steps while the clock makes none, the program has switched


class OptimizerWatch:
    """Watches every optimizer of this process."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._known: List[Any] = []  # weak references, in construction order
        self._held: Set[int] = set()
        self._held_groups = -1
        self._written: Set[int] = set()  # ids of parameters that the program writes itself
        self._clock: Optional[Any] = None
        self._steps_of_others = self._counted_steps = 0
        self._short: Any = None  # the clock's short hook while that is installed
        self._is_scaling = False
        self.is_stepping = self.is_uninstalled = False
        self.num_skipped = 0
        self._num_skipped_before = 0  # skipped steps when the window opened
        self.scaler: Optional[Any] = None
        self._prepared: Set[int] = set()
        self.num_stepped = 0  # number of optimizers that have stepped
        self._captured = CapturedSteps(context)
        self._patch()

    def _patch(self) -> None:
        import torch

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
        import torch

        is_enabled = torch.amp.GradScaler.is_enabled

        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_enabled(scaler) or (self.is_uninstalled and _is_left_alone(optimizer)):
                return step(scaler, optimizer, *args, **kwargs)
            self.settle(is_uninstalled=False)
            # The scaler passes its scale to an optimizer that is fused at this moment. If the optimizer were no longer fused
            # when it steps, it would fail. So the implementation is set first.
            if self._before in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
                self._prepare_once(optimizer)
            self.scaler, self._is_scaling, self._stepped_inside = scaler, True, False
            try:
                returned = step(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaling = False
            self.num_skipped += not self._stepped_inside
            self._count(optimizer)
            return returned

        return scaled_step

    _stepped_inside = False

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.is_stepping = True
        if self._clock is None or self._clock() is None:
            self._clock = weakref.ref(optimizer)
        self._prepare_once(optimizer)

    def _prepare_once(self, optimizer: Any) -> None:
        if id(optimizer) not in self._prepared:
            self._prepared.add(id(optimizer))
            try:
                self.prepare(optimizer)
            except Exception:
                self._context.broke("preparing an optimizer")

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.is_stepping = False
        if self._is_scaling:
            self._stepped_inside = True  # counted when the scaler's step returns
            return
        self._count(optimizer)

    def settle(self, *, is_uninstalled: bool) -> None:
        """Gives the clock the short hook if `is_uninstalled`, otherwise its full hooks again; see `Session._look`.

        The short hook replaces the hook after a step. The hook before a step is removed: it is needed only to prepare an
        optimizer once, and to recognise a closure's forward calls while forward calls are counted.
        """
        optimizer = self.clock()
        if is_uninstalled == (self._short is not None):
            return
        if optimizer is None:
            self._short = None
            return
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if is_uninstalled:
            own, short = self._after, self._context.plain_step_hook(self._after)
            for number in [number for number, hook in before.items() if hook == self._before]:
                del before[number]
        else:
            own, short = self._short, self._after
            Optimizer.register_step_pre_hook(optimizer, self._before)
        for number, hook in after.items():
            if hook == own:
                after[number] = short
        self._short = short if is_uninstalled else None

    # The compiler must not trace our hooks when a program compiles its optimizer's step.
    _before._torchdynamo_disable = True  # type: ignore[attr-defined]
    _after._torchdynamo_disable = True  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Removes the hooks from optimizers whose knobs are set (mode "apply"); optimizers made later get hooks again."""
        self.is_uninstalled, self._clock = True, None
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
        if self._clock is None:  # the scaler skipped the very first step
            self._clock = weakref.ref(optimizer)
        if self._captured.is_captured():
            return
        if self._clock() is optimizer or self._is_wrapper_of_clock(optimizer):
            self._context.step_done()
            return
        if self._counted_steps != self._context.num_steps:
            self._counted_steps, self._steps_of_others = self._context.num_steps, 0
        self._steps_of_others += 1
        if self._steps_of_others >= SILENT_STEPS or self._clock() is None:
            self.settle(is_uninstalled=False)
            self._clock = weakref.ref(optimizer)  # the program has built a new optimizer, though it may still hold the old one

    def _is_wrapper_of_clock(self, optimizer: Any) -> bool:
        inner = members.attribute(optimizer, "optimizer")
        return inner is not None and self._clock is not None and inner is self._clock()

    def prepare(self, optimizer: Any) -> None:
        """Sets the implementation before an optimizer's first step."""
        self._context.writes.optimizer_steps()
        self.num_stepped += 1
        self._context.handlers.optimizer.on_optimizer(optimizer)

    def open_window(self) -> None:
        """Records the steps skipped before the window opens: a scaler skips some steps until it has found its scale."""
        self._num_skipped_before = self.num_skipped

    # --- facts ---

    @property
    def has_any(self) -> bool:
        """Whether an optimizer was ever made."""
        return bool(self._known)

    def scaling(self) -> Optional[Dict[str, Any]]:
        """Returns {"scale", "skipped", "skipped_in_window"}; None without a GradScaler. Waits for the device."""
        if self.scaler is None:
            return None
        import torch

        in_window = self.num_skipped - self._num_skipped_before
        return {
            "scale": float(torch.amp.GradScaler.get_scale(self.scaler)),
            "skipped": self.num_skipped,
            "skipped_in_window": in_window,
        }

    def clock(self) -> Any:
        """Returns the optimizer whose steps are counted; None if it no longer exists."""
        return self._clock() if self._clock is not None else None

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


def _is_left_alone(optimizer: Any) -> bool:
    return _left_alone in getattr(optimizer, "_optimizer_step_post_hooks", {}).values()


_left_alone._torchdynamo_disable = True  # type: ignore[attr-defined]
