"""If a tracking store is down, slow, full or wrong, no trial is lost or recorded twice, and the user gets a message."""

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.cli.sync import TrackingProcess
from autotune.launchers.environment import own_environment
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder
from autotune.trackers import mlflow as tracker
from autotune.trackers import store
from autotune.trackers.sync import LAST_S, standing, sync
from tests.support.ports import free_port
from tests.support.stub_programs import PRELUDE
from tests.support.studies import add_trial, make_study, summary_of
from tests.support.waiting import wait_until
from tests.trackers.conftest import empty_store, new_server, no_server_of_the_user, runs, server  # noqa: F401
from tests.trackers.servers import Listener, Mirror, Proxy

# MLflow uses deprecated parts of SQLAlchemy and pydantic and does not close its connections.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


def sync_command(folder: StudyFolder, *words: str) -> list[str]:
    return [sys.executable, "-m", "autotune", "sync", folder.name, "--runs-dir", str(folder.path.parent), *words]


def cli(folder: StudyFolder, *words: str, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        sync_command(folder, *words), env=environment(), capture_output=True, text=True, timeout=90, check=False, **how
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in own_environment().items() if not name.startswith("MLFLOW_")}


def refused() -> str:
    return f"http://me:pass-word-1@127.0.0.1:{free_port()}"


@pytest.fixture
def hanging():
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def study(runs, request) -> StudyFolder:  # noqa: F811
    """Makes a study with a unique name, because the tests share one server."""
    return make_study(runs, f"s{random.randrange(10**9)}")


# The server is down --------------------------------------------------------------------------------------------------------


def test_refused_connection_is_one_message_with_the_command_to_retry(study, server):  # noqa: F811
    ended = cli(study, "--uri", refused())
    assert ended.returncode == 2
    (line,) = [text for text in ended.stderr.splitlines() if text.startswith("autotune: ")]
    assert "no answer (connection refused)" in line
    assert f"8 trials of {study.name} are not tracked yet, nothing is lost" in line
    assert f"`autotune sync {study.name} --runs-dir {study.path.parent} --uri URI` completes it" in line
    assert "pass-word-1" not in ended.stderr + ended.stdout
    assert sync(study, server.uri).is_complete
    assert Mirror(server.uri, study.name).problems(study) == []


def test_sync_gives_up_on_a_hanging_server_without_importing_mlflow(study, hanging):
    code = (
        "import sys; from autotune.cli.main import main; status = main(sys.argv[1:]); "
        "print('imported', 'mlflow' in sys.modules); sys.exit(status)"
    )
    words = ["sync", study.name, "--runs-dir", str(study.path.parent), "--uri", hanging.uri]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "no answer within 5 s" in ended.stderr
    assert "imported False" in ended.stdout, "a server that is down costs no import of MLflow"
    assert standing(study).pending == list(range(8))


def test_sync_process_reconnects_to_a_server_that_was_killed_and_restarted(runs, new_server):  # noqa: F811
    server = new_server()  # noqa: F811
    folder = make_study(runs, "killed", status="running", num_trials=3)
    with open(folder.path / "tracking.log", "wb") as log:
        follower = subprocess.Popen(
            sync_command(folder, "--follow", "--uri", server.uri),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: (state := standing(folder)) is not None and state.is_complete)
        server.kill()
        add_trial(folder, 3)
        wait_until(lambda: "no answer" in standing(folder).problem)
        server.start()
        wait_until(lambda: standing(folder).is_complete, "a push to the server that came back")
        trials = [*folder.read_trials(), add_trial(folder, 4)]
        folder.write_summary(summary_of(folder.name, trials, status="complete"))
        assert follower.wait(30) == 0
    finally:
        follower.kill()
        follower.communicate()
    mirror = Mirror(server.uri, "killed")
    assert mirror.problems(folder) == []
    assert mirror.numbers == [0, 1, 2, 3, 4]
    said = (folder.path / "tracking.log").read_text()
    assert said.count("no answer") == 1, "said once, not at every attempt"
    assert "up to date again" in said


# The server answers wrongly ------------------------------------------------------------------------------------------------


def test_lost_answers_create_no_duplicates(study, server):  # noqa: F811
    proxy = Proxy(server.port, lose_creations=4)
    try:
        states = [sync(study, proxy.uri)]
        while not states[-1].is_complete:
            assert len(states) < 10, states[-1]
            states.append(sync(study, proxy.uri))
    finally:
        proxy.close()
    assert proxy.num_lost >= 2
    assert Mirror(server.uri, study.name).problems(study) == []


