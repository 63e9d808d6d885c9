"""Checks the pinned dependencies for known security advisories with pip-audit, which is installed for this run only.

A package that could not be looked up counts as a failure: pip-audit itself would call it fine.

    python -m tests.benchmarks.advisories                      # all of constraints.txt
    python -m tests.benchmarks.advisories --only mlflow pyyaml # some of it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def pins(text: str, only: Sequence[str] = ()) -> list[str]:
    """Returns the pinned packages of a constraints file, "NAME==VERSION": all, or those named in `only`."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if "==" in line and (not only or line.partition("==")[0].lower() in only)]


def audit(packages: Sequence[str], service: str) -> list[dict[str, Any]]:
    """Returns pip-audit's finding for each package, {"name", "version", "vulns"} or {"name", "skip_reason"}.

    Raises:
        RuntimeError: pip-audit cannot be installed, or its output cannot be read; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as place:
        tool, names = Path(place) / "tool", Path(place) / "pins.txt"
        names.write_text("".join(f"{package}\n" for package in packages), encoding="utf-8")
        _run([sys.executable, "-P", "-m", "pip", "install", "--quiet", "--target", str(tool), "pip-audit"])
        words = [
            "--disable-pip",
            "--no-deps",
            "--requirement",
            str(names),
            "--format",
            "json",
            "--vulnerability-service",
            service,
        ]
        said = _run([sys.executable, "-P", "-m", "pip_audit", *words], PYTHONPATH=str(tool), may_fail=True)
    try:
        return list(json.loads(said)["dependencies"])
    except (ValueError, KeyError, TypeError):
        raise RuntimeError(f"the output of pip-audit cannot be read: {said[-600:]}") from None


def summary(found: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Returns lines to print about findings, and whether each package was looked up and has no known advisory."""
    lines, skipped, advisories = [], 0, 0
    for one in found:
        if "skip_reason" in one:
            skipped += 1
            lines.append(f"not looked up  {one['name']}: {one['skip_reason']}")
        for each in one.get("vulns", []):
            advisories += 1
            fixed = ", ".join(each.get("fix_versions", [])) or "no version"
            lines.append(f"advisory  {one['name']} {one['version']}: {each['id']}, fixed in {fixed}")
    lines.append(f"{len(found)} packages, {len(found) - skipped} looked up, {advisories} advisories")
    return lines, bool(found) and not skipped and not advisories


def _run(words: Sequence[str], *, may_fail: bool = False, **environment: str) -> str:
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise RuntimeError(f"`{' '.join(words[2:5])} ...` failed: {done.stderr[-600:]}")
    return done.stdout or done.stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings; returns 1 if there is an advisory, or a package could not be looked up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="packages; all of constraints.txt by default")
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi", help="where pip-audit looks")
    asked = parser.parse_args(argv)
    packages = pins(CONSTRAINTS.read_text(encoding="utf-8"), [name.lower() for name in asked.only])
    if not packages:
        parser.error(f"--only: none of these is in constraints.txt, got {asked.only}")
    lines, is_fine = summary(audit(packages, asked.service))
    print(*lines, sep="\n")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
