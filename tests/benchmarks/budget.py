"""Does a study keep its budget? Times `autotune run` on every program of tests/programs.

    python -m tests.benchmarks.budget [--minutes 3] [--only NAME ...] [--down] [--verify ROUNDS] [-- KEY=VALUE ...]

The programs run one after another, each in its own folder, started as the tests start them; they train until they are killed.
The time is the wall time of the whole command: start-up, trials, and tracking into the embedded store. With --down, the
tracking server accepts connections but never answers. With --verify, every winner is compared with its baseline once more, in
ROUNDS pairs of fresh processes, to see whether the study's interval contains that ratio. The exit status is 1 if a study took
longer than its budget or an interval misses the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.outage import server_that_is
from tests.benchmarks.reporting import interval, machine_lines, table
from tests.harness.conftest import REPOSITORY, SCRIPTS
from tests.programs.expectations import PROGRAMS, Program
from tests.programs.starting import environment

GRACE_S = 10.0  # how much longer than its budget of three minutes a study may take
STUCK_S = 300.0  # this long after its budget, the command is killed
NAME = "budget"  # of every study


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One study.

    Attributes:
        program: name of the program's row in the table.
        exit_code: exit status of the command; None if the command had to be killed.
        seconds: wall time of the whole command.
        over_s: `seconds` minus the budget; negative if time was left.
        verdict: the study's verdict.
        trials: number of trials with a rate.
        said: what the command printed about tracking.
        claim: the speed-up with its interval, from the study's summary.
        later: the same from the comparison after the study.
    """

    program: str
    exit_code: int | None
    seconds: float
    over_s: float
    verdict: str
    trials: int
    said: str
    claim: dict[str, Any]
    later: dict[str, Any]

    @property
    def is_inside(self) -> bool | None:
        """Whether the study's interval contains the ratio measured after the study; None if one of the two is missing."""
        low, high = self.claim.get("ci") or (None, None)
        return low <= self.later["ratio"] <= high if low is not None and self.later else None


def run(program: Program, place: Path, *, minutes: float, keys: list[str], uri: str | None, rounds: int = 0) -> Ran:
    """Runs a study of a program as a user would, then compares its winner again if `rounds` are given."""
    place.mkdir(parents=True)
    words = [word.format(python=sys.executable, scripts=SCRIPTS, folder=place) for word in (*program.starter, *program.argv)]
    keys = [*keys, f"study.name={NAME}", f"study.budget.minutes={minutes:g}", *([f"tracker.uri={uri}"] if uri else [])]
    env = environment({"JOURNAL": str(place / "journal"), "PYTHONPATH": f"{SCRIPTS}:{REPOSITORY}"}, harness=False)
    with open(place / "said.txt", "w") as said:
        started_s = time.monotonic()
        argv = [sys.executable, "-m", "autotune", "run", *keys, "--", *words]
        try:
            code = subprocess.run(argv, cwd=place, env=env, stdout=said, stderr=said, timeout=60 * minutes + STUCK_S).returncode
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - started_s
    lines = (place / "said.txt").read_text().splitlines()
    summary = _summary(place / "runs" / NAME / "summary.json")
    best = place / "runs" / NAME / "best.yaml"
    is_claimed = (summary.get("best") or {}).get("overrides") and best.exists()
    later = _later(best, words, rounds=rounds, place=place, env=env) if rounds and is_claimed else {}
    return Ran(
        program=program.name,
        exit_code=code,
        seconds=seconds,
        over_s=seconds - 60 * minutes,
        verdict=(summary.get("speedup") or {}).get("verdict") or summary.get("status") or (lines or ["nothing"])[-1][:60],
        trials=sum(trial["value"] is not None for trial in summary.get("trials", [])),
        said=" ".join(line.removeprefix("note").strip() for line in lines if "Tracking is" in line)[:60],
        claim=summary.get("speedup") or {},
        later=later,
    )


def _later(best: Path, words: list[str], *, rounds: int, place: Path, env: dict[str, str]) -> dict[str, Any]:
    """Returns the speed-up of a best.yaml as `autotune verify` measures it; {} if it measures none."""
    argv = [sys.executable, "-m", "autotune", "verify", str(best), "--rounds", str(rounds), "--minutes", "15", "--json"]
    ran = subprocess.run([*argv, "--", *words], cwd=place, env=env, capture_output=True, text=True, check=False)
    (place / "verified.json").write_text(ran.stdout + ran.stderr)
    verified = json.loads(ran.stdout) if ran.stdout.startswith("{") else {}
    return (verified.get("verification") or {}).get("now") or {}


def _summary(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Runs the studies and prints the table."""
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--down", action="store_true", help="the tracking server never answers")
    parser.add_argument("--verify", type=int, default=0, metavar="ROUNDS", help="rounds that compare every winner again")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="words for `autotune run`, after --")
    asked = parser.parse_args()
    print(*machine_lines(), sep="\n", flush=True)
    chosen, ran = [program for program in PROGRAMS if program.name in asked.only], []
    with tempfile.TemporaryDirectory(prefix="autotune-budget-") as place, contextlib.ExitStack() as server:
        uri = server.enter_context(server_that_is("hanging")) if asked.down else None
        for program in chosen:
            folder = Path(place, program.name)
            ran.append(run(program, folder, minutes=asked.minutes, keys=asked.keys, uri=uri, rounds=asked.verify))
            last = ran[-1]
            words = (last.program, f"{last.seconds:.1f} s", last.verdict, _ratio(last.claim), _ratio(last.later), last.said)
            print(*words, sep="  ", file=sys.stderr, flush=True)
    header = (
        "program",
        "exit code",
        "wall, s",
        "over (+) or under, s",
        "trials",
        "verdict",
        "speed-up",
        "afterwards",
        "tracking",
    )
    rows = []
    for r in ran:
        took = (r.program, r.exit_code, f"{r.seconds:.1f}", f"{r.over_s:+.1f}", r.trials)
        rows.append((*took, r.verdict, _ratio(r.claim), _ratio(r.later), r.said or "complete"))
    print(table(header, rows))
    num_kept = sum(each.over_s <= GRACE_S and each.exit_code == 0 for each in ran)
    print(f"{num_kept} of {len(ran)} within {asked.minutes:g} min {GRACE_S:.0f} s")
    inside = [each.is_inside for each in ran if each.is_inside is not None]
    if asked.verify:
        print(f"{sum(inside)} of {len(inside)} intervals hold the ratio that was measured afterwards")
    sys.exit(num_kept < len(ran) or not all(inside))


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.2f}x {interval(found.get('ci'))}" if found.get("ratio") else "-"


if __name__ == "__main__":
    main()
