"""The pass "memory": what uses the memory at the peak, and the FLOPs of one step.

Parameters, gradients and the optimizer's state are counted from their tensors. Activations are counted when autograd saves
them. The first two steps show the allocations (from the profiler's records on the CPU, from the allocator's on a GPU). The
third step shows what autograd saves, and the fourth how many FLOPs a step has.
"""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch

from .. import batches, members
from ..context import TrialContext
from ..gradient_state import parameters_of
from . import allocations
from .activations import Activations, Running, Storages, bytes_of, storage_of
from .base import Pass
from .documents import FORWARD, INPUT, MEMORY, TRANSFER, Memory
from .flops import StepFlops, plain_name
from .phase_marks import Marks
from .sources import Sources
from .syncs import SyncSites

COMPILED = "activations of compiled code: not known, because compiled code does not show what it saves; they are in `other`"
NO_FLOPS = "FLOPs: not known: {}"
OTHERS = "the program also trains parameters on other GPUs: this is only the memory of GPU {}"
NO_PRODUCTS = "speed of matrix products, convolutions and attention in 16 bits"
EVALUATED = "the program evaluated its model in each of the steps that were observed for this"
MOST_COUNTED = 4  # after this many steps in which the program evaluated its model, FLOPs stay unknown


class MemoryPass(Pass):
    """Follows allocations for two steps, then what autograd saves in the third, and counts the FLOPs of the fourth."""

    which = MEMORY

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._num_steps = 0
        self._inputs: Set[int] = set()
        self._input_bytes = 0
        self._saved: Optional[Activations] = None
        self._running: Optional[Running] = None
        self._flops: Optional[StepFlops] = None
        self._flops_samples = 0.0
        self._is_left_out = False  # whether the program evaluated its model since the last step
        self._num_left_out = 0  # steps whose FLOPs were counted in vain, because they contained an evaluation
        self._index: Optional[int] = None  # of the GPU whose memory is reported; None on the CPU

    def begin(self) -> None:
        """See the base class."""
        context = self.context
        if context.device == "cuda":
            self._index = torch.cuda.current_device() if context.device_index is None else context.device_index
        self._roots = [root.module for root in context.modules.living]
        optimizers = context.optimizers.optimizers()
        held = [p for o in optimizers for p in parameters_of(o)]
        self._names = {id(module): name for module, name in _named(self._roots)}
        in_modules = [p for root in self._roots for p in members.parameters(root)]
        trained = {id(p): p for p in [*in_modules, *held]}.values()
        self._parameters = list(filter(self._is_here, trained))
        if any(members.local(p).device.type == "cuda" for p in trained if not self._is_here(p)):
            self.notes.append(OTHERS.format(self._index))
        self._weights, self._state = Storages(), Storages()
        for tensor in (*self._parameters, *filter(self._is_here, _buffers(self._roots))):
            self._weights.add(tensor)
        self._marks = Marks(context)
        self._marks.on_result = self._noted
        self._marks.on_change = self._changed
        self._syncs = SyncSites(context, self._marks, Sources())  # also marks copies to the device as a phase
        self._syncs.install()
        self._marks.install()
        self._allocations = allocations.recorder(context.device, context.device_index)
        self._allocations.begin()

    def _is_here(self, tensor: Any) -> bool:
        """Whether a tensor is in the memory that the pass reports. A program may keep some in host memory or on other GPUs."""
        device = members.local(tensor).device
        return self.context.device == "cpu" or (device.type == "cuda" and device.index == self._index)

    def _noted(self, phase: str, result: Any) -> None:
        if phase not in (INPUT, TRANSFER) or hasattr(result, "__next__"):
            return
        found = Storages()
        for tensor in (each for each in batches._tensors(result) if hasattr(each, "untyped_storage")):
            found.add(tensor)
        if phase == INPUT:
            self._inputs, self._input_bytes = found.seen, found.num_bytes
        else:  # the batch's copy on the device
            self._inputs |= found.seen

    def _changed(self, phase: str) -> None:
        if phase == FORWARD and self._saved is not None:
            self._saved.count_gradients()

    def leave_out(self, samples: float, wait_s: float) -> None:
        """See the base class. Only the FLOPs are counted again, in the next step."""
        self._is_left_out = True

    def step_done(self) -> None:
        """See the base class."""
        is_left_out, self._is_left_out = self._is_left_out, False
        if is_left_out and self._flops is not None and not self.is_over and self._count_again(self._flops):
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._allocations.begin_second()
        elif self._num_steps == 2:
            self._allocations.end()
            self._begin_saved()
        elif self._num_steps == 3:
            self._end_saved()
            self._begin_flops()
        elif self._num_steps == 4:
            self._end_flops()
            self.is_over = True

    def _begin_saved(self) -> None:
        for optimizer in self.context.optimizers.optimizers():
            for tensor in _tensors_in(optimizer.state):
                if self._is_here(tensor) and storage_of(tensor)[0] not in self._weights.seen:
                    self._state.add(tensor)
        self._running = Running(self._names)
        if self.context.modules.num_graphs():
            self.notes.append(COMPILED)
            warnings.filterwarnings("ignore", message=".*global hooks on modules")  # torch warns when FLOPs are counted
        else:
            self._running.install()
        self._saved = Activations(
            self._parameters, self._weights.seen, self._running.now, lambda place: place in self._inputs, self._is_here
        )
        self._saved.install(is_compiled=bool(self.context.modules.num_graphs()))

    def _end_saved(self) -> None:
        if self._saved is not None and self._running is not None:
            self._saved.uninstall()
            self._running.uninstall()

    def _begin_flops(self) -> None:
        self._flops = StepFlops()
        try:
            self._flops.begin()
        except Exception as error:
            self.notes.append(NO_FLOPS.format(f"{type(error).__name__}: {error}"))
            self._flops = None

    def _count_again(self, flops: StepFlops) -> bool:
        """Discards the FLOPs of a step with an evaluation; returns whether those of the next step are counted instead."""
        flops.end()
        self._flops = None
        self._num_left_out += 1
        if self._num_left_out < MOST_COUNTED:
            self._begin_flops()
        else:
            self.notes.append(NO_FLOPS.format(EVALUATED))
        return self._flops is not None

    def _end_flops(self) -> None:
        if self._flops is not None:
            self._flops.end()
            self._flops_samples = self.context.window.steps["samples"][-1]

    def finish(self) -> Optional[Memory]:
        """See the base class."""
        self._marks.uninstall()
        self._syncs.uninstall()
        if self._num_steps < 3 or self._saved is None:  # the program ended before the third step was over
            self._allocations.end()
            self._end_saved()
            return None
        if not self.is_over:
            self._end_flops()
            self._flops = None
            self.notes.append(NO_FLOPS.format("the program ended before they were counted"))
        return self._document(self._saved)

    def _document(self, saved: Activations) -> Memory:
        context, seen, summary = self.context, self._allocations, self.context.memory.summary()
        is_on_gpu = context.device == "cuda"
        is_received = bool(context.loaders.num_workers()) and not is_on_gpu  # in shared memory, unseen by the allocator
        inputs = self._input_bytes if not is_on_gpu else saved.input_bytes
        base = 0 if is_on_gpu else self._weights.num_bytes + self._state.num_bytes + (inputs if is_received else 0)
        parts = (self._weights.num_bytes, saved.gradient_bytes, self._state.num_bytes, saved.saved_bytes, inputs)
        peak_bytes = max(sum(parts), base + seen.peak_bytes)
        self.notes += seen.notes
        flops = self._flops

        def again(which: str) -> Dict[str, float]:
            if flops is None:
                return {}
            return self.tried(NO_PRODUCTS, lambda: getattr(flops.products, which)(context.device, context.device_index))

        return Memory(
            rank=context.rank,
            world_size=context.world_size,
            device=context.device,
            peak_bytes=peak_bytes,
            parameters=parts[0],
            gradients=parts[1],
            optimizer_state=parts[2],
            activations=parts[3],
            input=parts[4],
            other=peak_bytes - sum(parts),
            by_module=self._by_module(saved),
            flops=flops.total if flops is not None else None,
            samples=self._flops_samples,
            unit=context.loaders.unit,
            products=again("timed"),
            products_in_16_bits=again("timed_in_16_bits"),
            padding={} if flops is None else self.tried("padding", flops.padding.result),
            timeline=seen.timeline,
            at_peak=seen.at_peak,
            fragmentation_frac=seen.fragmentation_frac,
            alloc_retries=seen.num_retries,
            capacity_bytes=summary["capacity_bytes"],
        )

    def _by_module(self, saved: Activations) -> List[Dict[str, Any]]:
        flops = self._flops.by_module(len(self._roots)) if self._flops is not None else {}
        rows: Dict[str, Dict[str, Any]] = {}
        # A wrapper and its module have the same name, and the module comes later. So the row has the module's class, and the
        # parameters of both are added up.
        for module, name in _named(self._roots):
            held = members.held(module).get("_parameters", {}).values()
            own = [each for each in held if each is not None and self._is_here(each)]
            known = rows.get(name, {"parameters": 0})["parameters"]
            rows[name] = {
                "module": name,
                "class": type(module).__name__,
                "activations": saved.by_module.get(name, 0),
                "parameters": known + sum(map(bytes_of, own)),
                "flops": flops.get(name, 0.0),
            }
        shown = [row for row in rows.values() if row["activations"] or row["parameters"] or row["flops"]]
        return sorted(shown, key=lambda row: (-row["activations"], -row["flops"]))


def _named(roots: List[Any]) -> Iterator[Tuple[Any, str]]:
    """Yields modules and their names, without what wrappers add. With several roots, a name is like "Encoder.layers.0"."""
    for root in roots:
        for name, module in members.named_modules(root):
            yield module, plain_name(name if len(roots) == 1 else f"{type(root).__name__}.{name}".rstrip("."))


def _buffers(roots: List[Any]) -> Iterator[Any]:
    for root in roots:
        for module in members.modules(root):
            yield from (each for each in members.held(module).get("_buffers", {}).values() if each is not None)


def _tensors_in(state: Any) -> Iterator[Any]:
    if hasattr(state, "untyped_storage"):
        yield state
    elif isinstance(state, dict):
        for each in list(state.values()):
            yield from _tensors_in(each)
    elif isinstance(state, (list, tuple)):
        for each in state:
            yield from _tensors_in(each)
