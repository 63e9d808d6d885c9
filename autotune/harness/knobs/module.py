"""Applies knobs to the training modules: precision, memory layout, compilation, activation checkpointing, float8.

Autocast is entered around the `__call__` of a training root (modules.py), outside whatever is compiled. Half-precision outputs
are converted to float32, so that the program's own loss gets the type it had before. Layout and compilation are set on the
module itself, before its first call or, under DDP, before the wrapper is built.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from typing import Any, Callable, Dict, List, Optional

import torch
from torch.utils import _pytree

from .. import members
from ..adapters import is_checkpointing
from ..checkpointing import NO_BLOCKS, Checkpointing, blocks, can_be_checkpointed
from ..context import TrialContext
from ..gradient_state import is_sharded
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from . import float8
from .base import KnobHandler, applying, compared
from .layout import convolution_weights, in_layout, is_channels_last, lay_out, verify_layout, with_layout
from .sharding import sharded_by

AMP, LAYOUT, COMPILE = "precision.amp", "layout.channels_last", "compile.mode"
BF16 = f"{AMP}=bf16"  # a key of `applicability`, with the reason why "bf16" cannot be chosen
DYNAMIC, SCOPE = "compile.dynamic", "compile.scope"
CHECKPOINTING, FLOAT8 = "memory.activation_checkpointing", "precision.float8"
KEYS = (AMP, LAYOUT, COMPILE, CHECKPOINTING, FLOAT8)
# `observe` must read these values before the module is wrapped: in the wrapper, it would also read what the trial has set.
OF_WRAPPED = (COMPILE, FLOAT8, "is_float8", "has_linear")
OWN_STATE = "autotune_own_state"  # attribute of an autocast: its (_enabled, fast_dtype) before the harness changed them
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DYNAMICS = {"auto": None, "true": True, "false": False}
DEFAULTS = {DYNAMIC: "auto", SCOPE: "model"}
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # values of COMPILE that record CUDA graphs
APART = "in a validation, CUDA graphs of single blocks would overwrite each other's outputs, and torch stops with an error"
REPLICATED = (
    "nn.DataParallel computes in float16 on its GPUs, whatever 16-bit format autocast is given; use DistributedDataParallel"
)
BY_POLICY = "the program's mixed-precision policy (FSDP) computes in {} already"
IN_FP64 = "the parameters are fp64, and autocast leaves products of fp64 as they are"
WRITES = "a block changes its tensor {} each time it runs, so running it again changes the training"
COMPILES_ITSELF = "the program compiles its modules itself"
RUNS_AGAIN = "the program itself runs modules again in the backward pass (activation checkpointing), without a switch for it"
NO_MODULE = "no module that was called owns parameters of the optimizer"
NO_CONVOLUTIONS = "no module that trains has convolution weights of four dimensions"
SHARDED = "the parameters are sharded over the ranks, and FSDP needs them contiguous"
IN_FUNCTION = (
    "after some steps, the program calls its module in a function that it has compiled, where the precision is not set"
)


def observe(module: Any) -> Dict[str, Any]:
    """Returns the program's own values of these knobs, and facts about the module, just before the module is first called."""
    device = device_of(module)
    found: Dict[str, Any] = {AMP: "off", LAYOUT: False, COMPILE: "off"}
    if torch.is_autocast_enabled(device):
        found[AMP] = _own_format(torch.get_autocast_dtype(device))
    found["policy"] = _policy(module)
    if found["policy"] and found[AMP] == "off":
        found[AMP] = found["policy"]
    dtypes = {_short(p.dtype) for p in members.parameters(module) if torch.is_floating_point(p)}
    found["parameter_dtypes"] = sorted(dtypes)
    weights = convolution_weights(module)
    found["has_convolutions"], found["is_sharded"] = bool(weights), is_sharded(module)
    found["num_replicas"] = _num_replicas(module)
    found[LAYOUT] = bool(weights) and any(is_channels_last(w) for w in weights)
    if _is_compiled(module):
        found[COMPILE] = "default"
    found[CHECKPOINTING] = _checkpoints(module)
    found["has_blocks"], found["repeats"] = can_be_checkpointed(module), bool(blocks(module))
    found.update(float8.observe(module))
    found["capability"] = float8.capability(module)
    found[FLOAT8] = "tensorwise" if found["is_float8"] else "off"
    return found


