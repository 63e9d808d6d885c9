"""The agent on a node and the launcher at the tuner, with a plain process instead of a job on Slurm or Ray."""

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time

import psutil
import pytest

import autotune
from autotune.errors import AutotuneError, BadInput, NoNode
from autotune.failures import classify
from autotune.knobs import malloc
from autotune.launchers import messages, node, remote, slurm_cancel, supervision, transport, tuner_files, user_files, warm
from autotune.launchers.base import Deadlines
from autotune.launchers.local import LocalLauncher
from autotune.records import Outcome
from tests.launchers.agents import AGENT, PipeLauncher, Pipes, environment, place, ready
from tests.support.launcher_contract import a_launch, gone, is_alive, marked_processes, wait, wait_for
from tests.support.stub_programs import SLEEP, program
from tests.support.waiting import wait_until

MUTE = (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")  # exits when the link closes
SEND = "[link.send(one) for one in json.loads(sys.argv[1])]; link._thread.join()"
OPENED = {"re": 0, "facts": {"cpu_model": "EPYC", "num_cores": 2, "gpus": []}, "given": []}
QUICK_NOTE = "import sys; from autotune.launchers import node; node.MISSED_S = 0.5; node.main()"  # soon reads the note
QUICK_LEASE = "import sys; from autotune.launchers import node; node.LEASE_S = 2.0; node.main()"  # soon gives up the tuner


@pytest.fixture
def make(tmp_path):
    """Makes launchers, and closes them after the test."""
    made = []

    def make_launcher(**how):
        made.append(PipeLauncher(place(tmp_path), **how))
        return made[-1]

    yield make_launcher
    for launcher in made:
        launcher.close()


@pytest.fixture
def launcher(make):
    return ready(make())


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A launcher that is ready, for tests that leave it and its agent as they are."""
    made = ready(PipeLauncher(place(tmp_path_factory.mktemp("shared"))))
    yield made
    made.close()


def test_slot_has_the_facts_that_its_machine_reports(shared):
    (slot,) = shared.slots()
    assert slot.host == os.uname().nodename
    assert slot.facts["num_cores"] >= 1
    assert slot.facts[malloc.FACT] == malloc.installed_here()
    assert set(slot.cores) == os.sched_getaffinity(0)
    assert shared.why_waiting() == ""


def test_trial_environment_is_the_local_one_plus_only_the_devices_of_the_engine(make, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_USER", "ü \udcff")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    devices = {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the order defines what 3 means
    engine = {**devices, "OMP_NUM_THREADS": "1", "SLURM_PROCID": "0", "OF_THE_USER": "changed"}
    launcher = ready(make(environment=engine))
    local = LocalLauncher()
    other = tmp_path / "runs" / "local" / "trials" / "0007"
    here = environment(local, other, ADDED="yes")
    local.close()
    assert environment(launcher, folder, ADDED="yes") == {**here, **devices}


def test_end_of_a_window_is_converted_to_the_clock_of_the_node(launcher, folder):
    launch = a_launch(folder, program("result(detected={'left_s': spec['end_s'] - time.monotonic()})"))
    launch.spec.end_s = launcher.clock.monotonic() + 100
    launcher.clock._paused_s += 50  # as after a wait for a node: the study's clock differs from the machine's
    launch.spec.end_s -= 50
    left_s = wait(launcher.start(launch)).results[0].detected["left_s"]
    assert 80 < left_s <= 100


def test_launch_and_its_result_are_unchanged_after_transfer(shared, folder):
    launch = a_launch(folder, program("result()"), deadlines=Deadlines(step_s=7.0), warm=("json",), env={"A": "b"})
    again = messages.to_launch(json.loads(json.dumps(messages.from_launch(launch, 0.0))))
    assert again == launch
    ended = wait(shared.start(launch))
    assert messages.to_ended(json.loads(json.dumps(dataclasses.asdict(ended)))) == ended
    assert ended.evidence["node"]["host"] == shared.slots()[0].host


def test_last_progress_is_known_after_the_trial_has_ended_on_the_node(shared, folder):
    running = shared.start(a_launch(folder, program("progress('steady', 5); time.sleep(1.5); result()")))
    wait_until(lambda: (seen := running.progress()) and seen.phase == "steady")
    wait_for(folder / "result.rank0.json")
    time.sleep(2.0)  # the agent ends the trial, which has not been polled yet
    assert running.progress().phase == "steady"
    assert wait(running).cause == "result"


def test_waiting_for_a_node_pauses_the_clock_and_can_be_stopped(make, folder):
    launcher = make(argv=MUTE)
    begun_s, before_s = time.monotonic(), launcher.clock.monotonic()
    running = launcher.start(a_launch(folder, program("result()")))
    paused_s, spent_s = launcher.clock.monotonic(), time.monotonic() - begun_s
    time.sleep(0.3)
    assert running.poll() is None
    assert launcher.why_waiting() == "Resources"
    assert launcher.clock.monotonic() == paused_s
    assert paused_s - before_s <= spent_s
    running.stop("interrupted by the user")
    assert running.poll().evidence["stop_reason"] == "interrupted by the user"


def test_launcher_gives_up_after_queue_minutes(make):
    launcher = make(argv=MUTE, patience_s=0.2)
    with pytest.raises(BadInput, match=r"queue_minutes.*Resources"):
        ready(launcher)
    assert launcher.started[0].process.poll() is not None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cwd": "/nowhere/at/all"}, ["cwd: ", "/nowhere/at/all"]),
        ({"program": "no-such-program"}, ["COMMAND: ", "no-such-program"]),
        ({"runs_dir": "/proc/nowhere"}, ["runs_dir: ", "/proc/nowhere"]),
    ],
)
def test_path_or_program_missing_on_the_node_is_named(make, tmp_path, changes, told):
    launcher = make()
    launcher._place = dataclasses.replace(place(tmp_path), **changes)
    with pytest.raises(BadInput) as caught:
        ready(launcher)
    assert all(words in str(caught.value) for words in told)
    assert launcher.started[0].process.poll() is not None


def test_runs_folder_that_is_read_only_on_the_node_is_named(make, tmp_path):
    if os.getuid():
        pytest.skip("a folder that is read-only for one process needs root")
    (runs := tmp_path / "runs").mkdir()
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    launcher = make(argv=("unshare", "--mount", "sh", "-c", script, str(runs), *AGENT))
    launcher._place = dataclasses.replace(place(tmp_path), runs_dir=str(runs))
    told = rf"^runs_dir: node \S+ cannot write to this folder, got '{runs}'"
    with pytest.raises(BadInput, match=told):
        ready(launcher)
    assert launcher.started[0].process.poll() is not None


def test_launcher_waits_for_new_files_that_a_node_sees_late(make, tmp_path):
    late = "import os, sys, time; from autotune.launchers import node; see, end_s = os.path.exists, time.monotonic() + 2.0; "
    late += "os.path.exists = lambda path: see(path) and (not path.endswith('.token') or time.monotonic() > end_s); node.main()"
    began_s = time.monotonic()
    ready(make(argv=(sys.executable, "-c", late)))
    assert time.monotonic() - began_s > 2.0


def test_another_version_of_autotune_on_the_node_is_refused(make, monkeypatch):
    launcher = make()
    monkeypatch.setattr(autotune, "__version__", "99.0")
    with pytest.raises(BadInput, match=r"another version of autotune.*This is 99\.0"):
        ready(launcher)


def says(*messages):
    """Returns the command of an agent that sends only these messages."""
    code = f"import json, os, sys; from autotune.launchers.link import Link; link = Link(os.dup(0), os.dup(1)); {SEND}"
    return (sys.executable, "-c", code, json.dumps(messages))


@pytest.mark.parametrize(
    "messages",
    [
        [{"is": "hello"}],
        [{**node.hello(), "cores": ["one"]}, OPENED],
        [node.hello(), {"re": 0}],
        [node.hello(), {"re": 0, "facts": {"gpus": [7]}}],
        [node.hello(), {"re": 0, "problems": 7}],
    ],
)
def test_agent_that_sends_unreadable_messages_at_the_start_is_refused(make, messages):
    with pytest.raises(BadInput, match=r"was lost at once, got: its agent sent an unreadable message \("):
        ready(make(argv=says(*messages)))


def test_unreadable_end_of_a_trial_counts_as_a_lost_node(make, folder):
    ended = {"is": "ended", "nonce": "made", "ended": {"exit_code": "0"}, "watched": {}}
    launcher = ready(make(argv=says(node.hello(), OPENED, {"re": 99}, {"re": 1}, ended)))
    launch = a_launch(folder, program("result()"))
    launch.spec.nonce = "made"
    found = wait(launcher.start(launch))
    assert found.evidence["node_lost"]
    assert "sent an unreadable message" in found.evidence["stop_reason"]


@pytest.mark.parametrize(("what", "why"), [("nonsense", "KeyError: 'nonsense'"), ("sweep", "KeyError: 'study'")])
def test_agent_reports_a_failed_request_and_continues(shared, what, why):
    with pytest.raises(AutotuneError, match=rf"could not do '{what}' \({why}\)"):
        shared.node.ask(what, 20.0)
    assert shared.node.ask("progress", 20.0)["progress"] is None


def test_replacement_node_must_have_the_same_hardware(launcher, folder, monkeypatch):
    launcher._first.facts["cpu_model"] = "another model"
    os.kill(launcher.started[0].process.pid, signal.SIGKILL)
    launcher.started[0].process.wait()
    launcher.started[0].link._thread.join()  # before the launcher notices it, a launch could go to the lost node
    with pytest.raises(BadInput, match=r"unlike node.*got cpu_model .* instead of 'another model'"):
        wait(launcher.start(a_launch(folder, program("result()"))))


@pytest.mark.parametrize("num_lost", [1, 3])
def test_replacement_that_is_lost_before_it_is_ready_is_replaced_again(launcher, folder, monkeypatch, num_lost):
    usual, lost = launcher._opened, iter(range(num_lost))

    def opened(*about):
        if next(lost, None) is not None:
            raise transport.NodeLost("preempted")
        return usual(*about)

    monkeypatch.setattr(launcher, "_opened", opened)
    launcher.started[0].process.kill()
    launcher.started[0].link._thread.join()
    running = launcher.start(a_launch(folder, program("result()")))
    if num_lost == 3:
        with pytest.raises(NoNode, match=r"was lost at once, got: preempted\. `autotune resume`"):
            wait(running)
    else:
        assert wait(running).cause == "result"
    assert len(launcher.started) == 1 + min(num_lost + 1, 3)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_replacement_is_requested_again_while_the_engine_does_not_answer(launcher, folder, monkeypatch, is_in_time):
    monkeypatch.setattr(remote, "AGAIN_S", 0.5 if is_in_time else 3.0)
    monkeypatch.setattr(remote, "UNANSWERED_S", 60.0 if is_in_time else 2.5)
    monkeypatch.setattr(Pipes, "unanswered", lambda _: "the engine does not answer")
    usual, launcher._argv = launcher._argv, ("false",)
    launcher.started[0].process.kill()
    launcher.started[0].link._thread.join()
    running = launcher.start(a_launch(folder, program("result()")))
    if not is_in_time:
        with pytest.raises(NoNode, match="the agent ended with status 1"):
            wait(running)
        return
    wait_until(lambda: running.poll() or len(launcher.started) > 2)
    wait_until(lambda: running.poll() or launcher.why_waiting() == "the engine does not answer")
    assert running.poll() is None
    launcher._argv = usual
    assert wait(running).cause == "result"
    assert launcher.why_waiting() == ""


def test_unanswered_request_at_the_start_of_a_study_is_not_repeated(make, monkeypatch):
    monkeypatch.setattr(Pipes, "unanswered", lambda _: "the engine does not answer")
    with pytest.raises(BadInput, match="the agent ended with status 1"):
        ready(make(argv=("false",)))


def test_a_machine_that_starts_no_more_processes_is_named_instead_of_a_traceback(make):
    launcher = make(argv=("/nowhere/at/all",))
    with pytest.raises(BadInput, match=r"^launcher: the process that requests a node cannot be started, got: .*No such file"):
        launcher.slots()


def test_trial_whose_start_is_interrupted_is_started_only_once(launcher, folder, monkeypatch):
    there, launcher.node = launcher.node, None
    running = launcher.start(a_launch(folder, program(SLEEP)))  # waits for a node
    launcher.node = there
    ask, asked = there.ask, []

    def interrupted(what, *args, **fields):
        asked.append(what)
        if len(asked) == 1:
            there.tell(what, **fields)
            raise KeyboardInterrupt
        return ask(what, *args, **fields)

    monkeypatch.setattr(there, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.poll()
    running.stop("interrupted by the user")
    assert asked == ["start", "stop"]
    assert running.poll().cause == "stopped"
    assert running.poll().evidence["node"]["host"] == there.about["host"]


def test_interrupted_start_that_the_node_refuses_is_not_taken_for_a_lost_node(launcher, folder, monkeypatch):
    wait(launcher.start(a_launch(folder, program("result()"))))  # the agent still has how this trial ended
    launch, there = a_launch(folder, program("result()")), launcher.node
    launch.cwd = "/nowhere/at/all"
    running = remote.RemoteRunning(launcher, launch, has_neighbours=False)

    def interrupted(what, _, **fields):
        there.tell(what, **fields)
        raise KeyboardInterrupt

    monkeypatch.setattr(there, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.poll()
    monkeypatch.undo()
    running.stop("interrupted by the user")
    ended = running.poll()
    assert (ended.cause, ended.results, "node_lost" in ended.evidence) == ("stopped", [], False)


def test_trial_that_still_waits_is_stopped_without_being_started(launcher, folder, monkeypatch):
    there, launcher.node = launcher.node, None
    running = launcher.start(a_launch(folder, program("result()")))
    launcher.node = there
    monkeypatch.setattr(launcher, "begin", lambda *_, **__: pytest.fail("started"))
    running.stop("another slot is free")
    assert running.poll().evidence["stop_reason"] == "another slot is free"


def test_start_may_take_as_long_as_two_warm_servers_in_turn():
    assert remote.START_S > 2 * (warm.READY_S + supervision.GONE_S)


def test_stop_may_take_as_long_as_copies_of_the_files_that_a_trial_removed():
    assert remote.STOP_S > user_files.END_S


def test_killed_agent_ends_its_trial_and_the_next_trial_gets_a_new_agent(launcher, folder):
    launch = a_launch(folder, program(SLEEP))
    running = launcher.start(launch)
    pid = int(wait_for(folder / "pid"))
    launcher.started[0].process.kill()
    ended = wait(running)
    assert ended.evidence["node_lost"]
    outcome, reason = classify(ended.facts(launch.spec))
    assert outcome is Outcome.interrupted
    assert "was lost" in reason
    assert gone(pid)
    again = wait(launcher.start(a_launch(folder, program("result()"))))
    assert (again.cause, len(launcher.started)) == ("result", 2)


def test_an_agent_without_a_tuner_ends_its_trial(make, folder, monkeypatch):
    monkeypatch.setattr("autotune.launchers.link.BEAT_S", 0.2)  # of the tuner
    launcher = ready(make(argv=[sys.executable, "-c", QUICK_LEASE]))
    launcher.start(a_launch(folder, program(SLEEP)))
    pid = int(wait_for(folder / "pid"))
    time.sleep(3.0)
    assert is_alive(pid), "the tuner still sends heartbeats"
    with silenced(launcher.started[0].link):
        assert gone(pid)
        assert launcher.started[0].process.wait(10) == 0


@contextlib.contextmanager
def silenced(link):
    """Sends nothing more over a link, but keeps its pipes open."""
    link._is_closed = True
    os.eventfd_write(link._wake, 1)
    link._thread.join()
    yield
    link._is_closed = False


def test_agent_given_up_by_the_tuner_ends_its_trial_before_the_lease_expires(make, folder, tmp_path, monkeypatch):
    """Nothing closes the agent's pipes, as on a node whose slurmd was killed."""
    (note := tmp_path / "note").touch()
    monkeypatch.setattr(Pipes, "note", note)
    launcher = ready(make(argv=[sys.executable, "-c", QUICK_NOTE]))
    launcher.start(a_launch(folder, program(SLEEP)))
    pid = int(wait_for(folder / "pid"))
    with silenced(launcher.started[0].link):
        time.sleep(3.0)
        assert is_alive(pid), "the tuner has not given up the agent yet"
        slurm_cancel.mark(note)
        assert gone(pid)
        assert launcher.started[0].process.wait(10) == 0


def test_agent_leaves_no_process_when_its_pipes_close(launcher, folder):
    launcher.start(a_launch(folder, program(SLEEP)))
    pid = int(wait_for(folder / "pid"))
    launcher.close()
    assert not is_alive(pid)
    assert marked_processes(folder.parent.parent) == []


@pytest.mark.thorough
def test_silent_agent_counts_as_lost_after_a_time_limit(launcher, folder, monkeypatch):
    monkeypatch.setattr(transport, "SILENT_S", 2.5)
    monkeypatch.setattr(transport, "LOST_S", 3.5)
    launch = a_launch(folder, program(SLEEP))
    running = launcher.start(launch)
    pid = int(wait_for(folder / "pid"))
    psutil.Process(launcher.started[0].process.pid).suspend()
    ended = wait(running)
    assert ended.evidence["node_lost"]
    assert "nothing was heard" in ended.evidence["stop_reason"]
    assert gone(pid)


def test_stopped_trial_still_returns_its_result(shared, folder):
    running = shared.start(a_launch(folder, program("result(); time.sleep(600)")))
    wait_for(folder / "result.rank0.json")
    running.stop("budget over")
    assert running.poll().cause == "result"


def test_message_with_values_of_wrong_types_is_refused():
    for spec in ("{}", ["x"], None):
        with pytest.raises(TypeError, match="spec: not an object"):
            messages.to_launch({"spec": spec})
    with pytest.raises(TypeError):  # a number would be taken for a file descriptor
        node.missing({"cwd": 2**63, "program": "sh", "runs_dir": "/", "token": "tmp"})


def test_token_left_by_a_killed_tuner_is_removed(tmp_path):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    host = platform.node()
    kept = {
        f".autotune-{host}-{os.getpid()}-x.token",
        f".autotune-far-{dead.pid}-x.token",
        f".autotune-{host}-{dead.pid}-x.job",
        f".autotune-{host}-{dead.pid}-4242-x.token",  # of a host that is called HOST-PID
    }
    for name in (*kept, f".autotune-{host}-{dead.pid}-x.token"):
        (tmp_path / name).touch()
    with remote._token(tmp_path) as token:
        assert (tmp_path / token).is_file()
    assert {entry.name for entry in tmp_path.iterdir()} == kept


def test_a_token_stays_while_it_is_locked_or_cannot_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tuner_files, "is_taken", lambda _: False)  # as in another container, which has the host's name
    with remote._token(tmp_path) as token, remote._token(tmp_path):
        assert (tmp_path / token).is_file()
    (stale := tmp_path / f".autotune-{platform.node()}-7-x.token").touch()
    monkeypatch.setattr(remote.os, "getuid", lambda: -1)
    assert tuner_files.left_by_killed(tmp_path, remote.TOKEN) == []
    monkeypatch.undo()
    monkeypatch.setattr(remote, "left_by_killed", lambda *_: [tmp_path, stale])  # a folder cannot be unlinked
    with remote._token(tmp_path):
        assert not stale.exists()
