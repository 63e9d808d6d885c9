"""Measures."""

import argparse
import sys
from pathlib import Path
from tests.benchmarks import planted_data
from tests.benchmarks.planted_causes import PROGRAMS
from tests.benchmarks.planted_truth import Truths


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/explanations"))
    o = parser.parse_args()
    planted_data.prepare(o.folder / "data")
    truths = Truths()
    for name in o.only or PROGRAMS:
        p = PROGRAMS[name]
        try:
            truths.measure(p, o.folder.resolve() / "data", num_pairs=o.pairs)
            print(name, *(f"{c.switch}: {truths.gain(p, c.switch)}" for c in p.causes))
        except Exception as e:
            print(name, e)


main()
