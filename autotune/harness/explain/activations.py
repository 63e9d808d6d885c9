"""Counts the bytes that autograd saves for the backward pass, by module, and the bytes of the gradients."""

from __future__ import annotations

import contextlib
import operator
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import members
from ..patches import Patch, patches

ROOT = ""  # the name of an outermost module, as in `named_modules()`


class Storages:
    """Adds up the bytes of distinct storages."""

    def __init__(self) -> None:
        self.seen: Set[int] = set()
        self.num_bytes = 0

    def add(self, tensor: Any) -> None:
        """Counts a tensor's storage, unless it has been counted already."""
        place, size = storage_of(tensor)
        if size and place not in self.seen:
            self.seen.add(place)
            self.num_bytes += size


def storage_of(tensor: Any) -> Tuple[int, int]:
    """Returns (address, bytes) of a tensor's storage; (0, 0) for a tensor without one."""
    try:
        storage = members.local(tensor).untyped_storage()
        return int(storage.data_ptr()), int(storage.nbytes())
    except Exception:  # a sparse, nested or functional tensor
        return 0, 0


def bytes_of(tensor: Any) -> int:
    """Returns the bytes of a tensor itself; 0 for a tensor without storage.

    Several tensors may share a storage: the gradients in a bucket of DistributedDataParallel, the weights of an LSTM on a GPU.
    """
    size = storage_of(tensor)[1]
    local = members.local(tensor) if size else None
    return 0 if local is None else min(size, Tensor.numel(local) * Tensor.element_size(local))


class Saved:
    """A tensor that autograd saves; counted until the graph releases it."""

    __slots__ = ("activations", "place", "tensor")

    def __init__(self, tensor: Any, activations: Optional[Activations], place: int) -> None:
        self.tensor, self.activations, self.place = tensor, activations, place

    def __del__(self) -> None:
        if self.activations is not None:
            self.activations.released(self.place)


class Activations:
    """Bytes that autograd saves in a step, and bytes of gradients, at the moment when the sum of both is highest.

    Attributes:
        peak_bytes: the highest sum; `saved_bytes`, `input_bytes` and `gradient_bytes` are its parts.
        by_module: module -> bytes saved in it, at the peak.

    Args:
        parameters: parameters of the modules that train, and those of the optimizers.
        excluded: addresses of storages that are not activations: parameters and buffers.
        module: returns the name of the module that runs.
        is_input: returns whether the storage at an address came from a loader.
        is_here: returns whether a tensor is in the memory that is reported.
    """

    def __init__(
        self,
        parameters: List[Any],
        excluded: Set[int],
        module: Callable[[], str],
        is_input: Callable[[int], bool],
        is_here: Callable[[Any], bool],
    ) -> None:
        self._parameters, self._excluded, self._module = parameters, excluded, module
        self._is_input, self._is_here = is_input, is_here
        self._living: Dict[int, List[Any]] = {}  # address -> [times saved, bytes, module]; module None for input
        self._gradients: Dict[int, int] = {}  # parameter -> bytes
        self._saved = self._gradient_sum = 0
        self._is_highest = False  # whether the sum is at its highest now; its parts are recorded only when it falls
        self.peak_bytes = self.saved_bytes = self.input_bytes = self.gradient_bytes = 0
        self.by_module: Dict[str, int] = {}
        self._hooks: Any = None
        self._thread = 0
        self._disabling: Optional[Patch] = None
        self._handles: List[Any] = []

    def install(self, *, is_compiled: bool = False) -> None:
        """Starts to count in the calling thread.

        Args:
            is_compiled: whether the program has compiled code. If so, no function of torch is replaced, because compiled code
                checks that these functions are unchanged.
        """
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_came))
        self.count_gradients()
        self._thread = threading.get_ident()
        if not is_compiled:
            self._disabling = patches.install(torch.autograd.graph, "disable_saved_tensors_hooks", self._around_disabling)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, operator.attrgetter("tensor"))
        self._hooks.__enter__()

    def uninstall(self) -> None:
        """Stops counting."""
        if self._disabling is not None:
            self._disabling.uninstall()
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
        while self._handles:
            self._handles.pop().remove()
        self._keep_parts()

    def _around_disabling(self, disable: Any) -> Any:
        # `torch.func` and `vmap` raise an error if hooks like ours are active, so nothing is counted in them.
        @contextlib.contextmanager
        def disabled(message: str) -> Iterator[None]:
            hooks = self._hooks if threading.get_ident() == self._thread else None
            if hooks is None:
                with disable(message):
                    yield
                return
            self._hooks = None
            hooks.__exit__(None, None, None)
            try:
                with disable(message):
                    yield
            finally:
                hooks.__enter__()
                self._hooks = hooks

        return disabled

    def count_gradients(self) -> None:
        """Counts the existing gradients. Also called when a forward pass begins, because the program may have cleared them."""
        self._gradients = {id(each): bytes_of(each.grad) for each in self._parameters if each.grad is not None}
        self._gradient_sum = sum(self._gradients.values())

    def _gradient_came(self, parameter: Any) -> None:
        size = bytes_of(parameter.grad) if parameter.grad is not None else 0
        self._gradient_sum += size - self._gradients.get(id(parameter), 0)
        self._gradients[id(parameter)] = size
        self._compare_with_peak()

    def _pack(self, tensor: Any) -> Any:
        place, size = storage_of(tensor)
        if not size or place in self._excluded or not self._is_here(tensor):
            return Saved(tensor.detach(), None, 0)
        living = self._living.get(place)
        if living is None:
            module = None if self._is_input(place) else self._module()
            living = self._living[place] = [0, size, module]
            self._saved += size
            self._compare_with_peak()
        living[0] += 1
        return Saved(tensor.detach(), self, place)

    def released(self, place: int) -> None:
        """Notes that the graph has released a tensor."""
        living = self._living[place]
        living[0] -= 1
        if not living[0]:
            self._keep_parts()
            self._saved -= living[1]
            del self._living[place]

    def _compare_with_peak(self) -> None:
        if self._saved + self._gradient_sum > self.peak_bytes:
            self.peak_bytes, self._is_highest = self._saved + self._gradient_sum, True

    def _keep_parts(self) -> None:
        if not self._is_highest:
            return
        self._is_highest, self.gradient_bytes = False, self._gradient_sum
        self.by_module, self.input_bytes = {}, 0
        for _, size, module in self._living.values():
            if module is None:
                self.input_bytes += size
                continue
            self.by_module[module] = self.by_module.get(module, 0) + size
        self.saved_bytes = sum(self.by_module.values())


class Running:
    """Tracks which module runs, by hooks on all modules of the process."""

    def __init__(self, names: Dict[int, str]) -> None:
        self._names, self._stack = names, [ROOT]
        self._handles: List[Any] = []

    def install(self) -> None:
        """Starts to follow the modules' calls."""
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave, always_call=True))

    def uninstall(self) -> None:
        """Stops following the modules' calls."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def now(self) -> str:
        """Returns the name of the innermost module that runs."""
        return self._stack[-1]
