"""Runs programs in forks of one process that has imported torch, which is what takes the time; started by `starting.py`.

A line of JSON a program on standard input, {"argv": [script or -m module, ...], "env": [of each rank, ...], "folder": ...}; a
line with the exit status of each rank comes back. Nothing is computed before the fork, so that a program begins as it would in
an interpreter of its own. Where its environment names a trial, the harness gets in as it does at an interpreter's start.
"""

import json
import os
import runpy
import sys
import traceback

import torch
import torch._dynamo  # noqa: F401  (the first optimizer would import it)


def become(argv: list[str], folder: str, added: dict[str, str]) -> None:
    """Turns this process into a program."""
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.update(added)
    os.chdir(folder)
    if "AUTOTUNE_SPEC" in added:
        runpy.run_path(os.path.join(added["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py"))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for added in job["env"]:
            children.append(os.fork())
            if not children[-1]:
                try:
                    become(job["argv"], job["folder"], added)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)  # a program's own end is its journal's
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
