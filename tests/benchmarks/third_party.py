"""Tunes other people's training programs, unmodified, and prints the results.

    python -m tests.benchmarks.third_party --checkouts DIR [--only NAME ...] [--minutes 3] [--inspect] [KEY=VALUE ...]

DIR holds the repositories, cloned as docs/benchmarks.md says; nothing is downloaded. A program's data are made next to it
(tests/benchmarks/third_party_data.py); then `autotune inspect` and `autotune run` are run in its folder, as a user would.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.quantities import rate_text
from tests.benchmarks.reporting import table
from tests.benchmarks.third_party_programs import PROGRAMS, Program

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DONE_FILE = ".autotune-data"  # this file in a program's folder marks that its data were made


def main() -> int:
    """Runs the requested programs and prints the table; returns 1 if a program could not be tuned."""
    arguments, overrides = _arguments()
    limits = [f"study.budget.minutes={arguments.minutes}", "search.warm_start=off"]  # earlier runs must not help
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
        failed += _autotune(program, folder, "run", *limits, *overrides).returncode != 0
        answer = _autotune(program, folder, "inspect", "--json", is_read=True)
        rows.append(_row(program, folder, json.loads(answer.stdout) if answer.returncode == 0 else {}))
    if rows:
        print("\n" + table(("program", "baseline", "best", "ratio", "changed", "cannot be changed", "left behind"), rows))
    return 1 if failed else 0


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--inspect", action="store_true", help="inspect only")
    return parser.parse_known_args()


def _prepare(program: Program, folder: Path) -> None:
    if not (folder / DONE_FILE).exists():
        program.prepare(folder)
        (folder / DONE_FILE).touch()


def _autotune(program: Program, folder: Path, *words: str, is_read: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs autotune in a program's folder, with this interpreter's environment first on PATH."""
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    offline = {"HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths), "PATH": path}
    command = [sys.executable, "-m", "autotune", *words, "--", *shlex.split(program.command)]
    output = subprocess.PIPE if is_read else None
    return subprocess.run(command, cwd=folder, env=environment, check=False, text=True, stdout=output)


def _row(program: Program, folder: Path, found: dict[str, Any]) -> tuple[str, ...]:
    studies = sorted((folder / "runs").glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(studies[-1].read_text()) if studies else {}
    best, speedup, unit = summary.get("best") or {}, summary.get("speedup") or {}, summary.get("unit", "")
    ratio = f"{speedup['ratio']:.2f} {_interval(speedup['ci'])} {speedup['verdict']}" if speedup.get("ratio") else "none"
    refused: dict[str, list[str]] = {}
    for row in found.get("knobs", []):
        if not row["can_be_turned"]:
            refused.setdefault(row["reason"], []).append(row["knob"])
    return (
        program.name,
        rate_text((summary.get("baseline") or {}).get("value"), unit),
        rate_text(best.get("value"), unit),
        ratio,
        ", ".join(f"{knob}={value}" for knob, value in (best.get("overrides") or {}).items()),
        "; ".join(f"{', '.join(knobs)}: {reason}" for reason, knobs in refused.items()),
        ", ".join(sorted({item["name"] for item in summary.get("files", {}).get("left", [])})),
    )


def _interval(ci: list[float] | None) -> str:
    return f"[{ci[0]:.2f}, {ci[1]:.2f}]" if ci else "[no interval]"


if __name__ == "__main__":
    sys.exit(main())
