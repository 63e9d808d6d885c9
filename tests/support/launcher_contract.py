"""Tests what every launcher must do. To run the tests, subclass `LauncherContract` and define its fixture `launcher`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotune.errors import BadInput
from autotune.failures import classify
from autotune.harness import protocol
from autotune.launchers import process_tree
from autotune.launchers.base import Deadlines, Ended, Launch, Launcher, Running
from autotune.launchers.environment import is_mark_of
from autotune.launchers.local import Graces
from autotune.records import Outcome
from tests.support.rows import more
from tests.support.stub_programs import IGNORES_SIGTERM, SLEEP, program
from tests.support.waiting import comes, wait_until

ATTEMPTS = itertools.count()
SHORT = Graces(ranks_s=0.8, leave_s=0.2, orphans_s=0.3, terminate_s=0.5, kill_s=5.0)
PATIENCE_S = 30.0  # for a loaded machine; passing tests do not wait this long


def a_launch(folder: Path, argv: list[str], **more: object) -> Launch:
    """Returns a launch of `argv` with a unique nonce, in its trial's folder."""
    spec = protocol.Spec(trial=7, nonce=f"nonce-{next(ATTEMPTS)}", folder=str(folder))
    return Launch(argv=argv, cwd=str(folder.parent), folder=folder, spec=spec, **more)  # type: ignore[arg-type]


def wait(running: Running) -> Ended:
    """Polls until the trial has ended, and returns how it ended."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (ended := running.poll()) is None:
        assert time.monotonic() < give_up_s, f"still running; last progress: {running.progress()}"
        time.sleep(0.02)
    return ended


def wait_for(file: Path) -> str:
    """Returns a file's text once the program has written it."""
    return wait_until(lambda: file.exists() and file.read_text(), str(file), within_s=PATIENCE_S) or ""


def started(launcher: Launcher, folder: Path, body: str = SLEEP) -> tuple[Running, int]:
    """Starts a trial; returns it and the process id that it wrote."""
    running = launcher.start(a_launch(folder, program(body)))
    return running, int(wait_for(folder / "pid"))


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not count."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(*pids: int) -> bool:
    """Returns whether all these processes end within 15 seconds."""
    return comes(lambda: not any(map(is_alive, pids)), within_s=15)


def marked_processes(study: Path) -> list[psutil.Process]:
    """Returns the processes of a study that still run, including those of its trials and its helpers."""
    return process_tree.members(lambda mark: is_mark_of(study, mark))


def trial_folder(tmp_path: Path) -> Path:
    """Returns the path of a trial's folder, which does not exist yet."""
    study = tmp_path / "runs" / "study"
    (study / "trials").mkdir(parents=True)
    return study / "trials" / "0007"


