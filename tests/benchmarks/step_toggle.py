"""Runs the step program with and without the harness in one process, and times the harness's own code.

    python step_toggle.py --blocks 20        (run by the launcher, with the harness inside)

Two fresh processes of the same program differ by some per cent of a step, which is more than the harness costs. So here the
harness is removed and installed again, block by block, in one process. On a shared machine, neighbouring blocks still differ by
about a per cent, so many blocks are needed. The time spent in the harness's own code, as a share of the step, is measured more
precisely. If any function of the harness still runs after the harness was removed, the program ends with an error.

It prints one JSON line. It contains the mean processor time of a step in blocks with the harness, without it, and without it
again, measured right after each other; the harness's own share of further blocks, heartbeats included; and how many functions
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
    """Removes the harness from a training loop and installs it again."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.loop = loop
        self.folder = folder
        self.taken_out: dict[tuple[Any, str], Any] = {}
        self.watched, self.original = type(loop.model), loop.model.__class__  # the swapped class shows the program's own
        self.hooks = [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]
        self.kept = [dict(hooks) for hooks in self.hooks]

    def out(self) -> None:
        """Removes the harness: torch is then as if it had never been patched."""
        for owner, name in PATCHED:
            patched = vars(owner)[name]
            if _code_file(patched).startswith(self.folder):  # `backward` is patched only at times
                self.taken_out[owner, name] = patched
                setattr(owner, name, patched.__wrapped__)
        object.__setattr__(self.loop.model, "__class__", self.original)
        for hooks in self.hooks:
            hooks.clear()

    def back(self) -> None:
        """Installs the harness again."""
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
    """Times the harness's wrappers and hooks, without the functions of torch that they wrap.

    The time includes that of the timers themselves. It does not include the time that torch takes to call its hooks (tenths of
    a microsecond).
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
    """Alternates blocks with the harness and without it, then times the harness's own code, and prints all times."""
    chosen = options()
    loop = Loop(chosen.device, 4 * chosen.blocks)
    loop.run(WARMUP_STEPS)
    folder = harness_folder()
    toggle = Toggle(loop, folder)
    called = min((calls_in(lambda: loop.run(1), folder) for _ in range(9)), key=len)  # most steps take the short path
    toggle.out()
    left = calls_in(lambda: loop.run(1), folder)
    toggle.back()
    if left or not called:
        raise SystemExit(f"the harness could not be taken out whole, still called: {left or 'never seen'}")
    # Two of three blocks are without the harness: their difference shows how small an effect the comparison can detect.
    switches = {"with_s": toggle.back, "without_s": toggle.out, "control_s": toggle.out}
    seconds: dict[str, list[float]] = {name: [] for name in switches}
    order = list(switches)
    for _ in range(chosen.blocks):
        order = [*order[1:], order[0]]
        for name in order:
            switches[name]()
            loop.run(5)  # after a switch, the caches are cold
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
