"""Runs real studies with failing trials through `autotune run`, and reads them through `autotune show --json`."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from autotune.launchers.environment import own_environment

PROGRAMS = Path(__file__).with_name("programs")
RULES = {
    "warmup_min_device_s": 0.05, "warmup_max_s": 2, "warmup_mean_frac": 0.9, "warmup_quartile_frac": 1,
    "min_s": 0.2, "max_s": 1, "half_width_frac": 0.5,
}  # fmt: skip
QUICK = [
    *(f"measure.{part}.{name}={value}" for part in ("screening", "finals") for name, value in RULES.items()),
    "measure.step_s=4",
    "measure.quiet=false",  # several of these studies run at once
    "tracker.uri=none",
    "search.sampler=grid",
    "device.kind=cpu",
    "threads.intra=1",
]


@dataclass
class Study:
    """A running study in its own folder."""

    cwd: Path
    process: subprocess.Popen
    num_peak_bytes: int = 0

    def finish(self) -> None:
        """Waits for the study's end, and watches the tuner's memory meanwhile."""
        while self.process.poll() is None:
            self._look()
            time.sleep(0.05)
        assert self.process.returncode == 0, (self.cwd / "said").read_text()

    def _look(self) -> None:
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return
        peaks = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")]
        self.num_peak_bytes = max([self.num_peak_bytes, *peaks])

    @property
    def said(self) -> str:
        """Returns the output of the study."""
        return (self.cwd / "said").read_text()

    def summary(self) -> dict:
        """Returns the document that `show --json` prints."""
        shown = run(self.cwd, "show", "--json")
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def record(self, number: int) -> dict:
        """Returns a trial's record."""
        return json.loads((self.folder(number) / "trial.json").read_text())

    def folder(self, number: int) -> Path:
        """Returns a trial's folder."""
        return next(self.cwd.glob(f"runs/*/trials/{number:04d}"))

    def left_running(self) -> list[str]:
        """Returns the command lines of this study's processes that still run."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                environment, command = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.cwd).encode() in environment + command:
                found.append(command.replace(b"\0", b" ").decode())
        return found


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs autotune to its end."""
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        cwd=cwd,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def start(
    cwd: Path,
    program: str,
    space: dict,
    *overrides: str,
    arguments: tuple[str, ...] = (),
    within: tuple[str, ...] = (),
    starter: tuple[str, ...] = (),
) -> Study:
    """Starts a study.

    Args:
        cwd: the study's folder.
        program: file in PROGRAMS, which is copied there.
        space: knob -> values to try.
        overrides: overrides in addition to QUICK.
        arguments: arguments of the program.
        within: words before the autotune command.
        starter: words between the interpreter and the program.
    """
    shutil.copy(PROGRAMS / program, cwd)
    (cwd / "space.yaml").write_text(json.dumps(space))
    words = ["run", *QUICK, "search_space=space.yaml", *overrides, "--", sys.executable, *starter, program, *arguments]
    environment = {**own_environment(), "NO_COLOR": "1", "COLUMNS": "120", "TERM": "dumb"}
    environment.pop("FAULT", None)
    with (cwd / "said").open("w") as out:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "autotune", *words],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Study(cwd, process)


def is_root() -> bool:
    """Returns whether this user may create mount namespaces."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None
