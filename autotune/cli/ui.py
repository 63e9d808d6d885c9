"""Implements `autotune ui`: serves the MLflow UI for a store until it is stopped, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn

from autotune.errors import AutotuneError, BadInput
from autotune.launchers.environment import own_environment
from autotune.masking import without_credentials
from autotune.plain_text import escaped
from autotune.records import StudyRecord
from autotune.run_dir import StudyFolder
from autotune.studies import studies
from autotune.trackers import store

FIRST_PORT, NUM_PORTS = 5000, 100
SYNCS = 2  # attempts, because the first may be killed before it has made the store
START_S = 60.0  # MLflow imports 400 MB, which is slow from a cold disk
END_S = 5.0
PDEATHSIG = 1  # prctl: signal the child when its parent dies
# One process is enough for one user. By default MLflow starts ten, including a job queue that autotune does not use.
SERVER_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONSAFEPATH": "1",  # the server's own child processes import nothing from the current folder, as with -P
}
NO_MODULES = "--app-dir=/"  # otherwise uvicorn would first look for modules in the current folder
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY = ("0.0.0.0", "::")  # listening on all addresses of this machine
ANY_PORT = ("localhost:*", "127.0.0.1:*")  # a port forwarded by ssh may have another number on the user's own machine
NO_PROXY = urllib.request.ProxyHandler({})  # otherwise requests to this machine would go through $http_proxy, too
ENDING = (signal.SIGTERM, signal.SIGHUP)  # `kill` and a closed terminal; Python turns Ctrl-C into KeyboardInterrupt itself


def serve(runs: Path, *, host: str, port: int | None, uri: str | None) -> int:
    """Serves the MLflow UI until Ctrl-C, SIGTERM or the terminal closes; leaves no process behind.

    Args:
        runs: the runs folder.
        host: address to listen on.
        port: port; None for 5000 or the next free one.
        uri: store to show instead of the one in the runs folder. If it is a tracking server, which has its own UI, only the
            address of the page is printed.
    """
    address = store.chosen_uri(runs, asked=uri)
    if address == store.NONE:
        raise BadInput(
            "tracker.uri: nothing is tracked, got 'none'. Show the embedded store with --runs-dir DIR, or give --uri URI."
        )
    if address.startswith(("http://", "https://")):
        print(f"The studies are tracked by a server, which has its own UI: {_page(address, runs)}")
        return 0
    if address.partition(":")[0] in ("databricks", "uc"):
        print("The studies are tracked by Databricks, which has its own UI.")
        return 0
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays ignored, as `nohup` requires
            signal.signal(number, _interrupt)
    try:
        _serve(address, runs, host=host, port=port)
    except KeyboardInterrupt:  # the normal end of this command
        return 0


def _serve(address: str, runs: Path, *, host: str, port: int | None) -> NoReturn:
    free, reservation = _port(host, port)
    with reservation, tempfile.TemporaryFile() as log:
        if address == store.embedded_uri(runs):
            _bring_up_to_date(runs)
        if host not in LOOPBACK:
            print(f"autotune: anyone who reaches {host}:{free} can read and change what is tracked", file=sys.stderr)
        server, url = _start(address, runs, host=host, port=free, log=log), _url(host, free)
        try:
            _wait_until_up(server, url, log)
            pages = [_page(url, runs, NO_PROXY, charts=charts) for charts in (False, True)]
            print("MLflow UI: {}\ncharts: {}\nCtrl-C ends it.".format(*pages), flush=True)
            server.wait()
        finally:
            _end(server)
    raise AutotuneError(f"the MLflow server ended by itself, with status {server.returncode}")


def _port(host: str, asked: int | None) -> tuple[int, socket.socket]:
    """Returns a port, reserved against other `autotune ui` processes until the server binds it seconds later.

    Raises:
        BadInput: this machine does not have the address, or no port is free.
    """
    if reason := _refused(host, 0):
        raise BadInput(f"--host: cannot be listened on, got {host!r} ({reason}). Give an address of this machine: 127.0.0.1.")
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS) if asked is None else (asked,):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0autotune-ui-{port}")  # abstract socket: no file, released when this process ends
            reason = _refused(host, port)
        except OSError as error:
            reason = str(error.strerror)
        if not reason:
            return port, reservation
        reservation.close()
    if asked is None:
        raise BadInput(f"--host: no free port from {FIRST_PORT} on, got {host!r} ({reason}). Give one: --port PORT.")
    raise BadInput(
        f"--port: cannot be listened on, got {asked} ({reason}). Give another, or leave it out for the next free one."
    )


def _refused(host: str, port: int) -> str:
    """Returns why this machine cannot listen on an address; "" if it can. Port 0 stands for any free port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: no host can have this name
        return str(getattr(error, "strerror", None) or error)
    return "" if host else "no address"


