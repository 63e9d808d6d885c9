"""Counts the samples that a training root is called with, for batches that do not come from a DataLoader.

A training root is an outermost module with trained parameters that the program calls (modules.py). Not every call brings new
samples to train on. In reinforcement learning, a policy also acts, mostly on a single observation. A program may test its model
without disabling gradients. No backward pass reaches such calls. A solver of differential equations, or an unrolled cellular
automaton, calls its model many times with what it has computed from the same samples. A radiance field, in contrast, is called
with one chunk of points after the other, and all chunks count.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Iterator, List, Optional

from torch import Tensor

from . import batches
from .batches import CallSizes

WATCHED_STEPS = 4  # number of first steps in which the outputs of all calls are watched
# At most this many outputs of a call are watched. A backward pass that reaches any output is assumed to reach one of these.
MAX_HOOKED = 4
_GRAD_FN: Any = Tensor.grad_fn
_REGISTER_HOOK: Any = Tensor.register_hook


class Call:
    """A call whose outputs are watched.

    Attributes:
        samples: number of its samples.
        is_counted: whether its samples are counted already. If not, they will be counted once a backward pass reaches the call.
        is_reached: whether a backward pass has reached the call.
    """

    def __init__(self, samples: float, *, is_counted: bool) -> None:
        self.samples, self.is_counted, self.is_reached = samples, is_counted, False


class Calls:
    """The calls of one root since the last counted step.

    Attributes:
        samples: the calls' samples so far, without `set_aside`.
        set_aside: samples of the calls before the last uncounted step. If a program has several optimizers, only the steps of
            one of them are counted (optimizers.py).
        least_trained: fewest samples of a call that a backward pass has reached; infinite if it has reached none.
        closed_step: the step in which the samples of an optimizer's closure (as for LBFGS) were last counted; -1 before.
    """

    def __init__(self, sizes: CallSizes) -> None:
        self._sizes = sizes
        self.samples = self.set_aside = 0.0
        self.closed_step = -1
        self._largest = 0.0  # most samples of a call
        self.least_trained = math.inf
        self._is_fed_back = False  # whether an input was ever computed from what an earlier call returned
        self._is_reached = self._is_mixed = False  # whether a backward pass reached any call; whether it missed other calls
        self._was_missed = False  # whether calls were watched in an earlier step
        self._num_steps = 0
        self._watched: List[Call] = []  # calls since the last step, in the first steps
        self._last: Optional[Call] = None  # the last watched call that brought new samples, since the last step

    def begin(self, args: Any, kwargs: Any) -> Optional[Call]:
        """Counts the samples of a call that begins. If this returns a `Call`, the caller must pass the outputs to `end`.

        Usually the samples are counted at once. There are three exceptions.

        A small call is counted only when a backward pass reaches it. A call is small if it has fewer samples than the largest
        call and than all calls that a backward pass has reached. If backward passes reached only some calls of the first steps,
        every later call waits for a backward pass, whatever its size.

        A call whose outputs were not computed from trained parameters is counted when it ends, because no backward pass can
        reach it.

        A call whose input was computed from an earlier call's outputs is not counted, because it continues with the same
        samples. But if a backward pass has already reached the last call with new samples, the new call belongs to another
        batch and is counted: a solver makes all calls of a batch before its backward pass.
        """
        samples = self._sizes.count(args, kwargs)
        if self._sizes.continues:
            self._is_fed_back = True
            if self._last is not None and not self._last.is_reached:
                return None
        is_certain = not self._is_mixed and samples >= min(self._largest, self.least_trained)
        self._largest = max(self._largest, samples)
        if is_certain:
            self.samples += samples
        if is_certain and not self._is_fed_back and self._num_steps >= WATCHED_STEPS:
            return None
        return Call(samples, is_counted=is_certain)

    def end(self, call: Call, outputs: Any) -> None:
        """Watches whether a backward pass reaches the outputs of a call."""

        def reached(_: Any) -> None:
            call.is_reached = self._is_reached = True
            self.least_trained = min(self.least_trained, call.samples)
            self._count(call)

        watched = list(itertools.islice(_computed(outputs), MAX_HOOKED))
        for tensor in watched:
            _REGISTER_HOOK(tensor, reached)
        if not watched:
            self._count(call)
            return
        if self._num_steps < WATCHED_STEPS:
            self._watched.append(call)
        if call.is_counted or (self._is_fed_back and self._last is None):
            self._last = call

    def _count(self, call: Call) -> None:
        if not call.is_counted:
            call.is_counted = True
            self.samples += call.samples

    def other_steps(self) -> None:
        """Sets the samples aside: an optimizer whose steps are not counted has made a step."""
        self.set_aside, self.samples, self._last = self.set_aside + self.samples, 0.0, None

    def clear(self) -> None:
        """Forgets the samples: a counted step has ended."""
        self.samples, self.set_aside, self._last = 0.0, 0.0, None
        if self._num_steps < WATCHED_STEPS:
            self._num_steps += 1
            self._is_mixed = self._is_mixed or (self._is_reached and not all(call.is_reached for call in self._watched))
            self._was_missed = self._was_missed or bool(self._watched)
            self._watched = []

    def only_act(self, least_trained: float) -> bool:
        """Whether no backward pass has reached these calls, although they were watched, and all of them are small.

        Such calls only choose actions, as in reinforcement learning: a program may call the policy's module to choose actions,
        but compute the loss by calling the module's `forward()` or layers. The layers are then roots, too.

        Args:
            least_trained: fewest samples of a call of any root that a backward pass has reached. A call with fewer is small.
        """
        is_missed = not self._is_reached and (self._was_missed or bool(self._watched))
        return is_missed and self._largest < least_trained < math.inf


def first_with_samples(all_calls: "List[Calls]") -> "tuple[Optional[int], float]":
    """Returns the index of the first root whose calls count for a step, and their samples; (None, 0) if there is none.

    Roots that only act are skipped (`Calls.only_act`). Samples that were set aside are used only if no root has other samples.
    This happens if each iteration has an uncounted step of one optimizer and then a counted step of another.
    """
    least = min((calls.least_trained for calls in all_calls), default=math.inf)
    for name in ("samples", "set_aside"):
        for number, calls in enumerate(all_calls):
            if getattr(calls, name) and not calls.only_act(least):
                return number, getattr(calls, name)
    return None, 0.0


def _computed(outputs: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the tensors in a module's (nested) outputs that were computed from trained parameters."""
    if isinstance(outputs, Tensor):
        if _GRAD_FN.__get__(outputs) is not None:
            yield outputs
    elif depth <= batches.MAX_DEPTH and not isinstance(outputs, (str, bytes)):
        for item in batches.parts(outputs):
            yield from _computed(item, depth + 1)