class ModuleKnobs(KnobHandler):
    """Sets precision, layout, compilation and checkpointing of the modules that train."""

    keys = (*KEYS, DYNAMIC, SCOPE)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self._knobs = self.asked
        self._reports: Dict[str, KnobReport] = {}
        self._has_replaced = False  # whether an autocast of the program was changed
        self._why_fixed = ""  # why a root cannot be given another precision
        self._was_channels_last = False  # whether weights that the program had put into channels_last were put back
        self.checkpointing = Checkpointing()
        self.runs_again = False  # whether the program itself was seen to run a module again in the backward pass

    def on_module(self, module: Any, observed: Dict[str, Any]) -> None:
        """Sets all knobs except autocast on a module that has not been called yet; `observed` is from `observe`."""
        if self._knobs.get(FLOAT8, "off") != "off":
            self._compute_in_float8(module, self._knobs[FLOAT8], observed)
        is_compiled = self._knobs.get(COMPILE, "off") != "off" or observed[COMPILE] != "off"
        if CHECKPOINTING in self._knobs:  # must come before compilation
            self._checkpoint(module, self._knobs[CHECKPOINTING], is_watched=not is_compiled)
        if LAYOUT in self._knobs:
            self._lay_out(module, self._knobs[LAYOUT], observed)
        if COMPILE in self._knobs:
            self._compile(module, self._knobs[COMPILE])

    def _compute_in_float8(self, module: Any, asked: str, observed: Dict[str, Any]) -> None:
        is_in_bf16 = "bf16" in (self._knobs.get(AMP), observed[AMP], *observed["parameter_dtypes"])
        problem = _float8_problem(observed) or (float8.NOT_IN_BF16 if asked == "rowwise" and not is_in_bf16 else None)
        if problem:
            self._reports.setdefault(FLOAT8, KnobReport(NOT_APPLICABLE, problem, "off"))
            return
        with applying(FLOAT8):
            float8.convert(module, asked)
        self._reports[FLOAT8] = KnobReport(APPLIED)

    def _checkpoint(self, module: Any, asked: bool, *, is_watched: bool) -> None:
        how = self.checkpointing
        with applying(CHECKPOINTING):
            problem = how.put_into(module, is_watched=is_watched) if asked else how.take_from(module)
        if not problem:
            self._reports[CHECKPOINTING] = KnobReport(APPLIED)
        else:
            self._reports.setdefault(CHECKPOINTING, KnobReport(NOT_APPLICABLE, problem, False))

    def _lay_out(self, module: Any, asked: bool, observed: Dict[str, Any]) -> None:
        if asked and observed["is_sharded"]:
            self._reports[LAYOUT] = KnobReport(NOT_APPLICABLE, SHARDED)
        elif asked and not observed["has_convolutions"]:
            self._reports.setdefault(LAYOUT, KnobReport(NOT_APPLICABLE, NO_CONVOLUTIONS))
        else:
            if not observed["is_sharded"]:
                with applying(LAYOUT):
                    lay_out(module, torch.channels_last if asked else torch.contiguous_format)
                self._was_channels_last = self._was_channels_last or (not asked and observed[LAYOUT])
            self._reports[LAYOUT] = KnobReport(APPLIED)

    def _compile(self, module: Any, mode: str) -> None:
        if _is_compiled(module):
            self._reports[COMPILE] = KnobReport(OVERRIDDEN, "the program compiles this module itself", "default")
            return
        if mode != "off":
            dynamic = DYNAMICS[self._knobs.get(DYNAMIC, DEFAULTS[DYNAMIC])]
            with applying(COMPILE):
                for each in self._compiled_parts(module):
                    _compile_in_place(each, mode=None if mode == "default" else mode, dynamic=dynamic)
        self._reports[COMPILE] = KnobReport(APPLIED)

    def _compiled_parts(self, module: Any) -> List[Any]:
        """Returns the modules to compile: the repeated blocks if these are asked for and exist, otherwise the whole module."""
        if self._knobs.get(SCOPE, DEFAULTS[SCOPE]) == "blocks":
            # The next call of compiled code may overwrite a CUDA graph's outputs, unless a backward pass needs them.
            has_graphs = self._knobs[COMPILE] in GRAPH_MODES
            if not has_graphs and (found := blocks(module)):
                self._reports[SCOPE] = KnobReport(APPLIED)
                return found
            self._reports.setdefault(SCOPE, KnobReport(NOT_APPLICABLE, APART if has_graphs else NO_BLOCKS, "model"))
        return [module]

    def around_calls(self, module: Any) -> Optional[Callable[..., Any]]:
        """Returns a wrapper for a root's calls that enters autocast or sets the inputs' layout; None if neither is needed."""
        device, mode, layout = device_of(module), self._knobs.get(AMP), self._layout_of_inputs(module)
        if mode is not None:
            problem = _amp_problem(module, device, mode)
            self._reports[AMP] = KnobReport(*problem) if problem else KnobReport(APPLIED)
            if problem:
                mode = None
        if mode in (None, "off"):
            return None if layout is None else functools.partial(with_layout, layout)
        dtype = FORMATS[mode]

        def around(call: Any, self: Any, args: Any, kwargs: Any) -> Any:
            if layout is not None:
                args, kwargs = in_layout(layout, args, kwargs)
            context = torch.autocast(device, dtype=dtype)
            context.is_autotunes_own = True  # type: ignore[attr-defined]
            with context:
                out = call(self, *args, **kwargs)
            torch.clear_autocast_cache()  # inside another context, even a disabled one, torch would keep old casts of weights
            return _to_float32(out)

        return around

    def _layout_of_inputs(self, module: Any) -> Any:
        """Returns the memory format that a root's inputs get; None if the trial leaves them as they are.

        A program that puts its weights into channels_last mostly does the same to its batches, and torch convolves in
        channels_last if either of the two has this format. So if the trial puts the weights back, it puts the inputs back, too.
        """
        asked = self._knobs.get(LAYOUT)
        if not (asked or self._was_channels_last) or not convolution_weights(module) or is_sharded(module):
            return None
        return torch.channels_last if asked else torch.contiguous_format

    def must_scale(self, observed: Dict[str, Any]) -> bool:
        """Whether losses must be scaled, because a root runs in float16 due to the knob; `observed` is from `observe`."""
        report = self._reports.get(AMP)
        is_by_knob = self._has_replaced or observed[AMP] == "off"
        return is_by_knob and self._knobs.get(AMP) == "fp16" and report is not None and report.status == APPLIED

    @property
    def has_graphs(self) -> bool:
        """Whether roots record CUDA graphs because of the knob."""
        report = self._reports.get(COMPILE)
        return self._knobs.get(COMPILE) in GRAPH_MODES and report is not None and report.status == APPLIED

    def leave_precision(self, why: str) -> None:
        """Stops using autocast because gradients cannot be scaled."""
        self._knobs = {key: value for key, value in self._knobs.items() if key != AMP}
        self._reports[AMP] = KnobReport(NOT_APPLICABLE, why, "off")

    def refuse_precision(self, why: str, *, is_asked: bool) -> None:
        """Notes that a root's calls cannot be wrapped, whether or not the trial asks for another precision."""
        self._why_fixed = why
        if is_asked:
            self._reports[AMP] = KnobReport(NOT_APPLICABLE, why)

    @property
    def replaces_autocast(self) -> bool:
        """Whether the trial sets the precision. If so, its format replaces that of each autocast that the program enters."""
        return AMP in self._knobs

    @property
    def must_watch_autocast(self) -> bool:
        """Whether an autocast that the program enters must be changed, or changed back."""
        return self.replaces_autocast or self._has_replaced

    def replace_autocast(self, context: Any) -> None:
        """Changes an autocast that the program will enter next: it gets the trial's format, or no effect if that is "off".

        Other modules that the autocast covers, such as a frozen teacher, are thus computed in that format, too.
        """
        is_enabled, dtype = vars(context).setdefault(OWN_STATE, (context._enabled, context.fast_dtype))
        asked = self._knobs[AMP]
        if not is_enabled or _short(dtype) == asked:
            return
        self._has_replaced = True
        context._enabled = asked != "off" or torch.is_autocast_enabled(context.device)
        context.fast_dtype = FORMATS.get(asked) or torch.get_autocast_dtype(context.device)

    def restore_autocast(self, context: Any) -> None:
        """Undoes `replace_autocast`, because the trial no longer sets the precision."""
        context._enabled, context.fast_dtype = vars(context).pop(OWN_STATE)

    def note_inner_autocast(self, context: Any) -> None:
        """Notes that the program enters its own autocast inside a root's call."""
        for root in self._context.modules.roots:
            if root.observed[AMP] == "off" and context.device == device_of(root.module):
                root.observed[AMP] = _own_format(context.fast_dtype)

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> the program's own value for its first root."""
        modules = self._context.modules
        own = {CHECKPOINTING: True} if self.runs_again else {}
        return {**{key: modules.reported[0].observed[key] for key in KEYS}, **own} if modules.roots else {}

    def note_repetition(self) -> None:
        """Notes that a module was called within a backward pass. If the knob has not caused this, the program has."""
        self.runs_again = self.runs_again or self._knobs.get(CHECKPOINTING) is not True

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report for every module knob of the trial."""
        asked = self.asked
        reports = {key: self._verify(key, asked[key]) for key in KEYS if key in asked}
        for key in DEFAULTS:
            if key in asked:
                reports[key] = self._verify_compiled(key, asked, reports.get(COMPILE))
        return reports

    def _verify_compiled(self, key: str, asked: Dict[str, Any], compiled: Optional[KnobReport]) -> KnobReport:
        if compiled is None or compiled.status != APPLIED or asked[COMPILE] == "off":
            return KnobReport(NOT_APPLICABLE, "has no effect, because compile.mode did not compile the module", None)
        found = self._reports.get(key)
        return found if found and found.status != APPLIED else KnobReport(APPLIED, "", asked[key])

    def _verify(self, key: str, asked: Any) -> KnobReport:
        report, modules = self._reports.get(key), self._context.modules
        if key == FLOAT8 and asked == "off" and modules.roots:
            return compared(self.observe()[FLOAT8], asked)
        if report is None:
            return KnobReport(NOT_APPLICABLE, NO_MODULE)
        if report.status != APPLIED:
            return report
        if key == AMP and asked != "off" and modules.functions.call_all_roots:
            return KnobReport(NOT_APPLICABLE, IN_FUNCTION, "off")
        if key == LAYOUT:
            return verify_layout([root.module for root in modules.living], bool(asked))
        if key == COMPILE and asked != "off":
            return _verify_compile(modules.num_graphs(), asked)
        if key == CHECKPOINTING and asked and self.checkpointing.written:
            return KnobReport(NOT_APPLICABLE, WRITES.format(self.checkpointing.written), True)
        if key == CHECKPOINTING and asked and self.checkpointing.is_run_again is False:
            return KnobReport(OVERRIDDEN, "no block of the module was run again in the backward pass", False)
        is_checkpointed = self.runs_again or any(_checkpoints(root.module) for root in modules.living)
        if key == CHECKPOINTING and not asked and is_checkpointed:
            return KnobReport(OVERRIDDEN, "the program turns activation checkpointing on itself", True)
        if key == FLOAT8 and not any(float8.is_in_float8(root.module) for root in modules.living):
            return KnobReport(OVERRIDDEN, "the program has replaced its linear layers since", "off")
        return KnobReport(APPLIED, "", asked)

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this program."""
        observed = [root.observed for root in self._context.modules.reported]
        if not observed:
            return dict.fromkeys(KEYS, NO_MODULE)
        reasons = {AMP: self._why_fixed} if self._why_fixed else {}
        if not any(o["has_convolutions"] for o in observed):
            reasons[LAYOUT] = NO_CONVOLUTIONS
        elif any(o["is_sharded"] for o in observed):
            reasons[LAYOUT] = SHARDED
        if policy := next((o["policy"] for o in observed if o["policy"]), None):
            reasons[AMP] = BY_POLICY.format(policy)
        half = next((d for o in observed for d in o["parameter_dtypes"] if d in ("bf16", "fp16")), None)
        if half:
            reasons[AMP] = f"the parameters are {half} already"
        if all(o["parameter_dtypes"] == ["fp64"] for o in observed):
            reasons[AMP] = IN_FP64
        if any(o["num_replicas"] > 1 for o in observed):
            reasons[BF16] = REPLICATED
        if any(o[COMPILE] != "off" for o in observed):
            reasons.update(dict.fromkeys((COMPILE, *DEFAULTS), COMPILES_ITSELF))
        elif not any(o["repeats"] for o in observed):
            reasons[SCOPE] = NO_BLOCKS
        if not any(o["has_blocks"] for o in observed):
            reasons[CHECKPOINTING] = NO_BLOCKS
        elif self.runs_again and not any(o[CHECKPOINTING] for o in observed):
            reasons[CHECKPOINTING] = RUNS_AGAIN
        problems = [_float8_problem(o) for o in observed]
        if all(problems):
            reasons[FLOAT8] = str(problems[0])
        return reasons


