"""Sets the optimizer's implementation: torch's default choice, foreach (horizontally batched), or fused (one kernel)."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from .. import members
from ..context import TrialContext
from ..gradient_state import parameters_of
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler, applying
from .step import NO_STEP

KEY = "optimizer.implementation"
FUSED = f"{KEY}=fused"  # a key of `applicability`, with the reason why "fused" cannot be chosen
FLAGS = {"default": (None, None), "foreach": (True, None), "fused": (None, True)}  # value -> (foreach, fused)


def implementation(optimizer: Any) -> str:
    """Returns "fused", "foreach" or "default", from the optimizer's first parameter group."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    return "foreach" if group.get("foreach") else "default"


class OptimizerKnobs(KnobHandler):
    """Sets the implementation of the optimizer that steps."""

    keys = (KEY,)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._report: Optional[KnobReport] = None
        # The program's implementation, and why others cannot be chosen, for the optimizer with the most choices so far.
        self._own: Optional[str] = None
        self._applicability = {KEY: NO_STEP}

    def on_optimizer(self, optimizer: Any) -> None:
        """Sets the implementation; called before an optimizer's first step."""
        if self._own is None or self._applicability:
            found = {KEY: _problem(optimizer, "foreach"), FUSED: _problem(optimizer, "fused")}
            problems = {key: problem for key, problem in found.items() if problem}
            if self._own is None or len(problems) < len(self._applicability):
                self._own, self._applicability = implementation(optimizer), problems
        if self.asked:
            with applying(KEY):
                self._set(optimizer, self.asked[KEY])
        if optimizer.param_groups and implementation(optimizer) == "fused":
            _lay_out_state(optimizer)

    def _set(self, optimizer: Any, value: str) -> None:
        problem = _problem(optimizer, value)
        if problem:
            self._report = self._report or KnobReport(NOT_APPLICABLE, problem, implementation(optimizer))
            return
        foreach, fused = FLAGS[value]
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["foreach"], group["fused"] = foreach, fused
        # With fused=True, an optimizer's constructor sets these attributes, too (torch/optim/sgd.py, adam.py).
        knows_scales = members.attribute(optimizer, "_step_supports_amp_scaling", False) or not _has_own_step(optimizer)
        optimizer._step_supports_amp_scaling = bool(fused) and knows_scales
        optimizer._need_device_dtype_check_for_fused = bool(fused)
        _move_step_counters(optimizer)
        self._report = KnobReport(APPLIED, "", value)

    def observe(self) -> Dict[str, Any]:
        """Returns the implementation that the program itself has chosen; {} before the first step."""
        return {} if self._own is None else {KEY: self._own}

    def applicability(self) -> Dict[str, str]:
        """Returns why the implementation cannot be chosen in this program."""
        return self._applicability

    def _verify(self, key: str, asked: Any) -> KnobReport:
        report, stepping = self._report or KnobReport(NOT_APPLICABLE, NO_STEP), self._context.optimizers.counted()
        can_be_set = report.status == APPLIED and stepping is not None and not _problem(stepping, asked)
        if can_be_set and implementation(stepping) != asked:
            return KnobReport(OVERRIDDEN, "the program has changed the optimizer's flags since", implementation(stepping))
        return report


def _problem(optimizer: Any, value: str) -> str:
    name = type(optimizer).__name__
    if "foreach" not in optimizer.defaults:
        return f"{name} has no implementations to choose from"
    if value == "fused" and "fused" not in optimizer.defaults:
        return f"{name} has no fused implementation"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True"
    if value != "default" and any(len({hasattr(p, "to_local") for p in g["params"]}) > 1 for g in optimizer.param_groups):
        return f"{name} holds distributed tensors beside others, which torch cannot update together"
    if value == "foreach" and _has_tensor_settings(optimizer):
        return f"{name} has a learning rate or betas that are tensors, and is not capturable"
    if value == "fused":
        parameters = parameters_of(optimizer)
        kinds = {p.device.type for p in parameters}
        if not kinds <= {"cpu", "cuda", "mps", "xpu"}:
            return f"no fused implementation for parameters on {', '.join(sorted(kinds))}"
        if "cuda" in kinds and _is_refused_on_cuda(type(optimizer)):
            return f"{name} of this torch has a fused implementation only for the CPU"
        if any(not torch.is_floating_point(p) for p in parameters):
            return "fused implementations need floating point parameters"
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
            return "fused implementations need dense gradients"
    return ""


def _is_refused_on_cuda(kind: Any) -> bool:
    """Whether an optimizer's fused implementation raises for parameters on CUDA, as Adagrad's did at first.

    Such an optimizer is recognised by its code, which calls `_device_dtype_check_for_fused(p, cuda_unsupported=True)`.
    """
    code = getattr(getattr(kind, "_init_group", None), "__code__", None)
    return any("cuda_unsupported" in each for each in getattr(code, "co_consts", ()) if isinstance(each, tuple))


def _has_own_step(optimizer: Any) -> bool:
    """Whether the program overrides `step` of torch's optimizer, so that GradScaler must unscale gradients before that step."""
    return not type(optimizer).step.__module__.startswith("torch.optim")


def _has_tensor_settings(optimizer: Any) -> bool:
    """Whether Adam's foreach implementation rejects a group, because its lr or betas are tensors and it is not capturable."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return False
    return any(
        isinstance(each, torch.Tensor)
        for group in optimizer.param_groups
        if not group.get("capturable")
        for each in (group.get("lr"), *group.get("betas", ()))
    )


def _move_step_counters(optimizer: Any) -> None:
    # A loaded checkpoint has its step counters on the device where the saving optimizer needed them. Fused and capturable
    # optimizers need them on the parameter's device. Torch's other optimizers read each counter in each step, so they need them
    # on the CPU.
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    for group in optimizer.param_groups:
        is_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"] if is_on_device or is_of_torch else ():
            state = optimizer.state.get(parameter)
            counter: Any = state.get("step") if isinstance(state, dict) else None
            if isinstance(counter, torch.Tensor):
                state["step"] = torch.Tensor.to(counter, device=parameter.device if is_on_device else "cpu")


def _lay_out_state(optimizer: Any) -> None:
    """Gives an optimizer's state the memory layout of its parameters, which torch's fused kernels for the CPU take for granted.

    A checkpoint that was saved before layout.channels_last was set has another layout.
    """
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter)
        for name, value in list(state.items()) if isinstance(state, dict) else ():
            is_like = type(value) is torch.Tensor and value.shape == parameter.shape
            if is_like and value.layout == parameter.layout == torch.strided and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).detach().copy_(value)
