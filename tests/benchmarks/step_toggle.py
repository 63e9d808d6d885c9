"""The step program, which takes the harness out of its way and puts it back, block by block, in one process.

    python step_toggle.py --blocks 20        (run by the launcher, with the harness inside)

Two fresh processes of the same program differ by some per cent of a step, more than the harness costs; two blocks of one
process by tenths. What is taken out is checked: a step in which any function of the harness still runs ends the program. It
prints one JSON line: mean seconds of a step in blocks with the harness and without it, next to each other in time, and how
many functions of the harness a step calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from step_program import BLOCK_STEPS, WARMUP_STEPS, Loop, options
from torch.utils.data.dataloader import _BaseDataLoaderIter

PATCHED = ((torch.Tensor, "backward"), (_BaseDataLoaderIter, "__next__"))


def harness_folder() -> str:
    """Returns the folder of the harness in this process."""
    for name, module in list(sys.modules.items()):
        if name.endswith(".session") and hasattr(module, "Session") and "autotune" in name:
            return str(module.__file__).rpartition("/")[0] + "/"
    raise SystemExit("the harness is not in this process")


class Toggle:
    """Takes the harness out of a loop and puts it back."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.loop = loop
        self.patches = [(owner, name, vars(owner)[name]) for owner, name in PATCHED]
        self.patches = [patch for patch in self.patches if _code_file(patch[2]).startswith(folder)]
        self.watched, self.original = type(loop.model), loop.model.__class__  # the swapped class shows the program's own
        self.hooks = [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]
        self.kept = [dict(hooks) for hooks in self.hooks]

    def out(self) -> None:
        """Leaves torch as it is without the harness."""
        for owner, name, patched in self.patches:
            setattr(owner, name, patched.__wrapped__)
        object.__setattr__(self.loop.model, "__class__", self.original)
        for hooks in self.hooks:
            hooks.clear()

    def back(self) -> None:
        """Puts everything back."""
        for owner, name, patched in self.patches:
            setattr(owner, name, patched)
        object.__setattr__(self.loop.model, "__class__", self.watched)
        for hooks, kept in zip(self.hooks, self.kept, strict=True):
            hooks.update(kept)


def _code_file(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return code.co_filename if code else ""


def calls_in(run: Callable[[], Any], folder: str) -> list[str]:
    """Returns the names of the harness's functions that `run` calls, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def main() -> None:
    """Alternates blocks with the harness and without it and prints what they took."""
    chosen = options()
    loop = Loop(chosen.device, 2 * chosen.blocks)
    loop.run(WARMUP_STEPS)
    folder = harness_folder()
    toggle = Toggle(loop, folder)
    called = calls_in(lambda: loop.run(1), folder)
    toggle.out()
    left = calls_in(lambda: loop.run(1), folder)
    toggle.back()
    if left or not called:
        raise SystemExit(f"the harness could not be taken out whole, still called: {left or 'never seen'}")
    seconds: dict[str, list[float]] = {"with_s": [], "without_s": []}
    for block in range(chosen.blocks):
        both = [(toggle.back, seconds["with_s"]), (toggle.out, seconds["without_s"])]
        for switch, values in both if block % 2 == 0 else reversed(both):
            switch()
            loop.run(5)  # the first steps after a switch find cold caches
            values.append(loop.run(BLOCK_STEPS))
    toggle.back()
    print(json.dumps({**seconds, "num_calls": len(called)}))


if __name__ == "__main__":
    main()
