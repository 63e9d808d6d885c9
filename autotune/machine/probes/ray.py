"""Probes Ray: whether it is installed here, and whether the cluster behind `launch.ray.address=auto` answers."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from pathlib import Path
from typing import Any

ANSWER_S = 2.0
CURRENT = Path("ray", "ray_current_cluster")  # written by `ray start`, below RAY_TMPDIR


def ray() -> dict[str, Any] | None:
    """Returns {"version", "address" ("" without a cluster), "problem" ("" if the cluster answers)}; None without Ray.

    Ray itself is not imported, which would take a second.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None
    address = os.environ.get("RAY_ADDRESS", "") or _current()
    return {"version": version, "address": address, "problem": _problem(address) if address else ""}


def _current() -> str:
    try:
        return (Path(os.environ.get("RAY_TMPDIR") or "/tmp") / CURRENT).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""


def _problem(address: str) -> str:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""
