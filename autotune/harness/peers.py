"""Measures processes of one trial that train at the same time without torch.distributed.

In Hogwild training, several processes train one model whose parameters are in shared memory, each at its own pace. Their rates
are added up over a span in which all of them are past their warm-up. Processes that do not share the memory of their parameters
are refused, because the harness cannot know how they belong together: they may be independent trainings, or ranks of a library
that averages gradients itself.

Each process that trains claims a file in the trial's folder at its first step. While a process sees other processes' claims, it
renews its own claim regularly. This distinguishes processes that train now from processes that have finished or were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Dict, Optional, Tuple

from . import protocol
from .blocks import Blocks
from .context import TrialContext
from .cores import read
from .interval import mean_half_width_frac

# Name of a claim's file, with the claim's number. It holds {"host", "pid", "memory", "beat", "open_s", "full_s"}: "memory" is
# `_shared_memory`, "beat" counts renewals, "open_s" and "full_s" are `Peers._open_s` and `Peers._full_s`.
CLAIM = "peer{}.json"
LEADER = "peer.leader.json"  # written by rank 0 of a process group; holds {"host", "pid"}
# Minimum seconds between two looks (`Peers.look`): with other processes, and without. Each look takes time from the training.
LOOK_S, ALONE_LOOK_S = 0.1, 0.5
MIN_RENEWALS = 2  # another process counts as training once it has renewed its claim this many times
# A peer counts as having stopped training if it has not renewed its claim for SILENT_S seconds and for SILENT_LOOKS times the
# time between our last two looks.
SILENT_S, SILENT_LOOKS = 10.0, 5.0
# How long to wait, from this process's first step on, for processes that were started together with it: STARTS_MORE times as
# long as this process took until its first step, but at least PATIENCE_S and at most PATIENCE_MAX_S seconds.
PATIENCE_S, STARTS_MORE, PATIENCE_MAX_S = 5.0, 2.0, 15.0
APART = (
    "{} processes train at the same time without torch.distributed (pids {}), and share no model in memory: their steps "
    "cannot be measured together. Give a command that trains in one process, or in several with torch.distributed (torchrun)"
)
TWO_LEADERS = (
    "the nodes train in groups of their own: there is a rank 0 on {} and one on {}. Let all nodes meet at one place: the same "
    "--nnodes, --rdzv_endpoint and --rdzv_id of torchrun, or the same MASTER_ADDR and WORLD_SIZE"
)
LESS = (
    "one of several processes that trained together without torch.distributed has ended or has stopped making steps before all "
    "of them were measured. Let all of them train longer: more epochs, or more data"
)


class Peers:
    """Coordinates this process with the other training processes of its trial.

    Attributes:
        is_joint: whether other processes train the same parameters.
        span: begin and end, on the monotonic clock, of the common measurement; None until all processes have measured.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.is_joint = False
        self.span: Optional[Tuple[float, float]] = None
        self._host = os.uname().nodename
        self._is_leader = False
        self._number = -1  # number of the claim; -1 for none yet
        self._memory: Optional[str] = None
        self._beat = 0
        self._open_s: Optional[float] = None  # when this process's window opened
        self._full_s: Optional[float] = None  # when this process had made enough steps in that window
        self._first_s = self._last_look_s = 0.0
        self._next_look_s = 0.0
        self._seen: Dict[int, "tuple[int, int, float]"] = {}  # claim -> (last beat, number of renewals, time of the last one)
        self._active: Dict[int, Dict[str, Any]] = {}

    def claim(self) -> None:
        """Claims a file; called at the first step of a process that is in no process group."""
        self._first_s = time.monotonic()
        self._memory = self._shared_memory()
        for number in range(1000):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                self._number = number
                self._renew()
                return

    def lead(self) -> None:
        """Notes that this process is rank 0; ends the program if a group on another node has a rank 0 as well.

        Called at the first step of rank 0 of a process group.
        """
        self._is_leader, path = True, os.path.join(self._context.spec.folder, LEADER)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                json.dump({"host": self._host, "pid": self._context.pid}, file)
        except FileExistsError:
            other = _read(path)
            if other is not None and other["host"] != self._host:  # on this host, torchrun may have restarted rank 0
                self._context.ending.give_up(TWO_LEADERS.format(other["host"], self._host))

    def look(self, now_s: float) -> None:
        """Looks for other processes and announces this one; the window restarts if more processes train than before.

        If there are no other processes, this costs one access to the file system.
        """
        if self._number < 0 or now_s < self._next_look_s:
            return
        is_alone = not self._number and not self._seen and not os.path.exists(self._path(1))
        self._next_look_s = now_s + (ALONE_LOOK_S if is_alone else LOOK_S)
        if is_alone:
            return
        gap_s, self._last_look_s = now_s - (self._last_look_s or now_s), now_s
        active = self._others(now_s, max(SILENT_S, SILENT_LOOKS * gap_s))
        is_changed, is_less = active.keys() != self._active.keys(), not self._active.keys() <= active.keys()
        self._active = active
        if is_less:
            self._context.ending.give_up(LESS)
        elif is_changed:
            self._gather()
        self._note(now_s)
        self._renew()

    def _others(self, now_s: float, silent_s: float) -> Dict[int, Dict[str, Any]]:
        active = {}
        for number in range(1000):
            if number == self._number:
                continue
            if not os.path.exists(self._path(number)):
                break
            document = _read(self._path(number))
            if document is None:
                continue
            if document["host"] == self._host and not _is_alive(document["pid"]):
                self._seen.pop(number, None)
                continue
            beat, num_renewed, renewed_s = self._seen.get(number, (document["beat"], 0, now_s))
            if document["beat"] != beat:
                num_renewed, renewed_s = num_renewed + 1, now_s
            self._seen[number] = (document["beat"], num_renewed, renewed_s)
            if num_renewed >= MIN_RENEWALS and now_s - renewed_s < silent_s:
                active[number] = document
        return active

    def _gather(self) -> None:
        """Notes which processes now train together, and restarts the window because their number has changed."""
        context = self._context
        others = list(self._active.values())
        if any(other["memory"] is None or other["memory"] != self._memory for other in others):
            everyone = [(self._host, context.pid), *((other["host"], other["pid"]) for other in others)]
            is_one_host = len({host for host, _ in everyone}) == 1
            pids = ", ".join(str(pid) if is_one_host else f"{pid} on {host}" for host, pid in sorted(everyone))
            context.rank, context.world_size = 0, 1
            context.ending.give_up(APART.format(len(others) + 1, pids))
        self.is_joint = bool(others)
        numbers = sorted([self._number, *self._active])
        context.rank, context.world_size = numbers.index(self._number), len(numbers)
        self._open_s = self._full_s = None
        context.window.first_step()

    def _note(self, now_s: float) -> None:
        context = self._context
        if context.spec.mode == "measure" and context.phases.now != "steady":
            self._open_s = self._full_s = None
        elif self._open_s is None:
            self._open_s = now_s
        self._full_s = (self._full_s or now_s) if self._open_s is not None and context.last_step.is_enough() else None

    def is_waiting(self) -> bool:
        """Whether processes that were started together with this one may still begin to train."""
        patience_s = min(PATIENCE_MAX_S, max(PATIENCE_S, STARTS_MORE * (self._first_s - self._context.started_s)))
        if self._number < 0 or time.monotonic() - self._first_s >= patience_s:
            return False
        return bool(set(self._seen) - set(self._active)) or _has_relatives(is_child=self._context.is_child)

    def is_over(self) -> bool:
        """Returns whether all processes have measured; the process with the lowest claim number announces it to the others."""
        context = self._context
        path = os.path.join(context.spec.folder, protocol.STOP_FILE)
        if context.rank == 0:
            claims = [{"open_s": self._open_s, "full_s": self._full_s}, *self._active.values()]
            if any(claim["full_s"] is None for claim in claims):
                return False
            self.span = max(claim["open_s"] for claim in claims), max(claim["full_s"] for claim in claims)
            protocol.write_json(path, {"span": self.span, "pids": [claim["pid"] for claim in self._active.values()]})
            return True
        if not os.path.exists(path):
            return False
        with open(path, encoding="utf-8") as file:
            announced = json.load(file)
        self.span = tuple(announced["span"]) if context.pid in announced["pids"] else None
        return True

    def window(self) -> Optional[protocol.Window]:
        """Returns the window of this process over the common span; None if there was no such span."""
        context = self._context
        if self.span is None or context.window.meter is None:
            return None
        begin_s, end_s = (at_s - context.clock.origin_s for at_s in self.span)
        ends_s, samples, meter = context.window.steps["end_s"], context.window.steps["samples"], context.window.meter
        inside = [n for n in range(1, len(ends_s)) if ends_s[n - 1] >= begin_s and ends_s[n] <= end_s]
        if not inside:
            return None
        blocks = Blocks(meter.width, meter.rules.block_min_s)
        for n in inside:
            blocks.add(ends_s[n] - ends_s[n - 1], samples[n])
        seconds, total = ends_s[inside[-1]] - ends_s[inside[0] - 1], sum(samples[n] for n in inside)
        return protocol.Window(
            steps=len(inside),
            seconds=seconds,
            samples=total,
            rate_per_s=total / seconds,
            block_rates_per_s=blocks.rates_per_s,
            half_width_frac=mean_half_width_frac(blocks.rates_per_s, blocks.block_s)[0],
            is_steady=meter.is_steady,
            reason=meter.reason,
            block_s=blocks.block_s,
        )

    def has_answered(self, path: str) -> bool:
        """Returns whether `path` has another process's result that must stay: a refusal, or a peer's measurement."""
        is_among_peers = self._number > 0 or (self._number == 0 and os.path.exists(self._path(1)))
        if not (is_among_peers or self._is_leader):
            return False
        try:
            found = protocol.read_result(path)
        except (OSError, ValueError):
            return False
        is_refused = (found.error or {}).get("type") == protocol.UNMEASURABLE
        is_other = (found.host, found.pid) != (self._host, self._context.pid)
        return is_other and (is_refused or (is_among_peers and found.status == "measured"))

    def _path(self, number: int) -> str:
        return os.path.join(self._context.spec.folder, CLAIM.format(number))

    def _renew(self) -> None:
        self._beat += 1
        claim = {"host": self._host, "pid": self._context.pid, "memory": self._memory, "beat": self._beat}
        text = json.dumps({**claim, "open_s": self._open_s, "full_s": self._full_s})
        with contextlib.suppress(OSError):  # the disk is full or the folder is gone: the result will report it
            protocol.write_text(self._path(self._number), text, is_durable=False)

    def _shared_memory(self) -> Optional[str]:
        """Returns the name of the first trained parameter's memory, see `shared_at`."""
        optimizer = self._context.optimizers.counted()
        parameters = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
        tensor = next(iter(parameters or self._context.writes.watched()), None)
        if tensor is None or tensor.device.type != "cpu":
            return None
        return shared_at(tensor.data_ptr())


def shared_at(address: int) -> Optional[str]:
    """Returns a name for the shared memory at an address, the same in all processes that map it; None if it is private."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            area, rights, offset, device, inode = line.split()[:5]
            begin, end = (int(word, 16) for word in area.split("-"))
            if begin <= address < end:
                return f"{device}:{inode}:{int(offset, 16) + address - begin}" if rights.endswith("s") else None
    return None


def _read(path: str) -> Optional[Dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):  # it is just being written
        return None


def _is_alive(pid: int) -> bool:
    state = read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return bool(state) and state[0] not in ("Z", "X")


def _has_relatives(*, is_child: bool) -> bool:
    """Whether this process has children other than daemons, or multiprocessing has started other processes together with it."""
    import multiprocessing

    if any(not child.daemon for child in multiprocessing.active_children()):
        return True
    if not is_child:
        return False
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
            return len([pid for pid in file.read().split() if "resource_tracker" not in read(f"/proc/{pid}/cmdline")]) > 1
    except OSError:  # the kernel does not list them
        return True
