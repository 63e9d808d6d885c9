"""Writes this process's call stacks to a file if the tuner cannot request them by a signal.

A signal does not reach another node. And the signal's handler writes the stacks to standard error, which a program may have
redirected away from the trial's log. In both cases the tuner requests the stacks by creating a file in the trial's folder. A
thread checks once a second whether this file exists. When it does, the thread writes the stacks and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time

from . import protocol

LOOK_S = 1.0  # seconds between two checks whether the file exists


def answer_by_file(spec: protocol.Spec) -> None:
    """Starts a thread that writes the stacks on request, if the tuner cannot request them by a signal.

    Also creates the file for the answer. A tuner that has requested the stacks waits while this file is empty.
    """
    scratch, host = os.path.join(spec.folder, protocol.SCRATCH), os.uname().nodename
    if not spec.host or (host == spec.host and _is_log(os.path.join(spec.folder, protocol.STDERR_FILE))):
        return
    path = os.path.join(scratch, protocol.STACK_FILE.format(host=host, pid=os.getpid()))
    with contextlib.suppress(OSError):  # the folder is gone, or the disk is full: where the process hangs stays unknown
        open(path, "w", encoding="utf-8").close()
        asked = os.path.join(scratch, protocol.STACKS_FILE)
        threading.Thread(target=_answer, args=(asked, path, host), daemon=True).start()


def _answer(asked: str, path: str, host: str) -> None:
    while not os.path.exists(asked):
        time.sleep(LOOK_S)
    place = protocol.place_of(os.environ)
    with contextlib.suppress(OSError), open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(json.dumps({"host": host, "pid": os.getpid(), "place": place}) + "\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        os.replace(f"{path}.tmp", path)


def _is_log(path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(2), os.stat(path))
    except OSError:
        return False
