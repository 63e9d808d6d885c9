"""Talks to the agent (node.py) on a node: a `Transport` starts it through Slurm or Ray, and a `Node` asks it questions."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, BadInput
from autotune.launchers.link import Link, LinkLost, Message
from autotune.launchers.local import signals_held
from autotune.plain_text import shortened

SILENT_S = 10.0  # after this time without a heartbeat, the engine (Slurm or Ray) is asked whether the node is still there
LOST_S = 32.0  # after this time the node counts as lost, whatever the engine says: its agent has exited by then (link.LEASE_S)
LEAVE_S, KILL_S = 15.0, 3.0  # longest wait for an agent to end its trial and exit; for an exit after a signal


class NodeLost(Exception):
    """The agent on the node cannot be reached any more; the message says why."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Gives up a node whose agent sends a message that this version of autotune does not understand.

    Raises:
        NodeLost: a message lacks a key, or a value has another type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NodeLost(
            f"its agent sent an unreadable message ({type(error).__name__}: {shortened(str(error), 200)})"
        ) from error


class Transport(ABC):
    """A connection to one node: the engine's job in which the agent runs.

    Attributes:
        link: the link to the agent.
        job: the engine's name for the job; "" until the agent has reported it.
        note: an empty file, or None. If the node is lost, `close` writes to the file. An agent that sees this exits.
    """

    link: Link
    job = ""
    note: Path | None = None

    @abstractmethod
    def why_waiting(self) -> str:
        """Returns the engine's reason why the agent has not started yet; "" if it gave none."""

    def why_never(self) -> BadInput | None:
        """Returns why the agent will never start although the engine has accepted the job; None if it may start."""
        return None

    def unseen(self) -> BadInput | None:
        """Returns the error if a node of the job does not see the files that the study needs; None if no such node is known."""
        return None

    @abstractmethod
    def refusal(self) -> BadInput:
        """Returns why the agent did not start, if the link closed before its first message."""

    def unanswered(self) -> str:
        """Returns how the engine failed to answer, if this was the reason for `refusal`; "" for any other reason."""
        return ""

    @abstractmethod
    def why_lost(self) -> str:
        """Returns what the engine says about the job's end; "" if it says nothing or if the job is running."""

    @abstractmethod
    def close(self) -> None:
        """Ends the job and returns when the job is gone, within a few seconds."""


class Node:
    """An agent that has sent its hello message.

    Attributes:
        about: facts about the node for the records: "host", "boot_id", "job".
    """

    def __init__(self, transport: Transport, hello: Message) -> None:
        self.about = {name: str(hello[name]) for name in ("host", "boot_id", "job")}
        self._transport = transport
        self._events: deque[Message] = deque()
        self._ids = itertools.count()

    def tell(self, what: str, **fields: Any) -> int:
        """Sends a message, and returns the id that its answer will have.

        Raises:
            NodeLost: the agent is gone.
        """
        number = next(self._ids)
        try:
            with signals_held():  # an interrupt must not leave half a message
                self._transport.link.send({"do": what, "id": number, **fields})
        except LinkLost as lost:
            raise NodeLost(self._why(str(lost))) from lost
        return number

    def ask(self, what: str, patience_s: float, **fields: Any) -> Message:
        """Sends a message and returns the answer.

        Raises:
            NodeLost: there is no answer within `patience_s`, or the agent is gone.
            BadInput: the agent refuses the message as bad input.
        """
        number = self.tell(what, **fields)
        give_up_s = time.monotonic() + patience_s
        while (left_s := give_up_s - time.monotonic()) > 0:
            message = self._next(min(left_s, 1.0))
            if message and message.get("re") == number:
                with readable():
                    return _checked(message)
            if message and "is" in message:  # an event; a message without "is" is a late answer to an earlier question
                self._events.append(message)
        raise NodeLost(f"its agent has not answered for {patience_s:.0f} s")

    def event(self) -> Message | None:
        """Returns the agent's message that the trial has ended; None if there is none. Does not wait.

        Raises:
            NodeLost: the agent is gone.
        """
        if self._events:
            return self._events.popleft()
        message = self._next(0.0)
        return message if message and "is" in message else None

    def _next(self, wait_s: float) -> Message | None:
        link = self._transport.link
        try:
            message = link.receive(wait_s)
        except LinkLost as lost:
            raise NodeLost(self._why(str(lost))) from lost
        if message is None and link.silent_s > SILENT_S:
            if why := self._transport.why_lost():
                raise NodeLost(why)
            if link.silent_s > LOST_S:
                raise NodeLost(f"nothing was heard from it for {LOST_S:.0f} s")
        return message

    def _why(self, otherwise: str) -> str:
        return self._transport.why_lost() or otherwise


def end_process(process: subprocess.Popen[bytes], link: Link) -> None:
    """Closes the link, and waits for the exit of the process at its other end. Ends a process that stays or is unreachable."""
    is_reached = link.is_begun and not link.is_lost and link.silent_s < SILENT_S
    leave_s = LEAVE_S if is_reached else 1.0 if link.is_begun else 0.0
    link.close()
    for end, patience_s in ((None, leave_s), (process.terminate, KILL_S), (process.kill, KILL_S)):
        if end is not None:
            end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return


def _checked(answer: Message) -> Message:
    """Returns an answer of the agent, or raises the error in it."""
    if "problems" in answer:
        raise BadInput([str(problem) for problem in answer["problems"]])
    if "fault" in answer:
        raise AutotuneError(answer["fault"])
    return answer
