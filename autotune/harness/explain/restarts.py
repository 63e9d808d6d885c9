"""Times how long the training thread waits because the training loader starts new workers for an epoch."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
import weakref
from typing import Any, Callable, List, Optional

from ..context import TrialContext
from ..members import nothing
from ..patches import Patch, patches
from .documents import Restarts


class RestartTimer:
    """Times the starts of the training loader's workers, the first batch after each, and the end of the workers.

    Created in the training thread.

    Attributes:
        found: what was observed since `install`.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._thread = threading.get_ident()
        self._patches: List[Patch] = []
        self._fresh: Callable[[], Any] = nothing  # weak reference to an iterator that has not yielded a batch yet
        self.found = Restarts()
        self._step_began = self.found  # `found` when the current step began

    def install(self) -> None:
        """Starts to observe."""
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator

        for name, wrap in (
            ("__init__", self._around_start),
            ("_next_data", self._around_next),
            ("_shutdown_workers", self._around_end),
        ):
            self._patches.append(patches.install(Iterator, name, wrap))

    def uninstall(self) -> None:
        """Stops observing."""
        while self._patches:
            self._patches.pop().uninstall()

    def step_begins(self) -> None:
        """Records that what is observed from now on belongs to the next step."""
        self._step_began = copy.copy(self.found)

    def leave_out_step(self) -> None:
        """Forgets what was observed since the current step began."""
        self.found = copy.copy(self._step_began)

    def result(self) -> Optional[Restarts]:
        """Returns what was observed; None if no workers were started."""
        training = self._context.loaders.training
        if training is None or not self.found.count:
            return None
        return dataclasses.replace(self.found, steps_per_epoch=training.steps_per_epoch)

    def _is_of_training(self, iterator: Any) -> bool:
        info = getattr(iterator, "_autotune", None)
        return info is not None and info is self._context.loaders.training and threading.get_ident() == self._thread

    def _around_start(self, start: Any) -> Any:
        def __init__(iterator: Any, loader: Any) -> None:
            began_s = time.perf_counter()
            start(iterator, loader)
            if self._is_of_training(iterator):
                self.found.count += 1
                self.found.start_s += time.perf_counter() - began_s
                self.found.num_remade += iterator._autotune.made_step == self._context.num_steps
                self._fresh = weakref.ref(iterator)

        return __init__

    def _around_next(self, next_data: Any) -> Any:
        def _next_data(iterator: Any) -> Any:
            if iterator is not self._fresh():
                return next_data(iterator)
            self._fresh, began_s = nothing, time.perf_counter()
            try:
                return next_data(iterator)
            finally:
                self.found.first_s += time.perf_counter() - began_s

        return _next_data

    def _around_end(self, end: Any) -> Any:
        def _shutdown_workers(iterator: Any) -> None:
            began_s = time.perf_counter()
            end(iterator)
            if self._is_of_training(iterator):
                self.found.end_s += time.perf_counter() - began_s

        return _shutdown_workers