def test_requests_executed_after_the_timeout_create_no_duplicates(runs, server):  # noqa: F811
    folder = make_study(runs, "late", num_trials=2)
    proxy = Proxy(server.port, late_s=1.3)
    try:
        impatient = tracker.MlflowTracker(proxy.uri, runs, secrets=Secrets(), timeout_s=1.0)
        state = impatient.push(folder)
        assert state.problem == "no answer in time"
        assert state.pending == [0, 1]
    finally:
        proxy.close()
    assert sync(folder, server.uri).is_complete
    assert Mirror(server.uri, "late").problems(folder) == []


def test_a_slow_server_receives_all_trials(runs, server):  # noqa: F811
    folder = make_study(runs, "slow", num_trials=2)
    proxy = Proxy(server.port, late_s=0.2)
    try:
        assert sync(folder, proxy.uri).is_complete
    finally:
        proxy.close()
    assert Mirror(server.uri, "slow").problems(folder) == []


def test_failing_server_store_is_reported_and_completed_later(study, server):  # noqa: F811
    with sqlite3.connect(server.store) as database:
        database.execute("ALTER TABLE runs RENAME TO runs_gone")
    try:
        state = sync(study, server.uri)
    finally:
        with sqlite3.connect(server.store) as database:
            database.execute("ALTER TABLE runs_gone RENAME TO runs")
    assert state.problem in ("the server answers with an error (HTTP 503)", "the server answers with an error (HTTP 500)")
    assert len(state.pending) == 8
    assert sync(study, server.uri).is_complete
    assert Mirror(server.uri, study.name).problems(study) == []


# The embedded store --------------------------------------------------------------------------------------------------------


