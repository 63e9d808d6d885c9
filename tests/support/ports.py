"""Ports of this machine that nothing listens on."""

from __future__ import annotations

import contextlib
import socket


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # all are open at once, so that they differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    return free_ports(1)[0]
