"""Reports knobs of the whole step: gradient accumulation over several batches, and how gradients are cleared.

`gradients.py` applies them; this module only reports the outcome.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

ACCUMULATION, SET_TO_NONE = "step.accumulation", "optimizer.set_to_none"

NO_STEP = "no optimizer of torch.optim stepped"
SEVERAL = "several optimizers step: their gradients cannot be told apart"
CLOSURE = "the optimizer may call its closure several times a step, so gradients cannot be accumulated or scaled"
SCALES = "the program scales its gradients itself"
SHARDED = "the parameters are sharded over the ranks, and loss scaling would not skip the same steps in all ranks"
CHANGES = "the program changes its gradients itself between backward() and step()"
CHAINED = "the program uses the gradients of one backward pass in the next, where they would be scaled again"
PIPELINE = "the program trains in stages of a pipeline, where a backward pass begins with the gradients of the next stage"
NO_BACKWARD = "the program computes its gradients by other means than backward()"
CLEARS = "the program clears its gradients by other means than zero_grad()"
CAPTURED = "the program records its step as a CUDA graph, which repeats the same work at each replay"
DISCARDS = "the program throws gradients away between backward() and step()"
UNCOUNTED = "it is not known how many samples a batch holds"
UNEVEN = "a step of the program holds {} samples over all ranks, and train.global_batch={} is not a multiple of this number"
OTHER_BATCH = "train.global_batch={1} was requested, but a step holds {0:g} samples over all ranks"


def calls_closure_once(optimizer: Any) -> bool:
    """Returns whether a step evaluates its closure once, before the update, as all of torch's optimizers except LBFGS do."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ != "LBFGS"


def with_closure(args: Any, kwargs: Any, wrap: Callable[[Any], Any]) -> Any:
    """Returns (args, kwargs) of an optimizer's step with its closure wrapped; None without one. args[0] is the optimizer."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    return None


class StepKnobs(KnobHandler):
    """Reports what `gradients.py` and `gradient_entry.py` do."""

    keys = (ACCUMULATION, SET_TO_NONE)

    def observe(self) -> Dict[str, Any]:
        """Returns the number of batches per step if a global batch determines it; {} otherwise."""
        gradients = self._context.gradients
        return {ACCUMULATION: gradients.every} if gradients.global_batch and not gradients.problem else {}

    def applicability(self) -> Dict[str, str]:
        """Returns why the knobs of this family cannot be changed in this program."""
        optimizers = self._context.optimizers
        stepping = optimizers.counted()
        if stepping is None and not optimizers.num_stepped:
            return {ACCUMULATION: NO_STEP, SET_TO_NONE: NO_STEP}
        reason = SEVERAL if optimizers.num_stepped > 1 else CLOSURE if type(stepping).__name__ == "LBFGS" else ""
        reason = reason or (PIPELINE if self._context.sharing.num_stages > 1 else "")
        return {ACCUMULATION: reason} if reason else {}

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report for each requested knob; also for accumulation, if a global batch requires it without a request."""
        reports = super().verify()
        if ACCUMULATION not in reports and self._context.gradients.global_batch:
            reports[ACCUMULATION] = self._accumulation(None)
        return reports

    def _verify(self, key: str, asked: Any) -> KnobReport:
        return self._accumulation(asked) if key == ACCUMULATION else self._set_to_none(bool(asked))

    def _accumulation(self, asked: Optional[int]) -> KnobReport:
        gradients = self._context.gradients
        every = gradients.every if asked is None else asked
        if gradients.problem:
            # One batch per step is what the program does anyway, so its gradients need not be changed.
            return KnobReport(APPLIED, "", 1) if every == 1 and asked is not None else _not(gradients.problem, 1)
        if every != 1 and not gradients.num_done:
            return _not(NO_STEP, None)
        seen = 1.0 if every == 1 else gradients.num_calls / gradients.num_done
        if seen != every:
            return KnobReport(OVERRIDDEN, f"{every!r} batches per step were requested, but a step had {seen:g}", seen)
        samples = gradients.samples_per_step()
        if gradients.global_batch and samples not in (None, gradients.global_batch):
            return KnobReport(OVERRIDDEN, OTHER_BATCH.format(samples, gradients.global_batch), every)
        return KnobReport(APPLIED, "", every)

    def _set_to_none(self, asked: bool) -> KnobReport:
        gradients = self._context.gradients
        if gradients.is_left_empty is None:  # in the first two steps, cleared gradients may not have been inspected yet
            return KnobReport(APPLIED, "", asked) if self._context.num_steps < 2 else _not(CLEARS, None)
        if gradients.is_left_empty != asked:
            return KnobReport(OVERRIDDEN, "zero_grad() did not leave the gradients as requested", gradients.is_left_empty)
        return KnobReport(APPLIED, "", asked)


def _not(why: str, observed: Any) -> KnobReport:
    return KnobReport(NOT_APPLICABLE, why, observed)
