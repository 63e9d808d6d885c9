"""What a person sees at several widths and in a pipe, whole and as it is: tests/cli/golden.

    GOLDEN=write python -m pytest tests/cli/test_golden.py

writes the screens anew; look at them before they are committed.
"""

import contextlib
import io
import os
import re
import time
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.testing.studies import make_study

GOLDEN = Path(__file__).with_name("golden")
SCREENS = {
    "show": ["show", "resnet18"],
    "trial": ["show", "resnet18", "--trial", "5"],
    "list": ["list"],
    "help": ["--help"],
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 120, 200, None])
@pytest.mark.parametrize("name", SCREENS)
def test_screens_are_as_they_were_looked_at(name, width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for variable, value in {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width or "")}.items():
        monkeypatch.setenv(variable, value)
    if width is None:
        monkeypatch.delenv("COLUMNS")
    for study in ("resnet18", "transformer-with-a-long-name"):
        make_study(Path("runs"), study)
    out = Terminal() if width else io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(SCREENS[name])) == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    said = "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"
    file = GOLDEN / f"{name}-{width or 'pipe'}.txt"
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")
    assert "…" not in said or name == "help"  # which the CLI library lays out
    if width:
        assert max(map(len, said.splitlines())) <= width
