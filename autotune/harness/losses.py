"""Records the losses that the program trains on, at `backward()`; reads them from the device once measuring is over."""

from __future__ import annotations

import math
import random
import sys
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from . import members
from .captures import is_capturing
from .context import TrialContext
from .knobs import attention
from .patches import patches

FIRST_GAP_S = 0.25  # doubled before each use, so `look_again` records losses 0, 0.5, 1.5, 3.5, ... s after its first call
MAX_LOSSES = 64  # losses that are recorded one by one
SCALED_ELSEWHERE = "a gradient scaler scales the loss in a way that cannot be undone here"


def seed_everything(seed: int) -> None:
    """Seeds the random generators, so that two runs begin alike; the program may seed them again later."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")  # torch imports it if it is installed
    if numpy is not None:
        numpy.random.seed(seed)


class LossWatch:
    """Keeps the first losses that `backward()` was called on, and the last one, without waiting for the device.

    It records the first losses one by one, then single losses at intervals that double each time. That is enough to find a NaN,
    since a NaN loss stays NaN. A permanent wrapper of `backward` would cost each call a microsecond. The wrapper must not be
    installed and removed often, either: each time, the interpreter's caches for the torch class become invalid, and after a
    thousand times the interpreter no longer caches the class at all (CPython 3.13).

    If a GradScaler has multiplied a loss, the value before the scaling is recorded, because the scale changes during training.

    Args:
        context: gives the number of optimizer steps, and whether a step is under way.
        num_steps: all losses of the first `num_steps` optimizer steps are recorded one by one; if None, the first MAX_LOSSES.
    """

    def __init__(self, context: TrialContext, num_steps: Optional[int] = None) -> None:
        self._context, self._wanted_steps = context, num_steps
        self._kept: List[Tuple[int, Any]] = []  # (optimizer steps before it, the loss)
        self._last: Any = None
        self._captured: Any = None  # a loss that a CUDA graph computes again at each replay
        self.num_seen = self._num_scaled = 0  # losses that backward() was called on, and those that a scaler had multiplied
        self._scaled: Tuple[Any, Any] = (None, None)  # (weak reference to a scaler's output, its input)
        self.attention: Optional[Set[str]] = None  # fused attention kernels used to compute the first loss
        self._closed_step = -1  # the step whose closure's loss is recorded
        self._gap_s, self._next_s = FIRST_GAP_S, 0.0
        self._grad_fn: Any = torch.Tensor.grad_fn
        is_compiling, numel = torch.compiler.is_compiling, torch.Tensor.numel
        is_dispatched = torch.overrides.has_torch_function_unary  # for a subclass of Tensor, torch calls the wrapper again

        def around_backward(backward: Any) -> Any:
            def watched_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
                if not is_compiling() and not is_dispatched(loss) and numel(loss) == 1:
                    self._see(loss)
                return backward(loss, *args, **kwargs)

            return watched_backward

        def around_scale(scale: Any) -> Any:
            def watched_scale(scaler: Any, outputs: Any) -> Any:
                scaled = scale(scaler, outputs)
                if isinstance(outputs, torch.Tensor) and numel(outputs) == 1:
                    self._scaled = (weakref.ref(scaled), members.plain(outputs))
                return scaled

            return watched_scale

        self._patches = [patches.install(torch.Tensor, "backward", around_backward)]
        self._patches.append(patches.install(torch.amp.GradScaler, "scale", around_scale))

    def _see(self, loss: Any) -> None:
        self.num_seen += 1
        if self.attention is None:
            self.attention = attention.seen(self._grad_fn.__get__(loss))
        scaled, plain = self._scaled
        if scaled is not None and scaled() is loss:
            self._scaled = (None, None)
            self._num_scaled += 1
            self._last = plain
        else:
            self._last = members.plain(loss)
        if is_capturing():
            self._captured = self._last
            return
        self._last = self._last.clone()  # a CUDA graph would overwrite it with the next loss
        if self._is_wanted:
            self._keep()
        else:
            for patch in self._patches:
                patch.uninstall()

    @property
    def device(self) -> Any:
        """The device of the last loss; None before the first."""
        return None if self._last is None else self._last.device

    @property
    def _is_wanted(self) -> bool:
        if self._wanted_steps is None:
            return self.num_seen <= MAX_LOSSES
        return bool(self._context.num_steps < self._wanted_steps)

    def replayed(self) -> None:
        """Records the loss of a step that a CUDA graph has replayed; called before that step is counted."""
        if self._captured is None:
            return
        self._last = self._captured
        self.num_seen += 1
        if self._is_wanted:
            self._kept.append((self._context.num_steps, self._last.clone()))

    def _keep(self) -> None:
        step = self._context.num_steps
        if self._context.optimizers.is_stepping:
            # LBFGS calls its closure as often as its line search needs. Only the first call is made before the weights change.
            if self._closed_step == step:
                return
            self._closed_step = step
        self._kept.append((step, self._last))

    def look_again(self, now_s: float) -> None:
        """Records the next loss if it is due, unless the program has replaced the patched functions in the meantime."""
        if now_s < self._next_s:
            return
        self._gap_s *= 2
        self._next_s = now_s + self._gap_s
        for patch in self._patches:
            patch.install()

    def summary(self) -> Optional[Dict[str, Any]]:
        """Returns {"first", "last", "is_finite", "curve", "why_no_curve"}; None when no scalar was seen. Waits for the device.

        The curve is the mean loss of each of the first complete optimizer steps, None for a mean that is not finite.
        """
        if self._last is None:
            return None
        steps: Dict[int, List[float]] = {}
        for step, loss in self._kept:
            if step < self._context.num_steps:  # otherwise the program ended in the middle of the step
                steps.setdefault(step, []).append(float(loss))
        if self._wanted_steps is None and self.num_seen > MAX_LOSSES and steps:
            del steps[max(steps)]  # some of its losses may be missing
        ends = self._kept[0][1] if self._kept else self._last, self._last
        first, last = (_finite(float(loss)) for loss in ends)
        scaler, harness = self._context.optimizers.scaler, self._context.gradients.scaler
        # The harness's own scaler scales gradients, not losses.
        why = "" if scaler is harness or self._num_scaled >= self.num_seen else SCALED_ELSEWHERE
        return {
            "first": first,
            "last": last,
            "is_finite": first is not None and last is not None,
            "curve": [] if why else [_finite(sum(losses) / len(losses)) for _, losses in sorted(steps.items())],
            "why_no_curve": why,
        }


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None
