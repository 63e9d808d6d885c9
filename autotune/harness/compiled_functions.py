"""Counts the samples that a program's compiled functions are called with, if the functions call a training root.

A training root is an outermost module with trained parameters that the program calls (modules.py). Usually the harness
intercepts the calls of roots to count samples. Compiled code bypasses the interception, so the harness intercepts the calls of
the compiled function instead.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, Callable, Dict, Iterable, List, Optional

from torch import Tensor, is_grad_enabled

from .batches import CallSizes
from .context import TrialContext
from .patches import patches


class CompiledFunctions:
    """The calls of compiled functions in this process, and the samples that they were called with since the last step."""

    def __init__(
        self, context: TrialContext, *, is_training: Callable[[], bool], sizes: Callable[[], Optional[CallSizes]]
    ) -> None:
        """Creates the counter.

        Args:
            context: the trial's context.
            is_training: returns whether a call may train: a training root is known, and the call is not inside a module call.
            sizes: returns the object that counts a call's samples; None if a loader already gives their number.
        """
        self._context, self._is_training, self._sizes = context, is_training, sizes
        self._samples: Dict[int, float] = {}  # compiled function -> samples that it was called with since the last step
        self._usual_samples = 0.0  # samples of the last step in which a root's calls were counted
        self._root_step = self._function_step = -1  # steps in which a root, or a compiled function, was last called

    def watch(self, eval_frame: Any) -> None:
        """Counts the calls of functions that are compiled from now on; `eval_frame` is torch._dynamo's module of that name."""
        patches.install(eval_frame.OptimizeContext, "__call__", self._around_compile)

    def _around_compile(self, compile_it: Any) -> Any:
        def __call__(context: Any, function: Any) -> Any:
            compiled = compile_it(context, function)
            if type(compiled) is not FunctionType:
                return compiled

            @functools.wraps(compiled)
            def counted(*args: Any, **kwargs: Any) -> Any:
                if self._is_training() and is_grad_enabled():
                    self._called(id(compiled), args, kwargs)
                return compiled(*args, **kwargs)

            counted._torchdynamo_wrapper_id = id(counted)  # type: ignore[attr-defined]  # see torch's `innermost_fn`
            return counted

        return __call__

    def _called(self, function: int, args: Any, kwargs: Any) -> None:
        context, sizes = self._context, self._sizes()
        self._function_step = context.num_steps
        if sizes is None:
            return
        try:
            context.clock.batch_is_there()
            samples = sizes.count(_inputs(args), _inputs(kwargs.values()))
            self._samples[function] = self._samples.get(function, 0.0) + samples
        except Exception:
            context.broke("counting the samples of a compiled function")

    def root_called(self) -> None:
        """Notes that a root's call was intercepted."""
        self._root_step = self._context.num_steps

    @property
    def call_all_roots(self) -> bool:
        """Whether roots are called only in compiled functions, which bypass the interception."""
        return self._function_step > self._root_step + 1

    def take(self, samples: float) -> float:
        """Returns the samples since the last step: from the roots' own calls or, if there are none, from a compiled function.

        Args:
            samples: the samples in calls of roots since the last step.
        """
        functions, self._samples = self._samples, {}
        if samples:
            self._usual_samples = samples
        elif functions:
            return next(filter(None, functions.values()), self._usual_samples)
        return samples


def _inputs(values: Iterable[Any]) -> List[Any]:
    """Returns the arguments that may hold a batch. Leaves out modules and trainers: their parameters would be counted."""
    return [v for v in values if isinstance(v, (list, tuple, dict)) or (isinstance(v, Tensor) and not v.requires_grad)]