def _checkpoints(module: Any) -> bool:
    """Whether a module, or a module in it, has activation checkpointing of its own that is on."""
    return any(map(is_checkpointing, members.modules(module)))


def _amp_problem(module: Any, device: str, mode: str) -> Any:
    if torch.is_autocast_enabled(device):
        own = _own_format(torch.get_autocast_dtype(device))
        return None if own == mode else (OVERRIDDEN, f"the program enters autocast({own}) itself", own)
    if policy := _policy(module):
        return NOT_APPLICABLE, BY_POLICY.format(policy), policy
    half = [p for p in members.parameters(module) if p.dtype in (torch.bfloat16, torch.float16)]
    if half:
        own = _short(half[0].dtype)
        return NOT_APPLICABLE, f"the parameters are {own} already", own
    kinds = {p.dtype for p in members.parameters(module) if torch.is_floating_point(p)}
    if mode != "off" and kinds == {torch.float64}:
        return NOT_APPLICABLE, IN_FP64, "off"
    return (NOT_APPLICABLE, REPLICATED, "off") if mode == "bf16" and _num_replicas(module) > 1 else None


def _policy(module: Any) -> Optional[str]:
    """Returns the 16-bit format that a policy of FSDP or DistributedDataParallel sets for a module; None without one."""
    states = [each._get_fsdp_state() for each in sharded_by(module)]
    policies = [getattr(state, "_mp_policy", None) for state in states]
    policies += [members.attribute(each, "mixed_precision") for each in members.modules(module)]
    formats = (members.attribute(policy, "param_dtype") for policy in policies)
    return next((_short(each) for each in formats if each in (torch.bfloat16, torch.float16)), None)


