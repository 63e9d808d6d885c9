"""Holds the shared facts about the trial, and lets the harness's objects find each other.

The classes of these objects are imported only for type checking. At run time this module needs none of them, so each of their
modules can import this one.
"""

from __future__ import annotations

import abc
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Optional

from . import protocol
from .clock import HostClock

if TYPE_CHECKING:
    from .applied import Applied
    from .ending import Ending
    from .explain.passes import Explained
    from .gradients import Gradients
    from .knobs.affinity import AffinityBinder
    from .knobs.registry import Handlers
    from .last_step import LastStep
    from .loaders import LoaderWatch
    from .losses import LossWatch
    from .modules import ModuleWatch
    from .optimizers import OptimizerWatch
    from .peers import Peers
    from .phases import Phases
    from .process import MemoryWatch
    from .ranks import Communication
    from .ranks_per_batch import Sharing
    from .supply import Supply
    from .window import Window
    from .writes import Writes

# Matches the beginning of an argument that multiprocessing gives to a process started by spawn, or to its fork server. The
# server's forks inherit its arguments.
_STARTED = re.compile(r"--multiprocessing-fork|(?:import sys; )?from multiprocessing\.forkserver import main;")


class TrialContext(abc.ABC):
    """The trial in this process.

    Attributes:
        spec: the trial as the tuner defines it.
        pid: id of this process.
        started_s: when the harness began, monotonic clock.
        clock_offset_s: see `protocol.clock_offset_s`.
        is_applying: whether this is a real run (mode "apply"): nothing is measured or written.
        is_active: whether this process has made a training step that counts.
        is_over: whether the harness has finished its work in this process.
        is_child: whether another process of the program started this process.
        rank, world_size: rank of this process among the processes that train together, and their number.
        num_steps: optimizer steps so far.
        device: "cuda" or "cpu", where the trained parameters are; known at the first step.
        device_index: index of the GPU that holds the trained parameters, which need not be the current device; None on the CPU,
            before the first step, or if unknown. Torch takes None as the current device.
        clock: times steps; a HostClock until the first step, then the clock for the device.
        applied: what the harness does in a real run; None in a trial.
        losses: records losses; None in a real run.
        explained: the pass of a trial in mode "explain"; None in other modes.
        binder: the handler that binds processes to cores, made before torch is imported.
        handlers: the handlers of all knobs.

    The other attributes are the harness's objects. Some of them exist only once torch is imported.
    """

    __slots__ = ("__dict__", "__weakref__", "num_steps")  # each step writes `num_steps`; a slot is faster than a dictionary

    clock: HostClock  # or a CudaClock, which has the same methods
    phases: Phases
    window: Window
    last_step: LastStep
    ending: Ending
    peers: Peers
    binder: AffinityBinder
    applied: Optional[Applied]
    losses: Optional[LossWatch]
    explained: Optional[Explained]
    memory: MemoryWatch
    loaders: LoaderWatch
    supply: Supply
    modules: ModuleWatch
    sharing: Sharing
    communication: Communication
    optimizers: OptimizerWatch
    gradients: Gradients
    writes: Writes
    handlers: Handlers

    def __init__(self, spec: protocol.Spec) -> None:
        self.spec = spec
        self.pid = os.getpid()
        self.started_s = time.monotonic()
        self.clock_offset_s = protocol.clock_offset_s(spec)
        self.is_applying = spec.mode == "apply"
        self.is_active = self.is_over = False
        self.is_child = any(_STARTED.match(word) for word in getattr(sys, "orig_argv", sys.argv))
        self.rank, self.world_size = protocol.place_of(os.environ) or (0, 1)
        self.num_steps = 0
        self.device, self.device_index = "cpu", None  # type: str, Optional[int]
        self.clock = HostClock()

    def broke(self, doing: str) -> None:
        """Ends the trial with a failed result that names the harness as the cause. Called in `except` blocks of the harness.

        In a real run (mode "apply"), the harness removes itself and lets the program continue.
        """
        self.ending.broke(doing)

    # `Session` makes the harness's objects and implements the methods below. The objects use only this class.

    @abc.abstractmethod
    def step_done(self) -> None:
        """Called after every counted optimizer step."""

    @abc.abstractmethod
    def trial_step(self, samples: Optional[float]) -> None:
        """Called when the program itself reports a step (`autotune.trial_step`)."""

    @abc.abstractmethod
    def plain_step_hook(self, otherwise: Any) -> Any:
        """Returns a fast hook for usual steps. The hook calls `otherwise`, the harness's full hook, after any other step."""
