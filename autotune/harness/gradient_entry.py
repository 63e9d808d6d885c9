"""Where a program's ways with gradients are led through the harness: backward, zero_grad, clipping, GradScaler, step.

What is done there is decided in `gradients.py`; a program that asks for nothing never gets here.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from .apply import step as apply_step

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
READING = "get_total_norm"


def put_in_place(watch: Any) -> None:
    """Leads what torch does with gradients through the harness, except the steps of optimizers."""
    import torch
    from torch.nn.utils import clip_grad

    torch.autograd.backward = _around_backward(watch, torch.autograd.backward)
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        kind.zero_grad = _around_zero_grad(watch, kind.zero_grad)  # type: ignore[method-assign]
    for name in CLIPS:
        if hasattr(clip_grad, name):
            clip = _around_clip(watch, getattr(clip_grad, name))
            for module in (clip_grad, torch.nn.utils):
                if hasattr(module, name):
                    setattr(module, name, clip)
    scaler = torch.amp.GradScaler
    for name in ("unscale_", "step", "update"):
        setattr(scaler, name, _around_scaler(watch, name, getattr(scaler, name)))


def before_steps(watch: Any, kind: Any) -> None:
    """Leads the steps of a class of optimizers through the harness, once."""
    own = kind.step
    if getattr(own, "is_autotunes_own", False):
        return

    @functools.wraps(own)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.is_through or not watch.is_in_charge(self):
            return own(self, *args, **kwargs)
        return watch.step(own, self, args, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch's own hooks are inside
    step.is_autotunes_own = True  # type: ignore[attr-defined]
    step._torchdynamo_disable = True  # type: ignore[attr-defined]
    kind.step = step


def _around_backward(watch: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(backward)
    def begun_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A backward pass within one, of a checkpointed segment, has its share already.
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
    @functools.wraps(zero_grad)
    def cleared(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.keeps(owner):
            return None
        if watch.set_to_none is None:
            return zero_grad(owner, *args, **kwargs)
        zero_grad(owner, set_to_none=watch.set_to_none)
        watch.cleared()
        return None

    cleared._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cleared


def _around_clip(watch: Any, clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not watch.is_active:
            return clip(parameters, *args, **kwargs)
        if watch.is_last():
            watch.unscale()
            return clip(parameters, *args, **kwargs)
        return (
            clip(parameters, *args, **kwargs)
            if clip.__name__ == READING
            else watch.norm(clip.__name__, parameters, args, kwargs)
        )

    return clipped


def _around_scaler(watch: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # The program's own scaler: it must not unscale, step or move its scale while gradients are still gathered.
    import torch

    is_enabled = torch.amp.GradScaler.is_enabled

    @functools.wraps(method)
    def scaled(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.is_through or scaler is watch.scaler or not watch.is_active or not is_enabled(scaler):
            return method(scaler, *args, **kwargs)
        if watch.scaler is not None:
            watch.stand_down(apply_step.SCALES)
            return method(scaler, *args, **kwargs)
        if name == "step" and watch.is_in_charge(args[0]):
            return watch.step(functools.partial(method, scaler), args[0], args[1:], kwargs)
        is_held = watch.gathered if name == "update" else name == "unscale_" and not watch.is_last()
        return None if is_held else method(scaler, *args, **kwargs)

    return scaled
