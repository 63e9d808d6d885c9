"""Runs studies in a row and measures what grows from trial to trial: descriptors, threads, memory, disk.

    python -m tests.benchmarks.soak --trials 500 [--file soak.jsonl] [--minutes 30] [--stub [--trial-s 15]] [--slurm]

A part is one process that runs --studies studies of --each trials with `autotune.run`, so it is the tuner of all of them. Each
study has its own supervisor and warm server. With --slurm or --ray, the trials run on a private cluster, and each study also
has an agent on a node. These processes are measured after every trial. With --file, the measurements are kept there, and a
later call continues from them. --stub runs a program without torch, and so without a warm server; its trials sleep for
--trial-s seconds. To fit many hours of such studies on one machine, run several calls at once, each with its own --file. Then
append these files to one; `--trials 0 --file` with that file prints the sum.

A slope is fitted for each process. The interval is that of the mean slope over processes (Student's t, 95 %), because the
values of one process are not independent. The exit status is 1 if the interval shows that descriptors or threads grow, or if a
process is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import autotune
from autotune.launchers.environment import is_mark_of, own_environment
from autotune.launchers.process_tree import members
from autotune.stats import half_width
from tests.benchmarks import chaos
from tests.benchmarks.chaos_engines import Engine, add_options
from tests.benchmarks.reporting import machine_lines, table
from tests.faults import quick_study
from tests.support.stub_programs import PRELUDE

PROGRAM = """
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(1 << 16, 8))
while True:
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=32):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""
OPTIONS = [
    *(word for word in chaos.OPTIONS if not word.startswith("study.")),
    "tracker.uri=none", "search.stop=false", "explain.auto=false",
]  # fmt: skip
BELOW = {"supervisor": "autotune.launchers.supervisor", "warm server": "warm_server.py"}  # process below another -> its command
PROCESSES = ("tuner", "agent", *BELOW)
WARM_UP = {"tuner": 20, "agent": 3, **dict.fromkeys(BELOW, 3)}  # trials that are left out: modules are imported, caches fill
NOTHING = 0.005  # a slope that is only the rounding of its computation
MIN_POINTS = 8
GROWING = ("descriptors", "threads")  # must not grow at all; memory holds the trials' records
MEASURED = (*GROWING, "memory_mib")


