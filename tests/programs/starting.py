"""Runs each program three times: alone, with the harness but no knobs, and with the harness and knobs."""

import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from autotune.harness import protocol
from autotune.harness.protocol import RankResult
from tests.harness.conftest import INJECT, RULES, SCRIPTS, Run, execute
from tests.harness.forks import Forks, of_ranks
from tests.programs.expectations import PYTHON, Program

NUM_PLAIN_STEPS = 80
# Long enough to include the work done once per epoch, even on a busy machine.
WINDOW = dataclasses.replace(RULES, min_s=0.4, min_steps=60, max_s=4.0, slow_max_s=10.0)
# The harness and then the program stamp the end of each step. At each edge of the window, so many late or early stamps of the
# program may be left out. A stamp of the program seems early if the stamp of the harness was late.
MAX_LATE, MAX_EARLY = 2, 1
# A stamp is late or early if its delay is outside the 10 % to 90 % quantiles of delays by this fraction of the window.
MAX_LATE_FRAC = 0.01


@dataclasses.dataclass
class Journal:
    """The journal that a program wrote, one file per rank. The harness does not count the first `num_uncounted` steps."""

    path: Path
    num_uncounted: int = 0

    def lines(self, rank: int | None = None) -> list[dict[str, Any]]:
        path = self.path if rank is None else Path(f"{self.path}{rank}")
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def steps(self, rank: int | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if "t" in line]

    def losses(self, rank: int | None = None) -> list[str]:
        return [step["loss"] for step in self.steps(rank)]

    def saw(self, rank: int | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for line in self.lines(rank):
            facts.update(line.get("saw", {}))
        batches = [line["saw"]["batch"] for line in self.lines(rank) if "batch" in line.get("saw", {})]
        if batches:  # an epoch's last batch may be smaller
            facts["batch"] = max(batches[-2:])
        return facts

    def window(self, found: RankResult, rank: int | None = None) -> "SameWindow":
        """Returns the steps of the harness's window, without evaluations, as timed by the harness and by the program."""
        assert found.window is not None
        steps, ends = self.steps(rank)[self.num_uncounted :], [0.0, *found.steps["end_s"]]
        training = [number for number in range(1, len(ends)) if number >= len(steps) or not steps[number]["away"]]
        first = found.steps["warmup"]
        inside = training[first : first + found.window.steps]
        # The program is ended before it can record the last step.
        told = [number for number in inside if number < len(steps)]
        assert len(told) >= len(inside) - 1
        told_harness_s, told_own_s, jitter_s = seconds_of_both(told, ends, [step["t"] for step in steps])
        return SameWindow(
            samples=sum(found.steps["samples"][number - 1] for number in inside),
            told_harness_samples=sum(found.steps["samples"][number - 1] for number in told),
            told_own_samples=sum(steps[number]["n"] for number in told),
            harness_s=sum(ends[number] - ends[number - 1] for number in inside),
            told_harness_s=told_harness_s,
            told_own_s=told_own_s,
            jitter_s=jitter_s,
        )


def seconds_of_both(told: list[int], ends: list[float], stamps: list[float]) -> tuple[float, float, float]:
    """Returns the seconds that the steps `told` took by `ends` and by `stamps`, and how far these may differ by jitter.

    The harness has recorded `ends`, and the program `stamps`.
    The machine may pause a process between the stamps of the harness and the program for one step. Inside the window, such a
    pause cancels out. At an edge, up to `MAX_LATE` steps are left out to remove it, or `MAX_EARLY` if the pause came before the
    stamp of the harness. If the harness really misses time, all later stamps differ, so the sums differ, too.
    """
    delays_s = [stamp - end for stamp, end in zip(stamps, ends, strict=False)]
    least_s, *_, most_s = statistics.quantiles([delays_s[number] for number in told], n=10)
    allowed_s = MAX_LATE_FRAC * (ends[told[-1]] - ends[told[0] - 1])

    def is_off(number: int, place: int) -> bool:
        is_early = place < MAX_EARLY and delays_s[number] < least_s - allowed_s
        return place < MAX_LATE and (is_early or delays_s[number] > most_s + allowed_s)

    first, last = 0, len(told)
    while is_off(told[first] - 1, first):
        first += 1
    while is_off(told[last - 1], len(told) - last):
        last -= 1
    inner = told[first:last]
    harness_s, own_s = (sum(clock[number] - clock[number - 1] for number in inner) for clock in (ends, stamps))
    changes_s = [abs(delays_s[number] - delays_s[number - 1]) for number in inner]
    return harness_s, own_s, statistics.quantiles(changes_s, n=10)[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SameWindow:
    """A window according to the harness and the program. `told_` values cover only the steps that the program recorded."""

    samples: float
    told_harness_samples: float
    told_own_samples: float
    harness_s: float
    told_harness_s: float
    told_own_s: float
    jitter_s: float


@dataclasses.dataclass
class Seen:
    """A program's three runs: without the harness, with the harness, and with the harness and knobs."""

    plain: Journal
    bare: Journal
    bare_run: Run
    turned: Journal
    turned_run: Run


def look_at(program: Program, folder: Path, forks: Forks) -> Seen:
    """Runs a program alone, then with the harness, then with knobs on the loader that the harness found."""
    folders = [folder / name for name in ("plain", "bare", "turned")]
    for each in folders:
        each.mkdir(parents=True)
    plain = run_plain(program, folders[0], forks)
    bare = run_trial(program, folders[1], forks)
    turned = run_trial(program, folders[2], forks, knobs=program.knobs, target=bare.result().target)
    journals = [Journal(each / "journal", program.uncounted) for each in folders[1:]]
    return Seen(plain, journals[0], bare, journals[1], turned)


def run_plain(program: Program, folder: Path, forks: Forks) -> Journal:
    """Runs a program without the harness."""
    path = folder / "journal"
    added = variables({"JOURNAL": str(path), "JOURNAL_STEPS": str(NUM_PLAIN_STEPS)}, harness=False)
    ended = forks.run(_filled(program.plain or program.argv, folder), folder, of_ranks(program.ranks, added))
    assert ended.returncode == 0, ended.stderr
    return Journal(path)


def run_trial(program: Program, folder: Path, forks: Forks | None, **options: Any) -> Run:
    """Runs a program as a trial: in forks if possible, else (no `forks`, or another starter) in new processes."""
    spec = protocol.Spec(trial=1, nonce="nonce", folder=str(folder), rules=WINDOW, **options)
    protocol.write_json(str(folder / protocol.SPEC_FILE), spec)
    asked = {key[4:]: str(value) for key, value in spec.knobs.items() if key.startswith("env.")}
    trial = {protocol.SPEC_VARIABLE: str(folder / protocol.SPEC_FILE), "JOURNAL": str(folder / "journal"), **asked}
    if forks is not None and (program.starter == PYTHON or program.ranks > 1):
        ranks = of_ranks(program.ranks, variables(trial, harness=True))
        return Run(*forks.run(_filled(program.argv, folder), folder, ranks), folder)
    return execute(_filled((*program.starter, *program.argv), folder), folder, environment(trial, harness=True))


def _filled(words: tuple[str, ...], folder: Path) -> list[str]:
    return [word.format(python=sys.executable, scripts=SCRIPTS, folder=folder) for word in words]


def environment(added: dict[str, str], *, harness: bool) -> dict[str, str]:
    """Returns the environment of a program's run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE")}
    return {**own, **variables(added, harness=harness)}


def variables(added: dict[str, str], *, harness: bool) -> dict[str, str]:
    """Returns the variables of a program's run that it does not inherit from the tests."""
    path = f"{INJECT}{os.pathsep}{SCRIPTS}" if harness else str(SCRIPTS)
    python = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    return {"PYTHONPATH": path, "PATH": python, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **added}
