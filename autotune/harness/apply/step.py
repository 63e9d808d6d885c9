"""Knobs of the step as a whole: gradients gathered over several batches, and how they are cleared.

What is done is done in `gradients.py`; here it is said what came of it.
"""

from __future__ import annotations

from typing import Any, Dict

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

ACCUMULATION, SET_TO_NONE = "step.accumulation", "optimizer.set_to_none"
METRICS = "step.metrics_sync_interval"

NO_STEP = "no optimizer of torch.optim stepped"
SEVERAL = "several optimizers step: their gradients cannot be told apart"
CLOSURE = "the optimizer calls its closure as often as it likes: gradients cannot be gathered or scaled around it"
SCALES = "the program scales its gradients itself"
SHARDED = "the parameters are shared out to ranks, which would each skip steps of their own"
CHANGES = "the program changes its gradients itself between backward() and step()"
CLEARS = "the program clears its gradients by other means than zero_grad()"
DISCARDS = "the program throws gradients away between backward() and step()"
UNCOUNTED = "nobody tells how many samples a batch holds"
UNEVEN = "a step of the program holds {} samples in all ranks, of which train.global_batch={} is no multiple"
OTHER_BATCH = "a step holds {:g} samples in all ranks, train.global_batch={} was asked"


def calls_closure_once(optimizer: Any) -> bool:
    """Returns whether a step evaluates its closure once, before the update, as all of torch's do but LBFGS."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ != "LBFGS"


def verify(knobs: Dict[str, Any], gradients: Any) -> Dict[str, KnobReport]:
    """Returns a report for each knob of this family, and for the accumulation that a global batch asks for."""
    reports = {}
    if ACCUMULATION in knobs or gradients.global_batch:
        reports[ACCUMULATION] = _accumulation(knobs.get(ACCUMULATION), gradients)
    if SET_TO_NONE in knobs:
        reports[SET_TO_NONE] = _set_to_none(bool(knobs[SET_TO_NONE]), gradients)
    return reports


def _accumulation(asked: Any, gradients: Any) -> KnobReport:
    every = gradients.every if asked is None else asked
    if gradients.problem:
        # A single batch to a step, as the program has it: nothing is asked of its gradients.
        return KnobReport(APPLIED, "", 1) if every == 1 and asked is not None else _not(gradients.problem, 1)
    seen = 1.0 if every == 1 else gradients.calls_per_step
    if seen is None:
        return _not(NO_STEP, None)
    if seen != every:
        return KnobReport(OVERRIDDEN, f"{seen:g} batches went into a step, {every!r} were asked", seen)
    samples = gradients.samples_per_step()
    if gradients.global_batch and samples not in (None, gradients.global_batch):
        return KnobReport(OVERRIDDEN, OTHER_BATCH.format(samples, gradients.global_batch), every)
    return KnobReport(APPLIED, "", every)


def _set_to_none(asked: bool, gradients: Any) -> KnobReport:
    if gradients.is_left_empty is None:
        return KnobReport(APPLIED, "", asked) if gradients.is_early else _not(CLEARS, None)
    if gradients.is_left_empty != asked:
        return KnobReport(OVERRIDDEN, "the program has changed its gradients since", gradients.is_left_empty)
    return KnobReport(APPLIED, "", asked)


def _not(why: str, observed: Any) -> KnobReport:
    return KnobReport(NOT_APPLICABLE, why, observed)


def observe(gradients: Any) -> Dict[str, Any]:
    """Returns the batches that go into a step where somebody has asked for a number of them; {} otherwise."""
    return {ACCUMULATION: gradients.every} if gradients.global_batch and not gradients.problem else {}


def applicability(optimizers: Any) -> Dict[str, str]:
    """Returns why the knobs of this family cannot be turned in this program (from the baseline)."""
    clock = optimizers.clock()
    if clock is None and not optimizers.num_stepped:
        return {ACCUMULATION: NO_STEP, SET_TO_NONE: NO_STEP}
    reason = SEVERAL if optimizers.num_stepped > 1 else ""
    if not reason and type(clock).__name__ == "LBFGS":
        reason = CLOSURE
    return {ACCUMULATION: reason} if reason else {}
