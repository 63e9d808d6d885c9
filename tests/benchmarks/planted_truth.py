"""Measures the cost of a program's planted cause: the program's own rate with the cause and without it, in turn.

autotune is not involved. If other programs use the cores during a run, the run is repeated a few times. Each round stores how
many cores other programs used, so that disturbed rounds can be left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.machine import host_facts
from autotune.monitors.cpu import CpuMonitor
from autotune.stats import paired_ratio
from tests.benchmarks.planted_causes import FOLDER, Program

TRUTHS = FOLDER / "truths.json"  # the measured costs, for each machine
METER = FOLDER / "meter.py"
WINDOW_S, LIMIT_S = 5.0, 120.0
PAIRS = 3
FOREIGN_CORES = 0.3  # a run is disturbed if other programs use more cores than this
ATTEMPTS = 2  # attempts at an undisturbed run
TAIL_CHARS = 800


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The program's rate without a cause divided by its rate with the cause, and the 95 % interval (none for a single pair)."""

    ratio: float
    ci: tuple[float, float] | None = None
    is_disturbed: bool = False  # whether other programs used the cores during a round

    def __str__(self) -> str:
        told = f"{self.ratio:.2f}x" + (f" [{self.ci[0]:.2f}, {self.ci[1]:.2f}]" if self.ci else "")
        return told + (" disturbed" if self.is_disturbed else "")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run for each set of switched-off causes.

    Attributes:
        rates: {switched-off causes: samples per second}.
        foreign_cores: the most cores that other programs used during one of these runs.
    """

    rates: dict[str, float]
    foreign_cores: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Returns whether other programs used more than FOREIGN_CORES cores."""
        return self.foreign_cores > FOREIGN_CORES


def switches(program: Program) -> list[str]:
    """Returns the sets of causes that are switched off in turn: "" for none, then "A", "B", and "AB" for both."""
    names = [cause.switch for cause in program.causes]
    return ["".join(chosen) for num in range(len(names) + 1) for chosen in itertools.combinations(names, num)]


def gain(rounds: Sequence[Round], switched_off: str) -> Gain:
    """Returns the gain from switching causes off, computed from rounds."""
    ratio = paired_ratio([one.rates[switched_off] for one in rounds], [one.rates[""] for one in rounds])
    return Gain(ratio=ratio.ratio, ci=ratio.ci, is_disturbed=any(one.is_disturbed for one in rounds))


class Truths:
    """The measured costs on this machine, kept in a file.

    Args:
        path: the file, with costs for each machine. If a program has changed since, its costs are measured again.
        is_calm: whether disturbed rounds are left out and measured again.
        attempts: attempts at an undisturbed run.
    """

    def __init__(self, path: Path = TRUTHS, *, is_calm: bool = False, attempts: int = ATTEMPTS) -> None:
        self.path, self.is_calm, self.attempts = path, is_calm, attempts
        facts = host_facts()
        self.machine = f"{facts['cpu_model']}, {facts['num_cores']} cores"
        self.kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.programs: dict[str, Any] = self.kept.setdefault(self.machine, {})

    def rounds(self, program: Program) -> list[Round]:
        """Returns the rounds that were measured with the present version of the program."""
        entry = self.programs.get(program.name, {})
        rounds = [Round(**one) for one in entry.get("rounds", [])] if entry.get("source") == digest(program) else []
        return [one for one in rounds if not (self.is_calm and one.is_disturbed)]

    def gain(self, program: Program, switched_off: str) -> Gain | None:
        """Returns the gain from switching causes off; None if it was not measured."""
        rounds = self.rounds(program)
        return gain(rounds, switched_off) if rounds else None

    def add(self, program: Program, measured: Round) -> None:
        """Stores a round, and drops rounds that do not count (see `rounds`)."""
        rounds = [asdict(one) for one in (*self.rounds(program), measured)]
        entry = {"source": digest(program), "date": time.strftime("%Y-%m-%d"), "rounds": rounds}
        self.programs[program.name] = entry
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(self.path)

    def measure(self, program: Program, data: Path, *, num_pairs: int) -> None:
        """Measures the missing rounds; every other round runs in reverse order."""
        names = switches(program)
        for number in range(len(self.rounds(program)), num_pairs):
            rates, worst = {}, 0.0
            for name in names if number % 2 == 0 else reversed(names):
                rates[name], foreign = undisturbed(program, data, name, attempts=self.attempts)
                worst = max(worst, foreign)
            rounded = {name: float(f"{rates[name]:.5g}") for name in names}
            self.add(program, Round(rates=rounded, foreign_cores=round(worst, 2)))
            told = "  ".join(f"{name or 'as it is'} {rates[name]:.1f}" for name in names)
            print(f"{program.name}: {told} samples/s, others used {worst:.2f} cores", file=sys.stderr, flush=True)


def digest(program: Program) -> str:
    """Returns a hash that identifies the program's version and its environment variables."""
    variables = str(program.variables).encode() if program.variables else b""
    return hashlib.sha256(program.path.read_bytes() + METER.read_bytes() + variables).hexdigest()[:16]


def undisturbed(program: Program, data: Path, switched_off: str, *, attempts: int) -> tuple[float, float]:
    """Returns the rate, and how many cores other programs used, of the first undisturbed attempt or else of the calmest one."""
    found: list[tuple[float, float]] = []
    for _ in range(attempts):
        monitor = CpuMonitor()
        before = monitor.look(time.monotonic())
        rate = own_rate(program, data, switched_off)
        use = monitor.use(before, monitor.look(time.monotonic()))
        found.append(((use.foreign_cores or 0.0) if use else 0.0, rate))
        if found[-1][0] <= FOREIGN_CORES:
            break
    foreign, rate = min(found)
    return rate, foreign


def own_rate(program: Program, data: Path, switched_off: str, seconds: float = WINDOW_S) -> float:
    """Returns the rate that the program prints, in samples per second.

    Raises:
        RuntimeError: the program printed no rate; the message has the end of its output.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("REVISION_")}
    environment |= {**program.variables, **{f"REVISION_{name}": "2" for name in switched_off}}
    command = [*program.command(data), "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    rates = list(_rates(done.stdout))
    if not rates:  # the exit status does not matter: when rank 0 ends, the other ranks fail
        raise RuntimeError(f"{program.name} printed no rate: {(done.stdout + done.stderr)[-TAIL_CHARS:]}")
    return rates[-1]


def _rates(output: str) -> Iterator[float]:
    for line in output.splitlines():
        if line.startswith('{"rate_per_s"'):
            yield float(json.loads(line)["rate_per_s"])
