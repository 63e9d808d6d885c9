"""Runs trials on another machine, through an agent (node.py). Subclasses start the agent through an engine: Slurm or Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autotune
from autotune.clock import PausableClock
from autotune.errors import AutotuneError, BadInput, NoNode
from autotune.harness.protocol import Progress
from autotune.launchers.base import Ended, Launch, Launcher, Running, Slot
from autotune.launchers.environment import PACKAGE, study_of
from autotune.launchers.link import LinkLost, Message
from autotune.launchers.local import Graces, signals_held
from autotune.launchers.messages import Watched, from_launch, to_ended
from autotune.launchers.node_watch import NodeWatch
from autotune.launchers.supervision import GONE_S
from autotune.launchers.transport import Node, NodeLost, Transport, readable
from autotune.launchers.tuner_files import left_by_killed, lock, own_prefix
from autotune.launchers.user_files import END_S
from autotune.launchers.warm import READY_S
from autotune.machine import comparable
from autotune.monitors.cpu import identity
from autotune.monitors.watch import MachineWatch
from autotune.plain_json import from_json
from autotune.quantities import seconds_text

ANSWER_S = 60.0  # longest wait for the answer to "open" (files may appear late) or "sweep" (with its grace periods)
# Longest wait for the answer to "start". The agent may have to start two warm servers (warm.py), one after the other: if the
# first is not ready in time, the agent ends it and starts one that imports less.
START_S = 60.0 + 2 * (READY_S + GONE_S)
# Longest wait for the answer to "stop": the grace periods, and the time to copy files that the trial has removed. A loss of the
# node is noticed sooner.
STOP_S = 60.0 + END_S
PROGRESS_S = 1.0  # longest wait for the answer to "progress"
PROGRESS_EVERY_S = 0.5  # minimum time between two "progress" messages: through Ray, a message costs both machines milliseconds
LOOK_S = 0.05  # wait for a message in a call that should return at once
# While the engine does not answer, a replacement for a lost node is requested every AGAIN_S, for at most UNANSWERED_S.
AGAIN_S, UNANSWERED_S = 30.0, 600.0
MAX_LOST = 3  # if this many nodes in a row are lost before they are ready, the launcher gives up
TOKEN = ".token"  # suffix of a file in the runs folder; a node that finds the file sees the same folder


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a node must see, and what its agent monitors.

    Attributes:
        cwd: working directory of the program.
        program: first word of the program's command.
        runs_dir: folder of the studies.
        device: kind of device, index of the first one, and number of devices, as in `watch.configured_device`.
    """

    cwd: str
    program: str
    runs_dir: str
    device: tuple[str, int, int] = ("auto", 0, 1)


