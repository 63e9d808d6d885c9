"""Runs cases one after the other in a fresh folder, inside this process, and reports problems with autotune's answers.

An audit hook of the interpreter stops and records each process that a case would start, each write outside of the folder, and
each unpickling.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune
import autotune.cli.main
import autotune.study
from autotune.cli import app
from autotune.config import compose
from autotune.replay import bench
from tests import compositions
from tests.benchmarks.fuzz import ends
from tests.benchmarks.fuzz.cases import BEST, GLOBAL, OF_RECIPE, OLD_STUDY, TABLE_BYTES
from tests.benchmarks.fuzz.damage import Case
from tests.support import studies

LIMIT_S = 10.0
CODES = (0, 2, 3, 4, 5, 130)  # the documented exit statuses, except 1: an internal error
MAX_LINE = 4000  # characters of a message
PACKAGE = f"{Path(autotune.__file__).parent}/"
CANARY, SECRET = "canary-sang", "hush-hush-4711"
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
NEVER = ("os.system", "pickle.find_class", "pty.spawn")
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")
HANDLED = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)  # by some command
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Paths outside of the folder that autotune may write to. The folder of a replay's study does not exist.
ALLOWED = ("/dev/null", "/proc/self", "/nonexistent")
MAY_START = ("run", "record", "verify", "explain", "resume", "apply", "doctor", "ui", "sync", "inspect", "replay", "report")
NAMES_OUTPUT = ("-o", "--o", "--pic", "--runs-dir", "runs_dir", "+runs_dir")  # the user says where to write
IGNORED = ("__pycache__", "runs", "tmp", "explain")  # folders that autotune may write in
_build, _studies = functools.cache(app.build), bench._studies


class Began(BaseException):
    """A process or a study would begin here, so autotune has accepted the input."""


class Hang(BaseException):
    """The case takes longer than LIMIT_S."""


@dataclass
class Answer:
    """How autotune answered a case: exit status (None if it raised), seconds, the first problem and its cause; "" for none."""

    code: int | None = None
    seconds: float = 0.0
    problem: str = ""
    cause: str = ""

    def fail(self, what: str, more: object) -> None:
        """Records a problem: `what` it is, the same for all failures with this cause, and `more` about this case."""
        self.problem, self.cause = self.problem or f"{what}: {more}", self.cause or what

    def broke(self, error: BaseException) -> str:
        """Records an exception that reached the user."""
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
        where = f"{own[-1].filename.removeprefix(PACKAGE)}:{own[-1].lineno}" if own else "outside of autotune"
        self.fail(f"{'hang' if isinstance(error, Hang) else 'traceback'}: {type(error).__name__} at {where}", str(error)[:200])
        return "internal error"


class Sandbox:
    """The audit hook; it stays in the process for good, and does nothing while `is_active` is false."""

    def __init__(self, folder: str) -> None:
        self._folder, self.is_active = folder, False
        self.started: list[str] = []
        self.wrong: list[tuple[str, str]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        is_shell = event in STARTS and os.path.basename(str(arguments[0])) in ("sh", "bash") and CANARY in str(arguments[1])
        if event in NEVER or is_shell:
            self.wrong.append(("code executed", f"{event} {arguments!r:.200}"))
            raise PermissionError(event)
        if event in STARTS:
            self.started.append(event)
            raise Began
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS
        if (is_write or event in WRITES) and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith((self._folder, *ALLOWED)):
                self.wrong.append(("written outside", f"{event} {path!r}"))
                raise PermissionError(13, "outside of the folder", path)


class FuzzPlace:
    """A folder with a study, scripts, canaries and a file of every kind."""

    def __init__(self, folder: Path) -> None:
        self._sandbox, self._clean, self._here = Sandbox(os.path.realpath(folder)), folder / "clean", folder / "here"
        self._pristine: set[tuple[str, int, int]] | None = None
        for name in ("mine", "model", "passes", "canary", "home", "tmp", "bin"):
            (self._clean / name).mkdir(parents=True)
        best = GLOBAL + yaml.safe_dump(BEST, sort_keys=False)
        texts = {
            "train.py": "raise SystemExit\n", "canary/file": "quiet\n", "best.yaml": best, "mine/best.yaml": best,
            "recipe.yaml": GLOBAL + yaml.safe_dump(OF_RECIPE, sort_keys=False),
            "marker.py": f"def touch(*_, **__):\n    open({CANARY!r}, 'w').close()\ntouch()\n",
        }  # fmt: skip
        for name, text in texts.items():
            (self._clean / name).write_text(text, encoding="utf-8")
        (self._clean / "table.jsonl.gz").write_bytes(TABLE_BYTES)
        studies.make_study(self._clean / "runs")
        with tarfile.open(OLD_STUDY) as archive:
            archive.extractall(self._clean / "runs", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        record = self._clean / "runs/mlp/study.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "cwd": "/"}))  # the recorded folder does not exist here

    def run(self, case: Case) -> Answer:
        """Returns how autotune answers a case."""
        self._restore()
        for name, content in case.files.items():
            Path(name).write_bytes(content)
        before, answer = self._listing(), Answer()
        self._sandbox.started, self._sandbox.wrong = [], []
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict, as a terminal's
        stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        with self._patched(case, answer), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _limited():
            started_s = time.perf_counter()
            self._sandbox.is_active = True
            try:
                answer.code = ends.RUNNERS.get(case.words[0], _cli)(case)
            except Began:
                answer.code = 0
            except (Exception, Hang) as error:
                answer.broke(error)
            finally:
                self._sandbox.is_active = False
                answer.seconds = time.perf_counter() - started_s
        self._judge(case, answer, *map(_written, (stdout, stderr)))
        if (changed := self._listing() ^ before) and not _names_output(case):
            answer.fail("files changed", sorted(changed)[:2])
        return answer

    def _restore(self) -> None:
        os.chdir(self._clean)
        if not self._here.exists() or self._listing(()) != self._pristine:
            shutil.rmtree(self._here, ignore_errors=True)
            shutil.copytree(self._clean, self._here)
            self._pristine = self._listing(())
        os.chdir(self._here)

    def _judge(self, case: Case, answer: Answer, out: str, err: str) -> None:
        for what, more in self._sandbox.wrong:
            if what != "written outside" or not _names_output(case):
                answer.problem = answer.cause = ""  # an error that follows from being stopped is not the problem
                answer.fail(what, more)
        if self._sandbox.started and next((word for word in case.words if not word.startswith("-")), "") not in MAY_START:
            answer.fail("started a process", self._sandbox.started)
        if (self._here / CANARY).exists():
            answer.fail("code executed", "the canary sang")
        if answer.code not in (*CODES, None):
            answer.fail("exit status", f"{answer.code} {err[:300]!r}")
        if "Traceback (most recent call last)" in out + err:
            answer.fail("traceback: printed", repr(err[-300:]))
        if SECRET in out + err:
            answer.fail("secret shown", "the value of FUZZ_SECRET")
        if answer.code == 2 and case.words[0] not in ends.RUNNERS:
            lines = err.removesuffix("\n").split("\n")
            wrong = [line for line in lines if not line.isprintable() or len(line) > MAX_LINE]
            if wrong or not lines[-1].startswith("autotune: "):
                answer.fail("unclear message", repr((wrong or lines)[-1][:300]))

    def _listing(self, ignored: Sequence[str] = IGNORED) -> set[tuple[str, int, int]]:
        found = set()
        for base, folders, files in os.walk(self._here):
            folders[:] = [name for name in folders if name not in ignored]
            found.add((os.path.relpath(base, self._here), 0, 0))
            for name in files:
                told = os.stat(os.path.join(base, name))
                found.add((os.path.relpath(os.path.join(base, name), self._here), told.st_size, told.st_mtime_ns))
        return found

    @contextlib.contextmanager
    def _patched(self, case: Case, answer: Answer) -> Iterator[None]:
        environment = dict(os.environ)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
            warnings.simplefilter("error", RuntimeWarning)  # NumPy's: it would appear between the user's lines
            patch.setattr(app, "build", _build)
            patch.setattr(compose, "_hydra", compositions.copied)
            patch.setattr(autotune.cli.main, "_fault", answer.broke)
            patch.setattr(autotune.study, "run_study", _begin)
            patch.setattr(autotune.study, "resume_study", _begin)
            patch.setattr(bench, "_studies", _few_studies)
            patch.setattr(sys, "argv", ["autotune", *case.words])
            patch.setattr(sys, "dont_write_bytecode", True)
            patch.setattr(sys, "path", [str(self._here), *sys.path])  # an import of `marker` works, and is seen
            patch.setattr(tempfile, "tempdir", str(self._here / "tmp"))
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            os.environ.update({"HOME": "home", "FUZZ_SECRET": SECRET, **case.env})
            try:
                yield
            finally:
                os.environ.clear()
                os.environ.update(environment)
                bench._table.cache_clear()
                if len(compositions._known) > 100:
                    compositions._known.clear()


def _cli(case: Case) -> int:
    return autotune.cli.main.main(case.words)


def _begin(*_: Any, **__: Any) -> None:
    raise Began


def _few_studies(jobs: Sequence[Any], *arguments: Any) -> Any:
    """Replays a single study. Several may take as long as the user asked for, which is no hang, so they are not run."""
    return _studies(jobs, *arguments) if len(jobs) == 1 else _begin()


def _names_output(case: Case) -> bool:
    return any(word.startswith(NAMES_OUTPUT) for word in case.words)


def _written(stream: io.TextIOWrapper) -> str:
    with contextlib.suppress(ValueError):
        stream.flush()
    return stream.buffer.getvalue().decode("utf-8", "replace")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Hang(f"longer than {LIMIT_S:.0f} s")

    before = {number: signal.getsignal(number) for number in HANDLED}
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S / 2)  # again, if something swallowed it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
