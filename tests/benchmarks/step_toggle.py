"""Runs the step program with and without the harness in one process, and times the harness's own code.

    python step_toggle.py --blocks 20        (run by the launcher, with the harness inside)

Two fresh processes of the same program differ by some per cent of a step, which is more than the harness costs. So here the
harness is removed and installed again, block by block, in one process. On a shared machine, neighbouring blocks still differ by
about a per cent, so many blocks are needed. The time spent in the harness's own code, as a share of the step, is measured more
precisely. The program ends with an error if any function of the harness still runs after the harness was removed, if this time
lacks a function of the harness that a plain step calls, or if this time contains a function of torch that the harness wraps.

It prints one JSON line. `with_s`, `without_s` and `control_s` are the mean processor seconds of a step in each block: with the
harness, without it, and without it again. These three blocks follow each other directly. `own_frac` is the harness's own share
of each of some further blocks, heartbeats included. `num_calls` is how many functions of the harness a plain step calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from step_program import WARMUP_BLOCKS, Loop, options

LEAST_OF = 9
COLD_STEPS = 5  # steps after a switch, with cold caches, which are left out
TIMER = "OwnTime._timed.<locals>.call"
# The harness wraps functions of torch in these folders. The program would call them anyway, so their time is not the harness's.
TORCH_FOLDERS = ("/torch/nn/modules/", "/torch/utils/data/", "/torch/optim/")


def harness_module(name: str) -> Any:
    """Returns a module of the harness in this process. In a trial, the harness is imported under another name."""
    for full_name, module in list(sys.modules.items()):
        if full_name.endswith(f"harness.{name}") and "autotune" in full_name:
            return module
    raise SystemExit("the harness is not in this process")


def harness_folder() -> str:
    """Returns the folder of the harness in this process."""
    return str(harness_module("patches").__file__).rpartition("/")[0] + "/"


def patches_of_torch() -> list[Any]:
    """Returns the harness's patches of torch that are installed, in the order in which they were made."""
    sites = [site for site in harness_module("patches").patches._sites.values() if _is_torch(site.owner)]
    return [patch for site in sites for patch in site._layers if patch.is_active]


def _is_torch(owner: Any) -> bool:
    return str(owner.__module__ if isinstance(owner, type) else owner.__name__).partition(".")[0] == "torch"


class Toggle:
    """Removes the harness from a training loop and installs it again."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._patches: list[Any] = []
        self._class: type | None = None  # the model's class under the harness; None while the harness is installed
        self._hooks: list[dict[int, Any]] = []

    def out(self) -> None:
        """Removes the harness: torch is then as if it had never been patched."""
        if self._class is not None:
            return
        self._patches = patches_of_torch()
        for patch in reversed(self._patches):
            patch.uninstall()
        self._class = type(self.loop.model)
        object.__setattr__(self.loop.model, "__class__", self.loop.model.__class__)  # unlike type(), it names the own class
        self._hooks = [dict(hooks) for hooks in hooks_of(self.loop)]
        for hooks in hooks_of(self.loop):
            hooks.clear()

    def back(self) -> None:
        """Installs the harness again."""
        if self._class is None:
            return
        for patch in self._patches:
            patch.install()
        object.__setattr__(self.loop.model, "__class__", self._class)
        self._class = None
        for hooks, kept in zip(hooks_of(self.loop), self._hooks, strict=True):
            hooks.update(kept)


def hooks_of(loop: Loop) -> list[dict[int, Any]]:
    """Returns the optimizer's hooks before and after a step; all of them are the harness's."""
    return [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]


def calls_in(run: Callable[[], Any], is_asked: Callable[[FrameType], bool]) -> list[str]:
    """Returns the names of the functions for which `is_asked` is true, in the order in which `run` calls them."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_asked(frame):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def calls_in_a_plain_step(loop: Loop, is_asked: Callable[[FrameType], bool]) -> list[str]:
    """Returns the shortest `calls_in` of LEAST_OF steps, because most steps take the short path."""
    return min((calls_in(lambda: loop.run(1), is_asked) for _ in range(LEAST_OF)), key=len)


