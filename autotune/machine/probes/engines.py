"""Probes the engines of the cluster launchers: whether Slurm and Ray are installed here, and whether their clusters answer."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

SLURM_S, RAY_S = 5.0, 2.0  # how long to wait for an answer
CURRENT = Path("ray", "ray_current_cluster")  # file with the cluster's address, written by `ray start` below RAY_TMPDIR


def slurm() -> dict[str, Any] | None:
    """Returns {"partitions" (names, the default one first), "problem" ("" if the controller answers)}; None without srun."""
    if shutil.which("srun") is None:
        return None
    try:
        asked = ["sinfo", "--noheader", "--format=%R|%P"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"partitions": [], "problem": f"sinfo did not answer ({type(error).__name__})"}
    if answer.returncode:
        words = answer.stderr.strip().splitlines() or [f"status {answer.returncode}"]
        return {"partitions": [], "problem": words[-1]}
    rows = [line.split("|") for line in answer.stdout.splitlines() if "|" in line]
    default = [name for name, marked in rows if marked.endswith("*")]
    return {"partitions": list(dict.fromkeys([*default, *(name for name, _ in rows)])), "problem": ""}


NOT_AN_ADDRESS = "not HOST:PORT"  # problem of an address that `launcher=ray` refuses without asking


def ray() -> dict[str, Any] | None:
    """Returns {"version", "address" ("" without a cluster), "problem" ("" if the cluster answers)}; None without Ray.

    The cluster is the one behind `launch.ray.address=auto`. Does not import Ray, because that takes a second.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None
    address = os.environ.get("RAY_ADDRESS", "")
    address = "" if address == "auto" else address  # Ray's word for the cluster of this machine
    try:
        folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
        address = address or (folder / CURRENT).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):  # no cluster
        pass
    return {"version": version, "address": address, "problem": _problem(address) if address else ""}


def _problem(address: str) -> str:
    if address == "local" or "://" in address:
        return NOT_AN_ADDRESS
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""
