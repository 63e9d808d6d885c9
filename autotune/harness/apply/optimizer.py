"""The optimizer's implementation: torch's default choice, foreach (horizontally batched), or fused (one kernel)."""

from __future__ import annotations

from typing import Any, Dict

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

KEY = "optimizer.implementation"
FLAGS = {"default": (None, None), "foreach": (True, None), "fused": (None, True)}  # value -> (foreach, fused)


def implementation(optimizer: Any) -> str:
    """Returns "fused", "foreach" or "default" as the optimizer's first group says."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    return "foreach" if group.get("foreach") else "default"


def apply(optimizer: Any, knobs: Dict[str, Any], reports: Dict[str, KnobReport]) -> None:
    """Sets the implementation of an optimizer before its first step and notes where it has none to choose."""
    value = knobs.get(KEY)
    if value is None:
        return
    problem = _problem(optimizer, value)
    if problem:
        reports.setdefault(KEY, KnobReport(NOT_APPLICABLE, problem, implementation(optimizer)))
        return
    foreach, fused = FLAGS[value]
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["foreach"], group["fused"] = foreach, fused
    # What the constructors do beside storing the flag (torch/optim/sgd.py, adam.py).
    optimizer._step_supports_amp_scaling = bool(fused)
    optimizer._need_device_dtype_check_for_fused = bool(fused)
    if fused:
        _move_step_counters(optimizer)
    reports[KEY] = KnobReport(APPLIED, "", value)


def _problem(optimizer: Any, value: str) -> str:
    import torch

    name = type(optimizer).__name__
    if "foreach" not in optimizer.defaults:
        return f"{name} has no implementations to choose from"
    if value == "fused" and "fused" not in optimizer.defaults:
        return f"{name} has no fused implementation"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable here"
    if value == "fused":
        kinds = {p.device.type for g in optimizer.param_groups for p in g["params"]}
        if not kinds <= {"cpu", "cuda", "mps", "xpu"}:
            return f"no fused implementation for parameters on {', '.join(sorted(kinds))}"
        if any(not torch.is_floating_point(p) for g in optimizer.param_groups for p in g["params"]):
            return "fused implementations need floating point parameters"
    return ""


def _move_step_counters(optimizer: Any) -> None:
    import torch

    # A state loaded from a checkpoint keeps its counters on the CPU; fused kernels want them beside the parameter.
    for parameter, state in optimizer.state.items():
        counter: Any = state.get("step") if isinstance(state, dict) else None
        if isinstance(counter, torch.Tensor):
            state["step"] = torch.Tensor.to(counter, device=parameter.device)


def verify(knobs: Dict[str, Any], noted: Dict[str, KnobReport], clock: Any) -> Dict[str, KnobReport]:
    """Returns the report of the implementation knob, read back from the optimizer that steps."""
    if KEY not in knobs:
        return {}
    report = noted.get(KEY) or KnobReport(NOT_APPLICABLE, "no optimizer of torch.optim stepped")
    if report.status == APPLIED and clock is not None and implementation(clock) != knobs[KEY]:
        report = KnobReport(OVERRIDDEN, "the program has changed the optimizer's flags since", implementation(clock))
    return {KEY: report}


def applicability(clock: Any) -> Dict[str, str]:
    """Returns why the implementation cannot be chosen in this program (from the baseline)."""
    if clock is None:
        return {KEY: "no optimizer of torch.optim stepped"}
    problem = _problem(clock, "foreach")
    return {KEY: problem} if problem else {}
