"""Applies knobs of DistributedDataParallel: how gradients are exchanged between the ranks.

Buckets, views and the static graph are arguments of the wrapper, set when it is constructed. Compression is a communication
hook, registered just before the wrapper's first call, because a program may register its own hook until then. For sharded
modules see `sharding.py`.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import members
from ..context import TrialContext
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

BUCKET, STATIC = "parallel.bucket_cap_mb", "parallel.static_graph"
VIEW, COMPRESSION = "parallel.gradient_as_bucket_view", "parallel.gradient_compression"
ARGUMENTS = {BUCKET: "bucket_cap_mb", STATIC: "static_graph", VIEW: "gradient_as_bucket_view"}
KEYS = (*ARGUMENTS, COMPRESSION)
STRATEGY = "parallel.strategy"  # if the command line sets it, other trials may use DistributedDataParallel
MIB = 1 << 20
NO_WRAPPER = "no module is wrapped in DistributedDataParallel"
ALONE = "only one process trains, so no gradients are exchanged"
BF16_HOOK = "bf16_compress_hook"


class ParallelKnobs(KnobHandler):
    """Handles the DistributedDataParallel modules of this process.

    Attributes:
        is_due: called before a forward pass; returns whether the backward pass that follows must average gradients over the
            ranks. Set if gradients are accumulated over several backward passes, because then only the last one must average.
            None leaves this to the program. The program's own `no_sync` applies in any case.
    """

    keys = KEYS

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._knobs = self.asked
        self.is_due: Optional[Callable[[], bool]] = None
        self._known: List[Any] = []  # weak references
        self._new: List[Any] = []  # weak references to wrappers that were not called yet
        self._observed: List[Dict[str, Any]] = []
        self._reports: Dict[str, KnobReport] = {}
        self._is_behind = False  # whether some gradients were held back and have not been averaged since

    @property
    def living(self) -> List[Any]:
        """The wrappers that still exist."""
        return [wrapper for ref in self._known if (wrapper := ref()) is not None]

    def arguments(self, construct: Callable[..., Any], wrapper: Any, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Returns the arguments for a wrapper's own `__init__`, without `self`: the program's, overridden by the trial's."""
        asked = {name: self._knobs[key] for key, name in ARGUMENTS.items() if key in self._knobs}
        if not asked:
            return args, kwargs
        bound = inspect.signature(construct).bind(wrapper, *args, **kwargs)
        bound.arguments.update(asked)
        return bound.args[1:], bound.kwargs

    def add(self, wrapper: Any) -> None:
        """Notes a wrapper that was constructed."""
        self._known.append(weakref.ref(wrapper))
        self._new.append(weakref.ref(wrapper))

    def called(self) -> None:
        """Observes new wrappers and sets their compression; called before the first call of a module that trains."""
        new, self._new = self._new, []
        for wrapper in [wrapper for ref in new if (wrapper := ref()) is not None]:
            self._observed.append(observe(wrapper))
            if self._knobs.get(COMPRESSION) == "bf16":
                self._compress(wrapper)

    def _compress(self, wrapper: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        if wrapper._comm_hooks:
            return  # the program has its own hook, which `_verify` reports
        if not any(p.requires_grad and p.dtype == torch.float32 for p in members.parameters(wrapper)):
            self._reports[COMPRESSION] = KnobReport(NOT_APPLICABLE, "the gradients are not float32")
            return
        try:
            DistributedDataParallel.register_comm_hook(wrapper, wrapper.process_group, bf16_compress_hook)
        except TypeError as error:  # torch has this hook only in builds with NCCL, whatever the backend
            self._reports[COMPRESSION] = KnobReport(NOT_APPLICABLE, str(error))

    def hold_back(self) -> List[Any]:
        """Does what entering `no_sync` does, unless averaging is due; called before the forward pass of a module that trains.

        Returns:
            The wrappers that are held back; pass them to `let_go` after the forward pass. In the backward pass that follows,
            they do not average either.
        """
        if self.is_due is None:
            return []
        if self.is_due():
            self._is_behind = False
            return []
        held = [wrapper for wrapper in self.living if wrapper.require_backward_grad_sync]
        for wrapper in held:
            wrapper.require_backward_grad_sync = False
        self._is_behind = self._is_behind or bool(held)
        return held

    def let_go(self, held: List[Any]) -> None:
        """Does what leaving `no_sync` does; called after the forward pass."""
        for wrapper in held:
            wrapper.require_backward_grad_sync = True

    def catch_up(self) -> None:
        """Averages gradients that were held back, if the program uses them for a step after all; called in all ranks."""
        if not self._is_behind:
            return
        self._is_behind = False
        for wrapper in self.living:
            ranks, ignored = dist.get_world_size(wrapper.process_group), wrapper.parameters_to_ignore
            for name, parameter in members.named_parameters(members.attribute(wrapper, "module")):
                if parameter.grad is not None and name not in ignored:
                    dist.all_reduce(parameter.grad.div_(ranks), group=wrapper.process_group)

    @property
    def bytes_an_element(self) -> Optional[int]:
        """Bytes per transmitted gradient element if gradients are compressed; None if they are not."""
        return 2 if any(observe(wrapper)[COMPRESSION] == "bf16" for wrapper in self.living) else None

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> the program's own value; {} without a wrapper."""
        return self._observed[0] if self._observed else {}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this program."""
        is_alone = self._context.world_size == 1
        if not self._observed:
            return {} if STRATEGY in self._context.spec.passed and not is_alone else dict.fromkeys(KEYS, NO_WRAPPER)
        if is_alone:
            return dict.fromkeys(KEYS, ALONE)
        hook = self._observed[0][COMPRESSION]
        return {} if hook in ("off", "bf16") else {COMPRESSION: _own_hook(hook)}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        if key in self._reports:
            return self._reports[key]
        values = [observe(wrapper)[key] for wrapper in self.living]
        odd = [value for value in values if value != asked]
        if not values:
            return KnobReport(NOT_APPLICABLE, NO_WRAPPER)
        if not odd:
            return KnobReport(APPLIED, "", asked)
        if key == COMPRESSION and odd[0] not in ("off", "bf16"):
            return KnobReport(OVERRIDDEN, _own_hook(odd[0]), odd[0])
        return KnobReport(OVERRIDDEN, f"{asked!r} was requested, but a wrapper has {odd[0]!r}", odd[0])


def observe(wrapper: Any) -> Dict[str, Any]:
    """Returns a wrapper's values of these knobs; for compression by an unknown hook, the hook's name."""
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in wrapper._comm_hooks]
    return {
        BUCKET: int(wrapper.bucket_bytes_cap) // MIB,
        STATIC: bool(wrapper.static_graph),
        VIEW: bool(wrapper.gradient_as_bucket_view),
        COMPRESSION: "bf16" if hooks == [BF16_HOOK] else hooks[0] if hooks else "off",
    }


def _own_hook(name: Any) -> str:
    return f"the program has a communication hook of its own ({name})"
