"""Implements `autotune ui`: serves the MLflow UI for a store until it is stopped, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

import psutil

from autotune.cli.processes import own_environment
from autotune.errors import AutotuneError, BadInput
from autotune.masking import without_credentials
from autotune.run_dir import studies
from autotune.trackers import store

FIRST_PORT, NUM_PORTS = 5000, 100
START_S = 60.0  # MLflow imports 400 MB, which is slow from a cold disk
END_S = 5.0
PDEATHSIG = 1  # prctl: signal the child when its parent dies
# One process is enough for one user. By default MLflow starts ten, including a job queue that autotune does not use.
SERVER_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, `kill`, closing the terminal


def serve(runs: Path, *, host: str, port: int | None, uri: str | None) -> int:
    """Serves the MLflow UI until Ctrl-C, SIGTERM or the terminal closes; leaves no process behind.

    Args:
        runs: the runs folder.
        host: address to listen on.
        port: port; None for 5000 or the next free one.
        uri: store to show instead of the one in the runs folder. A tracking server has its own UI, so its address is only
            printed.
    """
    address = store.chosen_uri(runs, asked=uri)
    if address == store.NONE:
        raise BadInput(
            "tracker.uri: nothing is tracked, got 'none'. Show the embedded store with --runs-dir DIR, or give --uri URI."
        )
    if address.startswith(("http://", "https://")):
        print(f"The studies are tracked by a server, which has its own UI: {without_credentials(address)}")
        return 0
    with _signals_interrupt():
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
        with _server(address, runs, host=host, port=free, log=log) as server:
            _wait_until_up(server, host, free, log)
            print(f"MLflow UI: {_experiment_url(host, free)}\nCtrl-C ends it.", flush=True)
            server.wait()
    raise AutotuneError(f"the MLflow server ended by itself, with status {server.returncode}")


def _port(host: str, asked: int | None) -> tuple[int, socket.socket]:
    """Returns a port, reserved against other `autotune ui` processes until the server binds it seconds later."""
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS) if asked is None else (asked,):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0autotune-ui-{port}")  # abstract socket: no file, released when this process ends
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            reservation.close()
            reason = error.strerror
            continue
        return port, reservation
    if asked is None:
        raise BadInput(f"--host: no free port from {FIRST_PORT} on, got {host!r} ({reason}). Give one: --port PORT.")
    raise BadInput(
        f"--port: cannot be listened on, got {asked} ({reason}). Give another, or leave it out for the next free one."
    )


def _bring_up_to_date(runs: Path) -> None:
    if not any(studies(runs)) and not store.store_file(runs).exists():
        raise BadInput(f"--runs-dir: nothing to show, there is no study in {str(runs)!r}. Make one with `autotune run`.")
    here = store.embedded_uri(runs)
    elsewhere = [folder.name for folder in studies(runs) if store.study_uri(folder) not in (None, here)]
    if elsewhere:
        how = f"To show it here, too: autotune sync STUDY --runs-dir {shlex.quote(str(runs))} --uri {shlex.quote(here)}"
        print(f"autotune: not shown, because tracked elsewhere or not at all: {', '.join(elsewhere)}. {how}", file=sys.stderr)
    # In a subprocess: MLflow would stay in memory once imported, and this process only waits from now on.
    argv = [sys.executable, "-m", "autotune", "sync", "--all", "--runs-dir", str(runs), "--uri", here]
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=own_environment(), preexec_fn=_die_with_parent
    )
    try:
        child.wait()
    finally:
        child.kill()  # killing it cannot corrupt anything
        child.wait()


@contextlib.contextmanager
def _server(uri: str, runs: Path, *, host: str, port: int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", host, "--port", str(port)]
    argv += ["--artifacts-destination", store.artifacts_path(runs).as_uri()]
    # Not an argument: the store's address may contain a password, and every user can read a process's arguments.
    environment = {**os.environ, **SERVER_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}
    server = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that the server can be ended as one group, and Ctrl-C reaches only autotune
        preexec_fn=_die_with_parent,
        umask=0o077 if uri == store.embedded_uri(runs) else -1,  # the server may be the process that creates the store
    )
    try:
        yield server
    finally:
        for number in ENDING:  # the clean-up below takes a few seconds at most; until it is done, signals are ignored
            signal.signal(number, signal.SIG_IGN)
        _end(server)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Turns the ending signals into KeyboardInterrupt. Ignored signals stay ignored, as `nohup` requires."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_S)
            break
    with contextlib.suppress(ProcessLookupError):  # workers that outlived the main process
        os.killpg(server.pid, signal.SIGKILL)


def _wait_until_up(server: subprocess.Popen[bytes], host: str, port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{_url(host, port)}/health", timeout=2):
            if _is_listening(server, port):  # the answer may come from another program that took the port first
                return
        time.sleep(0.1)
    log.seek(0)
    tail = log.read().decode("utf-8", "replace").strip().splitlines()[-5:]
    raise AutotuneError("the MLflow server did not start:\n  " + "\n  ".join(without_credentials(line) for line in tail))


def _is_listening(server: subprocess.Popen[bytes], port: int) -> bool:
    """Whether one of the server's processes listens on a port."""
    try:
        first = psutil.Process(server.pid)
        found = [c for p in [first, *first.children(recursive=True)] for c in p.net_connections("tcp")]
    except psutil.Error:
        return False
    return any(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port for connection in found)


def _experiment_url(host: str, port: int) -> str:
    from autotune.trackers.entries import VIEW
    from autotune.trackers.mlflow import EXPERIMENT

    asked = f"{_url(host, port)}/api/2.0/mlflow/experiments/get-by-name?experiment_name={urllib.parse.quote(EXPERIMENT)}"
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            number = json.load(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError):  # no study has been tracked in this store yet
        return _url(host, port)
    view = urllib.parse.urlencode({"viewStateShareKey": VIEW, "workflowType": "machine_learning"})
    return f"{_url(host, port)}/#/experiments/{number}/runs?{view}"


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
