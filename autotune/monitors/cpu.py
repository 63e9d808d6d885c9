"""Measures the CPU time of this study, the kernel and foreign processes, and how long the trial's threads wait for a core.

A look (`CpuLook`) reads each process's line in /proc once (measured: 2 ms for 100 processes). Looks are taken only at the start
and the end of a measurement. The study is the tuner's process and its descendants: supervisor, trial, tracker. A process's time
includes the time of the children it has waited for. So a trial that has exited by the second look is counted in its parent.
Kernel threads and interrupts are not foreign: they mostly work for the measured trial (writing back its files, decrypting what
it reads), and are part of the machine.

Without a cgroup quota, busy and idle time come from the lines of /proc/stat for the cores that the tuner may use. This holds in
a container, too: any process of the host can take a core that the trial could use. With a quota, these lines would mostly show
other work on the host. Busy time then comes from the cgroup's own usage, and the quota is the number of cores.

A trial may be bound to fewer cores than the tuner (`autotune run -- taskset -c 0 ...`). Then only the trial's cores count,
because use of other cores takes nothing from the trial.

A study may run trials in parallel on several slots, each with its own monitor. Slots may share the cores of one machine. Trials
on other slots are not foreign, because autotune/study/interference.py measures how much such trials slow each other down. They
are recognised by their mark, an environment variable that names the study. On a cluster, the agent (autotune's process on the
node) monitors the node. If the tuner runs on the same node, the tuner is not foreign, either.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autotune.harness.cores import read
from autotune.harness.protocol import MARK_VARIABLE
from autotune.monitors.host import CGROUPS, PROC, cgroup_quota
from autotune.plain_text import one_line

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000  # PF_KTHREAD of linux/sched.h, in the flags of /proc/<pid>/stat
SCRIPTS = (".py", ".sh", ".pl", ".rb", ".R", ".jar")  # endings of arguments that name what a program runs
NAMED_CORES = 0.05  # foreign processes that use fewer cores than this are not named
COVERED_FRAC = 0.5  # `WaitingWatch` has a result only if its readings cover more than this share of the window


Times = tuple[float, float, float]  # busy, idle and steal seconds of a core


@dataclass(frozen=True, kw_only=True)
class Process:
    """One line of the process table.

    Attributes:
        parent: id of the parent.
        started_ticks: start time since boot; together with the id it is unique.
        own_s: CPU time of all its threads.
        waited_for_s: CPU time of the children that it has waited for, including the children that those have waited for.
        is_kernel: whether it is a kernel thread.
        core: where its main thread ran last; None if unknown.
    """

    parent: int
    started_ticks: int
    own_s: float
    waited_for_s: float
    is_kernel: bool
    core: int | None = None


@dataclass(frozen=True, kw_only=True)
class CpuLook:
    """Counters at one moment; the difference of two looks is what happened between them.

    Attributes:
        time_s: monotonic clock.
        num_cores: how many cores the tuner may use, as limited by affinity or quota.
        busy_s: CPU time used on these cores or, with a quota, by the cgroup; None if unknown.
        idle_s: unused CPU time of these cores; None if unknown, as with a quota.
        steal_s: CPU time that the hypervisor gave to other guests; None if unknown.
        processes: all visible processes, by id.
        read_bytes: bytes that this study has read, as (in all, from disk); None if unknown.
        by_core: core -> (busy, idle, steal) in s, for every core in /proc/stat; {} with a quota, or if unknown.
        own: ids of this study's processes, without other slots; None stands for the tuner and all its descendants.
        neighbours: ids of processes that belong to the study but not to `own`: trials on other slots that may use the same
            cores, and the tuner if a cluster's agent is the monitoring process.
    """

    time_s: float
    num_cores: float
    busy_s: float | None
    idle_s: float | None
    steal_s: float | None
    processes: Mapping[int, Process]
    read_bytes: tuple[int, int] | None = None
    by_core: Mapping[int, Times] = field(default_factory=dict)
    own: frozenset[int] | None = None
    neighbours: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """CPU use between two looks; None means unknown, never zero.

    Attributes:
        seconds: time between the two looks.
        num_cores: largest number of cores that the trial may use.
        is_part: whether the machine has more cores than `num_cores`. Then `culprits` may also have used other cores.
        own_cores: cores used by this study. Here and below, 1.0 is one core in use all the time.
        tuner_cores: cores of the trial used by autotune itself (tuner, supervisor, tracker).
        foreign_cores: cores used by foreign processes: neither the study's, nor the kernel's, nor trials on other slots.
        kernel_cores: used by the kernel threads that are visible.
        idle_cores: unused.
        steal_cores: given to other guests by the hypervisor.
        culprits: the foreign processes that used the most, at most three, as (process id, cores), largest first.
        waiting_cores: mean number of the study's threads that were ready to run but had no core, because foreign threads or
            other threads of the study used all cores.
        read_bytes, disk_bytes: bytes that this study has read, in all and from disk.
    """

    seconds: float
    num_cores: float
    own_cores: float
    is_part: bool = False
    tuner_cores: float | None = None
    foreign_cores: float | None = None
    kernel_cores: float | None = None
    idle_cores: float | None = None
    steal_cores: float | None = None
    culprits: tuple[tuple[int, float], ...] = field(default=())
    waiting_cores: float | None = None
    read_bytes: int | None = None
    disk_bytes: int | None = None

    def metrics(self) -> dict[str, float]:
        """Returns {name in the tracker: value}; unknown metrics are absent."""
        users = ("own", "tuner", "foreign", "kernel", "idle", "waiting", "steal")
        known = {
            **{f"host.{user}_cores": getattr(self, f"{user}_cores") for user in users},
            "host.read_bytes_per_s": None if self.read_bytes is None else self.read_bytes / self.seconds,
            "host.disk_bytes_per_s": None if self.disk_bytes is None else self.disk_bytes / self.seconds,
        }
        return {name: float(value) for name, value in known.items() if value is not None}


class CpuMonitor:
    """Measures CPU use for one study. Without /proc everything is unknown.

    Args:
        root: id of the root of the study's process tree, the tuner or a cluster's agent; None for this process.
        proc, cgroups: folders of the kernel's files; replaced in tests.
        slot: cores of the slot to watch; processes bound to other cores belong to other slots. Empty without slots.
        tuner: id and start of the tuner (see `identity`), which may run on another machine; None if this process is the tuner.

    Attributes:
        study: processes whose mark begins with this text are trials on other slots, so not foreign; "" if there are no such
            trials.
    """

    def __init__(
        self,
        root: int | None = None,
        *,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
        slot: Collection[int] = (),
        tuner: tuple[int, int] | None = None,
    ) -> None:
        self.study, self._tuner = "", tuner
        self._root, self._proc, self._slot = root or os.getpid(), proc, frozenset(slot)
        self._cores = sorted(os.sched_getaffinity(0))
        found = cgroup_quota(proc, cgroups)
        self._quota = found if found and found.cores < len(self._cores) else None

    def look(self, now_s: float) -> CpuLook:
        """Returns the counters at this moment. `now_s` is the monotonic time that the look gets."""
        processes, by_core = read_processes(self._proc), self._times()
        own = frozenset(pid for pid in tree(processes, self._root) if _may_use(pid, self._slot))
        busy_s, idle_s, steal_s = _sums(by_core, self._cores)
        if self._quota and busy_s is not None:
            busy_s, idle_s = self._quota.used_s(), None
        return CpuLook(
            time_s=now_s,
            num_cores=self._quota.cores if self._quota else float(len(self._cores)),
            busy_s=busy_s,
            idle_s=idle_s,
            steal_s=steal_s,
            processes=processes,
            read_bytes=self._read_bytes(own),
            by_core={} if self._quota else by_core,
            own=own,
            neighbours=self._neighbours(processes) - own,
        )

    def own(self, look: CpuLook) -> frozenset[int]:
        """Returns the ids of this study's processes, without trials on other slots."""
        return tree(look.processes, self._root) if look.own is None else look.own

    def trial(self, look: CpuLook) -> frozenset[int]:
        """Returns the ids of the trial's processes: the tuner's descendants except its children, which belong to autotune."""
        parents = {pid: look.processes[pid].parent for pid in self.own(look) if pid != self._root}
        return frozenset(pid for pid, parent in parents.items() if parent != self._root)

    def use(self, before: CpuLook, after: CpuLook, cores: frozenset[int] = frozenset()) -> CpuUse | None:
        """Returns the CPU use between two looks; None if no time has passed.

        Args:
            before: the first look.
            after: the second look.
            cores: the cores that the trial may use. Use of other cores is ignored, since it takes nothing from the trial. Empty
                stands for the tuner's cores.
        """
        seconds = after.time_s - before.time_s
        if seconds <= 0:
            return None
        own = self.own(before), self.own(after)
        own_s = _total_s(after.processes, own[1]) - _total_s(before.processes, own[0])
        beside_s = _total_s(after.processes, after.neighbours) - _total_s(before.processes, before.neighbours)
        here = cores if cores <= before.by_core.keys() & after.by_core.keys() else frozenset()
        here = here or frozenset(self._cores)
        kernel_s, _ = _used_s(before, after, [pid for pid, one in after.processes.items() if one.is_kernel], here)
        tuner_s, elsewhere_s = _used_s(before, after, own[1] - self.trial(after), here)
        beside_s -= _used_s(before, after, after.neighbours, here)[1]
        (busy_s, idle_s, steal_s), num_cores = _between(before, after, cores and here), float(len(here))
        foreign_s = None
        if busy_s is not None:
            of_kernel_s = 0.0 if self._quota else kernel_s  # a cgroup's usage does not contain kernel threads
            foreign_s = max(0.0, busy_s - (own_s - elsewhere_s) - max(0.0, beside_s) - of_kernel_s)
        reads = before.read_bytes, after.read_bytes
        return CpuUse(
            seconds=seconds,
            num_cores=num_cores if cores and after.by_core else after.num_cores,
            is_part=0 < num_cores < len(after.by_core),
            own_cores=max(0.0, own_s) / seconds,
            tuner_cores=tuner_s / seconds if after.processes else None,
            foreign_cores=None if foreign_s is None else foreign_s / seconds,
            kernel_cores=kernel_s / seconds if any(process.is_kernel for process in after.processes.values()) else None,
            idle_cores=None if idle_s is None else max(0.0, idle_s) / seconds,
            steal_cores=None if steal_s is None else max(0.0, steal_s) / seconds,
            culprits=_culprits(
                before.processes, after.processes, own[0] | own[1] | before.neighbours | after.neighbours, seconds, here
            ),
            read_bytes=reads[1][0] - reads[0][0] if reads[0] and reads[1] else None,
            disk_bytes=reads[1][1] - reads[0][1] if reads[0] and reads[1] else None,
        )

    def _neighbours(self, processes: Mapping[int, Process]) -> frozenset[int]:
        """Returns the ids of marked processes, the tuner, and descendants of these, if they may use this monitor's cores."""
        pid, started_ticks = self._tuner or (0, 0)
        marked = [pid] if pid in processes and processes[pid].started_ticks == started_ticks else []
        if self.study:
            mark = "\0" + os.fsencode(f"{MARK_VARIABLE}={self.study}").decode(errors="replace")
            marked += [pid for pid in processes if mark in "\0" + read(self._proc / str(pid) / "environ")]
        return frozenset(pid for pid in tree(processes, *marked) if _may_use(pid, frozenset(self._cores)))

    def _times(self) -> dict[int, Times]:
        """Returns busy, idle and steal seconds of each core; {} without /proc."""
        found = {}
        for line in read(self._proc / "stat").splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                user, nice, system, idle, waiting, _, _, steal = [int(tick) / TICKS_PER_S for tick in [*ticks, "0"][:8]]
                found[int(name[3:])] = (user + nice + system, idle + waiting, steal)
        return found

    def _read_bytes(self, own: frozenset[int]) -> tuple[int, int] | None:
        """Returns the bytes read by processes and the children they waited for, as (in all, from disk); None if unknown."""
        everything = from_disk = 0
        for pid in own:
            fields = dict(line.split(": ") for line in read(self._proc / str(pid) / "io").splitlines())
            everything, from_disk = everything + int(fields.get("rchar", 0)), from_disk + int(fields.get("read_bytes", 0))
        return (everything, from_disk) if everything else None


