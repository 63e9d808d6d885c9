"""Describes a training root, i.e. an outermost module that trains (modules.py): its state, its calls and their samples."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional

from torch import Tensor
from torch.nn import Module

from . import members
from .batches import CallSizes
from .calls import Calls
from .knobs import module as module_knobs


class Root:
    """A training root; `ModuleWatch` (modules.py) finds it.

    Attributes:
        reference: weak reference to the module: if the program drops the module, its memory must become free.
        around: function that calls the module in the trial's precision; None if calls need no change.

    Args:
        module: the module.
        observed: what `observe` (knobs/module.py) found of the module before its knobs were set.
        asked: batch size passed on the command line; None if none was passed.
    """

    def __init__(self, module: Any, observed: Dict[str, Any], asked: Optional[int] = None) -> None:
        first = next(members.parameters(module), None)
        self.reference, self._kind = weakref.ref(module), type(module)
        self._first = members.first_parameter(module)
        self.name, self.num_parameters = _name(module), sum(Tensor.numel(p) for p in members.parameters(module))
        self.observed, self.device = observed, module_knobs.device_of(module)
        self.sizes = CallSizes(asked, members.shape_of(first) or ())
        self.calls = Calls(self.sizes)
        self.trains_in_evaluation = not module.training
        self.around: Any = None
        self.is_passive = False  # nothing is left to find, count or set, so its calls are not intercepted

    @property
    def module(self) -> Any:
        """The module; None if it no longer exists."""
        return self.reference()

    @property
    def is_needed(self) -> bool:
        """Whether the module or its parameters still exist, or samples of its calls have not been counted in a step yet."""
        is_counted = bool(self.calls.samples or self.calls.set_aside)
        return is_counted or self.module is not None or self._first() is not None

    def is_replaced_by(self, module: Any) -> bool:
        """Whether the program has made another object of the same class around the same parameters, and dropped this one."""
        first = self._first() if self.module is None and self._kind is type(module) else None
        return first is not None and first is next(members.parameters(module), None)


def _name(module: Any) -> str:
    """Returns the class name of a module, or "Wrapper(Inner)" for a wrapped one."""
    name, inner = type(module).__name__, [members.attribute(module, word) for word in ("module", "_orig_mod")]
    return next((f"{name}({type(each).__name__})" for each in inner if isinstance(each, Module)), name)