class RemoteLauncher(Launcher):
    """Starts trials on one node, one at a time. If the node is lost, the next trial waits for another node.

    Attributes:
        engine: name of the engine, for messages.
        node: the node; None while there is none.
        watched: the node's monitor.

    Args:
        place: what the node must see.
        graces: the grace periods of the LocalLauncher on the node.
        patience_s: longest wait for a node; None for no limit.
    """

    engine: str

    def __init__(self, place: Place, *, graces: Graces | None = None, patience_s: float | None = None) -> None:
        self.clock: PausableClock = PausableClock()
        self.node: Node | None = None
        self.watched = NodeWatch(lambda: self.node, self.clock)
        self._place, self._graces, self._patience_s = place, graces or Graces(), patience_s
        self._transport: Transport | None = None
        self._slot: Slot | None = None
        self._first: Slot | None = None  # the slot on which the study began
        self._study: Path | None = None
        self._trial: RemoteRunning | None = None  # the last trial
        self._asked_s = 0.0
        self._num_lost = 0  # number of nodes in a row that were lost before they were ready
        self._unanswered, self._unanswered_s = "", 0.0  # why requests are repeated, and since when; "" if they are not
        self._again_s = 0.0  # when to request a node again
        self._name = ""
        self._owners: dict[str, RemoteLauncher] = {}  # GPU -> launcher of the slot to which Ray has given it
        self._num_given: int | None = None  # number of GPUs that Ray has given to this slot; None before that

    def join(self, name: str, clock: PausableClock, owners: dict[str, RemoteLauncher]) -> None:
        """Makes this launcher one of several slots that share the study's clock and GPUs; called before any other method."""
        self._name, self.clock, self._owners = name, clock, owners
        self.watched = NodeWatch(lambda: self.node, clock)

    @abstractmethod
    def transport(self) -> Transport:
        """Requests a node from the engine, and returns at once.

        Raises:
            BadInput: the engine is not installed or not reachable.
        """

    def slots(self) -> list[Slot]:
        """Returns a list with the only slot once its agent is ready; [] until then. See `Launcher.slots`."""
        if self._slot is None:
            self._connect()
        return [self._slot] if self._slot else []

    def why_waiting(self) -> str:
        """See `Launcher.why_waiting`."""
        if self._slot is not None:
            return ""
        is_again = self._transport is None or time.monotonic() < self._again_s + AGAIN_S
        why = self._unanswered if is_again else ""
        why = why or (self._transport.why_waiting() if self._transport else "")
        return f"slot {self._name}: {why}" if self._name and why else why

    def watch(self) -> MachineWatch:
        """Returns the monitor of the node."""
        return self.watched

    @property
    def is_busy(self) -> bool:
        """Whether a trial runs on the node, as far as `poll` and `stop` have noticed."""
        return self._trial is not None and self._trial.is_on_node

    def start(self, launch: Launch, *, is_alone: bool = False) -> RemoteRunning:
        """Starts the trial. If there is no node yet, `poll` starts it later and raises the errors. See `Launcher.start`.

        Args:
            launch: the trial.
            is_alone: whether no trial runs on the study's other slots meanwhile.
        """
        self._trial = running = RemoteRunning(self, launch, has_neighbours=bool(self._name) and not is_alone)
        if self.node is None:
            self.clock.pause()
        else:
            running.poll()
        return running

    def sweep(self, study: Path) -> list[str]:
        """Ends what an earlier run has left running on the node. See `Launcher.sweep`.

        Processes that the earlier run left on other nodes end by themselves after link.LEASE_S.
        """
        self._study = study
        if self.slots() and self.node is not None:
            with contextlib.suppress(NodeLost):  # the first trial will report the loss
                answer = self.node.ask("sweep", ANSWER_S, study=str(study.resolve()))
                with readable():
                    return [str(line) for line in answer["lines"]]
        return []

    def close(self) -> None:
        """Ends the agent, and with it the engine's job."""
        if self._transport:
            self._transport.close()
        self._transport = self.node = self._slot = None
        self.clock.go_on()

    def ready(self) -> Node | None:
        """Returns the node; None while there is none. A node that was lost since the last trial is replaced.

        Raises:
            NoNode: no node is available.
        """
        if self.node is not None:
            try:
                self.node.event()
            except NodeLost:
                self.close()
                return None  # the next call requests another node
        try:
            return self.node if self.slots() else None
        except BadInput as error:
            raise NoNode(error.problems) from error

    def begin(self, node: Node, launch: Launch, *, has_neighbours: bool) -> None:
        """Starts a trial on the node. `has_neighbours`: whether trials may run on the study's other slots meanwhile.

        Raises:
            NodeLost: the node is lost.
            BadInput: the launch cannot be started.
        """
        self._study = study_of(launch.folder)
        self.clock.go_on()  # another slot may have paused the clock while it waited for a node
        node.ask("start", START_S, launch=from_launch(launch, self.clock.monotonic()), has_neighbours=has_neighbours)

    def _connect(self) -> None:
        """Takes the next step towards a ready agent: requests a node, or checks whether the agent has started there."""
        if self._transport is None and time.monotonic() >= self._again_s:
            try:
                self._transport, self._asked_s = self.transport(), time.monotonic()
            except OSError as error:
                self.close()
                raise BadInput(f"launcher: the process that requests a node cannot be started, got: {error}.") from error
        self.clock.pause()
        if self._transport is None:
            return
        try:
            hello = self._transport.link.receive(LOOK_S)
        except LinkLost:
            refusal, unanswered = self._transport.refusal(), self._transport.unanswered()
            self.close()
            if not self._may_ask_again(unanswered):
                raise refusal from None
            return
        waited_s = time.monotonic() - self._asked_s
        if hello is not None:
            if unseen := self._transport.unseen():  # another node of the job does not see the files that the study needs
                self.close()
                raise unseen
            self._open(self._transport, hello)
        elif never := self._transport.why_never():
            self.close()
            raise never
        elif self._patience_s is not None and waited_s > self._patience_s:
            why = self.why_waiting() or "it has not answered"
            self.close()
            problem = f"{self.engine} provided no node within {seconds_text(waited_s)} ({why})"
            raise BadInput(f"launch.queue_minutes: {problem}. Request less, or give more minutes; null waits without a limit.")

    def _may_ask_again(self, unanswered: str) -> bool:
        """Returns whether to repeat a refused request: if the engine did not answer, the study has begun, and time is left.

        Before the study has begun, the user loses nothing by starting it again.

        Args:
            unanswered: see `Transport.unanswered`.
        """
        now_s = time.monotonic()
        if not self._unanswered or now_s - self._asked_s > UNANSWERED_S:  # the engine queued the last request: it answered
            self._unanswered_s = now_s
        if not unanswered or self._first is None or now_s - self._unanswered_s > UNANSWERED_S:
            return False
        self._unanswered, self._again_s = unanswered, now_s + AGAIN_S
        return True

    def _open(self, transport: Transport, hello: Message) -> None:
        """Prepares a new agent for the study. If a replacement for a lost node is lost, too, `slots` requests another."""
        try:
            with readable():
                self._slot = self._opened(transport, hello)
        except NodeLost as lost:
            self.close()
            self._num_lost += 1
            if self._first is not None and self._num_lost < MAX_LOST:
                return
            host = hello.get("host", "of the study")
            do = "`autotune resume` continues the study" if self._first is not None else "Start again"
            raise BadInput(f"launcher: node {host} was lost at once, got: {lost}. {do}.") from lost
        except BaseException:
            self.close()
            raise
        if self._name:
            self.slot = dataclasses.replace(self._slot, name=f"{self._name}: {self._slot.name}")
        self.clock.go_on()

    def _opened(self, transport: Transport, hello: Message) -> Slot:
        node = Node(transport, hello)
        host, transport.job = node.about["host"], node.about["job"]
        _check_version(hello)
        answer = self._ask_to_open(node, transport.note)
        facts = dict(answer["facts"])
        self._take(answer["given"])
        if self._study:  # an earlier node was lost; if this is the same node, the trial there may still run
            node.ask("sweep", ANSWER_S, study=str(self._study.resolve()))
        gpus = tuple(str(gpu["uuid"]) for gpu in facts["gpus"] if gpu.get("uuid"))
        cores = tuple(int(core) for core in hello["cores"])
        slot = Slot(
            name=f"{host}, job {transport.job}" if transport.job else host, host=host, gpus=gpus, cores=cores, facts=facts
        )
        self._first = self._first or slot
        if problems := unlike(self._first, slot):
            raise BadInput(problems)
        self.node, self._num_lost, self._unanswered = node, 0, ""
        return slot

    def _take(self, gpus: Sequence[str]) -> None:
        """Makes this slot the owner of the GPUs that Ray has given to it."""
        for gpu in gpus:
            other = self._owners.get(gpu, self)
            if other is not self and other._transport and not other._transport.link.is_lost:
                raise BadInput(
                    f"launcher: slots {other._name} and {self._name} have the same GPU, got {gpu}. Two raylets offer it: start "
                    "one for each machine, or start each with its own CUDA_VISIBLE_DEVICES."
                )
            self._owners[gpu] = self
        self._num_given = len(gpus)

    def _ask_to_open(self, node: Node, note: Path | None) -> Message:
        with _token(Path(self._place.runs_dir)) as token:
            return node.ask(
                "open",
                ANSWER_S,
                environment=dict(os.environ),
                cwd=self._place.cwd,
                program=self._place.program,
                runs_dir=os.path.abspath(self._place.runs_dir),
                token=token,
                note=os.path.abspath(note) if note else "",
                device=list(self._place.device),
                graces=dataclasses.asdict(self._graces),
                slot=self._name,
                tuner=identity(),
            )


