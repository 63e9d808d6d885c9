"""The step program, in which the harness is timed where it works and compared with its absence.

    python step_toggle.py --blocks 20        (run by the launcher, with the harness inside)

Two fresh processes of the same program differ by some per cent of a step, more than the harness costs. In one process the
harness is taken out of the way and put back, block by block: neighbours in time still differ by a per cent on a shared
machine, so that takes many blocks. What is sharp is its own time, in place, as a share of the step it lies in. What is taken
out is checked: a step in which any function of the harness still runs ends the program.

It prints one JSON line: mean seconds of processor time of a step in blocks with the harness, without it, and without it once
more, next to each other in time; the harness's own share of each of further blocks, heartbeats included; and how many functions
of the harness a plain step calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
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
        self.folder = folder
        self.taken_out: dict[tuple[Any, str], Any] = {}
        self.watched, self.original = type(loop.model), loop.model.__class__  # the swapped class shows the program's own
        self.hooks = [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]
        self.kept = [dict(hooks) for hooks in self.hooks]

    def out(self) -> None:
        """Leaves torch as it is without the harness."""
        for owner, name in PATCHED:
            patched = vars(owner)[name]
            if _code_file(patched).startswith(self.folder):  # `backward` is patched now and then only
                self.taken_out[owner, name] = patched
                setattr(owner, name, patched.__wrapped__)
        object.__setattr__(self.loop.model, "__class__", self.original)
        for hooks in self.hooks:
            hooks.clear()

    def back(self) -> None:
        """Puts everything back."""
        for (owner, name), patched in self.taken_out.items():
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


class OwnTime:
    """Times the harness where it works: what its wrappers and hooks take, without the functions of torch that they wrap.

    An upper bound, as the timers count themselves; what it cannot see is torch's own walk through its hooks (tenths of a
    microsecond).
    """

    def __init__(self, loop: Loop) -> None:
        self.seconds = 0.0
        self._time(_BaseDataLoaderIter, "__next__", "advance")
        self._time(type(loop.model), "__call__", "original")
        hooks = loop.optimizer._optimizer_step_post_hooks
        for number, hook in hooks.items():
            hooks[number] = self._timed(hook, 1.0)

    def _time(self, owner: Any, name: str, inner: str) -> None:
        wrapper = vars(owner)[name]
        cell = wrapper.__closure__[wrapper.__code__.co_freevars.index(inner)]
        wrapped = getattr(cell.cell_contents, name) if isinstance(cell.cell_contents, type) else cell.cell_contents
        timed = self._timed(wrapped, -1.0)
        cell.cell_contents = SimpleNamespace(**{name: timed}) if isinstance(cell.cell_contents, type) else timed
        setattr(owner, name, self._timed(wrapper, 1.0))

    def _timed(self, function: Callable[..., Any], sign: float) -> Callable[..., Any]:
        now = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += sign * (now() - began_s)

        return call


def main() -> None:
    """Alternates blocks with the harness and without it, then times it in place, and prints what they took."""
    chosen = options()
    loop = Loop(chosen.device, 4 * chosen.blocks)
    loop.run(WARMUP_STEPS)
    folder = harness_folder()
    toggle = Toggle(loop, folder)
    called = min((calls_in(lambda: loop.run(1), folder) for _ in range(9)), key=len)  # most steps are not looked at
    toggle.out()
    left = calls_in(lambda: loop.run(1), folder)
    toggle.back()
    if left or not called:
        raise SystemExit(f"the harness could not be taken out whole, still called: {left or 'never seen'}")
    # Without twice: what two equal blocks differ by is what the comparison cannot see.
    switches = {"with_s": toggle.back, "without_s": toggle.out, "control_s": toggle.out}
    seconds: dict[str, list[float]] = {name: [] for name in switches}
    order = list(switches)
    for _ in range(chosen.blocks):
        order = [*order[1:], order[0]]
        for name in order:
            switches[name]()
            loop.run(5)  # the first steps after a switch find cold caches
            began_s = time.thread_time()
            loop.run(BLOCK_STEPS)
            seconds[name].append((time.thread_time() - began_s) / BLOCK_STEPS)
    toggle.back()
    own = OwnTime(loop)
    shares = []
    for _ in range(chosen.blocks):
        before_s = own.seconds
        step_s = loop.run(BLOCK_STEPS)
        shares.append((own.seconds - before_s) / (step_s * BLOCK_STEPS))
    print(json.dumps({**seconds, "own_frac": shares, "num_calls": len(called)}))


if __name__ == "__main__":
    main()
