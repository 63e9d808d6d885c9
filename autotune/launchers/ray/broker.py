"""Connects the tuner to an agent (node.py) on a node of a Ray cluster: `PYTHON broker.py REQUEST`, a child of the tuner.

Ray is imported here and nowhere else: when the head of a cluster dies, Ray ends every process that is connected to the cluster.
PYTHON may be another interpreter than the tuner's, because Ray requires the cluster's own versions of Python and Ray. So this
program needs only Ray and the standard library of Python 3.9, and it is run as a file, not as a module of autotune.

This program's standard input and output are the tuner's end of the link. Calls to an actor on the node carry the bytes, so no
separate port is needed. The actor starts the agent in a separate session, so that Ray does not find and end the agent. The
agent exits when its pipes to the actor close. They close no matter how the actor, its raylet or this program ends.

REQUEST is a JSON object:

    "address"           `launch.ray.address`
    "cpus", "gpus"      numbers that the agent needs; "gpus": null means "num_processes" if the cluster has GPUs, else 0
    "num_processes"     number of processes of a trial
    "may_wait"          whether to wait for a node that the cluster does not have yet
    "is_again"          whether the study had a node before; if so, this program waits for the head, too
    "num_slots"         number of brokers that request the same resources
    "agent"             the agent's command

This program reports on standard error, in lines that begin with SAID: {"waiting": why}, {"refused": kind, "words": why} or
{"lost": why}.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

# Ray passes this list on to its workers, which must not import modules from this file's folder.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

SAID = "autotune-broker: "
CONNECT_S = 5.0  # longest wait for a TCP connection to the head
LOOK_S = 2.0  # pause between two checks of why the actor waits
READ_S = 5.0  # a call that waits for the agent's bytes returns after this time if there are none
RETRY_S = 0.2  # pause before a call to the actor is repeated
LEAVE_S = 14.0  # the agent is killed if it has not exited this many seconds after the tuner closed the link
KILL_S = 1.0  # longest wait for a call that kills the agent
CHUNK_BYTES = 1 << 20
MAX_WORDS_BYTES = 1 << 14  # the tuner gets at most this much of the agent's standard error
CLUSTER = "autotune"  # Ray's namespace for the actor
# The only variables that the agent gets from Ray's worker. Later, the tuner sends the user's environment to the agent.
KEPT = (
    "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER",
    "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
)  # fmt: skip
# Forks a grandchild of the worker. The grandchild takes over the niceness, OOM score and umask of the tuner (`inherited`) and
# becomes the agent. Ray's workers have niceness 15, are killed first when memory is short, and may ignore SIGCHLD. Only root
# may lower a niceness.
DETACH = """
import os, signal, sys
if pid := os.fork():
    os.write(1, b"%d" % pid)
    os._exit(0)
nice, oom, umask, out = map(int, sys.argv[1:5])
os.dup2(out, 1)
os.close(out)
os.umask(umask)
try:
    open("/proc/self/oom_score_adj", "w").write(str(oom))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
except OSError:
    pass
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_DFL)
    except OSError:
        pass
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execv(sys.argv[5], sys.argv[5:])
"""


class Relay:
    """The actor: starts the agent on its node, and passes on bytes. It is safe to repeat any call except `start`."""

    def start(self, argv: list[str], inherited: list[int]) -> None:
        """Starts the agent. `inherited` is the result of the function `inherited` on the tuner's machine."""
        import ray

        context = ray.get_runtime_context()
        theirs, self._in = os.pipe()
        self._out, ours = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (what the agent prints to standard error)
        self._num_written = self._num_read = 0
        self._unread = bytearray()
        self._writing, self._reading = threading.Lock(), threading.Lock()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        # Ray may leave CUDA_VISIBLE_DEVICES unset, so that an actor without GPUs would see all GPUs of the node.
        gpus = sorted(context.get_accelerator_ids().get("GPU", []), key=lambda each: (len(each), each))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        started = subprocess.run(
            [sys.executable, "-I", "-S", "-c", DETACH, *map(str, inherited), str(ours), *argv],
            stdin=theirs,
            stdout=subprocess.PIPE,
            pass_fds=[ours],
            stderr=self._log,
            cwd="/",
            env={**environment, "RAY_JOB_ID": context.get_job_id()},
            start_new_session=True,
            check=True,
        )
        self._agent = os.pidfd_open(int(started.stdout))
        os.close(theirs)
        os.close(ours)

    def write(self, offset: int, data: bytes) -> None:
        """Writes to the agent; `offset` is the number of bytes sent before `data`."""
        with self._writing, contextlib.suppress(OSError):  # `read` notices if the agent is gone
            left = memoryview(data)[self._num_written - offset :]
            while left:
                num = os.write(self._in, left)
                self._num_written += num
                left = left[num:]

    def close(self) -> None:
        """Closes the agent's standard input, so that the agent exits."""
        with self._writing:
            if self._in >= 0:
                os.close(self._in)
            self._in = -1

    def kill(self) -> None:
        """Kills the agent. Its supervisor then ends the trial."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._agent, signal.SIGKILL)

    def read(self, offset: int, wait_s: float) -> bytes | None:
        """Returns what the agent wrote after its first `offset` bytes; b"" if nothing comes in `wait_s`; None after its end."""
        with self._reading:
            del self._unread[: offset - self._num_read]
            self._num_read = offset
            if not self._unread and select.select([self._out], [], [], wait_s)[0]:
                self._unread += os.read(self._out, CHUNK_BYTES)
                if not self._unread:
                    return None
            return bytes(self._unread)

    def words(self) -> str:
        """Returns the end of the agent's standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), MAX_WORDS_BYTES, max(0, size - MAX_WORDS_BYTES)).decode("utf-8", "replace")


