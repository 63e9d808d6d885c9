"""A private Ray cluster on this host, with all its files in one folder. `address=auto` does not find it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.ports import free_port
from tests.support.waiting import comes

START = (sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())", "start", "--block")
STORE_BYTES = 80_000_000  # little more than Ray's minimum


def why_not() -> str:
    """Returns why Ray cannot run here; "" if it can."""
    return "" if importlib.util.find_spec("ray") else "not installed: ray (pip install ray)"


class PrivateRay:
    """A running cluster. Its head pretends to have 4 CPUs and 2 GPUs; `add` adds further nodes.

    Args:
        token: the token that connecting programs need; "" for none.

    Attributes:
        address: the head's address.
        folder: the folder of all Ray files. It is also TMPDIR of Ray's processes, which identifies them.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path has at most 107 bytes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[list[str], Path | None]] = {}  # how each node was started, the head first
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        self._start("head", [*head, "--disable-usage-stats", "--num-cpus=4", "--num-gpus=2"])
        _wait_for(lambda: self._is_up("head"), self)

    def add(self, name: str, *, cpus: int, gpus: int = 0, apart: Path | None = None) -> None:
        """Adds a node. It is also this host, but cannot see the contents of the folder `apart`."""
        argv = [f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        self._start(name, argv, apart)
        _wait_for(lambda: self._is_up(name), self)

    def kill(self, name: str, *only: str) -> None:
        """Kills a node's daemons, or only those named in `only` ("raylet"), but not the processes that they have started."""
        processes = psutil.Process(self._processes[name].pid).children(recursive=True)
        if not only:
            self._processes[name].kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in (only or ("raylet", "gcs_server")):
                    process.kill()

    def remove(self, name: str) -> None:
        """Stops a node, or what is left of it."""
        del self._started[name]
        process = self._processes.pop(name)
        process.terminate()
        process.wait(30)

    def restart(self, name: str) -> None:
        """Starts a killed node again. Without its head a cluster is lost, so with the head all nodes are started again."""
        names = list(self._started) if name == "head" else [name]
        for each in names:
            self.kill(each)  # without a head, nodes do not end in time when they are terminated
            self._processes.pop(each).wait()
        for each in names:
            self._start(each, *self._started[each])
            _wait_for(lambda each=each: self._is_up(each), self)

    def workers(self) -> list[psutil.Process]:
        """Returns the processes that run actors."""
        return [one for one in self._ours() if "Relay" in " ".join(_cmdline(one))]

    def is_idle(self, within_s: float = 10.0) -> bool:
        """Whether no actor is left; waits up to `within_s` for the last one to end."""
        return comes(lambda: not self.workers(), within_s=within_s, every_s=0.1)

    def log(self) -> str:
        """Returns the ends of the nodes' logs, for a failing test."""
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-2000:]}" for file in self.folder.glob("*.out"))

    def stop(self) -> None:
        """Stops all processes and removes the folder."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs(self._ours(), timeout=5)
        for process in self._ours():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, argv: list[str], apart: Path | None = None) -> None:
        self._started[name] = argv, apart
        until_the_end = ["setpriv", "--pdeathsig", "TERM"]  # ends the node when this process ends, even if it is killed
        hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(apart)] if apart else []
        argv = [*until_the_end, *hide, *START, *argv, "--node-ip-address=127.0.0.1", f"--object-store-memory={STORE_BYTES}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token" if self._token else "disabled",  # ignore the user's token for other clusters
            "RAY_AUTH_TOKEN": self._token,
        }
        with open(self.folder / f"{name}.out", "wb") as out:
            self._processes[name] = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
            )

    def _is_up(self, name: str) -> bool:
        assert self._processes[name].poll() is None, self.log()
        return "Ray runtime started" in (self.folder / f"{name}.out").read_text(errors="replace")

    def _ours(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter() if _environ(one).get("TMPDIR") == str(self.folder)]


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _wait_for(is_there: Callable[[], bool], ray: PrivateRay) -> None:
    assert comes(is_there, every_s=0.1), f"no Ray: {ray.log()}"
