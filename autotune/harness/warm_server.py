"""Runs a warm server: it imports libraries in the program's interpreter and starts trials by forking, where that is possible.

The supervisor runs it by path as `python warm_server.py MODULE ... FD PARENT`, in the trials' environment and folder. Each
MODULE is one that the server imports: torch, and others that libraries.py has found. FD is the server's end of a socket pair.
PARENT is the supervisor's process id. The server runs no user code and does not initialise CUDA. It creates no tensor: after a
single multi-threaded operation in the server, such operations would hang in every child. Each trial prints again what the
server's imports have printed.

    server      {"ready": true} or {"failed": why}, one line of JSON
    supervisor  for each trial, a byte that carries four descriptors: the trial's standard input, output and error, and the
                trial's end of another socket pair

The trial is forked twice. When the process in between ends, the trial becomes a child of the supervisor (a subreaper), like any
other trial. It writes its process id to its socket and reads one line of JSON: {"argv", "cwd", "env"}. From then on it behaves
like `python SCRIPT ...` or `python -m MODULE ...`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
import warnings
from typing import Any, Dict, Iterator, List, Optional, Set

HERE = os.path.dirname(os.path.abspath(__file__))
HARNESS = "_autotune_harness"
SPEC_VARIABLE, MARK_VARIABLE = "AUTOTUNE_SPEC", "AUTOTUNE_MARK"
CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # lets torch check for CUDA without initialising it
READS_CHECK = "_nvml_based_avail"  # the function of torch.cuda that reads this variable
NUM_DESCRIPTORS = 4  # three standard descriptors and a socket
PR_SET_PDEATHSIG = 1
OF_TORCH = {"torch", "torchvision"}  # the threads and descriptors that importing these two leaves behind are harmless
LONGEST = 1 << 16  # a trial prints at most this many bytes of what the imports have printed
CHECK_S = 20.0  # how long `check` waits for a child's computation, which takes milliseconds
# A thread of pyarrow that a forked process can do without: jemalloc then frees memory in the threads that allocate it.
ALLOCATOR = "jemalloc_bg_thd"
LEAVE_S = 0.5  # how long leftovers may take to vanish: a thread that has ended may still be listed for a moment
BAD_FORK = 3  # exit status of the child in `check` that could not use CUDA
LARGE = 1 << 20  # elements; enough for torch to use several threads
IS_PATH_SAFE = bool(getattr(sys.flags, "safe_path", False))  # the script's folder is not put on sys.path


def main() -> None:
    """Serves until the supervisor closes the connection; in a forked trial, runs the program instead."""
    *modules, descriptor, parent = sys.argv[1:]
    if not IS_PATH_SAFE:
        del sys.path[0]  # this folder
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    del sys.argv[1:]  # a library that reads the program's arguments must not find the server's
    try:
        before = held()
        printed = load(modules)
        check()
        if {name.partition(".")[0] for name in modules} - OF_TORCH:
            check_nothing_is_left(before)
    except BaseException as error:  # importing a library may raise anything
        answer(control, {"failed": f"{type(error).__name__}: {error}"})
        return
    answer(control, {"ready": True})
    trial = serve(control, int(parent))
    if trial is None:
        os._exit(0)  # without the libraries' exit handlers, which are for the trials
    for number, text in printed.items():
        os.write(number, text)
    run(trial["argv"])


def load(modules: List[str]) -> Dict[int, bytes]:
    """Imports the modules that trials should find imported; returns {descriptor: text} of what this prints to 1 and 2.

    Raises:
        RuntimeError: an import initialised CUDA, which no forked child could then use.
    """
    files = {number: os.memfd_create("printed") for number in (1, 2)}
    others = {number: os.dup(number) for number in files}
    for number, file in files.items():
        os.dup2(file, number)
    for name in modules:
        with cuda_unused():
            importlib.import_module(name)
    sys.stdout.flush()
    sys.stderr.flush()
    printed = {number: os.pread(file, LONGEST, 0) for number, file in files.items()}
    for number, other in others.items():
        os.dup2(other, number)
        os.close(other)
        os.close(files[number])
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("an import initialised CUDA")
    return printed


class OfServer(bytes):
    """Marks a variable's value as set by the server, not by a library."""


