"""Where the trials of `chaos` and `soak` run if not on this host: a private Slurm or Ray cluster."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil

from tests.launchers.losses import agents
from tests.ray import private as private_ray
from tests.slurm import private as private_slurm

DOWN_S = (0.2, 5.0)  # shortest and longest time until a killed daemon is started again
HEAD_DOWN_S = (0.2, 90.0)  # the same for Ray's head; Ray gives up after 60 s


class Engine(ABC):
    """A private cluster.

    Attributes:
        why_not: returns why it cannot run here; "" if it can.
        options: the configuration with which a study runs its trials there.
        environment: variables that autotune needs for it.
        victims: kinds of processes that are killed, besides those of every study.
        daemons: the victims that `kill` kills and starts again.
        weights: {kind: how often it is drawn, relative to a kind that is not listed}.
    """

    why_not: ClassVar[Callable[[], str]]
    options: tuple[str, ...]
    environment: dict[str, str]
    victims: ClassVar[tuple[str, ...]]
    daemons: ClassVar[tuple[str, ...]]
    weights: ClassVar[dict[str, float]] = {}

    @abstractmethod
    def agents(self) -> list[psutil.Process]:
        """Returns autotune's agents on the nodes."""

    @abstractmethod
    def processes(self, tuner: psutil.Process) -> dict[str, list[psutil.Process]]:
        """Returns {kind of victim: its processes} for `victims` without `daemons`."""

    @abstractmethod
    def kill(self, daemon: str, rng: random.Random) -> None:
        """Kills a daemon, and returns once it has been started again."""

    @abstractmethod
    def left(self) -> list[str]:
        """Returns descriptions of what the engine still runs some seconds after the studies have ended."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the cluster."""


class OnSlurm(Engine):
    """Node n1 of a private Slurm."""

    why_not = staticmethod(private_slurm.why_not)
    options = ("launcher=slurm", "launch.slurm.cpus=2")
    victims = ("agent", "srun", "slurmstepd", "slurmd", "slurmctld")
    daemons = ("slurmd", "slurmctld")

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-slurm-")
        self._slurm = private_slurm.PrivateSlurm(Path(self._folder.name))
        self.environment = self._slurm.environment

    def agents(self) -> list[psutil.Process]:
        """See `Engine.agents`."""
        return agents("SLURM_CONF", self.environment["SLURM_CONF"])

    def processes(self, tuner: psutil.Process) -> dict[str, list[psutil.Process]]:
        """See `Engine.processes`."""
        there = self.agents()
        steps = [step for one in there if (step := one.parent())]
        return {"agent": there, "slurmstepd": steps, "srun": _below(tuner, lambda process: process.name() == "srun")}

    def kill(self, daemon: str, rng: random.Random) -> None:
        """See `Engine.kill`."""
        self._slurm.kill({"slurmd": "n1"}.get(daemon, daemon), for_s=rng.uniform(*DOWN_S))

    def left(self) -> list[str]:
        """See `Engine.left`."""
        return [] if self._slurm.is_idle() else [f"job {job}" for job in self._slurm.jobs()]

    def stop(self) -> None:
        """See `Engine.stop`."""
        self._slurm.stop()
        self._folder.cleanup()


class OnRay(Engine):
    """The second node of a private Ray cluster, which has more CPUs than the head. Without the head, Ray runs nothing new."""

    why_not = staticmethod(private_ray.why_not)
    victims = ("agent", "broker", "actor", "raylet", "head")
    daemons = ("raylet", "head")
    weights: ClassVar = {"head": 0.6}  # takes a minute or two

    def __init__(self) -> None:
        self._ray = private_ray.PrivateRay()
        self._ray.add("node", cpus=8)
        self.options = ("launcher=ray", f"launch.ray.address={self._ray.address}", "launch.ray.cpus=8")
        self.environment = {}

    def agents(self) -> list[psutil.Process]:
        """See `Engine.agents`."""
        return agents("TMPDIR", str(self._ray.folder))

    def processes(self, tuner: psutil.Process) -> dict[str, list[psutil.Process]]:
        """See `Engine.processes`."""
        brokers = _below(tuner, lambda process: any(word.endswith("/ray/broker.py") for word in process.cmdline()))
        return {"agent": self.agents(), "broker": brokers, "actor": self._ray.workers()}

    def kill(self, daemon: str, rng: random.Random) -> None:
        """See `Engine.kill`. Without its head, the whole cluster has to be started again."""
        name, *only = ["head"] if daemon == "head" else ["node", "raylet"]
        self._ray.kill(name, *only)
        time.sleep(rng.uniform(*(HEAD_DOWN_S if daemon == "head" else DOWN_S)))
        self._ray.restart(name)

    def left(self) -> list[str]:
        """See `Engine.left`."""
        return [] if self._ray.is_idle() else [f"actor {process.pid}" for process in self._ray.workers()]

    def stop(self) -> None:
        """See `Engine.stop`."""
        self._ray.stop()


def add_options(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the options --slurm and --ray, of which one may be given: `engine` is then a class, else None.

    Args:
        parser: a benchmark's parser.
        more: what else the benchmark does with the cluster, for the help.
    """
    where = parser.add_mutually_exclusive_group()
    for name, kind in (("slurm", OnSlurm), ("ray", OnRay)):
        words = f"run the trials on a private {name.capitalize()}{more}"
        where.add_argument(f"--{name}", dest="engine", action="store_const", const=kind, help=words)


def _below(tuner: psutil.Process, is_it: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in tuner.children(recursive=True):
        try:
            found += [process] if is_it(process) else []
        except psutil.NoSuchProcess:  # the others are still there
            continue
    return found