def read_processes(proc: Path = PROC) -> dict[int, Process]:
    """Returns every visible process, by id."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir(proc):
            if name.isdigit() and (process := _process(f"{proc}/{name}/stat")):
                found[int(name)] = process
    return found


def identity() -> tuple[int, int]:
    """Returns the id and the start (`Process.started_ticks`) of this process; no other process on this machine has both."""
    found = _process(f"{PROC}/self/stat")
    return os.getpid(), found.started_ticks if found else 0


def tree(processes: Mapping[int, Process], *roots: int) -> frozenset[int]:
    """Returns the ids of `roots` and of all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, new = set(roots), list(roots)
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        found.update(new)
    return frozenset(found)


def cores_of(pids: Iterable[int]) -> frozenset[int]:
    """Returns the cores that any thread of these processes may use; empty if that cannot be read."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # exited
            found.update(*(os.sched_getaffinity(int(thread)) for thread in os.listdir(f"{PROC}/{pid}/task")))
    return frozenset(found)


def describe(pid: int) -> str:
    """Returns a description for a message: "python hog.py, pid 4242", or the autotune study that the process belongs to."""
    try:
        process = psutil.Process(pid)
        command = command_text(process)
    except (psutil.Error, OSError):
        return f"pid {pid}, which has ended"
    try:
        study, _, _ = str(process.environ().get(MARK_VARIABLE, "")).rpartition(":")
    except (psutil.Error, OSError):  # a process of another user
        study = ""
    return f"another autotune study, {study}, pid {pid}" if study else f"{command}, pid {pid}"


def command_text(process: psutil.Process) -> str:
    """Returns a process's program and script, "python hog.py", without the rest of its command line, which may hold secrets.

    Raises:
        psutil.Error: the process has ended or belongs to another user.
    """
    program, *arguments = process.cmdline() or [process.name()]
    scripts = [os.path.basename(argument) for argument in arguments if argument.endswith(SCRIPTS)]
    return one_line(" ".join([os.path.basename(program), *scripts[:1]]), 60)


def _process(file: str) -> Process | None:
    try:
        with open(file, "rb", buffering=0) as opened:
            fields = opened.read(1024).rpartition(b")")[2].split()  # the name in parentheses may contain anything
        user, system, waited_user, waited_system = (int(field) / TICKS_PER_S for field in fields[11:15])
        return Process(
            parent=int(fields[1]),
            started_ticks=int(fields[19]),
            own_s=user + system,
            waited_for_s=waited_user + waited_system,
            is_kernel=bool(int(fields[6]) & KERNEL_THREAD),
            core=int(fields[36]) if len(fields) > 36 else None,
        )
    except (OSError, ValueError, IndexError):  # exited meanwhile
        return None


def _total_s(processes: Mapping[int, Process], members: frozenset[int]) -> float:
    return sum(processes[pid].own_s + processes[pid].waited_for_s for pid in members if pid in processes)


def _used_s(before: CpuLook, after: CpuLook, pids: Iterable[int], cores: frozenset[int]) -> tuple[float, float]:
    """Returns the seconds of CPU time that processes used between two looks, as (on `cores`, on other cores), without children.

    All time of a process counts as used on `cores` if the process was there at either look. A process that is absent from one
    of the looks counts as 0.
    """
    here_s = elsewhere_s = 0.0
    for pid in pids:
        first, last = before.processes.get(pid), after.processes.get(pid)
        used_s = max(0.0, last.own_s - first.own_s) if first and last else 0.0
        if first and last and (_was_on(first, cores) or _was_on(last, cores)):
            here_s += used_s
        else:
            elsewhere_s += used_s
    return here_s, elsewhere_s


def _was_on(process: Process, cores: frozenset[int]) -> bool:
    return process.core is None or not cores or process.core in cores


def _may_use(pid: int, cores: frozenset[int]) -> bool:
    try:
        return not cores or bool(os.sched_getaffinity(pid) & cores)
    except OSError:  # exited
        return True


def _sums(by_core: Mapping[int, Times], cores: Iterable[int]) -> tuple[float | None, float | None, float | None]:
    """Returns busy, idle and steal seconds, each summed over `cores`; all None if `by_core` lacks any of them."""
    found = [by_core.get(core) for core in cores]
    if not found or None in found:
        return None, None, None
    busy_s, idle_s, steal_s = (sum(column) for column in zip(*filter(None, found), strict=True))
    return busy_s, idle_s, steal_s


def _between(before: CpuLook, after: CpuLook, cores: frozenset[int]) -> tuple[float | None, float | None, float | None]:
    """Returns busy, idle and steal seconds between two looks on `cores`. If `cores` is empty, the tuner's cores count."""
    looks = [
        _sums(look.by_core, sorted(cores)) if cores and look.by_core else (look.busy_s, look.idle_s, look.steal_s)
        for look in (before, after)
    ]
    busy_s, idle_s, steal_s = (None if one is None or two is None else two - one for one, two in zip(*looks, strict=True))
    return busy_s, idle_s, steal_s