class RemoteRunning(Running):
    """A trial on a node, or one that waits for a node."""

    def __init__(self, launcher: RemoteLauncher, launch: Launch, *, has_neighbours: bool) -> None:
        self._launcher, self._launch, self._has_neighbours = launcher, launch, has_neighbours
        self._node: Node | None = None
        self._about: dict[str, Any] = {}
        self._newest: Progress | None = None
        self._ended: Ended | None = None
        self._started_s, self._next_s = time.monotonic(), 0.0

    @property
    def is_on_node(self) -> bool:
        """Whether the trial runs on a node, as far as `poll` and `stop` have noticed."""
        return self._node is not None and self._ended is None

    def poll(self) -> Ended | None:
        """See `Running.poll`.

        Raises:
            NoNode: the trial waits for a node but none is available.
            BadInput: the node cannot start the trial.
        """
        if self._ended is None:
            try:
                self._step()
            except NodeLost as lost:
                self._lose(str(lost))
            except AutotuneError as error:
                self._ended = self._without_results(str(error))
                raise
        return self._ended

    def progress(self) -> Progress | None:
        """Returns the newest progress line of rank 0 on the node; the last known one if the trial is over or the node lost."""
        if self._node is not None and self._ended is None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PROGRESS_EVERY_S
            with contextlib.suppress(NodeLost), readable():  # `poll` will report the loss
                if raw := self._node.ask("progress", PROGRESS_S)["progress"]:  # None once the trial is over on the node
                    self._newest = from_json(raw, Progress)
        return self._newest

    def request_stop(self, reason: str) -> None:
        """See `Running.request_stop`."""
        if self._node is not None and self._ended is None:
            with contextlib.suppress(NodeLost):  # `poll` will report the loss
                self._node.tell("stop", reason=reason)

    def stop(self, reason: str) -> None:
        """See `Running.stop`."""
        with signals_held():
            if self._node is None:  # `poll` could start the trial
                self._ended = self._ended or self._without_results(reason)
                return
            if self.poll() is not None:
                return
            try:
                over = self._node.ask("stop", STOP_S, reason=reason).get("over")
                with readable():
                    is_over = over is not None and over["nonce"] == self._launch.spec.nonce
                if is_over:
                    self._take(over)
                else:  # the node refused the start, but an interrupt came before its refusal
                    self._ended = self._without_results(reason)
            except NodeLost as lost:
                self._lose(str(lost))

    def _step(self) -> None:
        """Starts the trial if it still waits for a node; otherwise checks whether it is over."""
        if self._node is not None:
            event = self._node.event()
            if event and event.get("nonce") == self._launch.spec.nonce:  # not a late message about an earlier trial
                self._take(event)
        elif node := self._launcher.ready():
            # `_node` is set first: if the user interrupts `begin`, the trial may run there, and must not be started twice.
            self._node, self._about, self._started_s = node, node.about, time.monotonic()
            self._launcher.begin(node, self._launch, has_neighbours=self._has_neighbours)

    def _take(self, event: Any) -> None:
        with readable():
            self._launcher.watched.seen, ended = from_json(event["watched"], Watched), to_ended(event["ended"])
            ended.facts(self._launch.spec)
        ended.evidence["node"] = self._about
        self._ended = ended

    def _lose(self, why: str) -> None:
        host = self._about.get("host") or "of the study"
        self._launcher.close()
        self._launcher.watched.seen = Watched()
        self._ended = self._without_results(f"node {host} was lost: {why}")
        self._ended.evidence |= {"node": self._about, "node_lost": True}

    def _without_results(self, reason: str) -> Ended:
        phase, seconds = self._newest.phase if self._newest else "spawn", time.monotonic() - self._started_s
        return Ended.stopped(reason, phase=phase, seconds=seconds if self._node else 0.0)


