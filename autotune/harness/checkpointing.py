"""Applies activation checkpointing to a module's repeated blocks: the backward pass computes their activations again.

A block is a module that has children and is directly in a plain Sequential or ModuleList, but not inside another block. Only
blocks of the most frequent class are checkpointed, and only if there are at least two of them. If a library's model has its own
switch for checkpointing, the switch is used instead, because it also makes other required changes (turns off key-value caches).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.nn import Module, ModuleList, Sequential

from . import members
from .adapters import checkpointing_switches, is_checkpointing
from .patches import original_class, subclass

CHECKPOINTED = "_autotune_checkpointed"  # attribute of the `forward` of a checkpointed block
NO_BLOCKS = "no ModuleList or Sequential of the module holds two blocks of one class"


def blocks(module: Any) -> List[Any]:
    """Returns the blocks of a module that would be checkpointed; [] if no two blocks have the same class."""
    found = list(_candidates(module))
    if not found:
        return []
    kind, num = Counter(map(original_class, found)).most_common(1)[0]
    return [each for each in found if original_class(each) is kind] if num > 1 else []


def _candidates(module: Any) -> Iterator[Any]:
    for child in members.children(module):
        if type(module) in (ModuleList, Sequential) and type(child) not in (ModuleList, Sequential) and _has_children(child):
            yield child
        else:
            yield from _candidates(child)


def _has_children(module: Any) -> bool:
    return next(members.children(module), None) is not None


def can_be_checkpointed(module: Any) -> bool:
    """Whether a module has repeated blocks, or its own switch for checkpointing."""
    return bool(checkpointing_switches(module) or blocks(module))


class Checkpointing:
    """Checkpoints modules of this process and observes whether a backward pass runs a block again.

    Attributes:
        is_run_again: whether a block was seen to run within a backward pass; None if no block was observed.
        written: name of a tensor that a block writes to in its forward pass. With checkpointing it is written twice. "" if no
            block writes to a tensor.
    """

    def __init__(self) -> None:
        self.is_run_again: Optional[bool] = None
        self.written = ""
        self._hooks: List[Any] = []

    def put_into(self, module: Any, *, is_watched: bool) -> str:
        """Checkpoints a module; returns why that is impossible, "" on success.

        Args:
            module: the module, before its first call.
            is_watched: whether to observe a block for a few steps; false if the knob or the program compiles the module.
        """
        switches = checkpointing_switches(module)
        if switches:
            try:
                for enable, _ in switches:
                    enable({"use_reentrant": False})
            except ValueError as error:  # the class has the switch, but the model does not support checkpointing
                return f"the model refuses it: {error}"
            found = [each for each in members.modules(module) if is_checkpointing(each) and _has_children(each)]
        else:
            found = [each for each in blocks(module) if _checkpoint(each, self._note_written)]
        if not found:
            return NO_BLOCKS
        if is_watched:
            self._watch(found[-1])
        return ""

    def take_from(self, module: Any) -> str:
        """Turns off a switch that the program has turned on; returns "", because that always works."""
        for _, disable in checkpointing_switches(module):
            disable()
        return ""

    def stop_watching(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_written(self, names: List[str]) -> None:
        self.written = self.written or next(iter(names), "")

    def _watch(self, block: Any) -> None:
        for each in members.modules(block):
            if not _has_children(each):
                self._hooks.append(Module.register_forward_pre_hook(each, self._ran))

    def _ran(self, module: Any, inputs: Any) -> None:
        self.is_run_again = self.is_run_again or is_in_backward()


def is_in_backward() -> bool:
    """Whether a backward pass runs in this thread. If so, modules are called again by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def _checkpoint(block: Any, note_written: Callable[[List[str]], None]) -> bool:
    from torch.utils.checkpoint import checkpoint

    own = type(block).forward
    if hasattr(own, CHECKPOINTED):
        return True
    norms = [each for each in members.modules(block) if members.attribute(each, "running_mean") is not None]
    # Contexts for the forward pass and for its repetition. The second keeps running statistics from seeing a batch twice.
    more: Dict[str, Any] = {"context_fn": lambda: (contextlib.nullcontext(), _keeping(norms))} if norms else {}
    is_observed = False

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_observed
        if not self.training or not torch.is_grad_enabled():
            return own(self, *args, **kwargs)
        # torch restores the random state and autocast for the second run; the contexts protect running statistics.
        # Compiled code needs no contexts: it writes a buffer once, no matter how often its block is computed.
        if torch.compiler.is_compiling():
            return checkpoint(functools.partial(own, self, **kwargs), *args, use_reentrant=False)
        before = None if is_observed else _versions(self)
        out = checkpoint(functools.partial(own, self, **kwargs), *args, use_reentrant=False, **more)
        if before is not None:
            is_observed, after = True, _versions(self)
            note_written([name for name, version in after.items() if before.get(name) != version])
        return out

    forward.__dict__[CHECKPOINTED] = True
    return subclass(block, {"forward": forward})


def _versions(block: Any) -> Dict[str, Tuple[int, int]]:
    """Returns name -> (id, version) of the tensors of a block, without those of normalisations, which `_keeping` protects."""
    found = {}
    for name, module in members.named_modules(block):
        tables = [members.held(module).get(table, {}) for table in ("_parameters", "_buffers")]
        if members.attribute(module, "running_mean") is None:
            each = {key: value for table in tables for key, value in table.items() if value is not None}
            found.update({f"{name}.{key}".lstrip("."): (id(value), value._version) for key, value in each.items()})
    return found


@contextlib.contextmanager
def _keeping(norms: List[Any]) -> Iterator[None]:
    kept: List[Callable[[], Any]] = []
    for norm in norms:
        kept.append(functools.partial(setattr, norm, "momentum", norm.momentum))
        tracked = members.attribute(norm, "num_batches_tracked")
        if tracked is not None:
            kept.append(functools.partial(tracked.copy_, tracked.clone()))
        norm.momentum = 0.0  # new statistics = old ones
    try:
        yield
    finally:
        for restore in kept:
            restore()
