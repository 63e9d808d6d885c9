"""Routes a program's gradient calls through the harness: backward, zero_grad, clipping, GradScaler, step.

The parameter `watch` below is the `Gradients` object of gradients.py, which decides what these calls do. Nothing is installed
unless a knob needs it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.nn.utils import clip_grad

from .knobs import step as step_knobs
from .patches import patches

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
READING = "get_total_norm"  # only reads gradients


def put_in_place(watch: Any) -> None:
    """Routes torch's gradient functions through the harness, except the steps of optimizers."""
    patches.install(torch.autograd, "backward", functools.partial(_around_backward, watch))
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        patches.install(kind, "zero_grad", functools.partial(_around_zero_grad, watch))
    for name in CLIPS:
        owners = [module for module in (clip_grad, torch.nn.utils) if hasattr(module, name)]
        patches.install_in(owners, name, functools.partial(_around_clip, watch, name))
    for name in ("unscale_", "step", "update"):
        patches.install(torch.amp.GradScaler, name, functools.partial(_around_scaler, watch, name))


def before_steps(watch: Any, kind: Any) -> None:
    """Routes the steps of an optimizer class through the harness; idempotent."""
    if getattr(kind.step, "is_autotunes_own", False):
        return

    def around(own: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watch.is_through or not watch.is_in_charge(self):
                return own(self, *args, **kwargs)
            return watch.step(own, self, args, kwargs)

        step.hooked = True  # type: ignore[attr-defined]  # keeps torch from adding its hooks, which `own` runs already
        step.is_autotunes_own = True  # type: ignore[attr-defined]
        step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return step

    patches.install(kind, "step", around)


def _around_backward(watch: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    def begun_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Nested backward passes (of a checkpointed segment) pass through: their gradients are scaled already.
        if watch.is_inside or torch.compiler.is_compiling() or not watch.is_active:
            return backward(tensors, grad_tensors, *args, **kwargs)
        try:
            tensors, grad_tensors = watch.begin_backward(tensors, grad_tensors)
        except Exception:
            watch.broke("scaling a loss")
        watch.is_inside = True
        try:
            returned = backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            watch.is_inside = False
        watch.backward_done()
        return returned

    return begun_backward


def _around_zero_grad(watch: Any, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
    def cleared(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.keeps(owner):
            return None
        if watch.set_to_none is None:
            return zero_grad(owner, *args, **kwargs)
        parameters = watch.to_inspect(owner)
        zero_grad(owner, set_to_none=watch.set_to_none)
        watch.cleared(parameters)
        return None

    cleared._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cleared


def _around_clip(watch: Any, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    def clipped(*args: Any, **kwargs: Any) -> Any:
        is_last = watch.is_active and watch.is_last()
        if is_last:
            watch.unscale()
        if is_last or not watch.is_active or name == READING:
            return clip(*args, **kwargs)
        return watch.norm(name, *args, **kwargs)

    return clipped


def _around_scaler(watch: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # The program's own scaler must not unscale, step or update its scale while gradients are still being accumulated.
    is_enabled = torch.amp.GradScaler.is_enabled

    def scaled(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.is_through or scaler is watch.scaler or not watch.is_active or not is_enabled(scaler):
            return method(scaler, *args, **kwargs)
        if watch.scaler is not None:
            watch.stand_down(step_knobs.SCALES)
            return method(scaler, *args, **kwargs)
        if name == "step":
            optimizer, args, kwargs = _optimizer_of(*args, **kwargs)
            if not watch.is_in_charge(optimizer):
                return method(scaler, optimizer, *args, **kwargs)
            return watch.step(functools.partial(method, scaler), optimizer, args, kwargs)
        is_held = watch.gathered if name == "update" else name == "unscale_" and not watch.is_last()
        return None if is_held else method(scaler, *args, **kwargs)

    return scaled


def _optimizer_of(optimizer: Any, *args: Any, **kwargs: Any) -> "tuple[Any, Any, Any]":
    """Splits the arguments of `GradScaler.step`; the first one, the optimizer, may be passed by name."""
    return optimizer, args, kwargs