class Part:
    """A tuner that runs studies in a row.

    Args:
        file: the lines are appended to it.
        is_stub: run the program without torch.
        trial_s: seconds that a trial of this program sleeps.
        engine: where the trials run; None for this host.
    """

    def __init__(self, file: Path, *, is_stub: bool, trial_s: float, engine: Engine | None) -> None:
        self._file, self._is_stub, self._trial_s, self._engine = file, is_stub, trial_s, engine
        self._num_trials = self._num_in_study = 0

    def study(self, place: Path, num_trials: int) -> None:
        """Runs a study in an empty folder."""
        self._num_in_study = 0
        source = f"{PRELUDE}\n{quick_study.PROGRAM}" if self._is_stub else PROGRAM
        (place / "train.py").write_text(source, encoding="utf-8")
        command = [sys.executable, *(["-S", "train.py", str(self._trial_s)] if self._is_stub else ["train.py"])]
        os.chdir(place)
        minutes = "null" if self._is_stub else "1"  # finals of torch programs take long
        limits = [f"study.budget.trials={num_trials}", f"study.budget.minutes={minutes}"]
        options = [*OPTIONS, "study.name=soak", *limits, *(self._engine.options if self._engine else ())]
        start_s = time.monotonic()
        study = autotune.run(*options, command=command, on_trial=lambda *_: self._look(), is_quiet=True)
        num_bytes = sum(path.lstat().st_blocks * 512 for path in study.path.rglob("*"))
        left = [*(self._engine.left() if self._engine else []), *members(lambda mark: is_mark_of(study.path, mark))]
        took_s = time.monotonic() - start_s
        self._note(study_trials=len(study.trials), study_bytes=num_bytes, left=len(left), study_s=took_s)

    def _look(self) -> None:
        """Notes the state of each process."""
        self._num_trials += 1
        self._num_in_study += 1
        for name, found in self._processes().items():
            for one in found:
                self._note(
                    process=name,
                    id=f"{one.pid} {one.create_time()}",
                    trial=self._num_trials if name == "tuner" else self._num_in_study,
                    descriptors=one.num_fds(),
                    threads=one.num_threads(),
                    memory_mib=one.memory_info().rss / 2**20,
                )

    def _processes(self) -> dict[str, list[psutil.Process]]:
        """Returns the running processes of the study, by name."""
        own, agents = psutil.Process(), self._engine.agents() if self._engine else []
        below = [process for root in (own, *agents) for process in root.children(recursive=True)]
        there = []
        for process in sorted(below, key=psutil.Process.create_time):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                there.append((" ".join(process.cmdline()), process))
        found = {name: [process for words, process in there if word in words][:1] for name, word in BELOW.items()}
        return {"tuner": [own], "agent": agents[:1], **found}

    def _note(self, **what: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


def slopes(lines: list[dict[str, Any]], process: str, what: str) -> list[float]:
    """Returns the growth per 100 trials of each process that was seen often enough.

    Args:
        lines: what was measured.
        process: one of PROCESSES.
        what: one of MEASURED.
    """
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line.get("process") == process and line["trial"] > WARM_UP[process]:
            points[line["id"]].append((line["trial"], line[what]))
    return [100 * float(np.polyfit(*np.array(each).T, 1)[0]) for each in points.values() if len(each) >= MIN_POINTS]


def report(lines: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Returns the lines to print, and whether descriptors and threads do not grow and no process is left."""
    rows, is_clean = [], True
    for process in PROCESSES:
        for what in MEASURED:
            found = slopes(lines, process, what)
            half, last = half_width(found), [line[what] for line in lines if line.get("process") == process]
            if half is None:
                continue
            mean = float(np.mean(found))
            is_clean = is_clean and not (what in GROWING and mean - half > NOTHING)
            spread = f"[{mean - half:+.2f}, {mean + half:+.2f}]"
            rows.append((process, what, len(found), f"{np.median(last):.4g}", f"{max(last):.4g}", f"{mean:+.2f} {spread}"))
    studies = [line for line in lines if "study_trials" in line]
    num_trials, num_left = sum(line["study_trials"] for line in studies), sum(line["left"] for line in studies)
    kib = sum(line["study_bytes"] for line in studies) / 1024 / max(1, num_trials)
    header = ("process", "what", "processes", "median", "largest", "per 100 trials")
    hours = sum(line.get("study_s", 0) for line in studies) / 3600
    said = (
        f"{num_trials} trials in {len(studies)} studies ({hours:.1f} h), {kib:.0f} KiB of disk a trial, "
        f"{num_left} processes left behind"
    )
    return [table(header, rows), said], is_clean and not num_left


def read(file: Path) -> list[dict[str, Any]]:
    """Returns what was measured so far."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main() -> int:
    """Runs parts until there are enough trials; returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs studies in a row and measures what grows.")
    parser.add_argument("--trials", type=int, default=200, help="trials, including those of earlier calls with this file")
    parser.add_argument("--each", type=int, default=20, help="search trials of a study")
    parser.add_argument("--studies", type=int, default=4, help="studies in one process")
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which no part is started")
    parser.add_argument("--file", type=Path, help="keeps what was measured")
    parser.add_argument("--stub", action="store_true", help="a program without torch")
    parser.add_argument("--trial-s", type=float, default=0.05, help="seconds that a trial of the stub sleeps")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    asked = parser.parse_args()
    if asked.engine and (why := asked.engine.why_not()):
        parser.error(why)
    with tempfile.TemporaryDirectory(prefix="autotune-soak-") as folder:
        file = (asked.file or Path(folder, "soak.jsonl")).resolve()
        if asked.part:
            engine = asked.engine() if asked.engine else None
            os.environ.update(engine.environment if engine else {})
            part = Part(file, is_stub=asked.stub, trial_s=asked.trial_s, engine=engine)
            try:
                for number in range(asked.studies):
                    Path(folder, str(number)).mkdir()
                    part.study(Path(folder, str(number)), asked.each)
            finally:
                os.chdir("/")
                if engine:
                    engine.stop()
            return 0
        until_s = time.monotonic() + 60 * asked.minutes
        words = [sys.executable, "-m", "tests.benchmarks.soak", *sys.argv[1:], "--part", "--file", str(file)]
        while sum(line.get("study_trials", 0) for line in read(file)) < asked.trials and time.monotonic() < until_s:
            subprocess.run(words, env=own_environment(), check=True)
        said, is_clean = report(read(file))
    print("\n".join([*machine_lines(), *said]))
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