class OwnTime:
    """Times the harness's wrappers and hooks, without the functions of torch that they wrap.

    Each of the harness's functions is timed, and so is the function that it wraps, whose time is subtracted. The time includes
    that of the timers themselves. It does not include the time that torch takes to call its hooks (tenths of a microsecond).
    """

    def __init__(self, loop: Loop) -> None:
        self.seconds = 0.0
        self._time_patches()
        watched, original = type(loop.model), loop.model.__class__
        watched.__call__ = self._timed(watched.__call__, 1.0)  # type: ignore[method-assign]
        original.__call__ = self._timed(original.__call__, -1.0)  # type: ignore[method-assign]
        for hooks in hooks_of(loop):
            for number, hook in hooks.items():
                hooks[number] = self._timed(hook, 1.0)

    def _time_patches(self) -> None:
        # Some patches, such as that of `backward`, are installed only at times, so patches installed later are timed as well.
        kind = harness_module("patches").Patch
        install, timed = kind.install, []

        def timed_install(patch: Any) -> None:
            if _is_torch(patch._site.owner) and patch not in timed:
                timed.append(patch)
                patch.wrap, patch.function = self._timed_wrap(patch.wrap), None
            install(patch)

        kind.install = timed_install
        installed = patches_of_torch()
        for patch in reversed(installed):
            patch.uninstall()
        for patch in installed:
            patch.install()

    def _timed_wrap(self, wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda wrapped: self._timed(wrap(self._timed(wrapped, -1.0)), 1.0)

    def _timed(self, function: Callable[..., Any], sign: float) -> Callable[..., Any]:
        now = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += sign * (now() - began_s)

        return call

    def check(self, loop: Loop, folder: str) -> None:
        """Ends the program if a plain step calls the harness's code outside the timers, or torch's code inside them."""

        def is_left_out(frame: FrameType) -> bool:
            return frame.f_code.co_filename.startswith(folder) and not _is_counted(frame)

        def is_too_much(frame: FrameType) -> bool:
            return any(part in frame.f_code.co_filename for part in TORCH_FOLDERS) and _is_counted(frame)

        left_out, too_much = calls_in_a_plain_step(loop, is_left_out), calls_in_a_plain_step(loop, is_too_much)
        if left_out or too_much:
            raise SystemExit(f"the harness's own time is wrong: it lacks {left_out} and contains {too_much}")


def _is_counted(frame: FrameType | None) -> bool:
    """Whether the innermost timer around a call adds its time to the harness's."""
    while frame is not None and frame.f_code.co_qualname != TIMER:
        frame = frame.f_back
    return frame is not None and frame.f_locals["sign"] > 0


def main() -> None:
    """Alternates blocks with the harness and without it, then times the harness's own code, and prints all times."""
    chosen = options()
    num_steps = chosen.steps
    num_looked_at = 1 + 3 * LEAST_OF  # steps in which the calls of functions are looked at
    loop = Loop(chosen.device, (WARMUP_BLOCKS + 4 * chosen.blocks) * num_steps + 3 * chosen.blocks * COLD_STEPS + num_looked_at)
    loop.run(WARMUP_BLOCKS * num_steps)
    folder = harness_folder()
    toggle = Toggle(loop)
    called = calls_in_a_plain_step(loop, lambda frame: frame.f_code.co_filename.startswith(folder))
    toggle.out()
    left = calls_in(lambda: loop.run(1), lambda frame: frame.f_code.co_filename.startswith(folder))
    toggle.back()
    if left or not called:
        raise SystemExit(f"the harness could not be removed completely, still called: {left or 'never seen'}")
    # Two of three blocks run without the harness. Their difference shows how small an effect the comparison can detect.
    switches = {"with_s": toggle.back, "without_s": toggle.out, "control_s": toggle.out}
    seconds: dict[str, list[float]] = {name: [] for name in switches}
    order = list(switches)
    for _ in range(chosen.blocks):
        order = [*order[1:], order[0]]
        for name in order:
            switches[name]()
            loop.run(COLD_STEPS)
            began_s = time.thread_time()
            loop.run(num_steps)
            seconds[name].append((time.thread_time() - began_s) / num_steps)
    toggle.back()
    own = OwnTime(loop)
    own.check(loop, folder)
    shares = []
    for _ in range(chosen.blocks):
        before_s = own.seconds
        step_s = loop.run(num_steps)
        shares.append((own.seconds - before_s) / (step_s * num_steps))
    print(json.dumps({**seconds, "own_frac": shares, "num_calls": len(called)}))


if __name__ == "__main__":
    main()