def test_locked_embedded_store_is_reported_and_completed_later(study):
    runs = study.path.parent  # noqa: F811
    holder = sqlite3.connect(store.store_file(runs), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    state = sync(study)
    assert state.problem.endswith("mlflow.db cannot be written (database is locked)")
    holder.execute("ROLLBACK")
    holder.close()
    assert sync(study).is_complete
    assert Mirror(store.embedded_uri(runs), study.name).problems(study) == []


def test_full_disk_is_reported_and_tracking_completed_later(study):
    runs = study.path.parent  # noqa: F811
    size_bytes = store.store_file(runs).stat().st_size  # limit for the process's files: the store must not grow

    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    ended = cli(study, preexec_fn=no_room)
    assert ended.returncode == 2
    assert "full" in ended.stderr or "disk I/O error" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert sync(study).is_complete
    assert Mirror(store.embedded_uri(runs), study.name).problems(study) == []


def test_read_only_folder_is_reported(study):
    runs = study.path.parent  # noqa: F811
    words = " ".join(sync_command(study))
    shell = f"mount --bind {runs} {runs} && mount -o remount,ro,bind {runs} && exec {words}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("no user namespaces here: read-only folders are not tested")
    ended = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", shell], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "cannot be written (attempt to write a readonly database)" in ended.stderr
    assert sync(study).is_complete


# Several writers -----------------------------------------------------------------------------------------------------------

KILLED_AT_RANDOM = """
import os, random, signal, sys, time
from pathlib import Path
from autotune.run_dir import StudyFolder
from autotune.trackers.sync import standing, sync
import mlflow, mlflow.store.tracking.sqlalchemy_store
folder, num_kills = StudyFolder(Path(sys.argv[1])), int(sys.argv[2])
dice = random.Random(sys.argv[3])
for _ in range(num_kills):
    child = os.fork()
    if child == 0:
        sync(folder)
        os._exit(0)
    time.sleep(dice.uniform(0.05, 1.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_sync_killed_at_random_moments_duplicates_and_loses_no_trial(study):
    words = [sys.executable, "-c", KILLED_AT_RANDOM, str(study.path), "10", study.name]
    subprocess.run(words, env=environment(), check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = sync(study)
    assert state.is_complete
    mirror = Mirror(store.embedded_uri(study.path.parent), study.name)
    assert mirror.problems(study) == []
    assert sync(study).written == 0


def test_two_syncs_at_once_wait_for_each_other_or_one_is_refused(study):
    both = [
        subprocess.Popen(sync_command(study), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    ended = [(process.communicate(timeout=90)[0], process.returncode) for process in both]
    wrote = [said for said, code in ended if code == 0 and "8 trials written, 0 already there" in said]
    waited = [said for said, code in ended if code == 0 and "0 trials written, 8 already there" in said]
    refused = [said for said, code in ended if code == 2 and "another `autotune sync` of this study is running" in said]
    assert (len(wrote), len(waited) + len(refused)) == (1, 1), ended
    assert Mirror(store.embedded_uri(study.path.parent), study.name).problems(study) == []


TUNER = """
import sys, time
from pathlib import Path
from autotune.cli.sync import TrackingProcess
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder
tracking = TrackingProcess(StudyFolder(Path(sys.argv[1])), sys.argv[2] or None, Secrets())
print(tracking._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["refused", "hanging", "embedded"])
def test_tracking_process_ends_when_its_tuner_is_killed(runs, hanging, kind):  # noqa: F811
    folder = make_study(runs, status="running", num_trials=2)
    uri = {"refused": refused(), "hanging": hanging.uri, "embedded": ""}[kind]
    words = [sys.executable, "-c", TUNER, str(folder.path), uri]
    tuner = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    follower = psutil.Process(int(tuner.stdout.readline()))
    if kind == "hanging":
        wait_until(lambda: hanging.num_accepted)  # it now waits for an answer
    tuner.kill()
    tuner.communicate()
    gone, alive = psutil.wait_procs([follower], timeout=LAST_S + 20)  # it runs at the lowest priority, for at most LAST_S
    assert gone, f"still there: {alive}"
    assert sync(folder, store.embedded_uri(runs)).is_complete
    assert Mirror(store.embedded_uri(runs), folder.name).problems(folder) == []


def test_tracking_process_ends_even_if_the_tuner_died_first(runs):  # noqa: F811
    folder = make_study(runs, status="running", num_trials=2)
    reader, writer = os.pipe()
    os.close(writer)
    words = sync_command(folder, "--follow", "--uri", refused())
    follower = subprocess.Popen(words, env=environment(), stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reader)
    assert follower.wait(20) == 2


def test_tracking_process_runs_at_the_lowest_priority(runs, hanging):  # noqa: F811
    folder = make_study(runs, status="running", num_trials=1)
    follower = subprocess.Popen(
        sync_command(folder, "--follow", "--uri", hanging.uri), env=environment(), stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_until(lambda: hanging.num_accepted)
        assert psutil.Process(follower.pid).nice() == 19
        group = Path(f"/proc/{follower.pid}/autogroup")
        assert not group.exists() or "nice 19" in group.read_text(), "Linux shares cores by the niceness of autogroups"
    finally:
        follower.send_signal(signal.SIGKILL)
        follower.communicate()


def test_tracking_process_continues_at_normal_priority_once_the_study_is_over(runs, hanging):  # noqa: F811
    tracking = TrackingProcess(make_study(runs, num_trials=1), hanging.uri, Secrets())
    try:
        wait_until(lambda: hanging.num_accepted)
        tracking.hurry()
        wait_until(lambda: hanging.num_accepted > 1)
        assert psutil.Process(tracking._process.pid).nice() == os.nice(0)
    finally:
        tracking.terminate()


def test_study_does_not_wait_long_for_a_hanging_server_and_reports_missing_trials(runs, hanging):  # noqa: F811
    program = runs / "train.py"
    program.write_text(PRELUDE + "raise SystemExit(3)")
    words = ["run", "study.name=s", f"runs_dir={runs}", f"tracker.uri={hanging.uri}", "--", sys.executable, str(program)]
    argv, shown = [sys.executable, "-m", "autotune", *words], []
    study = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in study.stdout:
        shown.append((time.monotonic(), line))
    ended_s, said = time.monotonic(), study.communicate(timeout=30)[1]
    assert study.returncode == 3, said
    told = next(number for number, (_, line) in enumerate(shown) if "Tracking is incomplete" in line)
    assert "MLflow lacks 1 of 1 trials (" in shown[told][1]
    assert "`autotune sync s" in shown[told][1]
    assert ended_s - shown[told - 1][0] < 30, "it used to wait for a minute"
    assert sync(StudyFolder(runs / "s"), store.embedded_uri(runs)).is_complete