class Inbox:
    """Reads standard input in a thread, so that the tuner's exit is noticed at any time.

    Attributes:
        closed_s: when the tuner closed its end, monotonic clock; infinite until then.
    """

    def __init__(self) -> None:
        self.closed_s = math.inf
        self._data = bytearray()
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def take(self) -> bytes:
        """Waits for bytes that were not returned before, and returns them; b"" once the tuner has closed its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._data or self.closed_s < math.inf)
            data, self._data = bytes(self._data), bytearray()
            return data

    def _serve(self) -> None:
        while data := os.read(0, CHUNK_BYTES):
            with self._changed:
                self._data += data
                self._changed.notify()
        with self._changed:
            self.closed_s = time.monotonic()
            self._changed.notify()


def say(**fields: str) -> None:
    """Reports something to the tuner."""
    sys.stderr.write(f"\n{SAID}{json.dumps(fields)}\n")
    sys.stderr.flush()


def leave(status: int, **fields: str) -> NoReturn:
    """Reports `fields` to the tuner, if there are any, and ends this program. Ray then ends the actor."""
    if fields:
        say(**fields)
    sys.stdout.flush()
    with contextlib.suppress(Exception):
        ray.shutdown()
    os._exit(status)


def plainly(error: Exception) -> str:
    """Returns an error's message without Ray's indented lines of identifiers."""
    return " ".join(" ".join(line for line in str(error).splitlines() if not line.startswith("\t")).split())


def import_ray() -> Any:
    """Returns the module `ray`; ends this program if it cannot be imported."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else Ray would start a cluster on a call made after the connection has ended
    try:
        import ray
    except ImportError as error:
        say(refused="ray", words=str(error))
        os._exit(1)
    return ray


def connect(request: dict[str, Any], inbox: Inbox) -> None:
    """Connects to the cluster. If that fails, ends this program, or waits for the head if the study had a node before."""
    address, said = request["address"], ""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    if address == "local" or "://" in address:  # Ray would start a cluster, or run the driver elsewhere
        leave(1, refused="address", words=f"RAY_ADDRESS={address}: not HOST:PORT")
    while why := why_unreachable(address):
        if not request["is_again"] or "ersion mismatch" in why:
            leave(1, refused="version" if "ersion mismatch" in why else "address", words=why)
        if inbox.closed_s < math.inf:
            leave(0)
        if why != said:
            said = why
            say(waiting=f"Ray's head does not answer ({why})")
        time.sleep(LOOK_S)


