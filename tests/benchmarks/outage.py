"""Measures what a tracking server that is down costs a study: more time, or missing trials?

    python -m tests.benchmarks.outage [--trials 8] [--pairs 4]

A pair is one study with the embedded store and one study whose server refuses connections, or accepts them but never answers.
The order within the pairs is ABBA. Every study measures the same configurations of a program whose speed is known. No
configuration is good enough for the finals, so all studies have the same trials. The time is that of the whole `autotune run`,
including the wait for the tracker at its end. Afterwards, `autotune sync` writes each study of a server that was down to a
working store, and MLflow must have one run for each trial record.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.launchers.environment import own_environment
from autotune.run_dir import StudyFolder
from autotune.stats import Ratio, paired_ratio
from autotune.trackers import store
from tests.benchmarks.reporting import interval, machine_lines, table

GOAL_RATIO = 1.05  # the upper end of the ratio's 95 % interval must not exceed this
PROGRAM = Path(__file__).with_name("outage_program.py")
KINDS = ("refused", "hanging")
QUICK = ("warmup_min_device_s=0.2", "warmup_max_s=5", "min_s=1", "max_s=1.5")


@dataclass(kw_only=True)
class Ran:
    """One study.

    Attributes:
        seconds: wall time of `autotune run`.
        num_trials: number of trials with a record and a rate.
        said: what the command printed about tracking.
    """

    seconds: float
    num_trials: int
    said: str


def run(place: Path, name: str, *, num_trials: int, uri: str | None) -> Ran:
    """Runs a study of the known program by the command that a user would type."""
    values = ",".join(str(40 + n) for n in range(num_trials))  # far slower than the baseline, even if that is disturbed
    (place / "space.yaml").write_text(f"env.PAUSE_MS: [{values}]\n", encoding="utf-8")
    words = ["run", f"study.name={name}", "study.budget.minutes=null", f"study.budget.trials={num_trials}"]
    words += ["search.sampler=grid", "search_space=space.yaml", "device.kind=cpu"]
    words += ["measure.quiet=false"]  # repeating a disturbed trial would count as a cost of the tracker
    words += [f"measure.screening.{rule}" for rule in QUICK] + ([f"tracker.uri={uri}"] if uri else [])
    argv = [sys.executable, "-m", "autotune", *words, "--", sys.executable, str(PROGRAM)]
    started_s = time.monotonic()
    ended = subprocess.run(argv, cwd=place, env=_environment(), capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started_s
    if ended.returncode:
        raise SystemExit(f"the study failed:\n{ended.stdout}{ended.stderr}")
    records = StudyFolder(place / "runs" / name).read_trials()
    said = " ".join(line.strip() for line in ended.stdout.splitlines() if "Tracking is" in line)
    return Ran(seconds=seconds, num_trials=sum(record.value is not None for record in records), said=said)


def num_mirrored(place: Path, name: str) -> int:
    """Syncs a study to the embedded store, and returns how many runs of its trials MLflow has."""
    from mlflow import MlflowClient

    uri = store.embedded_uri(place / "runs")
    words = [sys.executable, "-m", "autotune", "sync", name, "--uri", uri]
    subprocess.run(words, cwd=place, env=_environment(), check=True, stdout=subprocess.DEVNULL)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autotune").experiment_id
    return len(client.search_runs([experiment], f"tags.study = '{name}' and tags.kind != 'study'", max_results=1000))


@contextlib.contextmanager
def server_that_is(kind: str) -> Iterator[str]:
    """Yields the address of a server that refuses connections or hangs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if kind == "hanging":
            held.listen(512)  # the kernel accepts connections, and no program answers
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in own_environment().items() if name != store.URI_VARIABLE and name != "PAUSE_MS"}


def _pairs(place: Path, kind: str, options: argparse.Namespace) -> list[tuple[Ran, Ran]]:
    """Returns a pair for each round: (study with a server that is down, study with a working store)."""
    found = []
    with server_that_is(kind) as uri:
        for number in range(options.pairs):
            order = [(kind, uri), ("good", None)]
            ran = {}
            for what, address in order if number % 2 == 0 else reversed(order):
                name = f"{kind}-{number}-{what}"
                ran[what] = run(place, name, num_trials=options.trials, uri=address)
                print(f"{name}  {ran[what].seconds:.1f} s  {ran[what].num_trials} trials  {ran[what].said}", flush=True)
            found.append((ran[kind], ran["good"]))
    return found


def _row(place: Path, kind: str, pairs: list[tuple[Ran, Ran]], num_trials: int) -> tuple[list[str], bool]:
    ratio: Ratio = paired_ratio([down.seconds for down, _ in pairs], [good.seconds for _, good in pairs])
    num_lost = sum(num_trials - down.num_trials for down, _ in pairs)
    mirrored = [num_mirrored(place, f"{kind}-{number}-{kind}") for number in range(len(pairs))]
    is_fast = ratio.ci is not None and ratio.ci[1] <= GOAL_RATIO
    is_whole = num_lost == 0 and mirrored == [num_trials] * len(pairs)
    is_told = all("Tracking is incomplete" in down.said for down, _ in pairs)
    cells = [kind, str(ratio.num_rounds), f"{ratio.ratio:.3f}", interval(ratio.ci), str(num_lost)]
    cells += [f"{sum(mirrored)} of {num_trials * len(pairs)}", "yes" if is_told else "NO"]
    return [*cells, "holds" if is_fast and is_whole and is_told else "FAILS"], is_fast and is_whole and is_told


def main() -> int:
    """Runs the pairs and prints what an outage costs; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="compares studies whose tracking server is down with a working store")
    parser.add_argument("--trials", type=int, default=8, help="search trials of each study")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of studies, for each kind of outage")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="kinds of outage")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outage-") as folder:
        place = Path(folder)
        run(place, "first", num_trials=1, uri=None)  # makes the store and warms the disk's cache
        rows = [_row(place, kind, _pairs(place, kind, options), options.trials + 1) for kind in options.only]
    header = ("server", "pairs", "seconds / good", "95 % interval", "trials lost", "in MLflow after sync", "told", "")
    print("\n" + table(header, [cells for cells, _ in rows]))
    print("\n".join(["", *machine_lines()]))
    print(f"goal      the interval's upper end at most {GOAL_RATIO}, no trial lost, every trial once in MLflow after a sync")
    return 0 if all(holds for _, holds in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    sys.exit(main())