@contextlib.contextmanager
def cuda_unused() -> Iterator[None]:
    """Lets torch check for CUDA without initialising it.

    If torch is imported already, its function READS_CHECK is replaced until the context ends. Otherwise the variable CUDA_CHECK
    is set until then. If a library sets the variable meanwhile, the library's value stays, as in a fresh process.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if hasattr(cuda, READS_CHECK):
        usual = getattr(cuda, READS_CHECK)
        setattr(cuda, READS_CHECK, lambda: True)
        yield
        setattr(cuda, READS_CHECK, usual)
    elif CUDA_CHECK in os.environ:
        yield
    else:
        values: Dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        key = os.fsencode(CUDA_CHECK)
        values[key] = OfServer(b"1")
        yield
        if isinstance(values.get(key), OfServer):
            del values[key]


def check_nothing_is_left(before: Set[str]) -> None:
    """Checks that imports left no threads or child processes, which forked processes lack, and no sockets, which they share.

    Args:
        before: result of `held` before the imports.

    Raises:
        RuntimeError: an import left one of these.
    """
    until_s = time.monotonic() + LEAVE_S
    while left := held() - before:
        if time.monotonic() > until_s:
            raise RuntimeError(f"an import left behind {', '.join(sorted(left))}: forked processes do not have it, or share it")
        time.sleep(0.01)


def held() -> Set[str]:
    """Returns the threads, child processes, sockets, pipes and the like of this process.

    OpenBLAS ends its threads before a fork, so they are not found after `check`.
    """
    found = set()
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/comm", encoding="utf-8", errors="replace") as file:
            found |= {f"thread {name}"} if file.read().strip() != ALLOCATOR else set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list itself
            place = os.readlink(f"/proc/self/fd/{name}")
            found |= {place} if place.startswith(("socket:", "pipe:", "anon_inode:")) else set()
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        found.add("a child process")
    return found


def check() -> None:
    """Checks that a forked child can compute with all threads: an import may have started threads, which a fork does not copy.

    Raises:
        RuntimeError: the child failed or did not finish, or an import has asked the CUDA driver for its devices. Torch then
            refuses to use CUDA in the child, even though the parent has not initialised CUDA.
    """
    child = fork()
    if child == 0:
        try:
            if "torch" in sys.modules:
                sys.modules["torch"].ones(LARGE).sum()
                os._exit(BAD_FORK if sys.modules["torch"].cuda._is_in_bad_fork() else 0)
            os._exit(0)
        finally:
            os._exit(1)
    until_s = time.monotonic() + CHECK_S
    while time.monotonic() < until_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            if os.waitstatus_to_exitcode(status) == BAD_FORK:
                raise RuntimeError("an import asked the CUDA driver for its devices, which no forked process can then use")
            if status:
                raise RuntimeError(f"a forked process cannot compute, status {status}")
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise RuntimeError("a forked process hangs when it computes: a library used threads when it was imported")


def serve(control: socket.socket, parent: int) -> Optional[Dict[str, Any]]:
    """Forks a trial for each request; returns the request in each trial, and None in the server when requests end."""
    while True:
        try:
            byte, descriptors, _, _ = socket.recv_fds(control, 1, NUM_DESCRIPTORS)
        except OSError:
            return None
        if not byte:
            return None
        try:
            between = fork()
        except OSError:  # no more processes allowed: the supervisor sees the socket close
            between = -1
        if between == 0:
            own = os.getpid()
            if fork():
                os._exit(0)
            control.close()
            return become_trial(descriptors, own, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        if between > 0:
            os.waitpid(between, 0)


def fork() -> int:
    """Forks without Python's warning about threads: the only threads are those of OpenBLAS, which ends them before a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become_trial(descriptors: List[int], between: int, parent: int) -> Dict[str, Any]:
    """Puts this forked process into the state of a fresh process before its program's first line; returns the request."""
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0001)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # as entry_point.py does for trials that start cold
    if os.getppid() != parent:
        os._exit(1)
    *standard, link = descriptors
    with socket.socket(fileno=link) as supervisor:
        supervisor.sendall(b"%d\n" % os.getpid())
        with supervisor.makefile("rb") as file:
            line = file.readline()
    if not line.endswith(b"\n"):
        os._exit(1)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    request: Dict[str, Any] = json.loads(line)
    # Keep the variables that this interpreter's start-up has set: LC_CTYPE in a plain C locale, those of a sitecustomize. In a
    # fresh process, the start-up would set them, too.
    set_here = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    os.environ.clear()
    os.environ.update({**request["env"], **set_here})
    os.chdir(request["cwd"])
    draw_anew()
    wake()
    return request


def draw_anew() -> None:
    """Redraws the random values that a fresh process draws while importing; `random` does so itself after a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def wake() -> None:
    """Starts the harness, as inject/sitecustomize.py does in a fresh process."""
    try:
        spec = importlib.util.spec_from_file_location(HARNESS, os.path.join(HERE, "__init__.py"))
        if spec is None or spec.loader is None:
            raise ImportError(f"nothing to load in {HERE}")
        module = sys.modules[HARNESS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.wake(os.environ[SPEC_VARIABLE])
    except Exception as error:  # the program must run anyway; the tuner notices that no harness answered
        sys.stderr.write(f"autotune: the harness could not start: {type(error).__name__}: {error}\n")


def run(argv: List[str]) -> None:
    """Runs the program as the interpreter would, with the same exit status and without this file in tracebacks.

    Args:
        argv: interpreter, then a script or "-m" and a module, then the program's own arguments.
    """
    sys.orig_argv = argv
    made = sys.modules["__main__"] = types.ModuleType("__main__")
    names: Dict[str, Any] = {"__builtins__": builtins}
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    made.__dict__.update(names)
    if "__mp_main__" in sys.modules:  # the main module under the name by which loader workers know it
        sys.modules["__mp_main__"] = made
    try:
        if argv[1] == "-m":
            run_module(argv[2], argv[3:])
        else:
            run_script(argv[1:], made)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        tell(error)
        forget_file(made)
        sys.exit(1)


def run_module(name: str, words: List[str]) -> None:
    """Runs `python -m NAME WORDS` through the function that the interpreter itself calls."""
    if not IS_PATH_SAFE:
        sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *words]
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def run_script(words: List[str], made: types.ModuleType) -> None:
    """Runs `python WORDS` in a module object."""
    script = words[0]
    path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)
    if not IS_PATH_SAFE:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    sys.argv = words
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    made.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), made.__dict__)
    forget_file(made)


def forget_file(made: types.ModuleType) -> None:
    """Removes the names that the interpreter removes when a script has ended, before the exit handlers run."""
    for name in ("__file__", "__cached__"):
        made.__dict__.pop(name, None)


def tell(error: BaseException) -> None:
    """Reports an exception that ends the program, as the interpreter does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except Exception as broken:  # raised by the program's own hook
        broken.__context__ = None
        if broken.__traceback__ is not None:
            broken.__traceback__ = broken.__traceback__.tb_next
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)


def answer(control: socket.socket, message: Dict[str, Any]) -> None:
    """Writes one line to the supervisor."""
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