def _bring_up_to_date(runs: Path) -> None:
    if not any(studies(runs)) and not store.store_file(runs).exists():
        raise BadInput(f"--runs-dir: nothing to show, there is no study in {str(runs)!r}. Make one with `autotune run`.")
    if not store.store_file(runs).exists() and not os.access(runs, os.W_OK):
        raise BadInput(
            f"--runs-dir: cannot be written, so the store of the trials cannot be made there, got {str(runs)!r}. Make it "
            "writable, or show a study in another store: `autotune sync STUDY --uri URI`, then `autotune ui --uri URI`."
        )
    here = store.embedded_uri(runs)
    elsewhere = [folder.name for folder in studies(runs) if not store.may_use(folder, here)]
    if elsewhere:
        how = f"To show it here, too: autotune sync STUDY --runs-dir {shlex.quote(str(runs))} --uri {shlex.quote(here)}"
        words = f"autotune: not shown, because tracked elsewhere or not at all: {', '.join(elsewhere)}. {how}"
        print(escaped(words), file=sys.stderr)
    for _ in range(SYNCS):
        code = _sync(runs, here)
        if store.store_file(runs).exists():
            return
        if code >= 0:  # not killed: `autotune sync` has printed why it failed
            kind = BadInput if code == BadInput.exit_code else AutotuneError
            option = "--runs-dir: " if kind is BadInput else ""
            raise kind(f"{option}the tracking store {here} could not be made, so there is nothing to show.")
    # The server must not make the store: if it were killed while doing so, the store would stay half made.
    raise AutotuneError(
        f"the tracking store {here} could not be made: `autotune sync --all` was killed first. Start `autotune ui` again."
    )


def _sync(runs: Path, here: str) -> int:
    """Mirrors all studies and returns the exit status, negative if a signal ended it.

    The mirroring runs in a subprocess. Otherwise, this process would keep MLflow in memory until the server ends.
    """
    argv = [sys.executable, "-P", "-m", "autotune", "sync", "--all", "--runs-dir", str(runs), "--uri", here]
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=own_environment(), preexec_fn=_die_with(os.getpid())
    )
    try:
        return child.wait()
    finally:
        child.kill()  # killing it cannot corrupt anything
        child.wait()


def _start(uri: str, runs: Path, *, host: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "mlflow", "server", "--workers", "1", "--host", host, "--port", str(port)]
    argv += ["--artifacts-destination", store.artifacts_path(runs).as_uri(), "--uvicorn-opts", NO_MODULES]
    # The store's address is not passed as an argument: it may contain a password, and every user can read arguments.
    environment = {**os.environ, **SERVER_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}
    # MLflow refuses requests that are addressed to a host name which it does not know. It also refuses the searches sent by a
    # page that was opened under such a name.
    if host not in LOOPBACK:
        reached = [f"{name}:{port}" for name in _names(host)]
        environment.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join([*ANY_PORT, *reached]))
        environment.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(f"http://{name}" for name in reached))
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that the server can be ended as one group, and Ctrl-C reaches only autotune
        preexec_fn=_die_with(os.getpid()),
        umask=0o077 if uri == store.embedded_uri(runs) else -1,  # what the server creates is as private as the store
    )


def _names(host: str) -> list[str]:
    """Returns the names and addresses under which other machines reach a server that listens on `host`."""
    import psutil

    names = {host, socket.gethostname(), socket.getfqdn()}
    if host in EVERY:
        found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
        names |= {a.address.partition("%")[0] for a in found if a.family in (socket.AF_INET, socket.AF_INET6)}
    return sorted(f"[{name}]" if ":" in name else name for name in names)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _die_with(parent: int) -> Callable[[], None]:
    """Returns a function for a forked child to call first. It makes the child end when this process (id `parent`) ends."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return prepare


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in (*ENDING, signal.SIGINT):  # ignored from now on: ending takes a few seconds at most
        signal.signal(number, signal.SIG_IGN)
    server.terminate()  # MLflow's command ends its own server
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.build_opener(NO_PROXY).open(f"{url}/health", timeout=2):
            return
        time.sleep(0.1)
    log.seek(0)
    tail = log.read().decode("utf-8", "replace").strip().splitlines()[-5:]
    what = "did not start in time" if server.poll() is None else f"ended with status {server.returncode} while it started"
    raise AutotuneError("\n  ".join([f"the MLflow server {what}", *map(without_credentials, tail)]))


def _page(url: str, runs: Path, *handlers: urllib.request.BaseHandler, charts: bool = False) -> str:
    """Returns the address of the page for the newest study's program; the server's own address if the page is unknown.

    Asks the server with a urllib opener of these handlers and Python's usual ones.
    """
    from autotune.trackers import views

    parts, shown = urllib.parse.urlsplit(url), without_credentials(url.rstrip("/"))
    server = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")
    newest = max(_records(runs), key=lambda found: found[1].started_at, default=None)
    try:
        name = store.chosen_experiment(url, newest[0] if newest else None)
        asked = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={urllib.parse.quote(name)}"
        with urllib.request.build_opener(*handlers).open(asked, timeout=10) as answer:
            experiment = json.load(answer)["experiment"]
    except (BadInput, OSError, ValueError, KeyError, http.client.HTTPException):
        return shown
    tags = {tag["key"] for tag in experiment.get("tags", [])}
    own = views.key(newest[1]) if newest else views.ALL
    view = own if views.TAG + own in tags else views.ALL
    return f"{shown}/{views.page(experiment['experiment_id'], view, charts=charts)}"


def _records(runs: Path) -> Iterator[tuple[StudyFolder, StudyRecord]]:
    for folder in studies(runs):
        with contextlib.suppress(OSError, ValueError):  # damaged, or of another version
            yield folder, folder.read_study()


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
