"""Intercepts the start of a loader's workers: makes them count batches, binds them to cores, and remembers their processes."""

from __future__ import annotations

import functools
import os
import signal
from multiprocessing.util import get_temp_dir
from typing import Any, Callable, Dict, List, Optional

from . import worker
from .context import TrialContext
from .explain import skipping, workers
from .explain.documents import LINES
from .knobs import affinity
from .knobs import loader as loader_knobs
from .knobs import process as process_knobs
from .loader import Loader
from .patches import patches


class WorkerStarts:
    """Watches the starts of all loaders' workers.

    Args:
        context: the trial.
        may_train: whether a loader may be the one that trains.
    """

    def __init__(self, context: TrialContext, may_train: Callable[[Loader], bool]) -> None:
        self._context, self._spec, self._may_train = context, context.spec, may_train
        self._is_measuring = self._spec.mode != "apply"
        self._processes: List[Any] = []  # worker processes of the loader that started last

    def watch(self, kind: Any) -> None:
        """Watches a class of iterators with workers."""
        if not self._is_measuring and not any(key in self._spec.knobs for key in affinity.KEYS):
            return

        # worker_init_fn is replaced only while the workers start: some programs read it from the loader.
        def around(start: Any) -> Any:
            def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
                self._start(lambda: start(iterator, loader, *args, **kwargs), iterator, loader)

            return __init__

        patches.install(kind, "__init__", around)

    def _start(self, start: Callable[[], None], iterator: Any, loader: Any) -> None:
        if self._is_measuring:
            get_temp_dir()  # makes the folder now, so workers make their sockets there, and `Ending.leave` removes it
        kept = loader.__dict__
        info, own, num_workers = kept.get("_autotune"), kept["worker_init_fn"], kept["num_workers"]
        cores = self._context.binder.workers_start(num_workers, may_train=info is None or info.is_target)
        if cores is not None:
            process_knobs.follow_cores(self._spec.knobs)
        is_counted = self._is_measuring and info is not None and self._has_counters(info, num_workers)
        observe = self._observer(info)
        if not is_counted and cores is None and observe is None:
            start()
            return
        path = info.counters_file if is_counted else ""
        kept["worker_init_fn"] = worker.WorkerInit(path, own, cores, observe=observe)
        try:
            start()
        finally:
            kept["worker_init_fn"] = own
        if info is None:
            return
        self._processes = iterator._workers
        method = getattr(iterator._workers[0], "_start_method", None)  # set by the worker's class; None for the default
        info.settings[loader_knobs.CONTEXT] = method or loader_knobs.start_method(None)

    def _observer(self, info: Optional[Loader]) -> Optional[Callable[[], None]]:
        """Returns the function by which a worker observes itself (pass "lines") or skips stages; None if it must do neither."""
        if self._spec.skipped:
            number = -1 if info is None else info.number
            trains = info is None or self._may_train(info)
            return skipping.for_workers(tuple(self._spec.skipped), self._spec.folder, number, is_training=trains)
        if info is None or self._spec.explain != LINES:
            return None
        return functools.partial(workers.observe, workers.prefix(self._spec.folder, info.number))

    def _has_counters(self, info: Loader, num_workers: int) -> bool:
        path = os.path.join(self._spec.folder, f"loader{info.number}.{os.getpid()}.bin")  # the parent process has another path
        try:
            worker.create(path, num_workers)
        except OSError:
            return False  # the folder is gone or the disk is full: the loader must work anyway
        info.counters_file = path
        return True

    def living(self) -> List[Any]:
        """Returns the live worker processes of the loader that started last."""
        return [process for process in self._processes if process.is_alive()]

    def dead(self) -> Dict[str, str]:
        """Returns {"worker": "12, SIGKILL"}, process id and signal, if a signal ended a worker; {} if none did.

        The program's exception often hides this: receiving a tensor from such a worker fails with "connection reset by peer".
        """
        for process in self._processes:
            code = process.exitcode
            if code is not None and code < 0 and code != -signal.SIGTERM:  # torch itself ends idle workers with SIGTERM
                return {"worker": f"{process.pid}, {signal.Signals(-code).name}"}
        return {}
