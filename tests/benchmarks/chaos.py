"""Hits processes of a study again and again and resumes the study: is anything lost, repeated, left behind, or wrong?

    python -m tests.benchmarks.chaos --kills 100 [--seed 0] [--minutes 30] [--ranks 1,2,4] [--file chaos.jsonl]
    python -m tests.benchmarks.chaos --slurm --kills 40    # trials run on a private Slurm, whose parts are killed as well
    python -m tests.benchmarks.chaos --ray --kills 40      # the same on a private Ray cluster
    python -m tests.benchmarks.chaos --stub --kills 1000   # trials without torch: many of them finish between two kills

Victims, moments and blows (the signals to a victim) are random. A victim is a trial's first process, one of its ranks or loader
workers, the warm server, the supervisor, the tuner (which is then resumed with `autotune resume`), the tracker, or a process of
`autotune ui`. "everything" is all processes of the study at once, including the keeper, as when a container or a job is killed.
On a cluster, a victim may also be the agent on the node; with --slurm, `srun`, the node's slurmstepd or slurmd, or slurmctld;
with --ray the broker, the actor (Ray's worker), the node's raylet, or rarely the head. A killed daemon is started again after a
while. After the death of Ray's head, the whole cluster is started again. Most blows are SIGKILL. The others stop a process for
up to five seconds (SIGSTOP, SIGCONT), or send it five SIGTERMs at once.

With --stub, trials take less than a second and hardly any CPU. So there is no warm server, but everything else is the same.
The stub's speed is known: bf16 makes it 1.5 times as fast. A verdict that contradicts this counts as wrong.

The trials overwrite the user's checkpoints, also when they receive SIGTERM. Meanwhile another program saves checkpoints in the
same folder. Before each save, it checks that its last checkpoint is unchanged.

If a study reaches its verdict before all kills are done, a new study starts with the next number of ranks. `autotune verify`
measures a study's claim again, undisturbed. The last study continues to its verdict. The exit status is 1 if anything is lost,
repeated, left behind or spoiled, or if a claim does not hold. With --file, each study's result is kept there; a later call does
the remaining kills and prints the sum. The folder of a study in which something went wrong is kept next to that file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import NotMeasured
from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.environment import own_environment
from autotune.launchers.slurm_cancel import NOTE, is_marked
from autotune.records import Kind, Outcome, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.trackers.sync import LAST_S
from tests.benchmarks.chaos_engines import Engine, add_options
from tests.benchmarks.chaos_programs import LAUNCH, OTHER, RATIO, STUB, TORCH
from tests.benchmarks.reporting import machine_lines, table

AMP = "precision.amp"
PRECIOUS, CHECKPOINTS = b"precious" * 1000, ("named.pt", "replaced.pt")  # content and names of the user's checkpoints
RULES = {"warmup_min_device_s": 0.05, "warmup_max_s": 1.0, "min_s": 0.2, "max_s": 0.5, "slow_max_s": 1.0, "min_steps": 5}
OPTIONS = [
    "study.name=chaos", "device.kind=cpu", "compile.mode=off", "study.budget.trials=8", "measure.quiet=false",
    *[f"measure.{phase}.{name}={value}" for phase in ("screening", "finals") for name, value in RULES.items()],
]  # fmt: skip
STUB_OPTIONS = ["study.budget.trials=100", "search.stop=false", "explain.auto=false"]  # a stub has no steps to explain
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
EVERYTHING = "everything"
VICTIMS = ("trial", "worker", "rank", "warm server", "supervisor", "tuner", "tracker", "ui", EVERYTHING)
BLOWS = ("SIGKILL",) * 6 + ("SIGSTOP", "SIGTERM")
STOPPED_S = (0.2, 5.0)  # shortest and longest time for which a process is stopped
NUM_SIGTERM = 5
UI_EVERY_S = 40.0  # shortest time between two starts of `autotune ui`, which each take seconds of CPU
WEIGHTS = {"tuner": 0.5, EVERYTHING: 0.5}  # after these, it takes seconds until a trial runs again
PAUSE_S, STUB_PAUSE_S = (0.2, 3.0), (0.1, 1.0)  # shortest and longest pause between two kills
LOOK_S = 0.05  # between two looks for the drawn victim, which read the whole process list
# How long to wait for the drawn victim to exist. Trials come back when the tuner has started, but the tracker may not.
PATIENCE_S, LASTING, LASTING_PATIENCE_S = 20.0, ("warm server", "tracker", "ui"), 1.0
LAST_PROCESS_S = LAST_S + 20.0  # time for the last processes to exit after a study, including the tracker
MAX_STARTS_WITHOUT_A_KILL = 5  # after this many starts of a tuner in a row without a kill, the study is given up
# Temporary files that torch and Python leave behind if they are killed by SIGKILL, in a real run as well.
OF_LIBRARIES = ("torchelastic_", "pymp-", "torch-shm-")


@dataclass
class Toll:
    """The result of the benchmark.

    Attributes:
        kills: {victim, with the blow if it is not SIGKILL: number of blows}.
        lost: descriptions of finished trials whose record disappeared or changed.
        repeated: configurations, and repeats in the finals, that were measured twice.
        orphans: descriptions of the processes that were left behind.
        segments: names in /dev/shm that were left behind.
        files: temporary files that were left behind: in the temporary folder, next to the user's files, or in the study.
        untracked: why studies could not be copied to MLflow after their end.
        spoiled: checkpoints of the user or of the other program that were changed.
        verdicts: verdicts of the completed studies.
        wrong: verdicts that contradict what is known of the program, and claims that `autotune verify` did not confirm or
            failed to check.
        num_verified: number of claims that `autotune verify` checked; it skips a claim if there is no time for a round.
        num_trials: number of finished trials.
    """

    kills: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_verified: int = 0
    num_trials: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, repeated, left behind, spoiled or wrong, and every study reached a verdict."""
        return not self.harm and bool(self.verdicts) and all(self.verdicts)

    @property
    def harm(self) -> list[str]:
        """Everything that went wrong."""
        left = [*self.orphans, *self.segments, *self.files]
        return [*self.lost, *self.repeated, *left, *self.spoiled, *self.untracked, *self.wrong]

    def __add__(self, other: Toll) -> Toll:
        """Returns the result of both."""
        return Toll(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def lines(self) -> list[str]:
        """Returns the table, and below it the names of everything that went wrong."""
        kills = ", ".join(f"{name} {number}" for name, number in self.kills.most_common())
        rows = [
            ("kills", f"{self.kills.total()} ({kills})"),
            ("finished trials", self.num_trials),
            ("finished trials lost", len(self.lost)),
            ("finished trials repeated", len(self.repeated)),
            ("orphan processes", len(self.orphans)),
            ("leaked shared-memory segments", len(self.segments)),
            ("leaked temporary files", len(self.files)),
            ("checkpoints spoiled", len(self.spoiled)),
            ("studies that MLflow does not take", len(self.untracked)),
            ("studies with a verdict", f"{sum(map(bool, self.verdicts))} of {len(self.verdicts)}"),
            (
                "wrong verdicts, or claims that did not hold",
                f"{len(self.wrong)}; {self.num_verified} claims were measured again",
            ),
        ]
        return [table(("", ""), rows), *self.harm]


class Victimized:
    """One study under attack.

    Args:
        cwd: an empty folder.
        kills: number of kills that are still to be done; counted down.
        rng: draws victims and moments.
        toll: gets the results.
        deadline_s: time on the monotonic clock after which nothing is killed.
        ranks: number of processes of a trial; several are started by torchrun.
        engine: where the trials run; None for this host.
        is_stub: whether the trials run a program without torch.
        most_pause_s: longest pause between two kills; None for the usual one.
    """

    def __init__(
        self,
        cwd: Path,
        kills: int,
        rng: random.Random,
        *,
        toll: Toll,
        deadline_s: float,
        ranks: int = 1,
        engine: Engine | None = None,
        is_stub: bool = False,
        most_pause_s: float | None = None,
    ) -> None:
        self.folder = StudyFolder(cwd / "runs" / "chaos")
        self._cwd, self._kills, self._rng, self._toll, self._deadline_s = cwd, kills, rng, toll, deadline_s
        self._finished: dict[int, TrialRecord] = {}
        # Short, because worker processes put sockets there, and a socket's path has at most 107 characters.
        (temporary := cwd / "tmp").mkdir()
        own = {k: v for k, v in own_environment().items() if k != "MLFLOW_TRACKING_URI"}
        self._environment = {**own, "TMPDIR": str(temporary)}
        self._engine, self._is_stub, self._options = engine, is_stub, [*OPTIONS, *(STUB_OPTIONS if is_stub else [])]
        least_s, most_s = STUB_PAUSE_S if is_stub else PAUSE_S
        self._pause_s = least_s, most_pause_s or most_s
        missing = {*(["rank"] if ranks == 1 else []), *(["warm server"] if ranks > 1 or is_stub or engine else [])}
        self._kinds = [name for name in VICTIMS if name not in missing]
        self._tuner: subprocess.Popen[bytes] | None = None
        self._ui: subprocess.Popen[bytes] | None = None
        self._next_ui_s = 0.0
        self._weights = dict(WEIGHTS)
        if engine:
            self._environment |= engine.environment
            self._kinds, self._options = [*self._kinds, *engine.victims], [*self._options, *engine.options]
            self._weights |= engine.weights
        (cwd / "train.py").write_text(STUB if is_stub else TORCH, encoding="utf-8")
        (cwd / "launch.py").write_text(LAUNCH, encoding="utf-8")
        program = [sys.executable, *(["-S"] if is_stub else []), "train.py"]
        if ranks > 1 and is_stub:
            self._command = [sys.executable, "-S", "launch.py", str(ranks), *program]
        else:
            torchrun = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else []
            self._command = [*program[:-1], *torchrun, program[-1]]
        for name in CHECKPOINTS:
            (cwd / name).write_bytes(PRECIOUS)

    def run(self, minutes: float) -> int:
        """Kills processes until the study reaches its verdict; returns how many kills are still to be done.

        Args:
            minutes: the study's budget.
        """
        budget = f"study.budget.minutes={minutes:g}"
        with (self._cwd / "other.log").open("wb") as log:
            other = subprocess.Popen([sys.executable, "-c", OTHER], cwd=self._cwd, stdout=log, stderr=log)
        try:
            self._attack_all(budget)
        finally:
            for process in filter(None, (self._tuner, self._ui)):
                process.terminate()
                process.wait()
            other.kill()
            other.wait()
        self._toll.spoiled += (self._cwd / "other.log").read_text().splitlines()
        self._close()
        return self._kills

    def _attack_all(self, budget: str) -> None:
        tuner, num_idle = self._start("run", *self._options, budget, "--", *self._command), 0
        while True:
            before = self._kills
            is_over = self._attack(tuner)
            self._look()
            if is_over and tuner.returncode == 0:
                break
            num_idle = 0 if self._kills < before else num_idle + 1
            if num_idle == MAX_STARTS_WITHOUT_A_KILL:
                break
            tuner = self._start("resume", "chaos")

    def _attack(self, tuner: subprocess.Popen[bytes]) -> bool:
        """Kills processes of the study until the tuner has ended; returns whether the tuner ended by itself."""
        self._tuner = tuner
        drawn, blow, from_s = self._draw()
        while tuner.poll() is None:
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            if self.folder.study_file.exists() and self._next_ui_s < now_s < self._deadline_s and not self._is_ui_there:
                self._ui, self._next_ui_s = self._start("ui"), now_s + UI_EVERY_S
            if not self._kills or not from_s <= now_s < self._deadline_s or not self.folder.study_file.exists():
                continue
            if self._hit(drawn, blow, tuner):
                if drawn == EVERYTHING or (drawn == "tuner" and blow != "SIGSTOP"):
                    tuner.wait()
                    return False
                drawn, blow, from_s = self._draw()
            elif now_s > from_s + (LASTING_PATIENCE_S if drawn in LASTING else PATIENCE_S):
                drawn, blow, from_s = self._draw()
        return True

    def _draw(self) -> tuple[str, str, float]:
        """Returns the next victim and blow, and the earliest moment for it."""
        weights = [self._weights.get(kind, 1.0) for kind in self._kinds]
        return (
            self._rng.choices(self._kinds, weights)[0],
            self._rng.choice(BLOWS),
            time.monotonic() + self._rng.uniform(*self._pause_s),
        )

    def _hit(self, name: str, blow: str, tuner: subprocess.Popen[bytes]) -> bool:
        """Hits a process of this kind; returns whether there was one."""
        if self._engine and name in self._engine.daemons:
            self._note(f"SIGKILL for {name}")
            self._engine.kill(name, self._rng)
            self._note(f"{name} runs again")
            blow = "SIGKILL"
        elif name == EVERYTHING:
            self._note("SIGKILL for everything")
            self._kill_everything(tuner)
            blow = "SIGKILL"
        else:
            try:
                victim = self._rng.choice(self._victims(tuner)[name])
                self._note(f"{blow} for {name} {victim.pid}")
                if blow == "SIGSTOP":
                    victim.suspend()
                    threading.Timer(self._rng.uniform(*STOPPED_S), _go_on, [victim]).start()
                for _ in range(NUM_SIGTERM if blow == "SIGTERM" else 0):
                    victim.send_signal(signal.SIGTERM)
                if blow == "SIGKILL":
                    victim.kill()
            except (IndexError, psutil.NoSuchProcess):
                return False
        self._kills -= 1
        self._toll.kills[name if blow == "SIGKILL" else f"{name} ({blow})"] += 1
        return True

    def _kill_everything(self, tuner: subprocess.Popen[bytes]) -> None:
        """Kills the tuner, the agents and all processes below them, almost at once, because they are stopped first."""
        roots = [psutil.Process(tuner.pid), *self._agents()]
        for send in (psutil.Process.suspend, psutil.Process.suspend, psutil.Process.kill):  # twice: new children may come
            for root in roots:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in (root, *root.children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            send(process)

    def _victims(self, tuner: subprocess.Popen[bytes]) -> dict[str, list[psutil.Process]]:
        """Returns {kind of victim: its processes}: only processes that this tuner has started, directly or indirectly."""
        found: dict[str, list[psutil.Process]] = {name: [] for name in self._kinds}
        try:
            own, there = psutil.Process(tuner.pid), self._agents()
            found |= {"tuner": [own], **(self._engine.processes(own) if self._engine else {})}
            if self._ui and self._is_ui_there:
                found["ui"] = [psutil.Process(self._ui.pid), *psutil.Process(self._ui.pid).children(recursive=True)]
            for process in (child for root in (own, *there) for child in root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # the others are still there
                    if (kind := kind_of(process)) in found:
                        found[kind].append(process)
        except psutil.NoSuchProcess:  # it ended meanwhile
            pass
        return found

    def _note(self, what: str) -> None:
        """Adds a line to the tuner's log, so that a fault can be traced to what was done before it."""
        with (self._cwd / "tuner.log").open("a") as log:
            log.write(f"--- {time.strftime('%H:%M:%S')} {what}\n")

    @property
    def _is_ui_there(self) -> bool:
        return self._ui is not None and self._ui.poll() is None

    def _agents(self) -> list[psutil.Process]:
        return self._engine.agents() if self._engine else []

    def _look(self) -> None:
        """Compares the records on disk and the user's checkpoints with those of the last call."""
        for name in CHECKPOINTS:
            if (self._cwd / name).read_bytes() != PRECIOUS:
                self._toll.spoiled.append(f"{self._cwd.name}: {name}, after {self._toll.kills.total()} kills")
                (self._cwd / name).write_bytes(PRECIOUS)
        now = {record.number: record for record in self.folder.read_trials() if record.outcome is not Outcome.interrupted}
        for number, record in self._finished.items():
            later = now.get(number)
            if later is None or (later.outcome, later.value, later.changed) != (record.outcome, record.value, record.changed):
                if number == 0 and not record.outcome.has_value:
                    continue  # a baseline that failed is measured again
                self._toll.lost.append(f"{self._cwd.name}: trial {number}, {record.outcome}, {record.value}")
        self._finished = now

    def _close(self) -> None:
        """Counts what the study has left behind."""
        toll = self._toll
        toll.num_trials += len(self._finished)
        trials = [one for one in self._finished.values() if not one.outcome.is_no_answer]  # others may be tried again
        searched = Counter(tuple(sorted(r.changed.items())) for r in trials if r.kind in (Kind.baseline, Kind.search))
        finals = Counter((r.round, r.repeats) for r in trials if r.kind is Kind.final)
        toll.repeated += [f"{self._cwd.name}: {key}" for counts in (searched, finals) for key, n in counts.items() if n > 1]
        shown = self._autotune("show", "chaos", "--json")
        summary = json.loads(shown.stdout) if shown.returncode == 0 else {}
        is_told = len(summary.get("trials", [])) == len(self.folder.read_trials())
        verdict = (summary.get("speedup") or {}).get("verdict") if summary.get("status") == "complete" and is_told else None
        toll.verdicts.append(verdict or "")
        if self._is_stub and verdict and (why := why_wrong(summary)):
            toll.wrong.append(f"{self._cwd.name}: {why}")
        if verdict == "faster":
            self._verify()
        deadline_s = time.monotonic() + LAST_PROCESS_S
        while (left := self._processes()) and time.monotonic() < deadline_s:
            for process in left:  # trackers give way to all other programs, so on a busy machine they would take minutes
                with contextlib.suppress(psutil.Error):
                    process.nice(0)
            time.sleep(0.2)
        for process in left:
            toll.orphans.append(f"{self._cwd.name}: process {process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
        tracked = self._autotune("sync", "chaos")
        if tracked.returncode:
            toll.untracked.append(f"{self._cwd.name}: {tracked.stderr[-400:]}")
        toll.files += [f"{self._cwd.name}: {path.relative_to(self._cwd)}" for path in self._temporary()]

    def _temporary(self) -> list[Path]:
        """Returns the temporary files that autotune left, except the note of a job that was lost at the end of the study."""
        left, runs = (
            [path for path in (self._cwd / "tmp").iterdir() if not (path.name.startswith(OF_LIBRARIES) or _is_pythons(path))],
            self.folder.path.parent,
        )
        notes = [note for note in runs.glob(".autotune-*") if note.suffix != NOTE or not is_marked(note)]
        of_study, of_runs = self.folder.path.rglob("*.tmp"), (*runs.glob(".mlflow.db.*"), *notes)
        return [*left, *self._cwd.glob(".*.tmp"), *of_study, *of_runs]

    def _verify(self) -> None:
        """Measures the study's claim again, undisturbed."""
        ended = self._autotune("verify", "chaos", "--rounds", "2", "--minutes", "1", "--", *self._command)
        if ended.returncode == NotMeasured.exit_code:  # there was no time for a single round
            return
        self._toll.num_verified += 1
        if ended.returncode:
            said = f"{ended.stdout}{ended.stderr}"[-400:]
            self._toll.wrong.append(f"{self._cwd.name}: verify, exit status {ended.returncode}: {said}")

    def _processes(self) -> list[psutil.Process]:
        """Returns the agents and the processes alive whose mark, command line or working directory names the study's folder."""
        found = self._agents()
        for process in psutil.process_iter():
            try:
                mark, words = process.environ().get(MARK_VARIABLE, ""), " ".join(process.cmdline())
                is_own = str(self._cwd) in mark or str(self._cwd) in words or process.cwd() == str(self._cwd)
                if is_own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self._cwd / "tuner.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", *words],
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _autotune(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autotune", *words]
        return subprocess.run(command, cwd=self._cwd, env=self._environment, capture_output=True, text=True, check=False)


def kind_of(process: psutil.Process) -> str | None:
    """Returns which kind of victim a process below the tuner or an agent is; None for others."""
    words, parent = " ".join(process.cmdline()), process.parent()
    above = " ".join(parent.cmdline()) if parent else ""
    if "supervisor" in words:
        return "supervisor"
    if " sync " in words:
        return "tracker"
    if "warm_server.py" in words:  # a trial that it forks has the same command line and the same parent, the supervisor
        servers = [each for each in (parent.children() if parent else []) if "warm_server.py" in " ".join(each.cmdline())]
        if "warm_server.py" in above:
            return "worker"
        return "warm server" if process == min(servers, key=psutil.Process.create_time, default=process) else "trial"
    if "train.py" in words and "entry_point" not in words:
        is_rank = "torch.distributed.run" in above or "launch.py" in above
        return "rank" if is_rank else "worker" if "train.py" in above else "trial"
    return None


def why_wrong(summary: dict[str, Any]) -> str:
    """Returns why the verdict on the stub is wrong; "" if it is right, or inconclusive."""
    speedup = summary["speedup"]
    verdict, ratio, changed = speedup["verdict"], speedup["ratio"], speedup.get("overrides", {})
    if verdict == "faster":
        is_right = AMP in changed and abs(ratio - RATIO) < 0.05
    else:  # each configuration with bf16 may have failed, in the search or later, because its processes were killed
        tried = [(json.dumps(trial["changed"]), trial) for trial in summary["trials"] if AMP in trial["changed"]]
        failed = {key for key, trial in tried if not trial["value"] and trial["outcome"] != Outcome.interrupted}
        is_right = verdict == "ambiguous" or failed >= {key for key, trial in tried if trial["value"]}
    return "" if is_right else f"{verdict}, {ratio} with {changed}, but {AMP}=bf16 is {RATIO} times as fast"


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def run(
    place: Path,
    num_kills: int,
    *,
    seed: int,
    minutes: float,
    study_minutes: float = 2.0,
    each: int | None = None,
    ranks: Sequence[int] = (1,),
    engine: Engine | None = None,
    is_stub: bool = False,
    most_pause_s: float | None = None,
) -> Iterator[Toll]:
    """Attacks studies until all kills are done or the time is up, and the last study has reached its verdict.

    Args:
        place: an empty folder, in which the studies are made.
        num_kills: number of kills.
        seed: seed of victims and moments. The state of a study at a kill still depends on the machine.
        minutes: time after which nothing is killed.
        study_minutes: budget of each study.
        each: kills of a study, which then runs on to its verdict; None for no limit.
        ranks: numbers of processes of a trial; the studies take turns.
        engine: where the trials run; None for this host.
        is_stub: whether the trials run a program without torch.
        most_pause_s: longest pause between two kills; None for the usual one.

    Yields:
        Each study's result.
    """
    rng, deadline_s, kills_left = random.Random(seed), time.monotonic() + 60 * minutes, num_kills
    for number in itertools.count():
        if not kills_left or time.monotonic() >= deadline_s:
            return
        cwd, toll, before = place / f"{number:02d}", Toll(), _segments()
        cwd.mkdir()
        how = {"deadline_s": deadline_s, "ranks": ranks[number % len(ranks)], "engine": engine, "is_stub": is_stub}
        how["most_pause_s"] = most_pause_s
        kills_left -= (num := min(each or kills_left, kills_left))
        kills_left += Victimized(cwd, num, rng, toll=toll, **how).run(study_minutes)
        toll.segments = sorted(_segments() - before)
        toll.orphans += engine.left() if engine else []
        yield toll


def _is_pythons(file: Path) -> bool:
    """Whether a file is the one with which `tempfile` tests a folder, left by a process that was killed before removing it."""
    return file.is_file() and re.fullmatch(r"[a-z0-9_]{8}", file.name) is not None and file.stat().st_size <= len(b"blat")


def read(file: Path | None) -> list[Toll]:
    """Returns the results of earlier calls."""
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    return [Toll(**{**made, "kills": Counter(made["kills"])}) for made in map(json.loads, lines)]


def _segments() -> set[str]:
    """Returns the names in /dev/shm that belong to no living process.

    torch puts the creator's process id into a name; a semaphore of multiprocessing is mapped by the processes that use it.
    """
    names = {path.name for path in Path("/dev/shm").glob("*") if path.is_file()}  # folders there belong to tests
    names -= _mapped()
    return {name for name in names if not any(word.isdecimal() and Path("/proc", word).exists() for word in _words(name))}


def _mapped() -> set[str]:
    """Returns the names in /dev/shm that a living process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has exited
            found.update(re.findall(r"/dev/shm/(\S+)", maps.read_text(errors="replace")))
    return found


def _words(name: str) -> list[str]:
    return name.replace("-", "_").split("_")


def main() -> int:
    """Runs the benchmark and returns its exit status."""
    parser = argparse.ArgumentParser(description="Kills parts of a study at random and resumes the study.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--study-minutes", type=float, default=2.0, help="budget of each study")
    parser.add_argument("--each", type=int, help="kills of a study, which then runs on to its verdict; default: no limit")
    parser.add_argument(
        "--pause", type=float, help="longest pause between two kills, in seconds; raise it to let trials finish"
    )
    parser.add_argument("--ranks", default="1,2,4", help="processes of a trial; the studies take turns")
    add_options(parser, ", and kill its parts as well")
    parser.add_argument("--stub", action="store_true", help="trials run a program without torch, in a fraction of the time")
    parser.add_argument("--file", type=Path, help="keeps the results of several calls; --kills counts those of all")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the study, too
    earlier = read(asked.file)
    before = sum(earlier, Toll())
    kills_left, seed, made = max(0, asked.kills - before.kills.total()), asked.seed + len(earlier), Toll()
    ranks = [int(number) for number in asked.ranks.split(",")] if not asked.engine else [1]
    turn = len(earlier) % len(ranks)
    if asked.engine and (why := asked.engine.why_not()):
        parser.error(why)
    with tempfile.TemporaryDirectory(prefix="autotune-chaos-") as folder:
        engine = asked.engine() if asked.engine else None
        how = {"seed": seed, "minutes": asked.minutes, "study_minutes": asked.study_minutes, "each": asked.each}
        how |= {"most_pause_s": asked.pause, "engine": engine, "is_stub": asked.stub}
        try:
            for number, toll in enumerate(run(Path(folder), kills_left, **how, ranks=[*ranks[turn:], *ranks[:turn]])):
                made += toll
                if asked.file:
                    _keep(toll, asked.file, Path(folder, f"{number:02d}"), len(earlier) + number)
        finally:
            if engine:
                engine.stop()
        total = before + made
        print("\n".join([*machine_lines(), *total.lines()]))
        if kills_left and not made.is_clean:
            for log in sorted(Path(folder).glob("*/tuner.log")):
                print(f"\n{log.parent.name}: the tuner's last words\n{log.read_text(errors='replace')[-2000:]}")
    return 0 if total.is_clean and total.kills.total() >= asked.kills else 1


def _keep(toll: Toll, file: Path, study: Path, number: int) -> None:
    """Adds a study's result to a file, and keeps the study's folder next to the file if something went wrong."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(vars(toll)) + "\n")
    if not toll.is_clean:
        left_out = shutil.ignore_patterns(*(f"{name}*" for name in OF_LIBRARIES))
        shutil.copytree(study, file.with_name(f"{file.stem}-{number:02d}"), symlinks=True, dirs_exist_ok=True, ignore=left_out)


if __name__ == "__main__":
    sys.exit(main())
