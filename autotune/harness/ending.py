"""Ends a trial's process when the measurement is complete or impossible, the program ends or raises, or the harness fails."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from typing import Any, Dict, Optional

from . import protocol, state
from .context import TrialContext
from .knobs.base import APPLYING

EXIT_BROKEN = 70  # EX_SOFTWARE: the harness itself failed
LAST_RANK_S = 5.0  # how long rank 0 waits for the other ranks' results
MAX_MESSAGE = 2000  # characters of an exception's message: half from its beginning, half from its end
COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # escape sequences for a terminal, which torch.load, rich and others write
# A GPU kernel fails after the call that queued it. So any later call may report the failure, even a call by the harness.
FAULT_OF_A_KERNEL = re.compile(
    r"(?:CUDA|HIP) error: (?:an illegal memory access|device-side assert|unspecified launch failure|misaligned address"
    r"|an illegal instruction|invalid program counter|hardware stack error|the launch timed out|uncorrectable"
    r"|operation not supported on global/shared address space)"
)
# Torch's SIGCHLD handler raises this exception wherever the program happens to be. A program that waits for the GPU mostly
# waits in a call by the harness.
WORKER_ENDED = re.compile(r"DataLoader worker \(pid")
NOTICED = ((FAULT_OF_A_KERNEL, "an earlier kernel of the program failed"), (WORKER_ENDED, "a worker of a loader ended"))


class Ending:
    """Ends one process and writes its result.

    Attributes:
        error: {"type", "message", "traceback"} of the exception that ends the program, and "knob" if a knob was being set;
            None without an exception.
        failed_s: when the exception was noted, on the monotonic clock of the machine that launched the trial.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.error: Optional[Dict[str, str]] = None
        self.failed_s: Optional[float] = None
        # `at_exit` closes this descriptor to free it for the result file: the program may have used up all other descriptors.
        self._spare = -1 if context.is_applying else os.open(os.devnull, os.O_RDONLY)

    def leave(self, status: str) -> None:
        """Writes the result and ends the process immediately: `except:` in the program cannot catch this."""
        context = self._context
        context.clock.close_window()
        context.phases.enter("exit")
        if context.explained is not None:
            context.explained.finish()
        self._write_result(status)
        context.is_over = True
        try:
            if context.communication.probe():
                self._write_result(status)
            if context.rank == 0:
                self._await_other_ranks()
                _say(f"autotune: trial {context.spec.trial} is measured; autotune ends the program here")
            _end_daemons()
        finally:
            os._exit(0)

    def give_up(self, why: str) -> None:
        """Writes what was observed of a program that cannot be measured, and ends the program immediately."""
        context = self._context
        if context.is_over or context.is_applying:
            return
        context.is_over = True
        self.error = {"type": protocol.UNMEASURABLE, "message": why, "traceback": ""}
        try:
            from . import report

            protocol.write_json(self._path(), report.unmeasured(context))
            _say(f"autotune: {why}; autotune ends the program here")
            _end_daemons()
        finally:
            os._exit(0)

    def broke(self, doing: str) -> None:
        """See `TrialContext.broke`."""
        context = self._context
        if context.is_applying:
            if not context.is_over:
                state.stand_aside(doing)
            context.is_over = True
            with contextlib.suppress(Exception):  # the harness may have failed before these existed
                context.modules.is_looking = False
                context.modules.uninstall()
            return
        message = _message(sys.exc_info()[1])
        noticed = next((what for fault, what in NOTICED if fault.search(message)), "")
        with contextlib.suppress(Exception):  # the disk is full, or the program has closed its standard error
            said = f"{noticed}, which was noticed" if noticed else "the harness failed"
            sys.stderr.write(f"autotune: {said} while {doing}\n{traceback.format_exc()}")
        if context.is_over:
            return
        context.is_over = True
        self._note(*sys.exc_info())
        assert self.error is not None
        if not noticed:
            what = f"{doing} ({self.error['knob']})" if "knob" in self.error else doing
            self.error["message"] = f"autotune's harness failed while {what}: {self.error['message']}"
        try:
            from . import report

            protocol.write_json(self._path(), report.bare(context, "failed"))
        finally:
            os._exit(EXIT_BROKEN)

    def at_exit(self) -> None:
        """Writes the result as the interpreter ends: the program ended, perhaps by an exception, before the window was full."""
        context = self._context
        if context.is_over or threading.current_thread() is not threading.main_thread():
            return
        if context.applied is not None:
            try:
                if not context.is_child:
                    context.applied.at_exit()
            except Exception:
                self.broke("ending")
            return
        with contextlib.suppress(OSError):  # the program may have closed it
            os.close(self._spare)
        value = getattr(sys, "last_value", None)  # set by the interpreter, even if sys.excepthook was replaced
        if value is not None and not isinstance(value, KeyboardInterrupt):
            self._note(type(value), value, value.__traceback__)
            self.error = {**(self.error or {}), **context.loaders.starts.dead()}
        try:
            if context.is_active:
                self._end()
            elif self.error is not None and not context.is_child:
                self._tell_error()
        except Exception:
            self.broke("writing the result")

    def around_process(self, bootstrap: Any) -> Any:
        """Returns multiprocessing's `_bootstrap`, wrapped so that a process writes its result at the end.

        Exit handlers do not run in forked processes. After an exception nothing is written, because the log says more.
        """

        def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
            code = bootstrap(process, *args, **kwargs)
            if not code:
                self.at_exit()
            return code

        return _bootstrap

    def around_exit(self, exit_now: Any) -> Any:
        """Returns `os._exit`, wrapped so that the training process writes its result first: `os._exit` runs no exit handlers.

        If the status is not 0, nothing is written, because the log says more. A child that does not train writes nothing.
        """

        def _exit(status: Any) -> None:
            if not status and (self._context.is_active or not self._context.is_child):
                self.at_exit()
            exit_now(status)

        return _exit

    def _end(self) -> None:
        context = self._context
        try:
            context.clock.close_window()
        except Exception:  # the device is in an error state: what was measured is still reported
            traceback.print_exc()
        context.phases.enter("exit")
        try:
            if context.explained is not None:
                context.explained.finish()
        except Exception:
            if self.error is None:
                raise
            traceback.print_exc()  # not reported: it may follow from the program's error, which the result reports
        self._write_result("failed" if self.error else "ended")
        context.is_over = True

    def _tell_error(self) -> None:
        # This process did not train, and an exception ended it. The exception was raised before training, or came from a rank
        # that this process had started. If the process is torchrun itself, the number that srun gave it is not a rank.
        from . import report

        if "torch.distributed.launcher.api" in sys.modules and "RANK" not in os.environ:
            self._context.rank, self._context.world_size = 0, 1
        path = self._path()
        found = report.bare(self._context, "failed")
        found.memory = self._context.memory.summary()
        if os.path.exists(path):
            found = protocol.read_result(path)
            if found.status != "ended":
                return
            found.status, found.error, found.failed_s = "failed", self.error, self.failed_s
        protocol.write_json(path, found)

    def _note(self, kind: Any, value: Any, trace: Any) -> None:
        """Records the exception that is about to end the program."""
        self.failed_s = time.monotonic() + self._context.clock_offset_s
        name = f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
        text = COLOURS.sub("", "".join(traceback.format_exception(kind, value, trace)))
        self.error = {"type": name, "message": _bounded(COLOURS.sub("", _message(value))), "traceback": text[-24000:]}
        if hasattr(value, APPLYING):
            self.error["knob"] = getattr(value, APPLYING)

    def _write_result(self, status: str) -> None:
        from . import report

        if not self._context.peers.has_answered(self._path()):
            protocol.write_json(self._path(), report.result(self._context, status))

    def _path(self) -> str:
        return os.path.join(self._context.spec.folder, protocol.result_file(self._context.rank))

    def _await_other_ranks(self) -> None:
        # Rank 0 may host torch.distributed's store, which the other ranks still need.
        context = self._context
        names = [protocol.result_file(rank) for rank in range(1, context.world_size)]
        until_s = time.monotonic() + LAST_RANK_S
        while time.monotonic() < until_s:
            if all(os.path.exists(os.path.join(context.spec.folder, name)) for name in names):
                return
            time.sleep(0.01)


def _bounded(message: str) -> str:
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def _message(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # the program's own `__str__` failed
        return f"(no message: {type(error).__name__})"


def _say(line: str) -> None:
    try:
        print(line, flush=True)
        sys.stderr.flush()
    except Exception:  # the program has closed them, or the disk is full
        pass


def _end_daemons() -> None:
    # multiprocessing ends daemons only at a normal exit. Loader workers would take seconds to notice that they are not needed.
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    _clean_up()


def _clean_up() -> None:
    # Queues of workers that are not forked have named semaphores, and tensors are passed through sockets in a temporary folder
    # (worker_starts.py). multiprocessing removes both at a normal exit. Otherwise a helper process removes the semaphores, with
    # a warning in the program's log, and the folder remains.
    synchronize, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("synchronize", "util"))
    known = getattr(getattr(synchronize, "SemLock", None), "_cleanup", None), getattr(util, "_remove_temp_dir", None)
    for finalizer in list(getattr(util, "_finalizer_registry", {}).values()):
        callback = getattr(finalizer, "_callback", None)
        if callback is not None and any(callback is each for each in known):
            with contextlib.suppress(OSError):  # it is already gone
                finalizer()
