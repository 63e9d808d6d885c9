"""Runs trials on a node of a Ray cluster. A child process, the broker, requests the node from Ray and connects to its agent.

Only the broker (broker.py) imports Ray. It runs as long as the node is used, usually for the whole study.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from autotune.config.schema import RayOptions
from autotune.errors import BadInput
from autotune.launchers.child import EXIT_S, ChildTransport, agent_command
from autotune.launchers.local import Graces
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.transport import Transport
from autotune.plain_text import one_line

BROKER = Path(__file__).resolve().parent / "broker.py"
SAID = "autotune-broker: "
MAX_WORDS = 400


class RayLauncher(RemoteLauncher):
    """Starts trials on a node of a Ray cluster.

    Args:
        ray: `launch.ray`.
        place: what the node must see, and the devices of a trial.
        graces: the grace periods of the LocalLauncher on the node.
        patience_s: longest wait for a node; None for no limit.
        num_slots: number of the study's RayLaunchers, each with its own resources.
    """

    engine = "Ray"

    def __init__(
        self,
        ray: RayOptions,
        place: Place,
        *,
        graces: Graces | None = None,
        patience_s: float | None = None,
        num_slots: int = 1,
    ) -> None:
        super().__init__(place, graces=graces, patience_s=patience_s)
        self._ray, self._num_slots = ray, num_slots

    def transport(self) -> Transport:
        """Starts a broker and returns at once. After a loss, the broker waits, because the node or the head may come back."""
        ray = self._ray
        python = shutil.which(ray.python or sys.executable)
        if python is None:
            raise BadInput(f"launch.ray.python: no such program, got {ray.python!r}. Give the path of an interpreter.")
        # Absolute, because the broker starts in "/". Symbolic links are not resolved: the interpreter of a virtual environment
        # is a link whose target does not see the packages of the environment.
        python = os.path.abspath(python)
        return Broker(ray, self._place.device, python, num_given=self._num_given, num_slots=self._num_slots)


class Broker(ChildTransport):
    """One run of the broker, connected to an agent.

    Args:
        ray: `launch.ray`.
        device: kind of device, index of the first one, and number of devices, as in `Place`.
        python: the interpreter that has Ray.
        num_given: number of GPUs that this slot got from Ray for its last node; None before the first node. If it is given, the
            broker waits for the head, and for a node that the cluster does not have now.
        num_slots: number of the study's brokers, each of which requests the same resources.
    """

    def __init__(
        self,
        ray: RayOptions,
        device: tuple[str, int, int],
        python: str,
        *,
        num_given: int | None = None,
        num_slots: int = 1,
    ) -> None:
        kind, _, num_processes = device
        usual = {"cpu": 0, "cuda": num_processes}.get(kind, num_given)  # a cluster that just restarted may show no GPU yet
        is_again = num_given is not None
        self._asked = {
            "address": ray.address,
            "cpus": ray.cpus,
            "gpus": usual if ray.gpus is None else ray.gpus,
            "num_processes": num_processes,
            "may_wait": ray.autoscaling or is_again,
            "is_again": is_again,
            "num_slots": num_slots,
            "agent": agent_command(),
        }
        super().__init__([python, str(BROKER), json.dumps(self._asked)])
        self._ray, self._python = ray, python

    def why_waiting(self) -> str:
        """Returns what Ray lacks: "Ray has no node for 1 GPU, 1 CPU yet (0 of 2 GPUs free, 3 of 4 CPUs free)"."""
        return self._said("waiting")

    def why_lost(self) -> str:
        """See `Transport.why_lost`."""
        status = self.exited(2.0 if self.link.is_lost else 0.0)
        if status is None:
            return ""
        return one_line(self._said("lost") or f"Ray's broker ended with status {status}", MAX_WORDS)

    def refusal(self) -> BadInput:
        """Returns why the broker has no agent: no Ray, no cluster, no node, or an agent that does not start."""
        self.exited(EXIT_S)
        words = self._said("words") or self._said("lost") or self.last_words() or "it printed nothing"
        words, kind = one_line(words, MAX_WORDS), self._said("refused")
        if unseen := self.unseen():
            return unseen
        address, asked = self._ray.address, self._asked
        told = {
            "ray": f"launch.ray.python: this interpreter does not import Ray, got {self._python!r} ({words}). Install the "
            "cluster's version of Ray there (pip install ray==VERSION), or name an interpreter that has it.",
            "version": f"launch.ray.python: the cluster has other versions, got {self._python!r} ({words}). Give an "
            "interpreter with the cluster's versions of Python and Ray.",
            "address": f"launch.ray.address: no Ray cluster can be reached there, got {address!r} ({words}). Start autotune on "
            "a node of the cluster, or give HOST:PORT of its head; autotune starts no cluster itself.",
            "gpus": f"launch.ray.gpus: no node of the cluster has that many, got {asked['gpus']} ({words}). Give fewer, or "
            "launch.ray.autoscaling=true if the cluster adds nodes.",
            "cpus": f"launch.ray.cpus: no node of the cluster has that many, got {asked['cpus']} ({words}). Give fewer, or "
            "launch.ray.autoscaling=true if the cluster adds nodes.",
            "slots": f"launch.slots: the cluster has no room for so many, got {asked['num_slots']} ({words}). Give fewer, or "
            "launch.ray.autoscaling=true if the cluster adds nodes.",
        }
        otherwise = f"launch.ray: Ray does not start the agent, got {address!r} ({words}). Change launch.ray.*."
        return BadInput(told.get(kind, otherwise))

    def _said(self, name: str) -> str:
        """Returns the value that the broker last reported under a name; "" if there is none."""
        lines = [line.removeprefix(SAID) for line in self.text().splitlines() if line.startswith(SAID) and line.endswith("}")]
        said = [str(fields[name]) for fields in map(json.loads, lines) if name in fields]
        return said[-1] if said else ""
