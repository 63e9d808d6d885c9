"""Studies on a real Ray cluster, the environment of their trials, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from autotune.config.schema import RayOptions
from autotune.errors import BadInput
from autotune.launchers.child import ChildTransport
from autotune.launchers.environment import own_environment
from autotune.launchers.local import LocalLauncher
from autotune.launchers.node import DEVICE_VARIABLES
from autotune.launchers.ray.launcher import RayLauncher
from tests.faults.quick_study import QuickStudy
from tests.launchers.agents import environments, place, ready
from tests.launchers.losses import check_one_job, check_refused_study
from tests.launchers.slots_of_a_cluster import check_four_slots, check_slots
from tests.ray.conftest import launcher_on
from tests.ray.private import PrivateRay, why_not
from tests.support.launcher_contract import a_launch, wait
from tests.support.stub_programs import program

RAY = ("launcher=ray", "study.budget.minutes=0.35", "study.budget.trials=1", "explain.auto=false")


def test_study_on_a_node_completes_and_leaves_no_process(ray, tmp_path):
    check_one_job(QuickStudy(tmp_path, trial_s=0.05), ray.is_idle, *RAY, f"launch.ray.address={ray.address}")


def test_environment_of_a_trial_is_that_of_a_local_trial_plus_the_gpu_of_the_job(make, folder, tmp_path, monkeypatch):
    here, there = environments(make(gpus=1), folder, tmp_path / "runs", monkeypatch)
    devices = {name: there.pop(name) for name in DEVICE_VARIABLES if name in there}
    assert there == here
    assert devices["CUDA_VISIBLE_DEVICES"] in ("0", "1")


# Prints what a process inherits besides its environment: ignored and blocked signals, cores, limits, priorities.
STATE = """
import resource
lines = open("/proc/self/status").read().splitlines()
state = [line for line in lines if line.split(":")[0] in ("SigBlk", "SigIgn", "Cpus_allowed", "NoNewPrivs", "Umask")]
state += [os.nice(0), os.sched_getscheduler(0), open("/proc/self/oom_score_adj").read()]
limits = [resource.getrlimit(each) for each in range(16)]
result(detected={"state": state, "limits": limits, "gpus": os.environ.pop("CUDA_VISIBLE_DEVICES", None)})
"""


def test_trial_without_gpus_inherits_no_priority_signals_or_gpus_from_ray(make, folder, tmp_path):
    local = LocalLauncher()
    (tmp_path / "runs" / "local" / "trials").mkdir(parents=True)
    here = wait(local.start(a_launch(tmp_path / "runs" / "local" / "trials" / "0007", program(STATE)))).results[0].detected
    local.close()
    there = wait(ready(make()).start(a_launch(folder, program(STATE)))).results[0].detected
    if os.getuid():  # only root may lower the niceness
        here["state"][-3] = there["state"][-3]
    assert there == {**here, "gpus": ""}


@pytest.mark.thorough
def test_reason_why_a_trial_waits_is_reported_and_the_clock_is_paused(make, folder):
    first, second = ready(make(gpus=2)), make(gpus=1)
    running = second.start(a_launch(folder, program("result()")))
    stood_s, give_up_s = second.clock.monotonic(), time.monotonic() + 30
    while "no node for 1 GPU, 1 CPU yet (" not in second.why_waiting():
        assert time.monotonic() < give_up_s, second.why_waiting()
        assert running.poll() is None
        time.sleep(0.1)
    assert "0 of 2 GPUs free" in second.why_waiting()
    third = make(cpus=4)
    assert third.slots() == []
    while "no node for 4 CPUs yet (3 of 4 CPUs free)" not in third.why_waiting():  # no GPUs are named if none are asked for
        assert time.monotonic() < give_up_s, third.why_waiting()
        assert third.slots() == []
        time.sleep(0.1)
    third.close()
    assert second.clock.monotonic() == stood_s
    first.close()
    assert wait(running).cause == "result"
    assert second.why_waiting() == ""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": 3}, ["launch.ray.gpus: ", "got 3", "2 GPUs, 4 CPUs", "launch.ray.autoscaling=true"]),
        ({"cpus": 64}, ["launch.ray.cpus: ", "got 64", "2 GPUs, 4 CPUs"]),
        ({"address": "127.0.0.1:1"}, ["launch.ray.address: ", "got '127.0.0.1:1'", "refused"]),
        ({"address": "nosuch.invalid:6379"}, ["launch.ray.address: ", "nosuch.invalid:6379"]),
        ({"python": "/nowhere/python"}, ["launch.ray.python: no such program, got '/nowhere/python'"]),
    ],
)
def test_unavailable_resources_addresses_and_interpreters_are_reported(make, options, told):
    with pytest.raises(BadInput) as caught:
        ready(make(**options))
    assert all(words in str(caught.value) for words in told), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_more_slots_than_the_cluster_has_room_for_are_refused(ray, tmp_path):
    no_room = r"launch\.slots: the cluster has no room for so many, got 3 \(room for 2, each with 1 GPU, 1 CPU\)"
    overrides = (*RAY, f"launch.ray.address={ray.address}", "launch.slots=3", "launch.ray.gpus=1")
    check_refused_study(QuickStudy(tmp_path), ray.is_idle, no_room, *overrides)


@pytest.mark.thorough
def test_a_study_on_two_slots_runs_its_search_in_two_actors(ray, tmp_path):
    check_slots(QuickStudy(tmp_path), "launcher=ray", f"launch.ray.address={ray.address}", "launch.ray.gpus=1")
    assert ray.is_idle()


@pytest.mark.thorough
def test_study_on_four_slots_of_two_nodes_finds_the_same_speedup_as_on_one_slot(ray, tmp_path):
    engine = ("launcher=ray", f"launch.ray.address={ray.address}", "launch.ray.cpus=2")
    ray.add("second", cpus=4)  # the head has four, too
    try:
        check_four_slots(tmp_path, *engine, where=lambda: [str(worker.ppid()) for worker in ray.workers()])
        assert ray.is_idle()
    finally:
        ray.remove("second")


def test_an_interpreter_without_ray_is_named(make, tmp_path):
    python = wrapped(tmp_path, "-S")
    with pytest.raises(
        BadInput, match=rf"^launch\.ray\.python: .* does not import Ray, got '{python}' \(No module named 'ray'\)"
    ):
        ready(make(python=str(python)))


def test_interpreter_with_another_version_of_ray_than_the_cluster_is_refused(make, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '1.2.3'\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(BadInput, match=r"^launch\.ray\.python: the cluster has other versions, got .*Ray: 1\.2\.3"):
        ready(make())


@pytest.mark.thorough
def test_folder_or_interpreter_that_a_node_does_not_see_is_named(ray, make, tmp_path, monkeypatch):
    if os.getuid():
        pytest.skip("hiding a folder from a node needs root")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    ray.add("apart", cpus=16, apart=hidden)
    try:
        there = {name: hidden / name for name in ("cwd", "runs_dir")}
        for name, path in there.items():
            path.mkdir()
            launcher = make(dataclasses.replace(place(tmp_path), **{name: str(path)}), cpus=16)
            with pytest.raises(BadInput, match=rf"{name}: node {os.uname().nodename} does not see .*{path}"):
                ready(launcher)
        python = hidden / "python"
        python.symlink_to(sys.executable)
        launcher = make(cpus=16, python=sys.executable)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(BadInput, match=rf"node {os.uname().nodename} does not see the interpreter.*{python}"):
            ready(launcher)
    finally:
        ray.remove("apart")


@pytest.mark.thorough
def test_gpu_offered_by_two_raylets_is_refused(ray, tmp_path):
    same = r"launcher: slots [12] and [12] have the same GPU, got 0 of node "
    ray.add("twin", cpus=4, gpus=2)  # also this machine: each raylet gives away GPUs 0 and 1
    try:
        overrides = (*RAY, f"launch.ray.address={ray.address}", "launch.slots=2", "launch.ray.gpus=2")
        check_refused_study(QuickStudy(tmp_path), ray.is_idle, same, *overrides)
    finally:
        ray.remove("twin")


@pytest.mark.thorough
def test_only_the_right_token_gives_access_to_a_cluster_with_authentication(tmp_path, folder, monkeypatch):
    if why := why_not():
        pytest.skip(why)
    right, wrong = "1" * 40, "2" * 40
    ray = PrivateRay(token=right)
    try:
        for mode, token, told in (
            ("disabled", right, "needs RAY_AUTH_MODE=token and that token"),
            ("token", wrong, "needs RAY_AUTH_MODE=token and that token"),
            ("token", "", "no authentication token was found"),
        ):
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
            monkeypatch.setenv("RAY_AUTH_TOKEN", token)
            monkeypatch.setenv("HOME", str(tmp_path))  # Ray also looks for a token there
            with pytest.raises(BadInput, match=rf"^launch\.ray\.address: no Ray cluster can be reached .*{told}") as caught:
                ready(launcher_on(ray, place(tmp_path)), 60)
            assert right not in str(caught.value)
            assert ray.workers() == []
        monkeypatch.setenv("RAY_AUTH_TOKEN", right)
        launcher = ready(launcher_on(ray, place(tmp_path)))
        assert wait(launcher.start(a_launch(folder, program("result()")))).cause == "result"
        launcher.close()
    finally:
        ray.stop()


@pytest.mark.thorough
def test_unreachable_cluster_is_not_replaced_by_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "files"))
    study = QuickStudy(tmp_path)
    check_refused_study(study, lambda: True, r"launch\.ray\.address: no Ray cluster can be reached there, got 'auto'", *RAY)
    assert not study.folder.path.exists()
    assert not (tmp_path / "files").exists()


def test_call_without_a_connection_starts_no_cluster(ray, tmp_path):
    code = "from autotune.launchers.ray import broker; ray = broker.import_ray(); ray.nodes()"
    told = subprocess.run(
        [sys.executable, "-c", code], env={**own_environment(), "RAY_TMPDIR": str(tmp_path)}, capture_output=True
    )
    assert b"Ray has not been started yet" in told.stderr
    assert list(tmp_path.iterdir()) == []


def wrapped(folder, *options):
    """Returns a script that runs this interpreter with the given options."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(options)} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("kind", "given", "gpus"), [("auto", None, None), ("auto", ["0"], 1), ("cpu", ["0"], 0)])
def test_a_lost_slot_asks_for_as_many_gpus_as_it_had_and_waits_for_the_head(tmp_path, monkeypatch, kind, given, gpus):
    asked = []
    monkeypatch.setattr(ChildTransport, "__init__", lambda self, argv: asked.append(json.loads(argv[-1])))
    launcher = RayLauncher(RayOptions(), dataclasses.replace(place(tmp_path), device=(kind, 0, 1)))
    if given is not None:
        launcher._take(given)
    launcher.transport()
    assert [(each["gpus"], each["is_again"]) for each in asked] == [(gpus, given is not None)]