class LauncherContract:
    """The contract of all launchers. Every test starts real processes and leaves none."""

    @pytest.fixture
    def launcher(self) -> Launcher:
        """Returns the launcher under test, with short grace periods."""
        raise NotImplementedError  # each launcher's suite overrides it; a class of tests cannot be abstract for pytest

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Returns a trial's folder that does not exist yet."""
        return trial_folder(tmp_path)

    @pytest.fixture(autouse=True)
    def nothing_left(self, launcher: Launcher, folder: Path) -> Iterator[None]:
        """Fails a test that leaves a process, and ends the process."""
        yield
        launcher.close()
        left = marked_processes(folder.parent.parent)
        process_tree.send(left, signal.SIGKILL)
        assert not left

    def run(self, launcher: Launcher, launch: Launch) -> Ended:
        """Starts the launch and waits for its end."""
        return wait(launcher.start(launch))

    # What the program receives

    def test_program_sees_spec_mark_and_injection_folder_first(self, launcher: Launcher, folder: Path) -> None:
        """The program has the environment that the protocol defines."""
        body = "result(detected={'env': dict(os.environ), 'spec': spec, 'cwd': os.getcwd(), 'stdin': sys.stdin.read()})"
        launch = a_launch(folder, program(body), env={"ADDED": "yes", "PYTHONPATH": "/somewhere"})
        seen = self.run(launcher, launch).results[0].detected
        assert seen["spec"]["nonce"] == launch.spec.nonce
        assert seen["cwd"] == os.path.realpath(launch.cwd)
        assert seen["stdin"] == ""
        assert seen["env"]["ADDED"] == "yes"
        assert seen["env"][protocol.SPEC_VARIABLE] == str(folder / protocol.SPEC_FILE)
        assert seen["env"][protocol.MARK_VARIABLE] == f"{folder.parent.parent}:7"
        first, second = seen["env"]["PYTHONPATH"].split(os.pathsep)[:2]
        assert first.endswith(os.path.join("harness", "inject"))
        assert second == "/somewhere"

    def test_program_writes_no_records_of_the_user(self, launcher: Launcher, folder: Path) -> None:
        """W&B and MLflow write to the trial's own records."""
        seen = self.run(launcher, a_launch(folder, program("result(detected=dict(os.environ))"))).results[0].detected
        assert seen["WANDB_MODE"] == "offline"
        assert seen["MLFLOW_TRACKING_URI"].startswith(folder.as_uri())
        assert seen["MLFLOW_DISABLE_TELEMETRY"] == "true"

    def test_hostile_paths_and_arguments_arrive_unchanged(self, launcher: Launcher, tmp_path: Path) -> None:
        """No shell interprets paths or arguments."""
        folder = tmp_path / "a b'c\"d\n$(e) ü" / "s" / "trials" / "0007"
        folder.mkdir(parents=True)
        arguments = ["a b", "'", '"', "$(touch x)", "\n", "ü☃", "", "--", "*"]
        ended = self.run(launcher, a_launch(folder, [*program("result(detected={'argv': sys.argv[1:]})"), *arguments]))
        assert ended.results[0].detected["argv"] == arguments

    def test_missing_working_directory_is_bad_input(self, launcher: Launcher, folder: Path) -> None:
        """The missing folder is reported before anything starts."""
        launch = a_launch(folder, ["true"])
        launch.cwd = str(folder / "nowhere")
        with pytest.raises(BadInput, match="nowhere"):
            launcher.start(launch)

    @pytest.mark.parametrize(("argument", "env"), [("a\0b", {}), ("a", {"A=B": "c"}), ("a", {"A": "b\0"})])
    def test_arguments_and_variables_that_no_process_accepts_are_bad_input(
        self, launcher: Launcher, folder: Path, argument: str, env: dict[str, str]
    ) -> None:
        """A NUL, for example, cannot be passed to a process."""
        with pytest.raises(BadInput, match="COMMAND"):
            launcher.start(a_launch(folder, ["true", argument], env=env))

    def test_command_that_cannot_be_started_gives_a_failed_trial(self, launcher: Launcher, folder: Path) -> None:
        """The start returns a trial instead of raising."""
        launch = a_launch(folder, ["no-such-program-anywhere"])
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.exit_code) == ("exit", 127)
        outcome, reason = classify(ended.facts(launch.spec))
        assert outcome is Outcome.error
        assert "no-such-program-anywhere" in reason

    # Results

    def test_result_ends_the_whole_process_tree(self, launcher: Launcher, folder: Path) -> None:
        """The launcher ends the program, even if it would continue."""
        body = "child = spawn('import time; time.sleep(600)'); result(detected={'child': child.pid}); time.sleep(600)"
        launch = a_launch(folder, program(body))
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.exit_code, ended.signal) == ("result", None, None)
        assert classify(ended.facts(launch.spec)) == (Outcome.ok, "")
        assert not is_alive(ended.results[0].detected["child"])

    def test_program_that_exits_after_its_result_keeps_its_exit_status(self, launcher: Launcher, folder: Path) -> None:
        """The launcher sends signals only to a program that does not exit on its own."""
        ended = self.run(launcher, a_launch(folder, program("result(); sys.exit(5)")))
        assert (ended.cause, ended.exit_code) == ("result", 5)

    def test_all_ranks_are_waited_for(self, launcher: Launcher, folder: Path) -> None:
        """The first result gives the world size."""
        body = "result(0, 3); time.sleep(0.2); result(2, 3); time.sleep(0.2); result(1, 3); time.sleep(600)"
        ended = self.run(launcher, a_launch(folder, program(body)))
        assert ended.cause == "result"
        assert [result.rank for result in ended.results] == [0, 1, 2]

    def test_rank_that_never_answers_is_not_waited_for_forever(self, launcher: Launcher, folder: Path) -> None:
        """For example, one rank has failed, and the other rank hangs in a collective."""
        launch = a_launch(
            folder, program("result(1, 2, status='failed', error={'type': 'ValueError', 'message': 'x'}); time.sleep(600)")
        )
        ended = self.run(launcher, launch)
        assert ended.cause == "result"
        assert ended.problems == ["no result from rank 0"]
        assert classify(ended.facts(launch.spec)) == (Outcome.error, "ValueError: x (rank 1)")

    @pytest.mark.parametrize(
        "body",
        [
            "result(nonce='of another attempt')",
            "result(trial=8)",
            "result(rank=4, world_size=9); os.rename(folder + '/result.rank4.json', folder + '/result.rank0.json')",
            "result(world_size='many')",
            "result(schema=99)",
            "result(knobs=[1])",
        ],
    )
    def test_result_of_another_attempt_or_shape_is_a_problem(self, launcher: Launcher, folder: Path, body: str) -> None:
        """Such a result is not taken for a result of this trial, and no exception is raised."""
        launch = a_launch(folder, program(body))
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.results) == ("exit", [])
        assert len(ended.problems) == 1
        assert classify(ended.facts(launch.spec))[0] is Outcome.error

    @pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "[" * 100_000, "\\x00\\xff"])
    def test_corrupt_result_is_a_problem(self, launcher: Launcher, folder: Path, content: str) -> None:
        """A program may overwrite any file."""
        body = f"open(folder + '/result.rank0.json', 'w').write({content!r})"
        ended = self.run(launcher, a_launch(folder, [*program(body)]))
        assert (ended.cause, ended.results, len(ended.problems)) == ("exit", [], 1)

    def test_files_of_an_earlier_attempt_are_not_mistaken_for_this_one(self, launcher: Launcher, folder: Path) -> None:
        """The launcher resets the folder."""
        self.run(launcher, a_launch(folder, program("progress('steady', 5); result()")))
        ended = self.run(launcher, a_launch(folder, program("pass")))
        assert (ended.cause, ended.results, ended.problems, ended.phase) == ("exit", [], [], "spawn")

    # Ends without a result

    def test_exit_without_the_harness_is_reported(self, launcher: Launcher, folder: Path) -> None:
        """Such a trial must not be taken for a baseline."""
        launch = a_launch(folder, [sys.executable, "-I", "-S", "-c", "pass"])
        outcome, reason = classify(self.run(launcher, launch).facts(launch.spec))
        assert outcome is Outcome.error
        assert reason.startswith("harness not loaded")

    def test_exit_after_steps_reports_the_number_of_steps(self, launcher: Launcher, folder: Path) -> None:
        """The reason also says what to do about it."""
        launch = a_launch(folder, program("progress('warmup', 3)"))
        outcome, reason = classify(self.run(launcher, launch).facts(launch.spec))
        assert outcome is Outcome.error
        assert "3 optimizer steps" in reason
        assert "epochs" in reason

    def test_exception_is_named(self, launcher: Launcher, folder: Path) -> None:
        """The reason is the last line of the user's traceback."""
        launch = a_launch(folder, program("raise ValueError('bad shape')"))
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.exit_code) == ("exit", 1)
        assert classify(ended.facts(launch.spec)) == (Outcome.error, "ValueError: bad shape")

    @pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT", "SIGTERM"])
    def test_signal_is_named(self, launcher: Launcher, folder: Path, name: str) -> None:
        """The reason names the signal and the phase."""
        launch = a_launch(folder, program(f"progress('compile'); os.kill(os.getpid(), signal.{name})"))
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.exit_code, ended.signal) == ("exit", None, name)
        outcome, reason = classify(ended.facts(launch.spec))
        assert outcome is Outcome.crash
        assert f"{name} in phase compile" in reason

    def test_signal_behind_a_shell_is_named(self, launcher: Launcher, folder: Path) -> None:
        """Exit status 139 means SIGSEGV."""
        launch = a_launch(folder, ["sh", "-c", "sh -c 'kill -SEGV $$'; exit $?"])
        outcome, reason = classify(self.run(launcher, launch).facts(launch.spec))
        assert outcome is Outcome.crash
        assert "SIGSEGV" in reason

    # Hangs

    @pytest.mark.parametrize(
        ("phase", "limit"),
        [
            *((protocol.PHASES[0], "start"), ("compile", "compile"), ("steady", "step"), ("exit", "step")),
            *more(*((phase, "start") for phase in protocol.PHASES[1:4]), ("warmup", "step")),
        ],
    )
    def test_hang_ends_at_the_limit_of_its_phase(self, launcher: Launcher, folder: Path, phase: str, limit: str) -> None:
        """All other limits are long."""
        deadlines = Deadlines(**{"start_s": 60.0, "compile_s": 60.0, "step_s": 60.0, f"{limit}_s": 2.0})
        launch = a_launch(folder, program(f"progress({phase!r}, 2); time.sleep(600)"), deadlines=deadlines)
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.phase) == ("deadline", phase)
        outcome, reason = classify(ended.facts(launch.spec))
        assert outcome is Outcome.timeout
        assert reason.startswith(f"{limit}:")
        assert phase in reason, reason

    def test_trial_with_endless_progress_ends_at_the_total_limit(self, launcher: Launcher, folder: Path) -> None:
        """Steady progress does not extend the total limit."""
        body = "for step in range(10_000): progress('steady', step); time.sleep(0.05)"
        ended = self.run(launcher, a_launch(folder, program(body), deadlines=Deadlines(total_s=1.0)))
        assert ended.cause == "deadline"
        assert ended.evidence["deadline"].startswith("total:")

    # Ending

    def test_children_in_separate_sessions_that_ignore_sigterm_are_ended(self, launcher: Launcher, folder: Path) -> None:
        """Orphans, whose parent has already exited, are ended as well."""
        body = f"""
child = spawn({IGNORES_SIGTERM!r}, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
parent = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], start_new_session=True, stdout=s.DEVNULL).pid)"
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
orphan = int(subprocess.run([sys.executable, "-S", "-c", parent, *sleeper], stdout=subprocess.PIPE).stdout)
open(folder + "/pids.tmp2", "w").write("%d %d" % (child.pid, orphan))
os.rename(folder + "/pids.tmp2", folder + "/pids")
time.sleep(600)
"""
        running = launcher.start(a_launch(folder, program(body)))
        pids = [int(pid) for pid in wait_for(folder / "pids").split()]
        assert all(is_alive(pid) for pid in pids)
        running.stop("interrupted by the user")
        assert not any(is_alive(pid) for pid in pids)

    def test_stop_ends_the_trial_and_keeps_the_reason(self, launcher: Launcher, folder: Path) -> None:
        """A second call of `stop` changes nothing."""
        launch = a_launch(folder, program("progress('warmup', 1); time.sleep(600)"))
        running = launcher.start(launch)
        wait_for(folder / protocol.PROGRESS_FILE)
        running.stop("budget over")
        running.stop("again")
        ended = running.poll()
        assert ended is not None
        assert ended is running.poll()
        assert (ended.cause, ended.exit_code, ended.signal) == ("stopped", None, None)
        assert classify(ended.facts(launch.spec)) == (Outcome.interrupted, "budget over")

    def test_requested_stop_ends_the_trial_before_stop_waits_for_it(self, launcher: Launcher, folder: Path) -> None:
        """So several trials can end at the same time."""
        running, pid = started(launcher, folder)
        running.request_stop("interrupted by the user")
        assert gone(pid)
        running.stop("too late")
        ended = running.poll()
        assert ended is not None
        assert (ended.cause, ended.evidence["stop_reason"]) == ("stopped", "interrupted by the user")

    def test_stop_after_the_results_keeps_the_results(self, launcher: Launcher, folder: Path) -> None:
        """A finished measurement is not thrown away."""
        running = launcher.start(a_launch(folder, program("result(); time.sleep(600)")))
        wait_for(folder / protocol.result_file(0))
        running.stop("budget over")
        ended = running.poll()
        assert ended is not None
        assert ended.cause == "result"

    def test_result_written_because_of_a_signal_of_the_launcher_is_not_used(self, launcher: Launcher, folder: Path) -> None:
        """torchrun may answer SIGTERM with an exception, but the trial was stuck nevertheless."""
        body = """
def leave(*_): result(status='failed', error={'type': 'SignalException', 'message': 'got 15'}); os._exit(1)
signal.signal(signal.SIGTERM, leave); progress('steady', 3); time.sleep(600)
"""
        launch = a_launch(folder, program(body), deadlines=Deadlines(step_s=0.8))
        ended = self.run(launcher, launch)
        assert (ended.cause, ended.results) == ("deadline", [])
        assert classify(ended.facts(launch.spec))[0] is Outcome.timeout

    def test_progress_is_the_newest_complete_line(self, launcher: Launcher, folder: Path) -> None:
        """Other lines in the file are ignored."""
        body = """
progress('init'); progress('warmup', 4)
open(folder + '/progress.jsonl', 'ab').write(b'nonsense\\n[1]\\n{"phase": 3}\\n\\xff\\n{"time_s": 1, "phase": "stea')
open(folder + '/done', 'w').write('x'); time.sleep(600)
"""
        running = launcher.start(a_launch(folder, program(body)))
        wait_for(folder / "done")
        progress = running.progress()
        running.stop("enough")
        assert progress is not None
        assert (progress.phase, progress.step) == ("warmup", 4)

    # Logs

    def test_endless_output_leaves_a_short_tail(self, launcher: Launcher, folder: Path) -> None:
        """The output fills neither memory nor disk."""
        body = "for _ in range(100): sys.stdout.write('y' * 299_999 + '\\n')\nprint('last words'); sys.stdout.flush(); result()"
        ended = self.run(launcher, a_launch(folder, program(body)))
        assert ended.evidence["stdout_tail"].rstrip().endswith("last words")
        assert len(ended.evidence["stdout_tail"]) <= 8192
        assert (folder / protocol.STDOUT_FILE).stat().st_size < 8 << 20

    def test_secrets_are_masked_in_the_tails(self, launcher: Launcher, folder: Path) -> None:
        """Secrets are recognised by their keys, in URLs, and by their values in the environment."""
        body = "sys.stderr.write('see ' + os.environ['MY_TOKEN'] + ' api_key=abc123 http://me:pass1@host/x lr=0.1')"
        ended = self.run(launcher, a_launch(folder, program(body), env={"MY_TOKEN": "s3cr3t-value"}))
        assert ended.evidence["log_tail"] == "see *** api_key=*** http://***@host/x lr=0.1"

    def test_files_left_in_the_working_directory_are_listed(self, launcher: Launcher, folder: Path) -> None:
        """A trial may have written a checkpoint."""
        body = "with open('left.pt', 'w') as file: file.write('xyz'); time.sleep(0.5)\nresult()"
        assert self.run(launcher, a_launch(folder, program(body))).evidence["files_left"] == {"left.pt": 3}

    def test_new_file_of_another_program_is_listed_separately(self, launcher: Launcher, folder: Path) -> None:
        """Other programs may write there as well."""
        running = launcher.start(a_launch(folder, program("time.sleep(0.5); result()")))
        (folder.parent / "theirs.pt").write_text("xyz")
        evidence = wait(running).evidence
        assert (evidence["files_left"], evidence["files_new"]) == ({}, {"theirs.pt": 3})


class SharedLauncherContract(LauncherContract):
    """The contract of a launcher that all tests share, as the trials of a study do. Its helper processes start only once.

    The fixture `launcher` of a subclass has the scope "class", depends on `study`, and closes the launcher.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def study(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """Yields the folder of the study to which all trials belong; fails if a process is left at the end."""
        study = trial_folder(tmp_path_factory.mktemp("shared")).parent.parent
        yield study
        assert not marked_processes(study)

    @pytest.fixture
    def folder(self, study: Path) -> Path:
        """Returns a trial's folder that does not exist yet."""
        return study / "trials" / f"{next(ATTEMPTS):04d}"

    @pytest.fixture(autouse=True)
    def nothing_left(self, launcher: Launcher, study: Path) -> Iterator[None]:
        """Fails a test that leaves a process of a trial, and ends the process."""
        yield
        left = process_tree.members(lambda mark: is_mark_of(study, mark) and mark[-1].isdigit())
        process_tree.send(left, signal.SIGKILL)
        assert not left
