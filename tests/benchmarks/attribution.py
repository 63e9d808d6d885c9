"""Attribution on a real program with planted effects: one knob +30 %, one +5 %, three that do nothing.

    python -m tests.benchmarks.attribution [--minutes 10] [--trials 12] [--seed 0]

`autotune run` on `attribution_program.py`, as a user would, with a random sampler, whose winner has useless changes in it more
often than not. Ends with status 1 when a planted effect is not named, when an interval misses the truth, or when a knob
without effect is handed over.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.cli.processes import own_environment
from autotune.run_dir import StudyFolder
from tests.benchmarks.attribution_program import GAINS
from tests.benchmarks.reporting import interval, machine_lines, table

PROGRAM = Path(__file__).with_name("attribution_program.py")
STUDY = "planted"


def run(place: Path, *, minutes: float, num_trials: int, seed: int) -> dict[str, Any]:
    """Runs the study in a process of its own and returns its summary."""
    space = "".join(f"env.PLANT_{name}: ['0', '1']\n" for name in GAINS)
    (place / "space.yaml").write_text(space, encoding="utf-8")
    words = ["run", f"study.name={STUDY}", f"study.seed={seed}", f"study.budget.minutes={minutes}"]
    words += [f"study.budget.trials={num_trials}", "search.sampler=random", "search_space=space.yaml", "device.kind=cpu"]
    argv = [sys.executable, "-m", "autotune", *words, "--", sys.executable, str(PROGRAM)]
    unset = {f"PLANT_{name}": "0" for name in GAINS}
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(argv, cwd=place, env={**own_environment(), **unset, "PYTHONPATH": path}, check=True)
    return StudyFolder(place / "runs" / STUDY).read_summary()


def mistakes(summary: dict[str, Any]) -> list[str]:
    """Returns what the attribution got wrong; nothing when it named the planted effects and nothing else."""
    found = {entry["knob"].removeprefix("env.PLANT_"): entry for entry in summary["attribution"]}
    kept = {key.removeprefix("env.PLANT_") for key in (summary["best"] or {}).get("overrides") or {}}
    wrong = [f"{name} does nothing and is handed over" for name in sorted(kept) if GAINS[name] == 1.0]
    for name, gain in GAINS.items():
        if gain == 1.0:
            continue
        entry = found.get(name) or {}
        if entry.get("verdict") != "faster":
            wrong.append(f"{name} is worth {gain} and was not named, got {entry.get('verdict')}")
        elif not entry["ci"] or not entry["ci"][0] <= gain <= entry["ci"][1]:
            wrong.append(f"{name} is worth {gain}, outside {interval(entry['ci'])}")
    return wrong


def rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns one row a change of the winner: knob, truth, found, interval, verdict, what became of it."""
    dropped = (summary.get("minimality") or {}).get("dropped") or []
    made = []
    for entry, fate in [*((e, "kept") for e in summary["attribution"]), *((e, "put back") for e in dropped)]:
        name = entry["knob"].removeprefix("env.PLANT_")
        ratio = f"{entry['ratio']:.3f}" if entry["ratio"] else "-"
        made.append((name, f"{GAINS[name]:.2f}", ratio, interval(entry["ci"]), entry["verdict"], fate))
    return made


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("\n".join(machine_lines()), flush=True)
    with tempfile.TemporaryDirectory(prefix="autotune-attribution-") as folder:
        summary = run(Path(folder), minutes=options.minutes, num_trials=options.trials, seed=options.seed)
    print(table(("knob", "truth", "found", "95 % interval", "verdict", "fate"), rows(summary)))
    wrong = mistakes(summary)
    print("\n".join(wrong) or "all planted effects named, their intervals hold the truth, nothing else is handed over")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
