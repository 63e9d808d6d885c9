"""Waits for the import of torch, and of trackers that would log a trial to the user's account or server."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, Callable, Dict, List

from . import adapters, guarded_files, protocol, state
from .patches import Awaited, patches

READ_BY_COMPILER = ("TORCH", "PYTORCH", "TRITON")  # prefixes of the variables that torch's compiler reads when it is imported
_environment: Dict[str, str] = {}  # the environment variables when the harness started in this process


def note_start() -> None:
    """Saves the environment variables, to find out later which of them the program changes before it imports torch.

    In a warm start, torch is imported before the program runs, so torch would not see these changes.
    """
    state.startup["is_first"] = False  # `sign_in` sets it to True in the trial's first process
    _environment.update(os.environ)


def _note_compiler(_: Any) -> None:
    # If the program has changed none of READ_BY_COMPILER, warm starts import the compiler in advance, too (trials/warm.py).
    # This saves seconds even for a program that compiles nothing, because constructing an optimizer imports the compiler.
    state.startup["changed_before_compiler"] = [name for name in _changed() if name.startswith(READ_BY_COMPILER)]


def _changed() -> List[str]:
    """Returns the names of the environment variables that have changed since the harness started."""
    return sorted(name for name in {**_environment, **os.environ} if os.environ.get(name) != _environment.get(name))


def sign_in(spec_path: str) -> None:
    """Writes the trial's first progress line, which shows that the harness was loaded even if torch is never imported."""
    try:
        spec = protocol.read_spec(spec_path)
        if spec.mode == "apply":
            return  # a real run writes no progress
        now_s = time.monotonic() + protocol.clock_offset_s(spec)
        line = {"time_s": now_s, "phase": protocol.PHASES[0], "step": 0, "rate_per_s": None}
        path = os.path.join(os.path.dirname(spec_path), protocol.PROGRESS_FILE)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        state.startup["is_first"] = True
    except (OSError, ValueError, TypeError):
        return  # this is not the trial's first process, or the spec cannot be read; the session will report the latter


def answer_stack_requests() -> None:
    """Lets the tuner ask a hanging process for its stacks. Until the tuner asks, this costs and changes nothing.

    faulthandler writes from the C signal handler, so a process answers even in an endless loop, in a call that holds the GIL,
    or before anything is imported. It writes to descriptor 2; the tuner asks only processes whose descriptor 2 is the trial's
    log.
    """
    if signal.getsignal(protocol.STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(protocol.STACK_SIGNAL, file=2, all_threads=True)


def wait_for_torch(spec_path: str) -> None:
    """Begins the session when torch is imported: by an import hook, or immediately if torch is already imported."""
    if "torch" in sys.modules:
        state.startup.clear()
        _guarded(guarded_files.torch_is_there)
        session = _guarded(_begin, spec_path)
        if session is not None:
            _guarded(session.torch_is_there)
        if not state.is_called:  # a warm start: it imported libraries before the harness replaced functions
            from . import libraries

            _guarded(lambda: patches.reach(libraries.loaded()))
        return

    def around(execute: Callable[[], None], _: Any) -> None:
        state.startup["changed"] = [name for name in _changed() if not name.startswith("AUTOTUNE_")]
        patches.on_import("torch._dynamo", _note_compiler)
        session = _guarded(_begin, spec_path)
        execute()
        _guarded(guarded_files.torch_is_there)
        if session is not None:
            _guarded(session.torch_is_there)

    if state.startup.get("is_first"):
        from . import libraries  # only where it is needed: it imports more of the standard library

        _guarded(libraries.begin)
    sys.meta_path.insert(0, Awaited("torch", around))


def keep_records_away() -> None:
    """Prevents a trial from logging to the user's account and tracking server, even if the program's code selects them.

    The environment of a trial already prevents this (offline mode, a separate store). This function covers programs that
    override their environment, or change it before they import a library or start their ranks.
    """
    at_start = json.loads(os.environ.get(protocol.RECORDS_VARIABLE, "{}"))
    for name, keep_away in adapters.KEEP_RECORDS_AWAY.items():
        patches.on_import(name, functools.partial(_guarded, keep_away, at_start))


def _begin(spec_path: str) -> Any:
    from .session import Session

    state.session = Session(spec_path)
    return state.session


def _guarded(action: Callable[..., Any], *arguments: Any) -> Any:
    # A failure of the harness must not end the program. It is reported, and a trial then has no result.
    try:
        return action(*arguments)
    except Exception:
        if protocol.is_real_run(os.environ):
            state.stand_aside("starting")
        else:
            with contextlib.suppress(Exception):  # the program has closed it
                sys.stderr.write("autotune: the harness failed to start\n" + traceback.format_exc())
        return None
