"""Counts the samples of steps that take no batch from a loader, because the program trains on batches that it has kept.

`itertools.cycle(loader)` keeps the batches of the first epoch, for example.
"""

from __future__ import annotations

from typing import Optional

from .context import TrialContext
from .loader import Loader

# After this many consecutive steps without a batch, a program that calls its model as before counts as training on batches that
# it has kept. The number must be larger than the queue of a thread that fetches ahead.
IDLE_STEPS = 32


class IdleSteps:
    """The steps since the last one that took a batch from a loader.

    Attributes:
        num_kept: steps so far that count as training on batches that the program has kept.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._fed_step = 0  # the last step that took a batch; the fast hook of steps writes `Loader.fed_step` instead
        self._num_credited = 0  # idle steps since `_fed_step` whose samples are counted already
        self._num_dimensions = 0  # number of dimensions of the model's input in steps that took a batch
        self.num_kept = 0

    def num(self, training: Optional[Loader]) -> int:
        """Returns the number of steps since the last one that took a batch; `training` is the loader that feeds the steps."""
        return self._context.num_steps - max(self._fed_step, training.fed_step if training is not None else 0)

    def num_open(self, training: Loader) -> int:
        """Returns how many steps without a batch are not counted yet, but may turn out to be steps on kept batches."""
        return min(self.num(training) - self._num_credited, IDLE_STEPS)

    def is_long(self, training: Optional[Loader]) -> bool:
        """Returns whether no batch was taken for so many steps that the samples of forward calls should be counted."""
        return self.num(training) >= IDLE_STEPS // 2

    def note(self, training: Optional[Loader], *, is_fed: bool) -> None:
        """Notes whether the step that just ended took a batch."""
        if is_fed:
            self._fed_step = self._context.num_steps
        self._num_credited = min(self._num_credited, self.num(training))

    def samples(self, training: Loader, *, is_counted: bool) -> float:
        """Returns the samples of a step that took no batch, if the program trains on batches that it has kept; 0 otherwise.

        Each such step has the training loader's mean samples per step. The first step that counts includes the idle steps
        before it; `Window` spreads the samples over all of them.

        Args:
            training: the loader that feeds the steps.
            is_counted: whether samples are counted by the loader's batches.
        """
        root = next(iter(self._context.modules.roots), None)
        num_dimensions, num_idle = 0 if root is None else len(root.sizes.shape), self.num(training)
        if not num_idle:
            self._num_dimensions = num_dimensions
        is_alike = is_counted and num_dimensions == self._num_dimensions
        if num_idle < IDLE_STEPS or not is_alike or training.is_iterated:
            return 0.0
        num, self._num_credited = num_idle - self._num_credited, num_idle
        self.num_kept += num
        return num * training.total_samples / training.num_steps_fed
