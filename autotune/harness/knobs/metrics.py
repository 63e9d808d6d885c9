"""How often a program reads its metrics back from the device, each of which waits for it.

A library's loop is told (`adapters.METRIC_READERS`) before it begins to train, and looked at again when all is over. A program
that was told by its own command line is counted: how many steps lie between two times that it reads a loss. Losses are looked
at elsewhere (`losses.py`), whatever is said here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .. import adapters
from ..patches import patches
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

if TYPE_CHECKING:
    from ..context import TrialContext

METRICS = "step.metrics_sync_interval"
BY_ITSELF = (
    "the program's own loop reads its metrics: where it has an argument for that, write {step.metrics_sync_interval=10} in "
    "the command"
)
NEVER = "the program's trainer reads no metrics between two epochs"


class Met:
    """A trainer that was met as it began to train; it is not kept alive.

    Attributes:
        interval: the steps between two readings as it was last seen; None where it reads none.
        is_reader: whether it read any before it was told.
        why_not: why it cannot be told to read more seldom; "" when it can.

    Args:
        trainer: the trainer.
        reader: its kind.
    """

    def __init__(self, trainer: Any, reader: adapters.MetricReader) -> None:
        self.trainer, self._reader = weakref.ref(trainer), reader
        self.interval = reader.interval(trainer)
        self.is_reader, self.why_not = self.interval is not None, reader.why_not(trainer)

    def look(self) -> None:
        """Notes the settings as they are now; of a trainer that is gone they stay as they were."""
        trainer = self.trainer()
        if trainer is not None:
            self.interval = self._reader.interval(trainer)


class MetricKnobs(KnobHandler):
    """Sees and sets how often metrics are read in this process."""

    keys = (METRICS,)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._asked: Optional[int] = context.spec.knobs.get(METRICS)
        self._passed: Optional[int] = context.spec.passed.get(METRICS)
        self._met: List[Met] = []
        self._last = (0, 0)  # steps, and turns of the program's loop, at its own last reading of a loss
        self._gap = 0  # most of either between two readings; 0 before the second
        for name, reader in adapters.METRIC_READERS.items():
            self._await(name, reader)
        if self._passed is not None and not context.is_applying:
            self._count()

    def _await(self, name: str, reader: adapters.MetricReader) -> None:
        patches.on_import(name, lambda module: self._watch(module, reader))

    def _watch(self, module: Any, reader: adapters.MetricReader) -> None:
        kind = getattr(module, reader.kind, None)
        if not hasattr(kind, reader.method):
            return

        def around(begin: Any) -> Any:
            def watched_begin(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    self._meet(trainer, reader)
                except Exception:
                    self._context.broke("setting how often metrics are read")
                return begin(trainer, *args, **kwargs)

            return watched_begin

        patches.install(kind, reader.method, around)

    def _meet(self, trainer: Any, reader: adapters.MetricReader) -> None:
        if all(known.trainer() is not trainer for known in self._met):
            self._met.append(Met(trainer, reader))
        if self._asked is not None:
            reader.seldom(trainer, int(self._asked))
        for known in self._met:
            known.look()

    def _count(self) -> None:
        from torch import Tensor

        def around(item: Any) -> Any:
            def counted_item(tensor: Any) -> Any:
                if tensor.grad_fn is not None:
                    self._read()
                return item(tensor)

            return counted_item

        patches.install(Tensor, "item", around)

    def _read(self) -> None:
        # The longest gap counts: an epoch's end, or a line that is printed beside the others, makes single ones shorter.
        (steps, turns), (last_steps, last_turns) = self._position, self._last
        if last_steps:
            self._gap = max(self._gap, steps - last_steps, turns - last_turns)
        self._last = steps, turns

    @property
    def _position(self) -> "tuple[int, int]":
        """Optimizer steps so far, and turns of the program's loop, several of which may make a step: it may count either."""
        gradients, training = self._context.gradients, self._context.loaders.training
        if training is not None:
            return self._context.num_steps, int(training.total_batches) + training.num_yields
        return self._context.num_steps, self._context.num_steps * (gradients.every or 1) + gradients.gathered

    @property
    def _interval(self) -> Optional[int]:
        """Steps between two readings by a library's loop; None where none reads."""
        for each in self._met:
            each.look()
        return min((each.interval for each in self._met if each.interval is not None), default=None)

    def observe(self) -> Dict[str, Any]:
        """Returns the steps between two readings as they are now; {} where that is not known."""
        if self._passed is not None:
            # An epoch that ends in between may make it more.
            return {METRICS: min(self._gap, self._passed)} if self._gap else {}
        return {} if self._interval is None else {METRICS: self._interval}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be turned in this program."""
        if self._passed is not None:
            return {}
        why = next((each.why_not for each in self._met if each.why_not), "")
        if self._interval is None:
            why = NEVER if self._met else BY_ITSELF
        return {METRICS: why} if why else {}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        found = self._interval
        if found is None and any(each.is_reader for each in self._met):
            return KnobReport(APPLIED, "", asked)  # what it had read, it reads no more
        if found is None:
            return KnobReport(NOT_APPLICABLE, NEVER if self._met else BY_ITSELF)
        if found >= asked:
            return KnobReport(APPLIED, "", asked)
        why = f"the program reads its metrics every {found} steps, or its progress bar does"
        return KnobReport(OVERRIDDEN, why, found)
