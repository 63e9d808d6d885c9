"""A server that imports the modules named on its command line, and then runs programs in its forks; `forks.py` starts it.

Each line of standard input asks for one program: {"argv": [script or -m module, ...], "env": [variables of each rank, ...],
"folder": ..., "logs": [standard output, standard error]}. A variable that is null is removed. The answer is a line with the
exit status of each rank. The server computes nothing before it forks, so a program begins and ends as in a new interpreter. If
the environment names a trial, the harness is loaded as at an interpreter's start. A line {"modules": [...]} imports further
modules; it has no answer.

If the first word of the command line is --listen=N, each connection to the socket with the descriptor N gets a fork of the
server, whose standard input and output is the connection. The server then ends when its own standard input does.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types

_status = None  # the program's exit status, once it has ended by itself


def _leave():
    """Ends a program after its other exit handlers, without tearing torch down, which would take seconds."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


atexit.register(_leave)  # registered first, so that it is called last
LISTEN, LIMIT_S = "--listen=", 120


def prepare(modules: "list[str]") -> None:
    """Imports the modules that programs need."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in a fork would otherwise copy the memory of all these modules, which took half of a fork's time


class Main(types.ModuleType):
    """Stands for the current `__main__` under the name `__mp_main__`, which spawned workers use."""

    def __getattr__(self, name):
        return getattr(sys.modules["__main__"], name)


def become(job: dict, added: "dict[str, str | None]") -> None:
    """Turns this process into a program."""
    globals()["__name__"] = "fork_server"  # the program becomes the main module
    sys.modules["__mp_main__"] = Main("__mp_main__")
    signal.alarm(LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (the inherited sys.stdin may have read ahead)
    for descriptor, path in enumerate(job["logs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    for name, value in added.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # importing the modules may have chosen a folder; TMPDIR may name another one now
    os.chdir(job["folder"])
    argv, path = job["argv"], [each for each in (added.get("PYTHONPATH") or "").split(os.pathsep) if each]
    if "AUTOTUNE_SPEC" in added:
        runpy.run_path(os.path.join(path.pop(0), "sitecustomize.py"))
    sys.path[1:1] = path
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], job["folder"]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def serve() -> "tuple[dict, dict[str, str | None]] | None":
    """Forks for each program. In a fork, returns the program and its environment; in the server, None when input ends."""
    for line in sys.stdin:
        job = json.loads(line)
        if "modules" in job:
            prepare(job["modules"])
            continue
        children = []
        for added in job["env"]:
            children.append(os.fork())
            if not children[-1]:
                return job, added
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)
    return None


def connected(descriptor: int) -> bool:
    """Forks for each connection to a socket. In a fork, returns True; in the server, False when its standard input ends."""
    with socket.socket(fileno=descriptor) as listener:
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if listener not in ready:
                return False
            with listener.accept()[0] as connection:
                if not os.fork():
                    for number in (0, 1):
                        os.dup2(connection.fileno(), number)
                    return True
            reap()


def reap() -> None:
    """Waits for the forks that have ended."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    words = sys.argv[1:]
    listens = bool(words) and words[0].startswith(LISTEN)
    prepare(words[1:] if listens else words)
    asked = serve() if not listens or connected(int(words[0][len(LISTEN) :])) else None
    if asked is not None:  # the program's exceptions pass through, so the interpreter ends as after any program
        try:
            become(*asked)
            _status = 0
        except SystemExit as end:
            _status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except Exception:
            _status = 1
            raise
    else:
        _status = 0
