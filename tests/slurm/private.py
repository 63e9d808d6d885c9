"""A private Slurm on this host: munged, slurmctld and one slurmd per node, with ports, keys and state in one folder.

It needs root, and Debian's packages slurm-wlm and munge. All its nodes are this host and see the same files, except that node
n3 sees an empty folder instead of `apart`. Node n4 has a host name, process ids and a monotonic clock of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.waiting import comes, wait_until

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "squeue", "scontrol")
UNTIL_THE_END = ("setpriv", "--pdeathsig", "KILL")  # ends a daemon when this process ends, even if it is killed
NODES = ("n1", "n2", "n3", "n4")
FAR = "far"  # host name of node n4
BOOT_ID = "/proc/sys/kernel/random/boot_id"
FAR_S = 1_000_000  # seconds by which n4's monotonic clock is ahead of this host's
NODE_LOST_S = 10  # SlurmdTimeout; Slurm marks a silent node as down after two to three times as long
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={lost_s}
InactiveLimit=0
KillWait=3
MinJobAge=300
MessageTimeout=10
UnkillableStepTimeout=180
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
GresTypes=gpu
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 "
    "Gres=gpu:2 Features=plain State=UNKNOWN\n"
)


def why_not() -> str:
    """Returns why Slurm cannot run here; "" if it can."""
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install --no-install-recommends slurm-wlm munge)"
    return "" if os.getuid() == 0 else "a Slurm of our own needs root"


class PrivateSlurm:
    """A running Slurm.

    Its partitions are main (node n1), other (n2), apart (n3), two (n1 and n4, which is `FAR`) and half (n1 and n3). Jobs of
    urgent (n2) preempt those of other and spare (n2).

    Attributes:
        environment: the variables that Slurm's commands need.
        apart: the folder whose contents n3 does not see.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, {}
        self.apart = folder / "apart"
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", "log", "run", "spool", "munge", "dev", "apart"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        self._configure()
        self._start_munge(folder)
        self.start("slurmctld")
        for name in NODES:
            self.start(name)
        self._wait_until_ready()

    def start(self, name: str, *, boot_id: str = "") -> None:
        """Starts the controller ("slurmctld") or a node's daemon ("n1"). With a `boot_id`, the node seems to be rebooted."""
        conf = self.environment["SLURM_CONF"]
        argv = ["slurmctld", "-D", "-f", conf] if name == "slurmctld" else ["slurmd", "-D", "-N", name, "-f", conf]
        if name == "n3":
            argv = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.apart), *argv]
        if name == "n4":
            clock = ["--time", "--monotonic", str(FAR_S)]
            can = subprocess.run(["unshare", "--fork", *clock, "true"], capture_output=True, check=False).returncode == 0
            far = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--uts", *(clock if can else [])]
            argv = [*far, "sh", "-c", 'hostname "$0" && exec "$@"', FAR, *argv]
        if boot_id:
            (file := self._folder / "boot_id").write_text(f"{boot_id}\n")
            renamed = ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"', str(file)]
            argv = [*renamed, *argv, "-b"]
        self._popen(name, argv)

    def reboot(self, name: str, boot_id: str) -> None:
        """Kills a node's daemon and all processes of its jobs, and starts the daemon with another boot id."""
        for process in self.processes_on(name):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.kill(name)
        self.start(name, boot_id=boot_id)

    def processes_on(self, name: str) -> list[psutil.Process]:
        """Returns the processes of a node's jobs, and the daemons that started them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_on = process.environ().items() >= {**self.environment, "SLURMD_NODENAME": name}.items()
                above = [process.parent()] if is_on else []
                found += [one for one in above if one and one.name() == "slurmstepd"]
                found += [process, *process.children(recursive=True)] if is_on else []
        return found

    def kill(self, name: str, *, for_s: float | None = None) -> None:
        """Kills the controller or a node's daemon, but not the processes that run on the node.

        Args:
            name: as in `start`.
            for_s: seconds after which it is started again; None for never.
        """
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        if for_s is not None:
            time.sleep(for_s)
            self.start(name)
            wait_until(self.answers, name)

    def save(self) -> None:
        """Waits until the controller has saved its jobs, which takes up to 5 s. If it is killed earlier, it forgets them."""
        before_s, file = time.time(), self._folder / "state" / "job_state"
        for job in self.jobs():
            self.ask("scontrol", "update", f"JobId={job.split()[0]}", "Comment=to be saved")
        wait_until(lambda: file.exists() and file.stat().st_mtime > before_s, "saved jobs")

    def jobs(self) -> list[str]:
        """Returns "NUMBER STATE" for every job that has not ended."""
        return self.ask("squeue", "--noheader", "--format=%i %T").splitlines()

    def answers(self) -> bool:
        """Whether the controller answers; it does not for some time after it was started."""
        return bool(self._states())

    def is_idle(self, within_s: float = 10.0) -> bool:
        """Whether no job is left; waits up to `within_s` for the last one to end."""
        return comes(lambda: not self.jobs(), within_s=within_s, every_s=0.1)

    def ask(self, *argv: str) -> str:
        """Runs one of Slurm's commands; returns its output."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=True).stdout

    def resume_nodes(self) -> None:
        """Makes drained nodes usable. Slurm drains a node if a step has not ended in time while the controller was down."""
        drained = [name for name, state in self._states().items() if state.startswith(("drain", "drng"))]
        if drained:
            self.ask("scontrol", "update", f"NodeName={','.join(drained)}", "State=RESUME")

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        for job in self.jobs() if "slurmctld" in self._processes else []:
            with contextlib.suppress(subprocess.CalledProcessError):  # it has ended meanwhile
                self.ask("scancel", "--signal=KILL", job.split()[0])
        for name, process in reversed(self._processes.items()):
            process.send_signal(signal.SIGKILL if name == "n4" else signal.SIGTERM)  # unshare ignores SIGTERM
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self) -> str:
        """Returns the ends of all logs, for a failing test."""
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-2000:]}" for file in (self._folder / "log").iterdir())

    def _configure(self) -> None:
        host, folder = socket.gethostname().partition(".")[0], self._folder
        controller, *ports = free_ports(1 + len(NODES))
        nodes = [NODE.format(name=f"n{n}", host=host, port=port) for n, port in enumerate(ports, 1)]
        partitions = [
            f"PartitionName={name} Nodes={node} MaxTime=600 State=UP {more}\n"
            for name, node, more in (
                ("main", "n1", "Default=YES"),
                ("other", "n2", ""),
                ("spare", "n2", "PreemptMode=CANCEL"),
                ("urgent", "n2", "PriorityTier=2"),
                ("apart", "n3", ""),
                ("half", "n1,n3", ""),
                ("two", "n1,n4", ""),
            )
        ]
        conf = CONF.format(host=host, port=controller, folder=folder, lost_s=NODE_LOST_S)
        (folder / "slurm.conf").write_text(conf + "".join([*nodes, *partitions]))
        for number in range(2):
            os.mknod(folder / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-1]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")

    def other_key(self, folder: Path) -> str:
        """Starts a munged with another key in `folder`; returns a configuration with which Slurm's commands use it."""
        for name in ("munge", "run", "log"):
            (folder / name).mkdir()
        self._start_munge(folder)
        text = Path(self.environment["SLURM_CONF"]).read_text()
        (folder / "slurm.conf").write_text(text.replace(f"{self._folder}/munge/socket", f"{folder}/munge/socket"))
        return str(folder / "slurm.conf")

    def _start_munge(self, folder: Path) -> None:
        key = folder / "munge.key"
        (folder / "munge").chmod(0o755)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        options = {
            "key-file": key, "socket": folder / "munge" / "socket", "pid-file": folder / "run" / "munged.pid",
            "log-file": folder / "log" / "munged.log", "seed-file": folder / "munge.seed",
        }  # fmt: skip
        name = "munged" if folder == self._folder else "other munged"
        self._popen(name, ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in options.items())])
        wait_until(lambda: (folder / "munge" / "socket").exists(), "munged")

    def _popen(self, name: str, argv: list[str]) -> None:
        with open(self._folder / "log" / f"{name}.out", "ab") as out:
            environment = {**os.environ, **self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
            self._processes[name] = subprocess.Popen(
                [*UNTIL_THE_END, *argv], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, cwd="/",
            )  # fmt: skip

    def _wait_until_ready(self) -> None:
        try:
            wait_until(lambda: self._states() == dict.fromkeys(NODES, "idle"), "the nodes")
        except BaseException:
            print(self.log())
            self.stop()
            raise

    def _states(self) -> dict[str, str]:
        try:
            rows = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        except subprocess.SubprocessError:
            return {}
        return {name: state.rstrip("*") for name, state in (row.split() for row in rows)}
