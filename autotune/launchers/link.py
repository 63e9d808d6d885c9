"""Carries messages between the tuner and the agent on a node (node.py), over a pair of pipes.

A message is its length in bytes (four bytes, big-endian), followed by a JSON object. It is never a pickle, so neither side
executes anything that the other sends. Each side sends a heartbeat every BEAT_S. If the heartbeats stop, the sender is gone,
even if no pipe was closed.
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

START = b"\nautotune link 1\n"  # sent first. Anything before it is output of other programs, such as a site's login scripts
LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 30  # a trial's results have 64 MiB per rank at most
READ_BYTES = 1 << 16
BEAT_S = 2.0
LEASE_S = 30.0  # an agent that hears nothing from its tuner for this long ends its trial and itself
WRITE_S = 30.0  # longest wait for the other side to read
BEAT = {"is": "beat"}
BEAT_BYTES = LENGTH.size + len(json.dumps(BEAT))
Message = dict[str, Any]


class LinkLost(Exception):
    """The other side has closed the link, or no longer reads. The error's message says which."""


class Link:
    """One end of a link. A thread receives messages and sends the heartbeats, so both continue while the owner is busy.

    Attributes:
        is_begun: whether the other side has begun to send.

    Args:
        read: descriptor of the pipe that the other side writes; owned by the link.
        write: descriptor of the pipe that the other side reads; owned by the link.
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
        """Seconds since the other side was last heard from, or since the link was opened.

        A piece of an incomplete message counts only if it is longer than a heartbeat. If a message was cut short, the
        heartbeats after it look like its missing pieces, and must not count.
        """
        return time.monotonic() - self._heard_s

    @property
    def is_lost(self) -> bool:
        """Whether the other side is known to be gone. Messages that it sent before may still be unread."""
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
        """Sends a heartbeat, unless a message is being sent or the pipe is full: then the other side has something to read."""
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
