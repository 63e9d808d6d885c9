"""Runs programs as they are, without a harness: one process imports torch, a fork of it becomes each program.

A line of JSON a program on standard input, {"argv": [script or -m module, ...], "env": {...}, "folder": ...}; a line with its
exit status comes back. Nothing is computed before the fork, so that a program begins as it would in an interpreter of its own.
"""

import json
import os
import runpy
import sys
import traceback

import torch  # noqa: F401  (what takes the time)


def become(argv: list[str], folder: str, added: dict[str, str]) -> None:
    output = os.open(os.path.join(folder, "output.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(added)
    os.chdir(folder)
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