def _num_replicas(module: Any) -> int:
    """Returns on how many GPUs DataParallel runs a module, each in a thread of its own; 1 without DataParallel.

    Torch tells these threads that autocast is enabled, but not in which format. So they use the default format, float16.
    """
    found = (each for each in members.modules(module) if isinstance(each, torch.nn.DataParallel))
    return max((1, *(len(members.attribute(each, "device_ids", ())) for each in found)))


def _to_float32(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return torch.Tensor.float(out) if out.dtype in (torch.bfloat16, torch.float16) else out
    # torch's pytree treats a dataclass as a leaf. Its fields are converted in a copy, which keeps the program's own class.
    if _is_own_dataclass(out):
        fields = {field.name: getattr(out, field.name) for field in dataclasses.fields(out) if hasattr(out, field.name)}
        out = copy.copy(out)
        for name, value in fields.items():
            object.__setattr__(out, name, _to_float32(value))
        return out
    return _pytree.tree_map(lambda x: _to_float32(x) if isinstance(x, torch.Tensor) or _is_own_dataclass(x) else x, out)


def _is_own_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))


def _float8_problem(observed: Dict[str, Any]) -> Optional[str]:
    """Returns why the layers of a module cannot be computed in float8; None if they can."""
    if observed["is_float8"]:
        return float8.IN_FLOAT8
    if not observed["has_linear"]:
        return float8.NO_LINEAR
    if observed["is_sharded"]:
        return "the parameters are sharded over the ranks already"
    if observed[COMPILE] != "off":
        return COMPILES_ITSELF
    capability = observed.get("capability")
    if capability is not None and capability < float8.CAPABILITY:
        return float8.TOO_OLD.format(*capability)
    return None if float8.is_installed() else float8.NO_TORCHAO


