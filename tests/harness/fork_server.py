"""A server that imports the modules named on its command line, and then runs programs in its forks; `forks.py` starts it.

Each line of standard input asks for one program: {"argv": [script or -m module, ...], "env": [variables of each rank, ...],
"folder": ..., "logs": [standard output, standard error]}. A variable that is null is removed. The answer is a line with the
exit status of each rank. The server computes nothing before it forks, so a program begins and ends as in a new interpreter. If
the environment names a trial, the harness is loaded as at an interpreter's start.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import types

_status = None  # the program's exit status, once it has ended by itself


def _leave():
    """Ends a program after its other exit handlers, without tearing torch down, which would take seconds."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


atexit.register(_leave)  # registered first, so that it is called last
for module in sys.argv[1:]:
    importlib.import_module(module)
gc.collect()
gc.freeze()  # collections in a fork would otherwise copy the memory of all these modules, which took half of a fork's time

LIMIT_S = 120


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
    os.chdir(job["folder"])
    argv = job["argv"]
    if "AUTOTUNE_SPEC" in added:
        runpy.run_path(os.path.join(added["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py"))
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
        children = []
        for added in job["env"]:
            children.append(os.fork())
            if not children[-1]:
                return job, added
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)
    return None


if __name__ == "__main__":
    asked = serve()
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
