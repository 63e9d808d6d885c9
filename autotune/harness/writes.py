"""Counts the steps of programs without an optimizer of torch.optim: writes to parameters after backward passes.

Such programs write their parameters themselves (`p -= lr * p.grad`) or use another library's optimizers. The trained tensors
are found in the graph of the loss. A write changes a tensor's version or memory address. `p.data.add_(...)` changes neither, so
a few of the tensor's values are compared as well. On a GPU, reading values waits for the device. So values are compared there
only until it is known how many backward passes precede each write. From then on, backward passes are counted instead.

The tensors are examined from the second backward pass on; if the program has made an optimizer, only after MOST_PASSES passes.
The first step of an optimizer removes the patches.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from . import members
from .captures import is_capturing
from .context import TrialContext
from .knobs.step import NO_STEP
from .patches import Patch, patches

# The harness gives up after MOST_PASSES backward passes without a detected step, if the program has made no optimizer of
# torch.optim by then: a program with such an optimizer makes it before so many passes, even if it accumulates gradients. If
# there is an optimizer, the first MOST_PASSES passes are not examined, and the search ends quietly after as many more.
MOST_PASSES = 64
# How many writes must be seen before writes count as steps: MIN_WRITES if all later writes can be seen as well;
# MIN_UNSEEN_WRITES if backward passes will be counted instead.
MIN_WRITES, MIN_UNSEEN_WRITES = 3, 12
MIN_SHARE = 0.25  # writes count as steps only if at least this share of the changing tensors changes at the same checks
NUM_PROBES, NUM_VALUES = 3, 16  # number of tensors watched for writes; number of values compared in each
# If the longest step had n backward passes, and n * PATIENCE passes go by without a write, writes count as no longer visible.
PATIENCE = 64

WRITTEN = "parameters that the program writes itself after a backward pass"
COUNTED = "every {} backward passes, after which the program was seen to write its parameters itself"
WAY_OUT = (
    "Call `autotune.trial_step(samples=len(batch))` after each step of the program (and `import autotune` first), or use an "
    "optimizer of torch.optim"
)
UNSEEN = (
    f"steps cannot be counted: in {MOST_PASSES} backward passes, the program has made no optimizer of torch.optim, and has not "
    f"been seen to write parameters in place. {WAY_OUT}"
)
BOTH = (
    "the program first writes its parameters itself, and later an optimizer of torch.optim steps as well: autotune cannot tell "
    f"which of the two makes a step. {WAY_OUT}"
)
STILL = f"the parameters that the program writes itself no longer change: its steps can no longer be counted. {WAY_OUT}"
IRREGULAR = (
    "the program writes its parameters itself, through `.data` and after a varying number of backward passes: on a GPU, such "
    f"writes can be seen only by waiting for the device. {WAY_OUT}"
)


class Leaf:
    """A trained tensor and, for each check of it (`look`), whether it had changed since the previous check.

    Args:
        tensor: the tensor, which is not kept alive.
        since: number of the check (`Writes._look`) at which the tensor was first seen.
    """

    def __init__(self, tensor: Any, since: int) -> None:
        self.tensor, self.since, self.device = weakref.ref(tensor), since, str(tensor.device.type)
        self.place, self.values = place_of(tensor), values_of(tensor)
        self.changes: List[bool] = []
        self.is_seen_by_place = True  # whether its place (`place_of`) has changed at the same checks as its values

    def look(self, tensor: Any) -> None:
        """Notes whether the tensor has changed since the last look."""
        place, values = place_of(tensor), values_of(tensor)
        self.changes.append(values != self.values)
        self.is_seen_by_place = self.is_seen_by_place and (place != self.place) == self.changes[-1]
        self.place, self.values = place, values


class Probe:
    """A tensor that is watched for writes."""

    def __init__(self, leaf: Leaf) -> None:
        self.tensor = leaf.tensor  # a weak reference
        self._read = place_of if leaf.is_seen_by_place else values_of
        self._last = self._read(leaf.tensor())

    def is_written(self) -> Optional[bool]:
        """Returns whether the tensor has changed since the last call; None if it no longer exists."""
        tensor = self.tensor()
        if tensor is None:
            return None
        last, self._last = self._last, self._read(tensor)
        return bool(self._last != last)


class Writes:
    """Counts the steps of this process by the writes to its parameters, as long as no torch.optim optimizer makes steps.

    Attributes:
        source: how steps are recognised, in words; "" while optimizers step or nothing is known yet.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.source = ""
        self._num_passes = self._num_looks = 0
        self._leaves: Dict[int, Leaf] = {}
        self._probes: List[Probe] = []
        self._period: Optional[int] = None  # backward passes per step, if writes cannot be watched
        self._most_passes = 0  # largest number of passes seen in a step
        self._passes = 0  # backward passes since the last step
        self.device_type = ""
        self._thread = 0
        self._patches: List[Patch] = []
        self._is_watching = True
        self._watch_backward()

    def _watch_backward(self) -> None:
        is_compiling, is_dispatched = torch.compiler.is_compiling, torch.overrides.has_torch_function_unary  # as in losses.py

        def around(backward: Any) -> Any:
            def watched_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if self._is_watching and not is_compiling() and not is_dispatched(tensor) and not is_capturing():
                    self._backward_begins(tensor)
                return backward(tensor, *args, **kwargs)

            return watched_backward

        self._patches.append(patches.install(torch.Tensor, "backward", around))

    def _watch_loaders(self) -> None:
        # A program requests the next batch when a step is done. That is closer to the step's end than the next backward pass.
        def around(advance: Any) -> Any:
            def __next__(iterator: Any) -> Any:
                if self._passes and self._is_watching and threading.get_ident() == self._thread:
                    self._guarded_count()
                return advance(iterator)

            return __next__

        self._patches.append(patches.install(_BaseDataLoaderIter, "__next__", around))

    def stand_down(self) -> None:
        """Removes the patches: an optimizer or the program reports the steps, or nothing is counted any more."""
        self._is_watching = False
        self._leaves, self._probes = {}, []
        while self._patches:
            self._patches.pop().uninstall()

    def optimizer_steps(self) -> None:
        """Stops the search for writes; called before the first step of each optimizer of torch.optim."""
        if self.source and self._is_watching:
            self._context.ending.give_up(BOTH)
        self.stand_down()

    def _backward_begins(self, loss: Any) -> None:
        try:
            self._thread = threading.get_ident()
            if self._passes and self.source and self._count():
                self._context.clock.batch_is_there()
            self._passes += 1
            if not self._probes and self._period is None:
                self._find(loss)
        except Exception:
            self._context.broke("looking for steps without an optimizer")

    def _guarded_count(self) -> None:
        try:
            self._count()
        except Exception:
            self._context.broke("looking for steps without an optimizer")

    def _find(self, loss: Any) -> None:
        self._num_passes += 1
        is_early = self._num_passes <= (MOST_PASSES if self._context.optimizers.has_any else 1)
        if is_early or self._context.is_over:
            return
        self._look(loss)
        self._begin_if_certain()
        if not self.source and self._num_looks >= MOST_PASSES:
            if not self._context.optimizers.has_any:
                self._context.ending.give_up(UNSEEN)
            self.stand_down()

    def _look(self, loss: Any) -> None:
        self._num_looks += 1
        for key, leaf in list(self._leaves.items()):
            tensor = leaf.tensor()
            if tensor is None:
                del self._leaves[key]
            else:
                leaf.look(tensor)
        for tensor in trained_by(loss):
            if id(tensor) not in self._leaves:
                self._leaves[id(tensor)] = Leaf(tensor, self._num_looks)

    def _begin_if_certain(self) -> None:
        """Starts counting once tensors have been written together often enough."""
        groups: Dict[Tuple[Any, ...], List[Leaf]] = {}
        for leaf in self._leaves.values():
            if any(leaf.changes):
                groups.setdefault((leaf.since, *leaf.changes), []).append(leaf)
        known = [group for group in groups.values() if sum(group[0].changes) >= MIN_WRITES]
        largest = max(known, key=len, default=[])
        if not largest or len(largest) < MIN_SHARE * sum(map(len, groups.values())):
            return
        device = largest[0].device
        by_place = [leaf for leaf in largest if leaf.is_seen_by_place]
        gaps = _gaps(largest[0].changes)
        if not by_place and device != "cpu":
            if sum(largest[0].changes) < MIN_UNSEEN_WRITES:
                return
            if len(set(gaps)) > 1:
                self._context.ending.give_up(IRREGULAR)
            self._period = gaps[0]
        self._begin(sorted(by_place or largest, key=lambda leaf: (-len(leaf.values), leaf.since)), max(gaps), device)

    def _begin(self, leaves: List[Leaf], most_passes: int, device: str) -> None:
        is_first = not self.source
        self.device_type, self._most_passes = device, most_passes
        self._probes = [] if self._period else [Probe(leaf) for leaf in leaves[:NUM_PROBES]]
        self.source = COUNTED.format(self._period) if self._period else WRITTEN
        self._context.gradients.stand_down(NO_STEP)
        self._context.optimizers.hold(tensor for leaf in self._leaves.values() if (tensor := leaf.tensor()) is not None)
        self._leaves, self._num_looks, self._passes = {}, 0, 1  # 1 for the pass that begins now
        if is_first:
            self._context.loaders.begin_first_step()
            self._watch_loaders()

    def _count(self) -> bool:
        """Counts a step if one was made since the last call; returns whether it counted one."""
        if not self._has_stepped():
            if self._passes > PATIENCE * self._most_passes and self._probes:
                self._context.ending.give_up(STILL)
            return False
        self._passes = 0
        self._context.step_done()
        return True

    def _has_stepped(self) -> bool:
        if self._period is not None:
            return self._passes >= self._period
        seen = [probe.is_written() for probe in self._probes]
        if None in seen:  # the program has built another model
            self._probes = []
            self._num_passes = 1
        return any(seen)

    def watched(self) -> List[Any]:
        """Returns the tensors that are watched for writes."""
        return [tensor for probe in self._probes if (tensor := probe.tensor()) is not None]


def place_of(tensor: Any) -> Any:
    """Returns a tensor's version and address. Most kinds of writes change one of the two."""
    return tensor._version, members.local(tensor).data_ptr()


def values_of(tensor: Any) -> Any:
    """Returns a few values, evenly spaced in a tensor. Waits for the device."""
    flat = members.local(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_VALUES)][:NUM_VALUES].tolist()


def trained_by(loss: Any) -> Iterator[Any]:
    """Yields the tensors that get gradients in a backward pass from a loss."""
    found = (getattr(node, "variable", None) for node in members.nodes_of(loss.grad_fn))
    return (tensor for tensor in found if tensor is not None)


def _gaps(changes: List[bool]) -> List[int]:
    """Returns the number of checks from each change to the next; [1] if there were fewer than two changes."""
    seen = [number for number, is_changed in enumerate(changes) if is_changed]
    return [seen[number + 1] - seen[number] for number in range(len(seen) - 1)] or [1]
