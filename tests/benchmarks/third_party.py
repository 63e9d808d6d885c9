"""Tunes other people's training programs, unmodified, and prints the results.

    python -m tests.benchmarks.third_party --checkouts DIR [--only NAME ...] [--minutes 3] [--inspect | --rates] [KEY=VALUE ...]

DIR holds the repositories, cloned as docs/benchmarks.md says; nothing is downloaded. A program's data are made next to it
(tests/benchmarks/third_party_data.py). Then `autotune run` (with --inspect, `autotune inspect`) runs in its folder, as a user
would. The rate is also read from the program's own output (third_party_clock.py): after the study, without autotune and under
`autotune apply`; with --rates, in the trials instead. Without --rates the trials' output is not read, because reading it takes
a tenth of a core, which disturbs the finals. The repository's files are compared with those before the study.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autotune.explained import limit_lines
from autotune.launchers.environment import own_environment
from autotune.quantities import rate_text
from tests.benchmarks.reporting import table
from tests.benchmarks.third_party_checks import file_problems, listing, own_rate_per_s, with_batch
from tests.benchmarks.third_party_clock import Watch, compare
from tests.benchmarks.third_party_programs import PROGRAMS, Program

COLUMNS = (
    "program", "baseline", "best", "ratio", "changed", "counted / printed", "applied / finals", "applied / without",
    "left behind",
)  # fmt: skip
# Windows of nine seconds and more, also in disturbed trials: the samples are compared, not the speed.
RATES = ("measure.quiet=false", "measure.screening.slow_step_s=60", "measure.screening.min_s=9")
ROUNDS = 3  # real runs without autotune, and as many under `autotune apply`
DONE_FILE = ".autotune-data"  # this file in a program's folder marks that its data were made


def main() -> int:
    """Runs the requested programs and prints the table; returns 1 if a program could not be tuned."""
    arguments, overrides = _arguments()
    limits = [f"study.budget.minutes={arguments.minutes}", "search.warm_start=off"]  # earlier runs must not help
    limits += RATES if arguments.rates else ()
    rows, failed = [], 0
    for program in PROGRAMS:
        folder = Path(arguments.checkouts).resolve() / program.folder
        if arguments.only and program.name not in arguments.only:
            continue
        if not folder.is_dir():
            print(f"{program.name}: not checked out, no folder {folder}", flush=True)
            continue
        _prepare(program, folder)
        needs = f" (needs {program.packages})" if program.packages else ""
        print(f"\n=== {program.name}{needs}: cd {program.folder} && autotune run -- {program.command}", flush=True)
        if arguments.inspect:
            failed += _autotune(program, folder, "inspect", *overrides).returncode != 0
            continue
        before = listing(_repository(folder, arguments.checkouts))
        watch = Watch(folder, "runs/*/trials/*/std*.log")
        with watch if arguments.rates else nullcontext():
            failed += _autotune(program, folder, "run", *limits, *program.options, *overrides).returncode != 0
        summary, after = _summary(folder), listing(_repository(folder, arguments.checkouts))
        left = [item["name"] for kind in ("left", "new") for item in summary.get("files", {}).get(kind, [])]
        problems = file_problems(before, after, folder=folder, named=left)
        print("\n".join(problems or ["files: unchanged, and all new files are listed"]))
        print("\n".join(f"explained: {line}" for line in limit_lines(summary)), flush=True)
        real = (None, None) if arguments.rates else _real_runs(program, folder, summary)
        rows.append(_row(program, summary, watch, real))
        print(f"\n{table(COLUMNS, rows[-1:])}", flush=True)
    if len(rows) > 1:
        print("\n" + table(COLUMNS, rows))
    return 1 if failed else 0


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--inspect", action="store_true", help="inspect only")
    parser.add_argument("--rates", action="store_true", help="only compare what autotune counts with what the programs print")
    return parser.parse_known_args()


def _repository(folder: Path, checkouts: str) -> Path:
    top = Path(checkouts).resolve()
    return top / folder.relative_to(top).parts[0]


def _prepare(program: Program, folder: Path) -> None:
    if not (folder / DONE_FILE).exists():
        program.prepare(folder)
        (folder / DONE_FILE).touch()


def _environment() -> dict[str, str]:
    """Returns this process's variables, with this interpreter's environment first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**own_environment(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PATH": path}


def _autotune(program: Program, folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "autotune", *words, "--", *shlex.split(program.command)]
    return subprocess.run(command, cwd=folder, env=_environment(), check=False)


def _summary(folder: Path) -> dict[str, Any]:
    studies = sorted((folder / "runs").glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return {**json.loads(studies[-1].read_text()), "folder": studies[-1].parent} if studies else {}


def _real_runs(program: Program, folder: Path, summary: dict[str, Any]) -> tuple[float | None, float | None]:
    """Returns the program's own rate without autotune and under `autotune apply`; None where there is nothing to compare.

    The rates are medians over fresh processes in turn, because a process may be 10 % faster than the next one.
    """
    settings = _finalist(summary)[0]
    if not program.clock or not settings:
        return None, None
    size = ((summary.get("baseline") or {}).get("knobs") or {}).get("loader.batch_size")
    words = shlex.split(program.command.replace("{loader.batch_size=", "").replace("}", ""))
    file = summary["folder"]  # the study knows which loader trains
    if not (summary.get("best") or {}).get("overrides"):  # the baseline was kept, so only the finalist's settings are at hand
        file /= "finalist.yaml"
        file.write_text("".join(f"{json.dumps(knob)}: {json.dumps(value)}\n" for knob, value in settings.items()))
    apply = [sys.executable, "-m", "autotune", "apply", str(file), "--", *shlex.split(program.command)]
    applied = with_batch(program.clock, settings, baseline_batch=size)
    rates: tuple[list[float | None], ...] = ([], [])
    for _ in range(ROUNDS):
        for clock, command, found in zip((program.clock, applied), (words, apply), rates, strict=True):
            found.append(own_rate_per_s(clock, command, folder=folder, environment=_environment()))
            print(f"real run: {found[-1]} samples/s {'applied' if found is rates[1] else 'without'}", flush=True)
    without_per_s, applied_per_s = (statistics.median(known) if (known := [r for r in each if r]) else None for each in rates)
    return without_per_s, applied_per_s


def _finalist(summary: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Returns the settings that the finals compared with the baseline, and their rate, even if the baseline was kept."""
    best, baseline, found = (summary.get(name) or {} for name in ("best", "baseline", "speedup"))
    if best.get("overrides"):
        return best["overrides"], best["value"]
    if not found.get("overrides") or not found.get("ratio"):
        return {}, None
    return found["overrides"], baseline["value"] * found["ratio"]


def _row(program: Program, summary: dict[str, Any], watch: Watch, real: tuple[float | None, float | None]) -> tuple[str, ...]:
    best, speedup, unit = summary.get("best") or {}, summary.get("speedup") or {}, summary.get("unit", "")
    ratio = f"{speedup['ratio']:.2f} {_interval(speedup['ci'])}" if speedup.get("ratio") else "none"
    compared = list(compare(program.clock, watch)) if program.clock else []
    for found in compared:
        counted = f"{found.counted_per_s:.5g} counted, {found.own_per_s:.5g} printed in {found.seconds:.1f} s"
        print(f"clock: trial {found.trial}: {counted}; {found.window_per_s:.5g} reported")
    shares = [found.counted_per_s / found.own_per_s for found in compared]
    without, applied = real
    settings, finals_per_s = _finalist(summary)
    return (
        program.name,
        rate_text((summary.get("baseline") or {}).get("value"), unit),
        rate_text(best.get("value"), unit),
        f"{ratio} {speedup.get('verdict', '')}",
        ", ".join(f"{knob}={value}" for knob, value in settings.items()),
        f"{statistics.median(shares):.3f} (n {len(shares)})" if shares else "-",
        f"{applied / finals_per_s:.2f}" if applied and finals_per_s else "-",
        f"{applied / without:.2f}" if applied and without else "-",
        ", ".join(sorted({item["name"] for item in summary.get("files", {}).get("left", [])})),
    )


def _interval(ci: list[float] | None) -> str:
    return f"[{ci[0]:.2f}, {ci[1]:.2f}]" if ci else "[no interval]"


if __name__ == "__main__":
    sys.exit(main())
