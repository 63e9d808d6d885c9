"""Feeds autotune damaged input of every kind, and checks that each is used or refused and that nothing else happens.

    python -m tests.benchmarks.fuzz --cases 1000
    python -m tests.benchmarks.fuzz --kind yaml link --cases 100 --seed 7
    python -m tests.benchmarks.fuzz --case "{'words': ['show', 'x']}"    # a failed case again, as it was printed

A case fails if autotune ends with an undocumented exit status, prints a traceback or an unclear message, takes longer than ten
seconds, executes code from the input, or writes outside of the runs folder. Each kind runs in its own process. After --minutes,
at Ctrl-C and at SIGTERM, the table has the cases so far.
"""

from __future__ import annotations

import argparse
import ast
import math
import resource
import signal
import sys
import time
from collections import Counter, defaultdict

from tests.benchmarks.fuzz.cases import KINDS
from tests.benchmarks.fuzz.damage import Case
from tests.benchmarks.fuzz.runs import Tally, fuzz_apart, fuzz_place
from tests.benchmarks.reporting import machine_lines, table

HEAD = ("kind", "cases", "exit 0", "exit 2", "other", "tracebacks", "hangs", "code run", "failed", "median ms", "slowest ms")
MEMORY_BYTES = 8 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end each kind after this time, with the cases so far")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--case", help="run this one")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with fuzz_place() as place:
        if arguments.case:
            print(place.run(Case(**ast.literal_eval(arguments.case))))
            return
        print("\n".join([*machine_lines(), f"seed      {arguments.seed}"]))
        rows, failed = [], 0
        for kind in arguments.kind:
            started_s = time.monotonic()
            tally = fuzz_apart(place, kind, arguments.cases, arguments.seed, max_s=60 * arguments.minutes)
            print(f"{kind}: {len(tally.answers)} cases in {time.monotonic() - started_s:.0f} s", flush=True)
            show(tally)
            rows.append([kind, *cells(tally)])
            failed += len(tally.failed)
            if tally.is_stopped:
                break
    print(table(HEAD, rows))
    sys.exit(1 if failed else 0)


def cells(tally: Tally) -> list[object]:
    """Returns a kind's row of the table."""
    answers = tally.answers
    codes, causes = Counter(answer.code for answer in answers), [answer.cause for answer in answers]
    times_ms = sorted(1e3 * answer.seconds for answer in answers)
    words = (sum(cause.startswith(word) for cause in causes) for word in ("traceback", "hang", "code executed"))
    counts = (len(answers), codes[0], codes[2], len(answers) - codes[0] - codes[2], *words, len(tally.failed))
    return [*counts, *([f"{times_ms[len(times_ms) // 2]:.1f}", f"{times_ms[-1]:.0f}"] if times_ms else ["", ""])]


def show(tally: Tally) -> None:
    """Prints the failed cases by cause, the shortest first."""
    by_cause = defaultdict(list)
    for case, answer in tally.failed:
        by_cause[answer.cause].append((repr(case), answer.problem))
    for cause, failed in sorted(by_cause.items(), key=lambda pair: -len(pair[1])):
        print(f"  {len(failed)} x {cause}")
        for case, problem in sorted(failed, key=lambda pair: len(pair[0])):
            print(f"    {problem}\n      --case {case!r}")


if __name__ == "__main__":
    main()