def _compile_in_place(module: Any, **options: Any) -> None:
    """Compiles a module. Unlike `torch.nn.Module.compile` before torch 2.14, also compiles modules of torch's own classes.

    Seen with torch 2.11: `nn.Sequential(...).compile()` makes no graph, since Dynamo skips frames of torch's own files.
    Like `torch.compile(module)`, this function puts a frame around the call that Dynamo does not skip.
    """
    jit: Any = torch.jit
    if not str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn."):
        torch.nn.Module.compile(module, **options)
        compiled = module._compiled_call_impl
    else:
        from torch._dynamo import external_utils

        compiled = torch.compile(external_utils.wrap_inline(module._call_impl), **options)

    def call(*args: Any, **kwargs: Any) -> Any:  # a program may trace its trained model; torch refuses to trace compiled code
        return (module._call_impl if jit.is_tracing() else compiled)(*args, **kwargs)

    module._compiled_call_impl = call


def _verify_compile(num_graphs: int, asked: str) -> KnobReport:
    if num_graphs == 0:
        return KnobReport(NOT_APPLICABLE, "torch.compile produced no graph for this module and ran it eagerly", "off")
    limit = recompile_limit_reason()
    return KnobReport(OVERRIDDEN, limit, "off") if limit else KnobReport(APPLIED, "", asked)


def recompile_limit_reason() -> str:
    """Returns why compiled code may silently run eagerly, from torch's count of recompile limit hits; "" if there were none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    reasons = list(dynamo.counters["unimplemented"]) if dynamo is not None else []
    names = ("recompile_limit", "recompile limit", "cache_size_limit")  # the last until torch 2.6
    if any(name in str(reason) for reason in reasons for name in names):
        return "torch.compile exceeded its recompile limit and runs some of the model eagerly"
    return ""


def device_of(module: Any) -> str:
    """Returns the type of the device on which a module computes: "cuda" if some of its parameters are on a GPU."""
    kinds = [str(members.device_of(parameter).type) for parameter in members.parameters(module)]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), kinds[0] if kinds else "cpu")


def _short(dtype: Any) -> str:
    name = str(dtype).replace("torch.", "")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(name, name)


def _own_format(dtype: Any) -> str:
    """Returns the value of AMP for an autocast in a format; "off" for a 32-bit format, with which autocast changes nothing."""
    return _short(dtype) if dtype in FORMATS.values() else "off"


def _is_compiled(module: Any) -> bool:
    return any(members.attribute(module, name) is not None for name in ("_orig_mod", "_compiled_call_impl"))
