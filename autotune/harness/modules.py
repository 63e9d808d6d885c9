"""Finds the modules that train and counts the samples they are called with.

A training root is an outermost *called* module in training mode that owns parameters held by an optimizer. A program may have
several (GAN, encoder and decoder, the children of a module whose `training_step` is called directly). A root's class is swapped
for a subclass that only overrides `__call__`. So `forward` keeps its signature. Functions such as deepcopy, pickle and
`state_dict` see the original class. No global patch remains that could disturb the compiler.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from typing import Any, List, Optional, Set, Tuple

import torch
from torch import cuda, is_autocast_enabled, is_grad_enabled, jit
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data._utils import worker as loader_worker

from . import members
from .calls import Call, first_with_samples
from .checkpointing import is_in_backward
from .compiled_functions import CompiledFunctions
from .context import TrialContext
from .convolutions import Convolutions
from .gradient_state import parameters_of
from .knobs import module as module_knobs
from .patches import Patch, patches, subclass
from .roots import Root
from .wrapping import Wrapping

# Programs check `type(model) in (DataParallel, DistributedDataParallel)` before they unwrap a model, so a root of these classes
# keeps its class; the class's `__call__` is patched instead.
KNOWN_BY_TYPE = (DataParallel, DistributedDataParallel)
COMPILED = "_compiled_call_impl"  # attribute of a module that was compiled in place
UNCOUNTED_CALLS = 64  # number of training calls after which a search ends if steps are no longer counted (mode "apply")
DISCOVERY_STEPS = 3  # steps in which roots are searched for; optimizers that take turns have each stepped by then
# In a process that has made no optimizer, the search for roots ends after this many outermost calls of modules. It begins again
# when the process makes an optimizer.
IDLE_CALLS = 64


class Nesting(threading.local):
    """The number of nested module calls in the current thread."""

    depth = 0


class ModuleWatch:
    """Finds the training roots of this process and applies the knobs of modules to them."""

    __slots__ = ("__dict__", "__weakref__", "is_evaluated")  # every step reads `is_evaluated`; a slot is read faster

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._knobs = context.handlers.module
        self.roots: List[Root] = []
        self.convolutions = Convolutions()
        self._intercepted: List[Any] = []  # classes of KNOWN_BY_TYPE whose `__call__` is patched
        self.functions = CompiledFunctions(
            context,
            is_training=lambda: bool(self.roots) and not self.nesting.depth,
            sizes=lambda: self.roots[0].sizes if self.is_counting else None,
        )
        self._parallel, self._sharding = context.handlers.parallel, context.handlers.sharding
        self.nesting = Nesting()
        self.unit = "samples"
        self.is_evaluated = False
        self._num_evaluated_steps = 0
        self._compile_counters: Any = None
        self._calls: Optional[Patch] = None  # patch of all module calls while roots are being searched for
        self._autocasts: Optional[Patch] = None
        self.is_looking = False
        self.is_counting = context.spec.mode != "apply"
        self._look_until, self._calls_left = DISCOVERY_STEPS, math.inf
        self._idle_calls_left: float = IDLE_CALLS
        self.wrapping = Wrapping(context)
        patches.on_import("torch._dynamo.eval_frame", self._watch_compiled)
        self.look()
        self._watch_autocast()

    # --- discovery ---

    def look(self) -> None:
        """Starts watching every module call of the process."""
        self.is_looking = True
        self.settle()
        if self._calls is None:
            self._calls = patches.install(Module, "__call__", self._around_call)
            self._calls.uninstall_during_import("torch._dynamo.utils")  # dynamo treats a patched `__call__` specially
        else:
            self._calls.install()

    def _around_call(self, call: Any) -> Any:
        nesting = self.nesting

        def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or nesting.depth or not (self._calls is not None and self._calls.is_active):
                return call(module, *args, **kwargs)
            if is_in_backward():
                self._knobs.note_repetition()
                return call(module, *args, **kwargs)
            if not self._may_train():
                return call(module, *args, **kwargs)
            if self.is_counting:
                self._see(module)
            is_candidate = module.training or self._trains_in_evaluation()
            root = self._adopted(module) if is_candidate and not _is_exporting(module) else None
            if root is not None:
                return self.run(root, call, args, kwargs)
            if self._is_made_anew(module):
                return call(module, *args, **kwargs)
            nesting.depth += 1  # a module that is frozen, evaluates or has no parameters contains no roots either
            try:
                return call(module, *args, **kwargs)
            finally:
                nesting.depth -= 1

        # Makes the compiler trace `call` instead. A graph with our function would be compiled again once the patch is removed.
        __call__._torchdynamo_inline = call  # type: ignore[attr-defined]
        return __call__

    def _may_train(self) -> bool:
        """Whether this process may train; if not, ends the search, which slows down every call.

        Two kinds of processes call modules, but do not train. Loader workers call transforms. Actors of reinforcement learning
        call a policy; they are recognised by IDLE_CALLS calls without an optimizer.
        """
        self._idle_calls_left -= 1
        if self._idle_calls_left >= 0 and loader_worker._worker_info is None:
            return True
        self.end_search()
        return False

    def forked(self) -> None:
        """Limits the search in a forked process, which has its parent's optimizers but may not train."""
        self._idle_calls_left = IDLE_CALLS
        if self._context.is_over:
            self.end_search()

    def begin_training(self) -> None:
        """Searches for roots without a limit of calls; called before the first step of this process."""
        self._idle_calls_left = math.inf
        for root in self.living:
            if root.around is not None and root.device != module_knobs.device_of(root.module):  # moved since its first call
                root.around = self._knobs.around_calls(root.module)
        if not self.is_looking:
            self.look_again()

    def end_search(self) -> None:
        """Stops the search for roots; `look_again` begins it anew."""
        self.is_looking = False
        self.uninstall()

    def _is_made_anew(self, module: Any) -> bool:
        # True if the program makes a new wrapper in each step. The wrapper must not become a root: the modules inside it do,
        # because they are called in all steps.
        return any(root.is_replaced_by(module) for root in self.roots)

    def _see(self, module: Any) -> None:
        try:
            self.convolutions.see(module)
        except Exception:
            self._context.broke("looking for convolutions")

    def _trains_in_evaluation(self) -> bool:
        # A program may train with its model in evaluation mode, for example to freeze batch normalisation. So if a step was
        # made and no root was found, calls with gradients enabled count as training.
        return not self.roots and self._context.num_steps > 0 and is_grad_enabled()

    def look_again(self) -> None:
        """Searches for roots again; called when an optimizer is made, because it may train modules that are no roots yet."""
        self._look_until = self._context.num_steps + DISCOVERY_STEPS
        self._idle_calls_left = math.inf
        self._calls_left = UNCOUNTED_CALLS if self._context.optimizers.is_uninstalled else math.inf
        if self.nesting.depth:
            self.is_looking = True  # the search starts when the root's call is over
        else:
            self.look()

    def _continue_search(self) -> None:
        self._calls_left -= 1
        if self._calls_left > 0 and self._may_train():
            self.look()
            return
        self.is_looking = False  # too many calls without a step of the new optimizer, which may be a copy that never steps
        self.settle()

    def uninstall(self) -> None:
        """Stops watching module calls."""
        if self._calls is not None:
            self._calls.uninstall()

    def _adopted(self, module: Any) -> Optional[Root]:
        try:
            if not self._owns_trained_parameters(module) or any(map(is_lazy, members.parameters(module))):
                return None  # lazy layers get their shapes in this call, so the module may become a root in the next one
            return self.root_of(module) or (None if self._is_made_anew(module) else self._adopt(module))
        except Exception:
            self._context.broke("preparing a module for training")
            return None

    def _owns_trained_parameters(self, module: Any) -> bool:
        held: Set[int] = self._context.optimizers.held_parameters()
        if not held:
            return False
        return any(id(parameter) in held for parameter in members.parameters(module) if parameter.requires_grad)

    def _adopt(self, module: Any) -> Root:
        observed, before = module_knobs.observe(module), self.wrapping.observed_before(members.attribute(module, "module"))
        if before is not None:
            observed.update({key: before[key] for key in module_knobs.OF_WRAPPED})
        root = Root(module, observed, self._context.spec.passed.get("loader.batch_size"))
        # A program may train a new copy of its model for each task or client. Thousands of roots would slow down every step, so
        # those that are no longer needed are dropped.
        self.roots = [*(known for known in self.roots if known.is_needed), root]
        self._sharding.meet(module)
        self._context.sharing.meet(module)
        if before is None:
            self._knobs.on_module(module, root.observed)
        self._parallel.called()
        root.around = self._knobs.around_calls(module)
        if self._knobs.must_scale(root.observed):
            self._context.gradients.scale(module, module_knobs.device_of(module))
        if not self._intercept(root):
            why = f"a {type(module).__name__} cannot be given another class: its calls stay as they are"
            self._knobs.refuse_precision(why, is_asked=root.around is not None)
        self._context.phases.start_writing()
        if self._context.phases.now in ("init", "first_batch"):
            self._context.phases.enter("compile" if self.is_compiled() else "first_batch")
        return root

    def _intercept(self, root: Root) -> bool:
        """Intercepts the calls of a root; returns whether this succeeded."""
        kind = type(root.module)
        if kind not in KNOWN_BY_TYPE:
            return subclass(root.module, {"__call__": _around_root(self, kind, root)})
        if kind not in self._intercepted:
            self._intercepted.append(kind)
            around = _around_root(self, Module, None)  # these classes inherit `__call__` from Module
            patches.install(kind, "__call__", lambda _: around)
        return True

    def root_of(self, module: Any) -> Optional[Root]:
        """Returns the root of this module; None if it is not a root."""
        return next((root for root in self.roots if root.module is module), None)

    def leave_precision(self, why: str) -> None:
        """Removes autocast from the roots, because their gradients cannot be scaled; they keep their layout."""
        self._knobs.leave_precision(why)
        for root in self.living:
            root.around = self._knobs.around_calls(root.module)

    def _watch_autocast(self) -> None:
        # A program may enter autocast inside its module (libraries wrap `forward`). `_adopt` cannot see that.
        def around(enter: Any) -> Any:
            def __enter__(context: Any) -> Any:
                if not hasattr(context, "is_autotunes_own"):
                    if self._knobs.replaces_autocast:
                        self._knobs.replace_autocast(context)
                    elif hasattr(context, module_knobs.OWN_STATE):
                        self._knobs.restore_autocast(context)
                    elif self.nesting.depth and context._enabled:
                        self._knobs.note_inner_autocast(context)
                return enter(context)

            return __enter__

        self._autocasts = patches.install(torch.autocast, "__enter__", around)

    # --- compiled roots ---

    def _watch_compiled(self, eval_frame: Any) -> None:
        # Compiled code bypasses the interception of a root's calls. So if a program compiles a root, the compiled module
        # becomes the root. Otherwise its samples would not be counted, and it would not train in the trial's precision.
        def around(construct: Any) -> Any:
            def __init__(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
                construct(wrapper, module, *args, **kwargs)
                try:
                    self._compiled(wrapper, module)
                except Exception:
                    self._context.broke("preparing a compiled module")

            return __init__

        patches.install(eval_frame.OptimizedModule, "__init__", around)
        if self.is_counting:
            self.functions.watch(eval_frame)

    def _compiled(self, wrapper: Any, module: Any) -> None:
        """Replaces a root by the module that `torch.compile` has made of it."""
        inner = self.root_of(module)
        if inner is None:
            return
        root = Root(wrapper, {**inner.observed, module_knobs.COMPILE: "default"}, inner.sizes.asked)
        root.around = self._knobs.around_calls(wrapper) if inner.around is not None else None
        self.roots[self.roots.index(inner)] = root
        if not self._intercept(root):
            self.roots[self.roots.index(root)] = inner

    # --- calls of a root ---

    def run(self, root: Root, call: Any, args: Any, kwargs: Any) -> Any:
        """Calls a root through `call`, its class's `__call__`; counts its samples and sets the trial's precision."""
        self.functions.root_called()
        watched = self._called(root, args, kwargs) if self.is_counting else None
        if self.is_looking:
            self.uninstall()  # the compiler must see modules without our patch
        held = self._parallel.hold_back()
        nesting = self.nesting
        nesting.depth += 1
        try:
            out = call(root.module, *args, **kwargs) if root.around is None else root.around(call, root.module, args, kwargs)
            if watched is not None:
                self._returned(root, watched, out)
            return out
        finally:
            nesting.depth -= 1
            self._parallel.let_go(held)
            if self.is_looking:
                self._sharding.look()
                self._continue_search()

    def run_again(self, root: Root, call: Any, args: Any, kwargs: Any) -> Any:
        """Calls a checkpointed root again in the backward pass, in the precision in which it was called before.

        Torch restores the autocast state in which the checkpoint was called. If autocast was enabled then, by the program or by
        a root that contains this one, the precision is right already. So the root is called without `around`.
        """
        if root.around is None or is_autocast_enabled(module_knobs.device_of(root.module)):
            return call(root.module, *args, **kwargs)
        self.nesting.depth += 1
        try:
            return root.around(call, root.module, args, kwargs)
        finally:
            self.nesting.depth -= 1

    def run_evaluation(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Calls a root in evaluation mode; uncompiled if several roots have CUDA graphs, because compiled calls would fail.

        In an evaluation no backward pass is pending. So when the second root is called, torch assumes that the next iteration
        has begun. It then frees the first root's output while it captures the second root's graph.
        """
        if len(self.roots) < 2 or not self._knobs.has_graphs:
            return call(module, *args, **kwargs)
        held = [members.held(each) for each in (module, members.attribute(module, "module")) if each is not None]
        compiled = [(each, each[COMPILED]) for each in held if COMPILED in each]
        for each, _ in compiled:
            each[COMPILED] = None
        try:
            return call(module, *args, **kwargs)
        finally:
            for each, function in compiled:
                each[COMPILED] = function

    def _called(self, root: Root, args: Any, kwargs: Any) -> Optional[Call]:
        context = self._context
        if not is_grad_enabled():
            return None  # not training: a policy acts in a rollout, or lazy weights get their shapes
        try:
            context.clock.batch_is_there()
            if context.optimizers.is_stepping:
                if root.calls.closed_step == context.num_steps:
                    return None  # a closure repeats its forward pass on the same samples
                root.calls.closed_step = context.num_steps
            return root.calls.begin(args, kwargs)
        except Exception:
            context.broke("counting the samples of a call")
            return None

    def _returned(self, root: Root, watched: Call, out: Any) -> None:
        try:
            root.calls.end(watched, out)
        except Exception:
            self._context.broke("watching the outputs of a call")

    def other_steps(self) -> None:
        """Sets the samples of all roots aside, because another optimizer, whose steps are not counted, has made a step."""
        if self.is_counting:
            for root in self.roots:
                root.calls.other_steps()

    def evaluated(self) -> None:
        """Notes that a root was called in evaluation mode."""
        self.is_evaluated = True
        self._context.loaders.evaluated()

    def settle(self) -> None:
        """Decides whose calls to intercept: those of roots for which there is still something to find, count or set.

        Called by `Session._look`, because deciding at each call would cost too much.

        While a pass of `explain` is active, all calls are intercepted: the pass replaces `run` to mark the phases of a step.
        """
        for root in self.roots:
            is_idle = root.around is None and self._parallel.is_due is None and self._context.explained is None
            root.is_passive = not self.is_looking and not self.is_counting and is_idle

    def take_samples(self) -> float:
        """Returns the samples in the calls of one root since the last step; `unit` says whether they are tokens.

        That root is the first one that was called. Other roots called in the same step would count the same samples again.
        If roots were called only in a compiled function, that function's inputs are counted.
        """
        number, samples = first_with_samples([root.calls for root in self.roots])
        if number is not None:
            self.unit = self.roots[number].sizes.unit
        for root in self.roots:
            root.calls.clear()
        return self.functions.take(samples)

    def give_samples(self, samples: float) -> None:
        """Counts samples for the current step as if a root had been called with them.

        For the replay of a CUDA graph, which calls no root.
        """
        for root in self.roots[:1]:
            root.calls.samples = samples

    @property
    def is_in_evaluation(self) -> bool:
        """Whether the current step contains an evaluation so far.

        False if most steps contain one: such a program evaluates a module as part of its training step.
        """
        return self.is_evaluated and (self._num_evaluated_steps + 1) * 2 <= self._context.num_steps

    def take_evaluated(self) -> bool:
        """Notes that the step that just ended contained an evaluation; returns whether fewer than half of all steps do."""
        self.is_evaluated = False
        self._num_evaluated_steps += 1
        return bool(self._num_evaluated_steps * 2 < self._context.num_steps)

    def step_done(self) -> None:
        """Stops the search for roots after enough steps; called after each counted step."""
        if self._context.num_steps >= self._look_until:
            self.end_search()
            self._knobs.checkpointing.stop_watching()
            if self._autocasts is not None and not self._knobs.must_watch_autocast:
                self._autocasts.uninstall()

    # --- facts ---

    @property
    def living(self) -> List[Root]:
        """The roots whose modules still exist."""
        return [root for root in self.roots if root.module is not None]

    @property
    def reported(self) -> List[Root]:
        """The roots to report: the living ones, or all of them if the program has ended and released its modules."""
        return self.living or self.roots

    def device(self) -> Tuple[str, Optional[int]]:
        """Returns type and index of the device that trains; if parameters are unknown, a GPU in use or the CPU.

        This is the device of the first trained parameter. If that is the CPU, the program may train on another device and move
        parameters to the CPU only to store them. So the first other device that holds a parameter or the loss is preferred.
        """
        context = self._context
        trained = (parameter for root in self.living for parameter in members.parameters(root.module))
        held = (parameter for optimizer in context.optimizers.optimizers() for parameter in parameters_of(optimizer))
        found = [members.device_of(each) for each in itertools.chain(trained, held, context.writes.watched())]
        if found:
            found += [context.losses.device] if context.losses is not None and context.losses.device is not None else []
            first = next((device for device in found if device.type not in ("cpu", "meta")), found[0])
            return str(first.type), first.index
        in_use = "cuda" if cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
        return context.writes.device_type or in_use, None

    def is_compiled(self) -> bool:
        """Whether the compiler is used in this process."""
        return "torch._dynamo" in sys.modules and (self.num_graphs() > 0 or "compile.mode" in self._context.spec.knobs)

    def num_graphs(self) -> int:
        """Returns how many graphs have been compiled so far."""
        counters = self._compile_counters
        if counters is None:
            dynamo = sys.modules.get("torch._dynamo.utils")
            if dynamo is None:
                return 0
            counters = self._compile_counters = dynamo.counters
        return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def _is_exporting(module: Any) -> bool:
    """Whether a call of this module only exports a model: the module is traced, or `torch.onnx.export` will trace it."""
    tracer: Any = jit
    return tracer.is_tracing() or type(module).__name__ == "ONNXTracedModule"


def _around_root(watch: ModuleWatch, own: Any, root: Optional[Root]) -> Any:
    """Returns a `__call__` that calls roots through `ModuleWatch.run`.

    Args:
        watch: runs the roots.
        own: class of the program with the program's own `__call__`, which a library may replace at any time.
        root: the root whose class gets this `__call__`; None if objects of the class may be any root.
    """
    nesting = watch.nesting
    # A module made by `type(root)(...)`, or a replica, has the same class and is no root.
    the_module = None if root is None else root.reference

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # must come first: the compiler must not trace reads of state that changes
            return own.__call__(self, *args, **kwargs)
        if root is not None and root.is_passive and self.training:  # most calls end here, whether or not `self` is the root
            return own.__call__(self, *args, **kwargs)
        called = watch.root_of(self) if the_module is None else root if the_module() is self else None
        if called is None or (called.is_passive and self.training) or nesting.depth or is_compiling():
            return own.__call__(self, *args, **kwargs)
        is_training = self.training or (called.trains_in_evaluation and is_grad_enabled())
        if is_in_backward():
            if not is_training:
                return own.__call__(self, *args, **kwargs)
            return watch.run_again(called, own.__call__, args, kwargs)
        if not is_training:
            watch.evaluated()
            return watch.run_evaluation(own.__call__, self, args, kwargs)
        return watch.run(called, own.__call__, args, kwargs)

    return __call__