def _culprits(
    before: Mapping[int, Process],
    after: Mapping[int, Process],
    own: frozenset[int],
    seconds: float,
    cores: frozenset[int],
) -> tuple[tuple[int, float], ...]:
    used = []
    for pid, process in after.items():
        if pid in own or process.is_kernel:
            continue
        earlier = before.get(pid)
        is_same = earlier is not None and earlier.started_ticks == process.started_ticks
        num_cores = (process.own_s - (earlier.own_s if earlier and is_same else 0.0)) / seconds
        if num_cores >= NAMED_CORES and _may_use(pid, cores):
            used.append((pid, num_cores))
    return tuple(sorted(used, key=lambda entry: -entry[1])[:3])


class WaitingWatch:
    """Measures how long a trial's threads were ready to run but had no core: the kernel's run-queue delay of each thread.

    The amount of foreign load does not show what the load costs a trial. While another program used one of two cores, a trial
    with one thread was not slowed down (1.07 times its usual speed), but one with two threads nearly stopped (0.06 times). A
    thread's counter disappears with the thread, so the counters must be read about once a second while the trial runs.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last: dict[str, int] = {}
        self._last_s: float | None = None
        self._waited_s = self._seconds = 0.0

    def waiting_cores(self, seconds: float) -> float | None:
        """Returns the mean number of waiting threads between the first look and the last.

        Returns None if the looks cover at most COVERED_FRAC of the window, which lasted `seconds`. This happens if the trial
        ended before the second look, or if the kernel does not report delays.
        """
        return self._waited_s / self._seconds if self._seconds > COVERED_FRAC * seconds else None

    def look(self, now_s: float, pids: Iterable[int]) -> None:
        """Reads the delays of all threads of the trial's processes `pids`. Processes that have exited are skipped."""
        delays = {file: delay for pid in pids for file, delay in self._delays(pid)}
        known = delays.keys() & self._last.keys()
        if self._last_s is not None and known:
            self._waited_s += sum(delays[file] - self._last[file] for file in known) / 1e9
            self._seconds += now_s - self._last_s
        self._last, self._last_s = delays, now_s

    def _delays(self, pid: int) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError):  # exited
            for thread in os.listdir(f"{self._proc}/{pid}/task"):
                file = f"{self._proc}/{pid}/task/{thread}/schedstat"  # ns on a core, ns in the run queue, number of runs
                words = read(file).split()
                if len(words) == 3:
                    yield file, int(words[1])
