"""Which modules train, how often they are called and how much they are given.

A training root is an outermost *called* module in training mode that owns parameters held by an optimizer; a program may
have several (GAN, encoder and decoder, the children that Lightning's training_step calls). A root gets its class swapped
for a subclass that only overrides `__call__`: the signature of `forward` stays, deepcopy, pickle and `state_dict` see the
original class, and nothing global stays behind for the compiler to trip over.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Dict, List, Optional, Set

from .apply import module as apply_module
from .loaders import leading_dimension

DISCOVERY_STEPS = 3  # every optimizer has stepped by then in programs that alternate


class Root:
    """A training root: the module, and what it was like when it was first called."""

    def __init__(self, module: Any, observed: Dict[str, Any]) -> None:
        self.module = module
        self.observed = observed


class ModuleWatch:
    """Finds the training roots of this process and carries the knobs that belong to modules."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._knobs = session.spec.knobs
        self.roots: List[Root] = []
        self.prepared: Dict[int, Any] = {}  # id -> module whose layout and compilation were set at a wrapper's construction
        self.reports: Dict[str, Any] = {}
        self.wrappers: List[str] = []
        self._depth = 0
        self._samples = 0.0
        self._compile_counters: Any = None
        self._call: Any = None
        self._patch_wrappers()
        self.look()

    # --- discovery ---

    def look(self) -> None:
        """Starts looking at every module call of the process."""
        from torch.nn import Module

        if self._call is not None:
            return
        self._call = call = Module.__call__
        watch = self

        @functools.wraps(call)
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if watch._depth or _is_tracing():
                return call(module, *args, **kwargs)
            if module.training and watch._owns_trained_parameters(module):
                watch._adopt(module)
                return module(*args, **kwargs)  # by its new class
            watch._depth += 1  # frozen, in evaluation or without parameters: its children are no roots either
            try:
                return call(module, *args, **kwargs)
            finally:
                watch._depth -= 1

        Module.__call__ = __call__  # type: ignore[method-assign, assignment]

    def stop_looking(self) -> None:
        """Puts `Module.__call__` back as it was."""
        from torch.nn import Module

        if self._call is not None:
            Module.__call__, self._call = self._call, None  # type: ignore[method-assign]

    def _owns_trained_parameters(self, module: Any) -> bool:
        held: Set[int] = self._session.optimizers.held_parameters()
        if not held:
            return False
        return any(id(parameter) in held for parameter in module.parameters() if parameter.requires_grad)

    def _adopt(self, module: Any) -> None:
        observed = apply_module.observe(module)
        self.roots.append(Root(module, observed))
        inner = getattr(module, "module", None)
        if id(inner) not in self.prepared:
            apply_module.prepare(module, self._knobs, self.reports, observed)
        swap_class(module, self)
        if self._session.phase in ("init", "first_batch"):
            self._session.enter("compile" if self.is_compiled() else "first_batch")

    # --- wrappers ---

    def _patch_wrappers(self) -> None:
        # Layout and compilation belong to the wrapped module, at the wrapper's construction: channels_last after DDP raises a
        # stride error in its reducer.
        from torch.nn.parallel import DistributedDataParallel

        construct, watch = DistributedDataParallel.__init__, self

        @functools.wraps(construct)
        def __init__(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if id(module) not in watch.prepared:
                watch.prepared[id(module)] = module
                apply_module.prepare(module, watch._knobs, watch.reports, apply_module.observe(module))
            watch.wrappers.append(type(wrapper).__name__)
            construct(wrapper, module, *args, **kwargs)

        DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]

    # --- calls of a root ---

    def called(self, args: Any, kwargs: Any) -> None:
        """Counts what a training root is given."""
        session = self._session
        clock = session.clock
        if clock is not None:
            clock.batch_is_there()
        if session.optimizers.is_stepping and self._samples:
            return  # a closure repeats its forward: the same samples
        self._samples += leading_dimension(args) or leading_dimension(kwargs)

    def take_samples(self) -> float:
        """Returns the leading dimensions given to the first root since the last step."""
        samples, self._samples = self._samples, 0.0
        return samples

    def step_done(self) -> None:
        """Called after each counted step: looking ends once every optimizer has had its turn."""
        if self._call is not None and self._session.num_steps >= DISCOVERY_STEPS:
            self.stop_looking()

    # --- facts ---

    def device_type(self) -> str:
        """Returns "cuda" when trained parameters live there, else "cpu"."""
        for root in self.roots:
            for parameter in root.module.parameters():
                return "cuda" if parameter.device.type == "cuda" else "cpu"
        return self._session.optimizers.device_type()

    def is_compiled(self) -> bool:
        """Whether the compiler is at work in this process."""
        return "torch._dynamo" in sys.modules and (self.num_graphs() > 0 or "compile.mode" in self._knobs)

    def num_graphs(self) -> int:
        """Returns how many graphs have been compiled so far."""
        counters = self._compile_counters
        if counters is None:
            dynamo = sys.modules.get("torch._dynamo.utils")
            if dynamo is None:
                return 0
            counters = self._compile_counters = dynamo.counters
        return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def swap_class(module: Any, watch: ModuleWatch) -> None:
    """Gives a module a subclass of its own class whose `__call__` counts and sets the trial's precision."""
    original = type(module)
    around = apply_module.autocast_of(module, watch._knobs, watch.reports)
    is_first_root = len(watch.roots) == 1

    class Watched(original):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if _is_tracing() or not self.training or watch._depth or os.getpid() != watch._session.pid:
                return original.__call__(self, *args, **kwargs)
            if is_first_root:
                watch.called(args, kwargs)
            is_looking = watch._call is not None
            if is_looking:
                watch.stop_looking()  # the compiler must meet modules as torch made them
            watch._depth += 1
            try:
                return original.__call__(self, *args, **kwargs) if around is None else around(original, self, args, kwargs)
            finally:
                watch._depth -= 1
                if is_looking:
                    watch.look()

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Copies and pickles are of the program's own class.
            reduced = original.__reduce_ex__(self, protocol)
            function, arguments, *rest = reduced
            arguments = tuple(original if a is type(self) else a for a in arguments)
            return (function, arguments, *rest)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Watched, name, getattr(original, name))
    object.__setattr__(module, "__class__", Watched)  # OptimizedModule passes plain assignments on to its inner module


def _is_tracing() -> bool:
    dynamo = sys.modules.get("torch.compiler")
    return bool(dynamo is not None and dynamo.is_compiling())


def root_names(watch: ModuleWatch) -> List[str]:
    """Returns the class names of the training roots, wrapped ones as "Wrapper(Inner)"."""
    names = []
    for root in watch.roots:
        inner: Optional[Any] = getattr(root.module, "module", None) or getattr(root.module, "_orig_mod", None)
        name = type(root.module).__name__
        names.append(f"{name}({type(inner).__name__})" if inner is not None else name)
    return names
