"""Measures the cost of a program's planted cause: the program's own rate with the cause and without it, in turn.

If a finding proposes a setting, what it states is the setting's gain, which may differ from the cost of the planted cause. So
the setting's gain is measured, too: the program's own rate under `autotune apply` and as it is, in turn.

autotune is not involved otherwise. If other programs use the cores during a run, the run is repeated a few times. Each round
stores how many cores other programs used, so that disturbed rounds can be left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.machine import host_facts
from autotune.monitors.cpu import CpuMonitor
from autotune.stats import paired_ratio
from tests.benchmarks.planted_causes import FOLDER, Program

TRUTHS = FOLDER / "truths.json"  # the measured costs, for each machine
METER = FOLDER / "meter.py"
WINDOW_S, LIMIT_S = 5.0, 240.0  # of the program's stopwatch; of the whole run, which may compile
APPLIED = "applied"  # name of the rate with a setting
IN_EFFECT = re.compile(r"^autotune: the setting of .* is in effect", re.MULTILINE)  # printed by `autotune apply`
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a program that measures its own rate.

    Attributes:
        program: the program.
        data: folder of its data.
        off: the causes that are switched off, such as "AB".
        under: words before the program's command: `autotune apply`.
        seconds: how long the program measures.
    """

    program: Program
    data: Path
    off: str = ""
    under: tuple[str, ...] = ()
    seconds: float = WINDOW_S

    def own_rate(self) -> float:
        """Returns the rate that the program prints, in samples per second.

        Raises:
            RuntimeError: the program printed no rate, or `autotune apply` did not apply the setting; the message has the end of
                its output.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("REVISION_")}
        environment |= {**self.program.variables, **{f"REVISION_{name}": "2" for name in self.off}}
        command = [*self.under, *self.program.command(self.data), "--seconds", str(self.seconds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        rates = list(_rates(done.stdout))
        if not rates:  # the exit status does not matter: when rank 0 ends, the other ranks fail
            raise RuntimeError(f"{self.program.name} printed no rate: {(done.stdout + done.stderr)[-TAIL_CHARS:]}")
        if self.under and not IN_EFFECT.search(done.stderr):
            raise RuntimeError(f"{self.program.name}: the setting was not applied: {done.stderr[-TAIL_CHARS:]}")
        return rates[-1]


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
        # Hosts of one cloud share a model name ("AMD EPYC") although some lack bf16 or AVX-512 instructions.
        self.machine = f"{facts['cpu_model']} with {' '.join(sorted(facts['isa']))}, {facts['num_cores']} cores"
        self.kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.programs: dict[str, Any] = self.kept.setdefault(self.machine, {})

    def rounds(self, program: Program, setting: str = "") -> list[Round]:
        """Returns the rounds that were measured with the present version of the program: of its causes, or of a setting."""
        entry = self.programs.get(f"{program.name} {setting}".strip(), {})
        rounds = [Round(**one) for one in entry.get("rounds", [])] if entry.get("source") == digest(program) else []
        return [one for one in rounds if not (self.is_calm and one.is_disturbed)]

    def gain(self, program: Program, switched_off: str) -> Gain | None:
        """Returns the gain from switching causes off; None if it was not measured."""
        rounds = self.rounds(program)
        return gain(rounds, switched_off) if rounds else None

    def setting_gain(self, program: Program, setting: str) -> Gain | None:
        """Returns the gain from a setting, such as "precision.amp=bf16"; None if it was not measured."""
        rounds = self.rounds(program, setting)
        return gain(rounds, APPLIED) if rounds else None

    def add(self, program: Program, measured: Round, setting: str = "") -> None:
        """Stores a round, and drops rounds that do not count (see `rounds`)."""
        rounds = [asdict(one) for one in (*self.rounds(program, setting), measured)]
        entry = {"source": digest(program), "date": time.strftime("%Y-%m-%d"), "rounds": rounds}
        self.programs[f"{program.name} {setting}".strip()] = entry
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(self.path)

    def measure(self, program: Program, data: Path, *, num_pairs: int) -> None:
        """Measures the missing rounds of the program's causes."""
        self._measure(program, {name: Run(program=program, data=data, off=name) for name in switches(program)}, num_pairs)

    def measure_setting(self, program: Program, data: Path, setting: str, *, study: Path, num_pairs: int) -> None:
        """Measures the missing rounds of a setting.

        Args:
            program: the program.
            data: folder of its data.
            setting: the setting, such as "precision.amp=bf16".
            study: folder of a study of the program; its best.yaml says which loaders the settings change.
            num_pairs: number of rounds.
        """
        with tempfile.TemporaryDirectory(prefix="setting-") as place:
            best = Path(place) / "best.yaml"
            write_setting(best, setting, study / "best.yaml")
            apply = (sys.executable, "-m", "autotune", "apply", str(best), "--")
            runs = {"": Run(program=program, data=data), APPLIED: Run(program=program, data=data, under=apply)}
            self._measure(program, runs, num_pairs, setting)

    def _measure(self, program: Program, runs: Mapping[str, Run], num_pairs: int, setting: str = "") -> None:
        """Measures the missing rounds of some runs; every other round runs in reverse order."""
        for number in range(len(self.rounds(program, setting)), num_pairs):
            rates, worst = {}, 0.0
            for name in runs if number % 2 == 0 else reversed(runs):
                rates[name], foreign = undisturbed(runs[name], attempts=self.attempts)
                worst = max(worst, foreign)
            rounded = {name: float(f"{rates[name]:.5g}") for name in runs}
            self.add(program, Round(rates=rounded, foreign_cores=round(worst, 2)), setting)
            told = "  ".join(f"{name or 'as it is'} {rates[name]:.1f}" for name in runs)
            about = f"{program.name} {setting}".strip()
            print(f"{about}: {told} samples/s, others used {worst:.2f} cores", file=sys.stderr, flush=True)


def write_setting(path: Path, setting: str, like: Path) -> None:
    """Writes a best.yaml with a single setting, for the program that another best.yaml was made for."""
    key, _, value = setting.partition("=")
    group, _, name = key.partition(".")
    provenance = yaml.safe_load(like.read_text(encoding="utf-8"))["provenance"]
    path.write_text(yaml.safe_dump({"provenance": provenance, group: {name: yaml.safe_load(value)}}), encoding="utf-8")


def digest(program: Program) -> str:
    """Returns a hash that identifies the program's version and its environment variables."""
    variables = str(program.variables).encode() if program.variables else b""
    return hashlib.sha256(program.path.read_bytes() + METER.read_bytes() + variables).hexdigest()[:16]


def undisturbed(run: Run, *, attempts: int) -> tuple[float, float]:
    """Returns the rate, and how many cores other programs used, of the first undisturbed attempt or else of the calmest one."""
    found: list[tuple[float, float]] = []
    for _ in range(attempts):
        monitor = CpuMonitor()
        before = monitor.look(time.monotonic())
        rate = run.own_rate()
        use = monitor.use(before, monitor.look(time.monotonic()))
        found.append(((use.foreign_cores or 0.0) if use else 0.0, rate))
        if found[-1][0] <= FOREIGN_CORES:
            break
    foreign, rate = min(found)
    return rate, foreign


def _rates(output: str) -> Iterator[float]:
    for line in output.splitlines():
        if line.startswith('{"rate_per_s"'):
            yield float(json.loads(line)["rate_per_s"])
