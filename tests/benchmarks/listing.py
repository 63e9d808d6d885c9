"""Times `autotune list` and `autotune prune` in a runs folder with many studies, and in one with none.

    python -m tests.benchmarks.listing --studies 1000

Each study has a compile cache of 200 files, which `prune` may remove. `prune` is timed first without --yes, when it only lists
the files, and at the end with --yes. The benchmark checks that all studies are still there.
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
CACHED_FILES, CACHED_BYTES = 200, 100


def timed(runs: Path, *words: str) -> tuple[float, float, str]:
    """Runs a command of autotune in a runs folder; returns its wall seconds, its processor seconds and its output."""
    before, began = os.times(), time.monotonic()
    command = [sys.executable, "-P", "-m", "autotune", *words, "--runs-dir", str(runs)]
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True, check=True)
    seconds, after = time.monotonic() - began, os.times()
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system, done.stdout


def fill(runs: Path, number: int) -> None:
    """Makes a runs folder with that many studies, each with a compile cache."""
    first = make_study(runs, "s0").path
    (first / "compile_cache").mkdir()
    for each in range(CACHED_FILES):
        (first / "compile_cache" / f"{each}.so").write_bytes(b"x" * CACHED_BYTES)
    for each in range(1, number):
        shutil.copytree(first, runs / f"s{each}")


def files(runs: Path) -> int:
    """Returns the number of files below a folder."""
    return sum(len(names) for _, _, names in os.walk(runs))


def main() -> None:
    """Makes the studies, and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    number = parser.parse_args().studies
    with tempfile.TemporaryDirectory() as place:
        runs, empty = Path(place) / "runs", Path(place) / "empty"
        empty.mkdir()
        fill(runs, number)
        for folder, lines, what in ((runs, number + 1, f"{number} studies"), (empty, 1, "no study")):
            for words in (["list"], ["prune"]):
                for _ in range(TIMES):
                    seconds, own_s, printed = timed(folder, *words)
                    assert words != ["list"] or len(printed.splitlines()) == lines, printed[-300:]
                    print(f"{words[0]}, {what}: {seconds:.2f} s, of which the processor {own_s:.2f} s", flush=True)
        before = files(runs)
        seconds, own_s, _ = timed(runs, "prune", "--yes")
        removed = before - files(runs)
        assert removed >= number * CACHED_FILES, removed  # the logs of the trials are removed, too
        assert len(timed(runs, "list")[2].splitlines()) == number + 1, "a study is gone"
        print(f"prune --yes: {seconds:.2f} s, of which the processor {own_s:.2f} s; {removed:,} files removed")


if __name__ == "__main__":
    main()
