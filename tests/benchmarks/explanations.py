"""Does `autotune explain` find planted causes, their places and their costs, and nothing where nothing is planted?

    python -m tests.benchmarks.explanations [--only NAME ...] [--pairs N] [--truth-only] [--folder DIR] [--json FILE] [--again]

`planted/` has three groups of programs: fourteen with one cause, six with two causes, and six without any. First, the cost of
each cause is measured without autotune: the program's own rate with the cause and without it, in turn (planted_truth.py). Then
a short `autotune run` and `autotune explain` run on each program, and the findings are compared with planted_causes.py. If a
finding of a planted cause proposes a setting, the setting's gain is measured like the costs, and the stated gain is compared
with it. Costs and gains that were measured on this machine are in planted/truths.json and are not measured again. The same
command continues an interrupted run.

The programs were written without knowledge of the rules that find causes. Do not read the programs when you change the rules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.launchers.environment import own_environment
from tests.benchmarks import planted_data
from tests.benchmarks.explanation_verdicts import Finding, Verdict, findings_of, report
from tests.benchmarks.planted_causes import PROGRAMS, Program
from tests.benchmarks.planted_truth import ATTEMPTS, PAIRS, Truths, digest
from tests.benchmarks.reporting import machine_lines

ROOT = Path(__file__).resolve().parents[2]
RUN = (  # the shortest possible study: the baseline, and little else
    "study.budget.minutes=1",
    "study.budget.trials=1",
    "search.warm_start=off",
    "tracker.uri=none",
    "measure.quiet=false",
    "device.kind=cpu",
)
# Trial 0 is the baseline, because a faster trial may lack the cause. The minutes are enough to try every setting.
EXPLAIN = ("--trial", "0", "--minutes", "3", "--json")
RUN_LIMIT_S, EXPLAIN_LIMIT_S = 240.0, 300.0
TAIL_CHARS = 1_000


class Explained:
    """The output of `autotune explain` for each program, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, program: Program) -> dict[str, Any] | None:
        """Returns the output for the present version of the program; None if this version was not explained."""
        entry = self.kept.get(program.name)
        return entry if entry and entry["source"] == digest(program) else None

    def findings(self, program: Program) -> list[Finding] | None:
        """Returns the program's findings in order; None if it was not explained, or `autotune explain` failed."""
        entry = self.get(program)
        return findings_of(entry["document"]) if entry and entry["document"] else None

    def add(self, program: Program, document: Mapping[str, Any] | None, error: str, seconds: float) -> None:
        """Stores an output, or why there is none."""
        entry = {"source": digest(program), "document": document, "error": error, "seconds": round(seconds, 1)}
        self.kept[program.name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.kept, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def explain(program: Program, folder: Path) -> dict[str, Any]:
    """Returns the document that `autotune explain --json` prints for a new, short study of the program.

    Raises:
        RuntimeError: a command failed or printed no document; the message has the end of its output.
    """
    study = f"{program.name}-{time.strftime('%m%d-%H%M%S')}"
    command = program.command(folder / "data")
    run, explain = ("run", f"study.name={study}", *RUN, "--", *command), ("explain", study, *EXPLAIN)
    _autotune(folder, *run, limit_s=RUN_LIMIT_S, variables=program.variables)
    answer = _autotune(folder, *explain, limit_s=EXPLAIN_LIMIT_S, variables=program.variables)
    try:
        return dict(json.loads(answer))
    except ValueError as error:
        raise RuntimeError(f"autotune explain printed no JSON: {answer[-TAIL_CHARS:]}") from error


def _autotune(folder: Path, *words: str, limit_s: float, variables: Mapping[str, str]) -> str:
    """Runs a command in the benchmark's folder, as a user would, and returns its standard output."""
    environment = {key: value for key, value in own_environment().items() if not key.startswith("REVISION_")}
    environment |= variables
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "autotune", *words]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"autotune {words[0]} took longer than {limit_s:.0f} s") from error
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-TAIL_CHARS:]
        raise RuntimeError(f"autotune {words[0]} ended with exit status {done.returncode}: {tail}")
    return done.stdout


def ask(programs: Sequence[Program], folder: Path, explained: Explained, *, is_again: bool) -> None:
    """Runs `autotune explain` on the programs that it has not explained yet."""
    for program in programs:
        if explained.get(program) and not is_again:
            continue
        started_s = time.monotonic()
        document, problem = None, ""
        try:
            document = explain(program, folder)
        except RuntimeError as error:
            problem = str(error)
        explained.add(program, document, problem, time.monotonic() - started_s)
        told = problem or f"{len(findings_of(document or {}))} findings"
        print(f"{program.name}: {told}, {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)


def measure_settings(programs: Sequence[Program], folder: Path, explained: Explained, truths: Truths, num_pairs: int) -> None:
    """Measures the true gains of the settings that findings of planted causes propose."""
    for program in programs:
        for one in Verdict.of(program, truths, explained.findings(program)).judged:
            if one.finding and one.finding.setting:
                study = max((folder / "runs").glob(f"{program.name}-*"), key=lambda path: path.stat().st_mtime)
                try:
                    truths.measure_setting(program, folder / "data", one.finding.setting, study=study, num_pairs=num_pairs)
                except RuntimeError as error:  # the table then has no gain for it
                    print(error, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measures costs, explains the programs and prints the table; returns 1 if a goal is missed or a result is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="NAME", help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="number of runs with the cause, and as many without it")
    parser.add_argument(
        "--attempts", type=int, default=ATTEMPTS, help="attempts at a run during which no other program uses the cores"
    )
    parser.add_argument("--calm", action="store_true", help="leave out disturbed rounds and measure them again")
    parser.add_argument("--truth-only", action="store_true", help="measure the costs of causes without running `explain`")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "explanations", help="folder of data and studies")
    parser.add_argument("--json", type=Path, help="file with the findings so far (default: explained.json in the folder)")
    parser.add_argument("--again", action="store_true", help="run `explain` again on programs that it has explained")
    given = parser.parse_args(words)
    folder, programs = given.folder.resolve(), [PROGRAMS[name] for name in given.only or PROGRAMS]
    planted_data.prepare(folder / "data")
    truths = Truths(is_calm=given.calm, attempts=given.attempts)
    for program in filter(lambda one: one.causes, programs):
        try:
            truths.measure(program, folder / "data", num_pairs=given.pairs)
        except RuntimeError as error:  # this machine may not be able to run it; the table then has no cost for it
            print(error, file=sys.stderr, flush=True)
    explained = Explained(given.json or folder / "explained.json")
    if not given.truth_only:
        ask(programs, folder, explained, is_again=given.again)
        measure_settings(programs, folder, explained, truths, given.pairs)
    verdicts = [Verdict.of(program, truths, explained.findings(program)) for program in programs]
    text, is_reached = report(verdicts)
    print("\n".join([text, f"date      {time.strftime('%Y-%m-%d')}", *machine_lines()]))
    return 0 if given.truth_only or is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
