"""Tracking servers for tests: a real MLflow server, and servers that refuse, hang, answer late or lose answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.launchers.environment import own_environment
from autotune.trackers.contents import Contents
from tests.support.ports import free_port

START_S = 60.0


class MlflowServer:
    """A real `mlflow server` on the loopback address, with one worker and a separate store.

    Args:
        folder: folder for its files.
        store_uri: its database; None for an SQLite file in the folder.
        python: the interpreter that runs MLflow, perhaps with another version.
    """

    def __init__(self, folder: Path, *, store_uri: str | None = None, python: str | Path = sys.executable) -> None:
        self.folder, self.port, self._python = folder, free_port(), str(python)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = folder / "server.db"
        self._store_uri = store_uri or f"sqlite:///{self.store}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [
            self._python,
            "-m",
            "mlflow",
            "server",
            "--workers",
            "1",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        argv += ["--backend-store-uri", self._store_uri, "--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, env={**os.environ, **quiet}, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError((self.folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        """Kills all its processes, as in a crash."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self.kill()


class Ui:
    """A running `autotune ui` for the studies in `runs`.

    Attributes:
        process: the process that a user would start.
        lines: what it has printed.
        url, experiment: the server's address, and the experiment's id there.
        printed: the first address that it printed.
        children: its processes.

    Args:
        folder: the working directory.
        words: arguments.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autotune", "ui", *words],
            cwd=folder,
            env={name: value for name, value in own_environment().items() if not name.startswith("MLFLOW_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        while not (found := re.search(r"MLflow UI: (http://127\.0\.0\.\d:\d+)/#/experiments/(\d+)", "".join(self.lines))):
            self.lines.append(line := self.process.stdout.readline())
            if not line or "Ctrl-C" in line:
                self.process.kill()
                pytest.fail(f"it shows no page of the experiment: {self.lines}")
        self.url, self.experiment = found.groups()
        self.printed = next(word for word in "".join(self.lines).split() if word.startswith("http"))
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int) -> int:
        """Sends a signal; returns the exit status."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def runs(self, **headers: str) -> dict[str, dict[str, Any]]:
        """Returns the runs of the study resnet18, by name, as the server's API gives them."""
        asked = json.dumps({"experiment_ids": [self.experiment], "filter": "tags.study = 'resnet18'"}).encode()
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/runs/search", asked, headers={"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return {run["info"]["run_name"]: run for run in json.load(answer)["runs"]}


class Listener:
    """A server that accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._socket.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self.num_accepted = 0
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()
        for connection in self._kept:
            connection.close()

    def serve(self, connection: socket.socket) -> None:
        """Keeps the connection open without an answer."""

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_accepted += 1
            self._kept.append(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()


class Proxy(Listener):
    """A proxy in front of a real server. It forwards every request, but delays or drops answers.

    Args:
        port: port of the real server.
        late_s: delay of each answer in seconds.
        lose_creations: drops each n-th answer to the creation of a run, so that the run exists but the client does not know
            of it. 0 drops none.
    """

    def __init__(self, port: int, *, late_s: float = 0.0, lose_creations: int = 0) -> None:
        self._port, self._late_s, self._lose = port, late_s, lose_creations
        self._num, self._lock, self.num_lost = 0, threading.Lock(), 0
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as behind:
            behind.settimeout(0.05)
            connection.settimeout(0.05)
            while request := _read(connection):
                behind.sendall(request)
                answer = _read(behind)
                time.sleep(self._late_s)
                if self._is_lost(request):
                    break
                connection.sendall(answer)
        connection.close()

    def _is_lost(self, request: bytes) -> bool:
        if not self._lose or b"/mlflow/runs/create" not in request.partition(b"\r\n")[0]:
            return False
        with self._lock:
            self._num += 1
            is_lost = self._num % self._lose == 0
            self.num_lost += is_lost
            return is_lost


def _read(connection: socket.socket) -> bytes:
    """Reads one whole message, head and body; returns b"" if the other side has closed."""
    data = b""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        try:
            more = connection.recv(1 << 16)
        except TimeoutError:
            more = None
        except OSError:
            return b""
        if more == b"":
            return b""
        data += more or b""
        head, found, body = data.partition(b"\r\n\r\n")
        if found and _is_whole(head.lower(), body):
            return data
    return b""


def _is_whole(head: bytes, body: bytes) -> bool:
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
        if line.startswith(b"transfer-encoding: chunked"):
            return body.endswith(b"0\r\n\r\n")
    return True


class Mirror:
    """The runs of a study in MLflow, read with the client of MLflow."""

    def __init__(self, uri: str, study: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        experiment = self.client.get_experiment_by_name("autotune")
        found = self.client.search_runs([experiment.experiment_id], f"tags.study = '{study}'", max_results=1000)
        self.parents = [run for run in found if run.data.tags["kind"] == "study"]
        self.trials: list[Any] = [run for run in found if run.data.tags["kind"] != "study"]

    @property
    def numbers(self) -> list[int]:
        """The trial number of each run, sorted."""
        return sorted(int(run.data.tags["trial"]) for run in self.trials)

    def problems(self, folder: Any) -> list[str]:
        """Returns differences from the study's folder: each trial needs one complete run under one parent."""
        contents = Contents.read(folder)
        records = {record.number: record for record in contents.trials}
        found = [f"{n} runs of trial {number}" for number, n in Counter(self.numbers).items() if n > 1]
        found += [f"trial {number} is missing" for number in records.keys() - set(self.numbers)]
        found += [f"{len(self.parents)} parents"] if len(self.parents) != 1 else []
        parent_ids = {run.info.run_id for run in self.parents}
        for run in self.trials:
            record = records[int(run.data.tags["trial"])]
            name = f"trial {record.number}"
            if run.info.status == "RUNNING":
                found.append(f"{name} has not ended")
            if run.data.tags["mlflow.parentRunId"] not in parent_ids:
                found.append(f"{name} has another parent")
            if set(run.data.params) != set(contents.params(record)):
                found.append(f"{name} has params {sorted(run.data.params)}")
            for metric in run.data.metrics:
                if len(self.client.get_metric_history(run.info.run_id, metric)) != 1:
                    found.append(f"{name} has {metric} more than once")
            names = {file.path for file in self.client.list_artifacts(run.info.run_id)}
            if not {"spec.json", "trial.json"} <= names:
                found.append(f"{name} has files {sorted(names)}")
        return found
