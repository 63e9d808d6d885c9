"""Counts replays of a CUDA graph as steps, if the program has recorded whole steps in the graph (torch.cuda.graph).

While a stream is captured, any request to the device (for an event or a value) is an error that ends the capture. The recorded
work runs only when the graph is replayed. So the harness does not count a step that is being captured, and reads nothing in it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .context import TrialContext
from .patches import patches


def is_capturing() -> bool:
    """Whether the program is recording a CUDA graph on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class CapturedSteps:
    """Counts one step for each replay of a graph that contains a step. Patches torch at the first captured step."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._is_installed = self._has_step = False
        self._samples = 0.0  # of the forward calls in the current capture
        self._graphs: Any = weakref.WeakKeyDictionary()  # graph that holds a step -> samples of its forward calls

    def is_captured(self) -> bool:
        """Returns whether the step just made was recorded in a CUDA graph instead of computed. Must be called for each step."""
        if not is_capturing():
            return False
        if not self._is_installed:
            self._is_installed = True
            self._install()
        self._context.gradients.captured()
        self._has_step, self._samples = True, self._samples + self._context.modules.take_samples()
        return True

    def _install(self) -> None:
        def around_end(end: Any) -> Any:
            def capture_end(graph: Any) -> None:
                end(graph)
                self._graphs.pop(graph, None)
                if self._has_step:
                    self._graphs[graph] = self._samples
                self._has_step, self._samples = False, 0.0

            return capture_end

        def around_replay(replay: Any) -> Any:
            def counted_replay(graph: Any) -> None:
                samples = self._graphs.get(graph)
                if samples is not None:
                    self._replay_begins(samples)
                replay(graph)
                if samples is not None:
                    self._replay_ends()

            return counted_replay

        patches.install(torch.cuda.CUDAGraph, "capture_end", around_end)
        patches.install(torch.cuda.CUDAGraph, "replay", around_replay)

    def _replay_begins(self, samples: float) -> None:
        try:
            self._context.clock.batch_is_there()
            self._context.modules.give_samples(samples)
        except Exception:
            self._context.broke("timing the replay of a step")

    def _replay_ends(self) -> None:
        if self._context.losses is not None:
            self._context.losses.replayed()
        self._context.step_done()
