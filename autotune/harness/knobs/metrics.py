"""Sets how often a program reads its metrics back from the device; each reading waits for the device.

In a library's training loop (`adapters.METRIC_READERS`), the interval between two readings is set before training begins, and
looked up again at the end. If the program gets the interval on its command line, nothing is verified. The harness itself reads
losses independently of this knob (`losses.py`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Dict, List, Optional

from .. import adapters
from ..context import TrialContext
from ..patches import patches
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

METRICS = "step.metrics_sync_interval"
BY_ITSELF = (
    "the program's own loop reads its metrics. If an argument of the program sets the interval, write "
    "{step.metrics_sync_interval=10} in the command as its value"
)
NEVER = "the program's trainer reads no metrics during an epoch"


class KnownTrainer:
    """A library's trainer that began to train; it is not kept alive.

    Attributes:
        interval: steps between two readings when last seen; None if it reads no metrics.
        is_reader: whether it read metrics before the knob was applied.
        why_not: why its interval cannot be raised; "" if it can.
    """

    def __init__(self, trainer: Any, reader: adapters.MetricReader) -> None:
        self.trainer, self._reader = weakref.ref(trainer), reader
        self.interval = reader.interval(trainer)
        self.is_reader, self.why_not = self.interval is not None, reader.why_not(trainer)

    def look(self) -> None:
        """Updates the interval, unless the trainer no longer exists."""
        trainer = self.trainer()
        if trainer is not None:
            self.interval = self._reader.interval(trainer)


class MetricKnobs(KnobHandler):
    """Observes and sets how often metrics are read in this process."""

    keys = (METRICS,)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._asked: Optional[int] = context.spec.knobs.get(METRICS)
        self._trainers: List[KnownTrainer] = []
        for name, reader in adapters.METRIC_READERS.items():
            patches.on_import(name, functools.partial(self._watch, reader))

    def _watch(self, reader: adapters.MetricReader, module: Any) -> None:
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
        if all(known.trainer() is not trainer for known in self._trainers):
            self._trainers.append(KnownTrainer(trainer, reader))
        if self._asked is not None:
            reader.seldom(trainer, int(self._asked))
        for known in self._trainers:
            known.look()

    @property
    def _interval(self) -> Optional[int]:
        """Steps between two readings by a library's loop; None if no loop reads metrics."""
        for each in self._trainers:
            each.look()
        return min((each.interval for each in self._trainers if each.interval is not None), default=None)

    def observe(self) -> Dict[str, Any]:
        """Returns the current number of steps between two readings; {} if not known."""
        return {} if self._interval is None else {METRICS: self._interval}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this program."""
        if METRICS in self._context.spec.passed:
            return {}
        why = next((each.why_not for each in self._trainers if each.why_not), "")
        if self._interval is None:
            why = NEVER if self._trainers else BY_ITSELF
        return {METRICS: why} if why else {}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        found = self._interval
        if found is None and any(each.is_reader for each in self._trainers):
            return KnobReport(APPLIED, "", asked)  # a trainer read metrics before and no longer does
        if found is None:
            return KnobReport(NOT_APPLICABLE, NEVER if self._trainers else BY_ITSELF)
        if found >= asked:
            return KnobReport(APPLIED, "", asked)
        why = f"the program or its progress bar reads metrics every {found} steps"
        return KnobReport(OVERRIDDEN, why, found)