def why_unreachable(address: str) -> str:
    """Connects to the cluster. Returns "" or, if that fails, why the cluster cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        return f"{address}: {error}"
    try:
        ray.init(address=address, namespace=CLUSTER, log_to_driver=False, logging_level="error")
    except Exception as error:
        told = plainly(error)
        has_token = "; a cluster that asks for a token needs RAY_AUTH_MODE=token and that token"
        return told.rstrip(".") + has_token * ("Failed to connect" in told)
    return ""


def wanted(request: dict[str, Any]) -> dict[str, int]:
    """Returns the resources that the actor requests. Unless `may_wait`, ends this program if no node can provide them now."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max((node.get("GPU", 0) for node in nodes), default=0)
    gpus = request["gpus"]
    if gpus is None:
        gpus = request["num_processes"] if most else 0
    asked = {"CPU": request["cpus"], "GPU": gpus}
    if not request["may_wait"] and not any(all(node.get(name, 0) >= asked[name] for name in asked) for node in nodes):
        refused = "gpus" if gpus > most else "cpus"
        have = "; ".join(sorted({in_words({name: node.get(name, 0) for name in asked}) for node in nodes}))
        leave(1, refused=refused, words=f"nodes have {have}")
    num, names = request["num_slots"], [name for name in asked if asked[name]]
    places = sum(min((int(node.get(name, 0)) // asked[name] for name in names), default=num) for node in nodes)
    if not request["may_wait"] and places < num:
        leave(1, refused="slots", words=f"room for {places}, each with {in_words({name: asked[name] for name in names})}")
    return asked


def why_waiting(asked: dict[str, int]) -> str:
    """Returns a sentence about the resources for which the actor waits."""
    free, there = ray.available_resources(), ray.cluster_resources()
    names = [name for name in asked if asked[name]]
    parts = [f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}s free" for name in names]
    return f"Ray has no node for {in_words({name: asked[name] for name in names})} yet ({', '.join(parts)})"


def in_words(resources: dict[str, Any]) -> str:
    """Returns resources as text: "2 GPUs, 8 CPUs"."""
    return ", ".join(f"{value:g} {name}{'' if value == 1 else 's'}" for name, value in sorted(resources.items(), reverse=True))


def started(request: dict[str, Any], inbox: Inbox) -> Any:
    """Returns the actor once the agent has been started on its node; ends this program if that fails or the tuner is gone."""
    asked = wanted(request)
    options = {"num_cpus": asked["CPU"], "num_gpus": asked["GPU"], "max_restarts": 0, "max_task_retries": 0}
    said = ""
    while True:
        relay = ray.remote(Relay).options(max_concurrency=8, **options).remote()
        ready = relay.start.remote(request["agent"], inherited())
        while not ray.wait([ready], timeout=LOOK_S)[0]:
            if inbox.closed_s < math.inf:
                leave(0)
            if (why := why_waiting(asked)) != said:
                said = why
                say(waiting=why)
        try:
            ray.get(ready)
            return relay
        except ray.exceptions.ActorUnavailableError:  # this actor may or may not have started the agent: try another one
            ray.kill(relay)
        except ray.exceptions.RayError as error:
            leave(1, refused="actor", words=plainly(error))


def inherited() -> list[int]:
    """Returns niceness, oom_score_adj and umask of this process, which inherited them from the tuner."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom = int(file.read())
    umask = os.umask(0o77)
    os.umask(umask)
    return [os.getpriority(os.PRIO_PROCESS, 0), oom, umask]


def call(method: Any, *arguments: Any) -> Any:
    """Returns what a method of the actor returns. Tries again while the actor cannot be reached.

    Raises:
        RayError: the actor is dead.
    """
    while True:
        try:
            return ray.get(method.remote(*arguments))
        except ray.exceptions.ActorUnavailableError:
            time.sleep(RETRY_S)


def send(relay: Any, inbox: Inbox) -> None:
    """Passes on the tuner's bytes until the tuner closes the link."""
    offset = 0
    with contextlib.suppress(ray.exceptions.RayError):  # the actor is dead: `receive` raises this error, too
        while data := inbox.take():
            call(relay.write, offset, data)
            offset += len(data)
        call(relay.close)


def receive(relay: Any, inbox: Inbox, out: int) -> None:
    """Passes on the agent's bytes until the agent ends, but at most until LEAVE_S after the tuner closed the link."""
    offset = 0
    while time.monotonic() < inbox.closed_s + LEAVE_S and (data := call(relay.read, offset, READ_S)) is not None:
        offset += len(data)
        left = memoryview(data)
        while left:
            left = left[os.write(out, left) :]


def main() -> None:
    """Runs the broker; see the module docstring."""
    request, out, inbox = json.loads(sys.argv[1]), os.dup(1), Inbox()
    os.dup2(2, 1)  # what Ray prints must not go into the link
    connect(request, inbox)
    relay = started(request, inbox)
    threading.Thread(target=send, args=(relay, inbox), daemon=True).start()
    try:
        receive(relay, inbox, out)
        words = call(relay.words)
        sys.stderr.write(words)  # unchanged, because `ChildTransport.unseen` looks for a message of the agent's command in them
        say(lost=f"its agent ended ({words.strip().rpartition(chr(10))[2] or 'it printed nothing'})")
    except (BrokenPipeError, SystemExit):  # the tuner is gone, or wants this program to end
        pass
    except ray.exceptions.RayError as error:
        leave(1, lost=plainly(error))
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(relay.kill.remote(), timeout=KILL_S)
    leave(0)


if __name__ == "__main__":
    ray = import_ray()
    main()
