"""Runs the tests of harness and programs on other versions of torch, each in its own environment.

    python -m tests.benchmarks.torch_versions 2.4.1 2.6.0 2.9.1 [--tests tests/programs ...] [--minutes 90] [--logs DIR]

An environment has this interpreter's Python, autotune with its extra `dev`, torch in the requested version with the matching
torchvision, and all other packages as in constraints.txt. Before torch 2.6, it has transformers 4. All packages come from the
package index that pip is configured for. On Linux, an environment takes about 7 GB, because torch's wheels include CUDA. It is
removed before the next one is made.

Failed tests are run once more, alone, because some have time limits that a busy machine exceeds. The failures of each run and
the reasons for skipped tests are printed. The complete output is in DIR. The exit status is 1 if a test failed in both runs, or
if an environment could not be made.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from autotune.machine import host_facts

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/programs", "tests/harness")
FOLLOWS_TORCH = re.compile(r"(torch|torchvision|torchao|triton|sympy|nvidia-(?!ml-py)[\w-]+|cuda-[\w-]+)==")
TRANSFORMERS_4 = re.compile(r"(transformers|tokenizers|huggingface-hub)==")  # transformers 5 needs torch 2.6
VERSIONS = "import numpy, torch, torchvision; print(f'with torchvision {torchvision.__version__}, numpy {numpy.__version__}')"
NOTED = ("FAILED ", "ERROR ", "SKIPPED ")  # how lines of pytest's summary begin
TAIL_CHARS = 2000


def main() -> int:
    """Tests every version and prints the results; returns 1 if a test failed twice or could not be run."""
    arguments = _arguments()
    logs = Path(arguments.logs or tempfile.mkdtemp(prefix="torch-versions-"))
    logs.mkdir(parents=True, exist_ok=True)
    machine = f"{host_facts()['cpu_model']}, {os.cpu_count()} processors"
    print(f"machine  {machine}\ncommit   {_commit()}\nlogs     {logs}", flush=True)
    return max([_test(version, arguments.tests, logs, arguments.minutes * 60) for version in arguments.versions])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.6.0")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests")
    parser.add_argument("--minutes", type=float, default=90.0, help="the tests of a version are ended after this time")
    parser.add_argument("--logs", metavar="DIR", help="default: a new temporary folder")
    return parser.parse_args()


def _commit() -> str:
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "not known"


def _test(version: str, tests: Sequence[str], logs: Path, timeout_s: float) -> int:
    print(f"\n=== torch {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"torch-{version}-", ignore_cleanup_errors=True) as folder:
        try:
            python = install(version, Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"no environment: exit status {error.returncode}\n{error.stdout[-TAIL_CHARS:]}", flush=True)
            return 1
        words = ["-m", "pytest", "-v", "-rfEs", "--tb=short", "-o", f"cache_dir={folder}/cache", *tests]
        code = _pytest(python, words, logs / f"{version}.log", timeout_s)
        if code == 1:
            print("once more, only what failed:", flush=True)
            code = _pytest(python, [*words, "--last-failed"], logs / f"{version}-again.log", timeout_s)
        return int(code != 0)


def install(version: str, folder: Path) -> Path:
    """Makes an environment in a folder; returns its interpreter.

    Raises:
        subprocess.CalledProcessError: the packages could not be installed or imported; `stdout` has what was printed.
    """
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not FOLLOWS_TORCH.match(line)]
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 6):
        pinned = [*(line for line in pinned if not TRANSFORMERS_4.match(line)), "transformers<5"]
    (folder / "constraints.txt").write_text("\n".join(pinned) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "-c", str(folder / "constraints.txt")]
    for command in ([*pip, f"torch=={version}", "-e", f"{ROOT}[dev]"], [str(python), "-c", VERSIONS]):
        done = subprocess.run(
            command, check=True, text=True, cwd=folder, env=_environment(python),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    print(done.stdout.strip(), flush=True)
    return python


def _environment(python: Path) -> dict[str, str]:
    """Returns this process's variables without those of its virtual environment, with the folder of `python` first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])}


def _pytest(python: Path, words: Sequence[str], log: Path, timeout_s: float) -> int:
    """Returns pytest's exit status, or 124 if it ran too long; prints the end of its output and the tests that did not pass."""
    command, environment = [str(python), *words], _environment(python)
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join([*(line for line in lines if line.startswith(NOTED)), lines[-1].strip("= ")]), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
