"""Counts, by place, the calls in which the program waits for its device or converts tensors to Python numbers."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from typing import Any, Dict, List, Tuple

import torch

from .. import adapters
from ..context import TrialContext
from ..knobs.transfer import as_to, where_to
from ..patches import Patch, patches
from .documents import OPTIMIZER, OTHER, TRANSFER, Site
from .phase_marks import Marks
from .sources import Sources, name_of, text_of

KINDS = {
    **{"item": "item", "tolist": "tolist", "cpu": "cpu", "numpy": "numpy", "nonzero": "nonzero"},
    **{"__bool__": "bool", "__float__": "float", "__int__": "int"},
}
COPY, SYNCHRONIZE = "copy", "synchronize"
MAX_SITES = 50
# Recording a call takes microseconds, and a loop over the elements of a tensor makes thousands of calls per step. So after
# ALL_NOTED calls, about one in ONE_IN is recorded and counts as ONE_IN calls.
ALL_NOTED, ONE_IN = 2000, 16

Key = Tuple[str, Any, int, str]  # kind, code, line, phase


class SyncSites:
    """Counts synchronising calls by place, and marks copies of batches to the device as a separate phase."""

    def __init__(self, context: TrialContext, marks: Marks, sources: Sources) -> None:
        self._context, self._marks, self._sources = context, marks, sources
        self._is_on_gpu = context.device == "cuda"
        self._is_on = self._is_inside = False
        self._patches: List[Patch] = []
        self._seen: Dict[Key, List[float]] = {}  # calls, seconds
        self._num_noted = 0
        self._skip = 0  # number of calls to let pass before the next call is noted
        self._draw = random.Random(0).randrange

    def install(self) -> None:
        """Starts to count."""
        self._is_on = True
        for name, kind in KINDS.items():
            self._patches.append(patches.install(torch.Tensor, name, functools.partial(self._around, kind)))
        for name in ("to", "cuda"):
            self._patches.append(patches.install(torch.Tensor, name, functools.partial(self._around_move, name == "cuda")))
        adapters.keep_class_in(torch.Tensor.to)
        if self._is_on_gpu:
            self._patches.append(patches.install(torch.cuda, SYNCHRONIZE, functools.partial(self._around, SYNCHRONIZE)))

    def uninstall(self) -> None:
        """Removes the patches."""
        self._is_on = False
        while self._patches:
            self._patches.pop().uninstall()

    def _is_counted(self, first: Any) -> bool:
        if not self._is_on or self._is_inside or threading.get_ident() != self._marks.thread:
            return False
        if self._context.modules.is_in_evaluation:
            return False
        return not self._is_on_gpu or not hasattr(first, "is_cuda") or bool(first.is_cuda)

    def _around(self, kind: str, function: Any) -> Any:
        is_compiling, marks, is_on_host = torch.compiler.is_compiling, self._marks, not self._is_on_gpu

        def watched(*args: Any, **kwargs: Any) -> Any:
            # Torch's own optimizers read their step numbers in every step. On the CPU, the first condition ignores these reads.
            if (is_on_host and marks.now is OPTIMIZER) or is_compiling() or not self._is_counted(args[0] if args else None):
                return function(*args, **kwargs)
            if self._skip:
                self._skip -= 1
                return function(*args, **kwargs)
            return self._timed(kind, function, args, kwargs, weight=self._weight())

        return watched

    def _weight(self) -> int:
        """Returns how many calls this one counts for, and draws how many are skipped after it."""
        self._num_noted += 1
        if self._num_noted <= ALL_NOTED:
            return 1
        self._skip = self._draw(2 * ONE_IN - 1)  # ONE_IN - 1 on average; random, because the calls may follow a pattern
        return ONE_IN

    def _timed(self, kind: str, function: Any, args: Any, kwargs: Any, *, weight: int = 1) -> Any:
        self._is_inside, begin_s = True, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False
            self._note(kind, sys._getframe(2), time.perf_counter() - begin_s, weight)

    def _note(self, kind: str, frame: Any, seconds: float, weight: int) -> None:
        phase = self._marks.now
        own = self._sources.own_frame(frame)
        if own is not None:
            seen = self._seen.setdefault((kind, own.f_code, own.f_lineno, phase), [0, 0.0])
            seen[0] += weight
            seen[1] += weight * seconds

    def _around_move(self, is_cuda: bool, function: Any) -> Any:
        is_compiling, marks = torch.compiler.is_compiling, self._marks

        def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return function(tensor, *args, **kwargs)
            is_ours = self._is_on and not self._is_inside and marks.now == OTHER and threading.get_ident() == marks.thread
            if not is_ours or self._context.modules.is_in_evaluation:
                return function(tensor, *args, **kwargs)
            device, _, non_blocking, _ = where_to(*as_to(*args, **kwargs)) if is_cuda else where_to(args, kwargs)
            source = tensor.device.type
            if device is None or device.type == source:
                return function(tensor, *args, **kwargs)
            before = marks.enter(TRANSFER)
            try:
                if source != "cpu":
                    return self._timed("cpu", function, (tensor, *args), kwargs)
                if not non_blocking or (self._is_on_gpu and not tensor.is_pinned()):
                    copy = self._timed(COPY, function, (tensor, *args), kwargs)
                else:
                    copy = function(tensor, *args, **kwargs)
            finally:
                marks.leave(before)
            if marks.on_result is not None:
                marks.on_result(TRANSFER, copy)
            return copy

        return moved

    def sites(self, num_steps: float) -> List[Site]:
        """Returns the MAX_SITES places with the most seconds, sorted by seconds; calls and seconds are per step."""
        found = []
        for (kind, code, line, phase), (count, seconds) in self._seen.items():
            file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
            text = text_of(file, line)
            found.append(Site(kind, file, line, name_of(code), text, phase, count / num_steps, seconds / num_steps))
        return sorted(found, key=lambda site: (-site.seconds, -site.count))[:MAX_SITES]
