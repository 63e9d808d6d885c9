"""Starts a private PostgreSQL server for a test, from Debian's packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.ports import free_port

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
USER = "postgres"  # PostgreSQL refuses to run as root


def why_no_postgres() -> str:
    """Returns why no server can be started here, as the reason for a skip; "" if one can."""
    if not BINARIES:
        return "no PostgreSQL: misses a server with a real database (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg2") is None:
        return "no psycopg2: misses a server with a real database (pip install psycopg2-binary)"
    return ""


class Postgres:
    """A database server on the loopback address, with its data in a separate folder."""

    def __init__(self) -> None:
        self._data, self.port = Path(tempfile.mkdtemp(prefix="autotune-postgres-")), free_port()
        self.uri = f"postgresql+psycopg2://{USER}@127.0.0.1:{self.port}/postgres"
        if os.getuid() == 0:
            shutil.chown(self._data, USER)
        self._run("initdb", "-D", self._data, "-U", USER, "--auth=trust", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._data} -c fsync=off -c full_page_writes=off"
        self._run("pg_ctl", "-D", self._data, "-l", self._data / "log", "-o", options, "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "stop")
        shutil.rmtree(self._data)

    def _run(self, program: str, *words: str | Path) -> None:
        as_user = ["runuser", "-u", USER, "--"] if os.getuid() == 0 else []
        argv = [*as_user, str(BINARIES[-1] / program), *map(str, words)]
        ended = subprocess.run(
            argv, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
        )
        assert ended.returncode == 0, ended.stdout
