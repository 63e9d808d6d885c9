"""However `autotune ui` is ended, also on a real terminal, none of its processes is left."""

import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.launchers.environment import own_environment
from autotune.trackers import store

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow uses deprecated parts of SQLAlchemy
KINDS = ("ctrl-c", "terminal closed", "SIGKILL")


class Terminal:
    """A terminal that runs `autotune ui` in the foreground."""

    def __init__(self, runs: Path, *words: str) -> None:
        argv = [sys.executable, "-m", "autotune", "ui", "--runs-dir", str(runs), *words]
        environment = {name: value for name, value in own_environment().items() if not name.startswith("MLFLOW_")}
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, argv, environment)
        self.shown, self.known = "", {}

    def wait_for_address(self) -> str:
        until = time.monotonic() + 120
        while not (found := re.search(r"MLflow UI: http://127\.0\.0\.1:(\d+)", self.shown)):
            assert time.monotonic() < until, self.shown
            self.shown += os.read(self.screen, 4096).decode()
        process = psutil.Process(self.pid)
        self.known = {p.pid: p for p in [process, *process.children(recursive=True)]}
        return found[1]

    def end(self, how: str) -> None:
        if how == "ctrl-c":
            os.write(self.screen, b"\x03")
        elif how == "terminal closed":
            os.close(self.screen)
        else:
            os.kill(self.pid, getattr(signal, how))

    def left(self) -> list[psutil.Process]:
        """Returns the processes that are still there after 30 seconds."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            os.waitpid(self.pid, os.WNOHANG) if self.pid in self.known and self._is_zombie() else None
            alive = [p for p in self.known.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if not alive:
                return []
            time.sleep(0.1)
        return alive

    def _is_zombie(self) -> bool:
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def test_ui_ends_on_sigterm_without_leftover_processes(ui):  # in the last file, because other tests use this server
    children = ui.children
    assert ui.end(signal.SIGTERM) == 0
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert gone


@pytest.mark.thorough
def test_ui_leaves_no_process_however_it_ends(runs):
    uri = f"{store.embedded_uri(runs)}?password=hunter2"
    terminals = {how: Terminal(runs, "--uri", uri) for how in KINDS}  # in parallel, because each takes seconds to start
    ports = {how: terminal.wait_for_address() for how, terminal in terminals.items()}
    assert len(set(ports.values())) == len(KINDS), "each on a separate port"
    assert all(len(terminal.known) >= 3 for terminal in terminals.values())
    below = [process for terminal in terminals.values() for process in terminal.known.values() if process.pid != terminal.pid]
    assert not [process for process in below if "hunter2" in " ".join(process.cmdline())], "all users can see arguments"
    for how, terminal in terminals.items():
        terminal.end(how)
    assert {how: terminal.left() for how, terminal in terminals.items()} == {how: [] for how in KINDS}
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not listening & {int(port) for port in ports.values()}
