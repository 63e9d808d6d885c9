"""Carries messages between the tuner and the agent on a node (node.py), over a pair of pipes.

A message is sent as its length in bytes (four bytes, big-endian), followed by a JSON object. It is never a pickle, so neither
side executes anything that the other side sends. Each side sends a heartbeat every BEAT_S. If the heartbeats stop, their sender
counts as gone, even if no pipe was closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import struct
import threading
import time
from typing import Any

START = b"\nautotune link 1\n"  # sent first; what comes before it is output of other programs, such as a site's login scripts
LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 30  # longest message; the longest contain a trial's results, which have at most 64 MiB per rank
READ_BYTES = 1 << 16
BEAT_S = 2.0
LEASE_S = 30.0  # an agent that has received nothing from its tuner for this long ends its trial and itself
WRITE_S = 30.0  # longest wait for the other side to read when the pipe is full
BEAT = {"is": "beat"}
BEAT_BYTES = LENGTH.size + len(json.dumps(BEAT))
Message = dict[str, Any]


class LinkLost(Exception):
    """The link can no longer be used, for the reason in the error's message: for example, the other side has closed it."""


class Link:
    """One end of a link. A thread of the link receives messages and sends heartbeats, even while the caller is busy.

    Attributes:
        is_begun: whether START has arrived from the other side.

    Args:
        read: descriptor of the pipe to which the other side writes; the link closes it.
        write: descriptor of the pipe from which the other side reads; the link closes it.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._wake = read, write, os.eventfd(0, os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._buffer = bytearray()
        self.is_begun = False
        self._is_closed = False
        self._why_lost = ""
        self._heard_s = time.monotonic()
        self._sending = threading.Lock()
        os.set_blocking(write, False)
        with contextlib.suppress(OSError):  # the other side is gone already; the thread will notice
            os.write(write, START)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since something last arrived from the other side, or since the link was opened.

        A piece of an incomplete message counts only if it is longer than a heartbeat. The reason: if the rest of a message is
        lost, the heartbeats after it are taken for its missing pieces, and they must not count.
        """
        return time.monotonic() - self._heard_s

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended. Messages that arrived before can still be received."""
        return bool(self._why_lost)

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            LinkLost: the other side is gone, or does not read for WRITE_S.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than a message may be")
        with self._sending:
            self._write_all(LENGTH.pack(len(data)) + data)

    def receive(self, wait_s: float) -> Message | None:
        """Returns the next message; None if there is none within `wait_s`.

        Raises:
            LinkLost: the other side is gone, and every message that it sent has been returned.
        """
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        if message is None:
            self._inbox.put(None)
            raise LinkLost(self._why_lost)
        return message

    def close(self) -> None:
        """Closes both pipes, which tells the other side that this side is gone."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for descriptor in (self._read, self._write, self._wake):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _serve(self) -> None:
        ready = select.poll()
        for descriptor in (self._read, self._wake):
            ready.register(descriptor, select.POLLIN)
        try:
            next_beat_s = time.monotonic()
            while not self._is_closed:
                if (now_s := time.monotonic()) >= next_beat_s:
                    next_beat_s = now_s + BEAT_S
                    self._beat()
                if ready.poll(max(0.0, next_beat_s - now_s) * 1000) and not self._is_closed:
                    self._take(os.read(self._read, READ_BYTES))
        except (LinkLost, OSError, ValueError, RecursionError) as error:
            self._why_lost = str(error) or type(error).__name__
        finally:
            self._why_lost = self._why_lost or "the link was closed"
            self._inbox.put(None)

    def _beat(self) -> None:
        """Sends a heartbeat, unless a message is being sent or the pipe is full.

        In both cases the other side has something to read, which shows that this side is alive.
        """
        data = json.dumps(BEAT).encode()
        if self._sending.acquire(blocking=False):
            try:
                os.write(self._write, LENGTH.pack(len(data)) + data)  # shorter than PIPE_BUF: written completely or not at all
            except BlockingIOError:
                pass
            finally:
                self._sending.release()

    def _write_all(self, data: bytes) -> None:
        ready = select.poll()
        ready.register(self._write, select.POLLOUT)
        left, give_up_s = memoryview(data), time.monotonic() + WRITE_S
        while left:
            if not ready.poll(max(0.0, give_up_s - time.monotonic()) * 1000):
                raise LinkLost(f"the other side has not read for {WRITE_S:.0f} s")
            try:
                left = left[os.write(self._write, left[:READ_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost("the other side has closed the link") from error

    def _take(self, data: bytes) -> None:
        if not data:
            raise LinkLost("the other side has closed the link")
        if len(data) > BEAT_BYTES or not self.is_begun:
            self._heard_s = time.monotonic()
        self._buffer += data
        if not self.is_begun:
            at = self._buffer.find(START)
            del self._buffer[: at + len(START) if at >= 0 else max(0, len(self._buffer) - len(START))]
            self.is_begun = at >= 0
        while self.is_begun and (message := self._next()) is not None:
            self._heard_s = time.monotonic()
            if message != BEAT:
                self._inbox.put(message)

    def _next(self) -> Message | None:
        """Removes a complete message from the buffer and returns it; None if there is none."""
        if len(self._buffer) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._buffer)
        if size > MAX_BYTES:
            raise ValueError(f"a message of {size} bytes is longer than a message may be")
        end = LENGTH.size + size
        if len(self._buffer) < end:
            return None
        message = json.loads(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        if not isinstance(message, dict):
            raise ValueError("a message is not a JSON object")
        return message
