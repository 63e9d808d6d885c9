"""How often a program reads its metrics back from the device, each of which waits for it.

A library's loop is told (`adapters.METRIC_READERS`) before it begins to train, and looked at again when all is over. A program
that was told by its own command line is counted: how many steps lie between two times that it reads a loss. Losses are looked
at elsewhere (`losses.py`), whatever is said here.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import adapters
from .apply.step import METRICS
from .imports import Awaited
from .protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

BY_ITSELF = (
    "the program's own loop reads its metrics: where it has an argument for that, write {step.metrics_sync_interval=10} in "
    "the command"
)
NEVER = "the program's trainer reads no metrics between two epochs"


class MetricReads:
    """Sees and sets how often metrics are read in this process.

    Args:
        session: for what is asked, and the steps so far.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._asked: Optional[int] = session.spec.knobs.get(METRICS)
        self._passed: Optional[int] = session.spec.passed.get(METRICS)
        self._met: List[Tuple[Any, adapters.MetricReader]] = []  # weak references to trainers
        self._last_step, self._gap = -1, 0  # of the program's own readings of a loss; 0 before the second
        for name, reader in adapters.METRIC_READERS.items():
            self._await(name, reader)
        if self._passed is not None and not session.is_applying:
            self._count()

    def _await(self, name: str, reader: adapters.MetricReader) -> None:
        if name in sys.modules:
            self._watch(sys.modules[name], reader)
            return

        def around(execute: Callable[[], None], module: Any) -> None:
            execute()
            self._watch(module, reader)

        sys.meta_path.insert(0, Awaited(name, around))

    def _watch(self, module: Any, reader: adapters.MetricReader) -> None:
        kind = getattr(module, reader.kind, None)
        begin = getattr(kind, reader.method, None)
        if begin is None:
            return
        watch = self

        @functools.wraps(begin)
        def watched_begin(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                watch._meet(trainer, reader)
            except Exception:
                watch._session.broke("setting how often metrics are read")
            return begin(trainer, *args, **kwargs)

        setattr(kind, reader.method, watched_begin)

    def _meet(self, trainer: Any, reader: adapters.MetricReader) -> None:
        if all(known() is not trainer for known, _ in self._met):
            self._met.append((weakref.ref(trainer), reader))
        if self._asked is not None:
            reader.seldom(trainer, int(self._asked))

    def _count(self) -> None:
        from torch import Tensor

        item, session = Tensor.item, self._session

        @functools.wraps(item)
        def counted_item(tensor: Any) -> Any:
            if tensor.grad_fn is not None and session.num_steps != self._last_step:
                if self._last_step > 0:
                    self._gap = min(self._gap or sys.maxsize, session.num_steps - self._last_step)
                self._last_step = session.num_steps
            return item(tensor)

        Tensor.item = counted_item  # type: ignore[method-assign, assignment]

    @property
    def _interval(self) -> Optional[int]:
        """Steps between two readings by a library's loop; None where none reads."""
        found = [reader.interval(trainer) for ref, reader in self._met if (trainer := ref()) is not None]
        return min((each for each in found if each is not None), default=None)

    @property
    def observed(self) -> Dict[str, Any]:
        """Knob key -> the steps between two readings as they are now; {} where nobody can say."""
        if self._passed is not None:
            # An epoch that ends in between makes it more.
            return {METRICS: min(self._gap, self._passed)} if self._gap else {}
        return {} if self._interval is None else {METRICS: self._interval}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be turned in this program."""
        if self._passed is not None or self._interval is not None:
            return {}
        return {METRICS: NEVER if self._met else BY_ITSELF}

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report where the knob was asked for, read back from the trainers."""
        if self._asked is None:
            return {}
        found = self._interval
        if found is None:
            return {METRICS: KnobReport(NOT_APPLICABLE, NEVER if self._met else BY_ITSELF)}
        if found >= self._asked:
            return {METRICS: KnobReport(APPLIED, "", self._asked)}
        return {
            METRICS: KnobReport(
                OVERRIDDEN, f"the program reads its metrics every {found} steps, or its progress bar does", found
            )
        }
