"""Runs the cases without a command line: both ends of the link, the passes of `explain`, a resumed journal, variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import AutotuneError, BadInput
from autotune.explain import findings
from autotune.explain.evidence import operations_of
from autotune.explain.tables import explained, read_tables, write_tables
from autotune.harness import process, protocol
from autotune.harness.knobs import affinity
from autotune.launchers import node
from autotune.launchers.base import Running
from autotune.launchers.link import Link, LinkLost
from autotune.launchers.local import LocalLauncher
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.transport import Transport
from autotune.machine.visible import visible_gpus
from autotune.masking import Secrets
from autotune.search.study import begin_study
from tests.benchmarks.fuzz.damage import Case
from tests.explain.made import evidence
from tests.support.launcher_contract import a_launch

GPUS = [{"uuid": "GPU-12", "name": "A"}, {"uuid": "GPU-13", "name": "B"}]


def _go_on(_: Case) -> int:
    """Begins the search of a resumed study with its damaged journal."""
    path = Path("runs/resnet18/optuna.journal")
    begin_study(path, "made", optuna.samplers.RandomSampler()).add_trial(optuna.trial.create_trial(value=1.0))
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    assert len(optuna.load_study(study_name="made", storage=storage).trials) == 1
    return 0


def _functions(_: Case) -> int:
    """Calls the functions that read variables in the processes of tuner and program."""
    for read in (protocol.launched_rank, protocol.is_real_run, process.num_nodes, affinity.ranks_of_host, affinity.allowed):
        read(os.environ)
    Secrets.known(os.environ)
    visible_gpus(GPUS, os.environ)
    affinity.gpu_node(os.environ, 0)
    return 0


def _explained(_: Case) -> int:
    """Explains the files of the passes, as a study does; returns 2 if a file was unreadable."""
    made = explained([Path("passes")])
    write_tables(made.tables, Path("passes"))
    read_tables(Path("passes"))
    lines, memory = made.passes.of("lines"), made.passes.of("memory")
    findings.found(evidence(*lines, memory=memory, operations=operations_of(made.tables)))
    return 2 if made.passes.absent else 0


def _link(case: Case) -> int:
    """Lets one end of a link read the case's bytes until the pipe ends; returns 2 if it lost the other end."""
    (read, feed), (drain, write) = os.pipe(), os.pipe()
    link = Link(read, write)
    try:
        os.write(feed, case.files["bytes"])
        os.close(feed)
        return {"tuner": _tuner, "agent": _agent}[case.words[1]](link)
    finally:
        link.close()
        os.close(drain)


class _Fed(Transport):
    def __init__(self, link: Link) -> None:
        self.link = link

    def why_waiting(self) -> str:
        return ""

    def refusal(self) -> BadInput:
        return BadInput("launcher: the agent has ended. Start again.")

    def why_lost(self) -> str:
        return ""

    def close(self) -> None:
        self.link.close()


class _OfPipe(RemoteLauncher):
    def __init__(self, link: Link) -> None:
        super().__init__(Place(cwd="/", program="sh", runs_dir="runs", device=("cpu", 0, 1)))
        self._links = [link]

    def transport(self) -> Transport:
        if not self._links:
            raise BadInput("launcher: there is no other node. Start again.")
        return _Fed(self._links.pop())


def _tuner(link: Link) -> int:
    launcher = _OfPipe(link)
    launch = a_launch(Path("runs/resnet18/trials/0007").resolve(), ["true"])
    launch.spec.nonce = "made"
    try:
        while not launcher.slots():
            pass
        running = launcher.start(launch)
        running.progress()
        running.stop("enough")
        ended = running.poll()
    except AutotuneError:
        return 2
    finally:
        launcher.close()
    assert ended is not None
    ended.facts(launch.spec)
    return 2 if "node_lost" in ended.evidence else 0


class _Nothing(LocalLauncher):
    def start(self, launch: Any) -> Running:
        raise AutotuneError("nothing is started here")

    def sweep(self, study: Path) -> list[str]:
        return []


def _agent(link: Link) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "LocalLauncher", _Nothing)
        patch.setattr(node, "VISIBLE_S", 0.0)
        agent = node.Agent(link)
        try:
            agent.run()
        except LinkLost as lost:
            return 0 if "closed the link" in str(lost) else 2
        finally:
            agent.close()
    raise AssertionError("the agent leaves when the link ends")


RUNNERS: dict[str, Callable[[Case], int]] = {
    "go on": _go_on, "functions": _functions, "explained": _explained, "link": _link,
}  # fmt: skip