def unlike(first: Slot, slot: Slot, *, has_begun: bool = True) -> list[str]:
    """Returns a problem for each difference that makes the rates of two nodes incomparable.

    Args:
        first: the slot on one node.
        slot: the slot on the other node.
        has_begun: whether the study has begun on `first`; else the study needs both nodes to begin.
    """
    one, other = comparable(first.facts), comparable(slot.facts)
    began, do = "", "All slots need nodes of one kind. Request one kind, or give launch.slots=1."
    if has_begun:
        began, do = ", on which the study began", "Resume the study when a node like the first is free: autotune resume."
    return [
        f"launcher: node {slot.host} is unlike node {first.host}{began}, got {name} {other[name]!r} "
        f"instead of {one[name]!r}. {do}"
        for name in one
        if one[name] != other[name]
    ]


def _check_version(hello: Message) -> None:
    if hello["autotune"] != autotune.__version__:
        raise BadInput(
            f"launcher: node {hello['host']} has another version of autotune, got {hello['autotune']} in {hello['package']}. "
            f"This is {autotune.__version__} in {PACKAGE}, run by {sys.executable}. Install the same version on both."
        )


@contextlib.contextmanager
def _token(runs_dir: Path) -> Iterator[str]:
    """Makes a file in the runs folder, so that a node can show that it sees the same folder; yields the file's name."""
    try:
        runs_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        for left in left_by_killed(runs_dir, TOKEN):
            with contextlib.suppress(OSError):
                left.unlink()
        with tempfile.NamedTemporaryFile(dir=runs_dir, prefix=own_prefix(), suffix=TOKEN) as file:
            lock(file.fileno())
            yield Path(file.name).name
    except OSError as error:
        raise BadInput(
            f"runs_dir: cannot be written ({error.strerror}), got {str(runs_dir)!r}. Give another folder."
        ) from error
