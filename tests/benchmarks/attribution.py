"""Are planted effects found? Five knobs, of which some change the rate and some do nothing.

    python -m tests.benchmarks.attribution [--minutes 10] [--trials 12] [--seed 0]
    python -m tests.benchmarks.attribution --simulated 20 [--minutes 8] [--noise 0.03]

The first runs `autotune run` on `attribution_program.py`, as a user would, with a random sampler, whose winner has useless
changes in it more often than not. Ends with status 1 when a planted effect is not named, when an interval misses the truth, or
when a knob without effect is exported.

The second runs whole studies on a made-up machine with a clock of its own, with the default sampler: seconds, not minutes.
Its effects are 1.30, 1.10, 1.03 and twice 1.00.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.cli.processes import own_environment
from autotune.run_dir import StudyFolder
from autotune.testing.fake_launcher import DEFAULTS, Surface
from tests.benchmarks.attribution_program import GAINS
from tests.benchmarks.reporting import interval, machine_lines, table
from tests.study.conftest import Bench

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


SIMULATED = {"A": 1.30, "B": 1.10, "C": 1.03, "D": 1.0, "E": 1.0}


def simulated(num: int, *, minutes: float, noise: float, seed: int) -> int:
    """Runs studies on a made-up machine, prints how often what was found, and returns the exit status."""
    named, kept, inside, given, basis = Counter[str](), Counter[str](), 0, 0, Counter[str]()
    gains: dict[tuple[str, Any], float] = {(f"env.{name}", "1"): gain for name, gain in SIMULATED.items()}
    with tempfile.TemporaryDirectory(prefix="autotune-attribution-") as folder:
        for number in range(seed, seed + num):
            place = Path(folder) / str(number)
            place.mkdir()
            (place / "space.yaml").write_text("".join(f"env.{name}: ['0', '1']\n" for name in SIMULATED), encoding="utf-8")
            observed = {**DEFAULTS, **{f"env.{name}": "0" for name in SIMULATED}}
            surface = Surface(gains=gains, observed=observed, loader_per_s=1e9, noise_frac=noise, start_s=3.0, window_s=5.0)
            words = [f"search_space={place / 'space.yaml'}", "search.sampler=rates"]
            summary = Bench(place / "runs", surface, *words, seed=number, minutes=minutes).run()
            best = (summary["best"] or {}).get("overrides") or {}
            for name in SIMULATED:
                kept[name] += best.get(f"env.{name}") == "1"
            for entry in [*summary["attribution"], *((summary.get("minimality") or {}).get("dropped") or [])]:
                name = entry["knob"].removeprefix("env.")
                named[name] += entry["verdict"] == "faster"
                basis[entry.get("basis") or "neither"] += 1
                if entry.get("ci"):
                    given += 1
                    inside += entry["ci"][0] <= SIMULATED[name] <= entry["ci"][1]
    rows = [(name, f"{gain:.2f}", f"{kept[name]} of {num}", f"{named[name]} of {num}") for name, gain in SIMULATED.items()]
    print(table(("knob", "truth", "exported", "named faster"), rows))
    print(f"intervals that hold the truth: {inside} of {given}; {dict(basis)}")
    print(f"{num} simulated studies of {minutes:g} min, noise {noise:.0%} from process to process, seeds from {seed}")
    wrong = [name for name, gain in SIMULATED.items() if gain >= 1.1 and kept[name] < num]
    wrong += [name for name, gain in SIMULATED.items() if gain == 1.0 and kept[name] > 0.1 * num]
    return 1 if wrong or inside < 0.9 * given else 0


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="budget: 10 for a real study, 8 for a simulated one")
    parser.add_argument("--simulated", type=int, metavar="N", help="this many studies on a made-up machine instead")
    parser.add_argument("--noise", type=float, default=0.03, help="of the made-up machine, from process to process")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.simulated:
        return simulated(options.simulated, minutes=options.minutes or 8, noise=options.noise, seed=options.seed)
    print("\n".join(machine_lines()), flush=True)
    with tempfile.TemporaryDirectory(prefix="autotune-attribution-") as folder:
        summary = run(Path(folder), minutes=options.minutes or 10, num_trials=options.trials, seed=options.seed)
    print(table(("knob", "truth", "found", "95 % interval", "verdict", "fate"), rows(summary)))
    wrong = mistakes(summary)
    print("\n".join(wrong) or "all planted effects named, their intervals hold the truth, nothing else is handed over")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
