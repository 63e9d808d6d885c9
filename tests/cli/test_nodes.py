"""The launcher of a study on other machines keeps its node until the study has ended."""

import signal
import sys
from types import SimpleNamespace

import pytest

from autotune.cli.nodes import launcher_of
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput, Interrupted
from autotune.knobs import malloc
from tests.cli.test_golden import Terminal


@pytest.fixture
def launcher(monkeypatch):
    """A launcher with a node; `is_open` while it holds the node."""
    made = SimpleNamespace(is_open=True, why_waiting=lambda: "", unended=lambda: ["Job 12 may still hold nodes"])
    made.slots = lambda: [SimpleNamespace(name="node1", facts={"num_cores": 2})]
    made.close = lambda: setattr(made, "is_open", False)
    monkeypatch.setattr("autotune.launchers.make_launcher", lambda config, *_: setattr(made, "config", config) or made)
    return made


def study(on_node=None):
    return SimpleNamespace(config=SimpleNamespace(launcher="slurm"), command=None, on_node=on_node)


def test_launcher_keeps_the_node_that_a_study_waited_for(launcher, capsys):
    assert launcher_of(study(), {}) == (launcher, {"num_cores": 2})
    assert launcher.is_open
    assert "Job 12" not in capsys.readouterr().err


@pytest.mark.parametrize("there", [{"jemalloc": "/opt/libjemalloc.so.2"}, {}])
def test_trials_on_a_node_use_the_allocators_of_the_node(launcher, monkeypatch, there):
    monkeypatch.setattr(malloc, "_on_node", [])
    monkeypatch.setattr(malloc, "installed_here", lambda: {"tcmalloc": "/usr/lib/libtcmalloc.so.4"})
    launcher.slots = lambda: [SimpleNamespace(name="node1", facts={malloc.FACT: there})]
    seen = []
    launcher_of(study(lambda _: seen.append(malloc.installed())), {})
    assert seen == [there]
    launcher_of(SimpleNamespace(config=SimpleNamespace(launcher="local"), command=None, on_node=None), {})
    assert set(malloc.installed()) == {"tcmalloc"}


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_cluster_is_asked_for_one_slot_if_all_trials_run_alone(launcher, is_alone):
    config = StudyConfig()
    config.launcher, config.launch.slots = "slurm", 4
    launcher_of(SimpleNamespace(config=config, command=None, on_node=None), {}, is_alone=is_alone)
    assert launcher.config.launch.slots == (1 if is_alone else 4)
    assert config.launch.slots == 4  # which is what the study's folder keeps


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_reason_for_waiting_is_shown_on_every_kind_of_terminal(launcher, monkeypatch, term):
    answers = [[], [], launcher.slots()]
    launcher.slots, launcher.why_waiting = lambda: answers.pop(0), lambda: "Resources, nodes [a/b]"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", term)
    launcher_of(study(), {})
    said = terminal.getvalue()
    assert ("autotune: waiting: Resources, nodes [a/b]\n" in said) is (term == "dumb")
    assert "waiting: Resources, nodes [a/b]" in said
    assert "trials run on node node1" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_and_withdraws_the_request(launcher, number, capsys):
    launcher.slots = lambda: signal.raise_signal(number) or []
    with pytest.raises(Interrupted, match="interrupted while waiting for a node"):
        launcher_of(study(), {})
    assert not launcher.is_open
    assert "autotune: Job 12 may still hold nodes" in capsys.readouterr().err


def test_a_node_that_does_not_suit_the_study_is_given_back(launcher, capsys):
    def refuse(facts):
        raise BadInput("no GPU")

    with pytest.raises(BadInput, match="no GPU"):
        launcher_of(study(refuse), {})
    assert not launcher.is_open
    assert "autotune: Job 12 may still hold nodes" in capsys.readouterr().err
