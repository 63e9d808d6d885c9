"""Applies a file's knobs to a real run (mode "apply"), reports once what took effect, then leaves the program alone.

The harness measures nothing, writes no files and does not end the program. During the first few steps it watches as in a trial,
to find out what is trained. Then the hooks are removed. Two things stay: the precision that was set on the modules, and the
patched constructors, which set the knobs of loaders and optimizers that are made later.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List

import torch
from torch import Tensor

from . import process, protocol, report, state
from .context import TrialContext
from .knobs.module import COMPILE
from .patches import patches


class Applied:
    """What the harness does in a real run, where nothing is measured.

    Args:
        context: the real run in this process; knobs that cannot work here are removed from its spec.
        is_called: whether the program itself calls `autotune.apply`.
    """

    def __init__(self, context: TrialContext, *, is_called: bool) -> None:
        self._context, self._is_called = context, is_called
        self._spec = spec = context.spec
        self._has_reported = self._has_trained = False
        late = {**spec.late, **_impossible(spec.knobs)}
        self._left_out = {key: protocol.KnobReport(protocol.NOT_APPLICABLE, why) for key, why in late.items()}
        self._asked = {**spec.knobs, **spec.passed}
        spec.knobs = {key: value for key, value in spec.knobs.items() if key not in late}
        self._watch_first_backward()

    def _watch_first_backward(self) -> None:
        # A process that calls `backward()` is a training process. If no step is seen, it reports when it ends.
        def around(backward: Any) -> Any:
            def first_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                self._has_trained = True
                patch.uninstall()
                return backward(tensor, *args, **kwargs)

            return first_backward

        patch = patches.install(Tensor, "backward", around)

    def step_done(self) -> None:
        """Called after each counted step, until the optimizers' hooks are removed."""
        context = self._context
        if not context.loaders.is_uninstalled:
            context.loaders.take_step(0.0, context.modules.unit)
        if not self._has_reported:
            self._report([])
        if not context.modules.is_looking:
            context.writes.stand_down()
            context.loaders.uninstall()
            context.modules.settle()
            context.optimizers.uninstall()

    def at_exit(self) -> None:
        """Called as the program ends: reports what took effect, unless a step has already triggered the report."""
        has_failed = getattr(sys, "last_value", None) is not None  # the traceback is enough information for the user
        if self._has_reported or has_failed or not (self._has_trained or self._is_called):
            return
        hint = "no optimizer step was seen"
        if self._is_called and not self._has_trained:
            hint += " after autotune.apply(): call it before the model, the loader and the optimizer are made"
        self._report([hint])

    def _report(self, lines: List[str]) -> None:
        """Prints which settings are in effect, and whether torch or the device differs from `Spec.made_on`; only on rank 0.

        Args:
            lines: lines to print first.
        """
        self._has_reported = True
        ranks = process.group()
        rank = ranks.get_rank() if ranks else protocol.launched_rank(os.environ)
        if rank != 0 or not self._asked:
            return
        found = report.knobs(self._context)
        found.update(self._left_out)
        missed = {key: knob for key, knob in found.items() if knob.status != protocol.APPLIED}
        if self._spec.is_quiet and not missed and not lines:
            return
        name, num = self._spec.origin, len(self._asked)
        which = f"the setting of {name} is" if num == 1 else f"all {num} settings of {name} are"
        lines.append(f"{which} in effect" if not missed else f"{num - len(missed)} of {num} settings of {name} in effect")
        lines += [f"  {key}={_text(self._asked.get(key))}: {_why(knob)}" for key, knob in sorted(missed.items())]
        lines += self._differences()
        state.say(lines)

    def _differences(self) -> List[str]:
        made_on, here = self._spec.made_on, {"torch": str(torch.__version__), "device_name": None}
        if self._context.device == "cuda":
            here["device_name"] = torch.cuda.get_device_name(self._context.device_index)
        names = {"torch": "torch {}", "device_name": "{}"}
        changed = [key for key in here if key in made_on and made_on[key] != here[key]]
        pairs = [[names[key].format(side[key] or "the CPU") for side in (made_on, here)] for key in changed]
        return [f"made with {then}, runs with {now}" for then, now in pairs]


def _impossible(knobs: Dict[str, Any]) -> Dict[str, str]:
    """Returns knob -> reason, for knobs that would make the program fail here although they worked where the file was made."""
    if knobs.get(COMPILE, "off") == "off" or process.has_compiler("cpu") or process.has_compiler("cuda"):
        return {}
    return {COMPILE: "torch.compile needs a C++ compiler or triton, and there is none here"}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _why(knob: protocol.KnobReport) -> str:
    return f"{knob.status}: {knob.reason}" if knob.status == protocol.NOT_APPLICABLE else f"{knob.status} ({knob.reason})"
