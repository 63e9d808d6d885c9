"""Times `autotune list` in a runs folder with many studies, and in one with none.

python -m tests.benchmarks.listing --studies 1000
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.launchers.environment import own_environment
from tests.support.studies import make_study

TIMES = 3


def timed(runs: Path, lines: int) -> tuple[float, float]:
    """Returns the seconds and the processor's seconds that `autotune list` takes; checks that it prints `lines` lines."""
    before, began = os.times(), time.monotonic()
    words = [sys.executable, "-P", "-m", "autotune", "list", "--runs-dir", str(runs)]
    done = subprocess.run(words, env=own_environment(), capture_output=True, text=True, check=True)
    seconds, after = time.monotonic() - began, os.times()
    assert len(done.stdout.splitlines()) == lines, done.stdout[-300:]
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Makes the studies, and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    number = parser.parse_args().studies
    with tempfile.TemporaryDirectory() as place:
        runs, empty = Path(place) / "runs", Path(place) / "empty"
        empty.mkdir()
        first = make_study(runs, "s0").path
        for each in range(1, number):
            shutil.copytree(first, runs / f"s{each}")
        for folder, lines, what in ((runs, number + 1, f"{number} studies"), (empty, 1, "no study")):
            for _ in range(TIMES):
                print("{}: {:.2f} s, of which the processor {:.2f} s".format(what, *timed(folder, lines)), flush=True)


if __name__ == "__main__":
    main()
